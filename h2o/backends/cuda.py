"""The backend for CUDA devices: the C core's kernels, if the build and the driver support them.

The core checks a call and computes the size of its workspace ("measure"), torch allocates the
workspace, and the core queues the kernels on torch's current stream ("launch"). Nothing waits for
the device. Calls that no kernel supports go to the torch backend: attention with a head dimension
above 256, except steps, and, before compute capability 8.0, prompts in bfloat16 and head dimensions
above 128. All calls go to the torch backend if

- the build has no `kernels.fatbin` ("not built": `make cuda` builds it with NVIDIA's compiler);
- the kernels and the core were built from different sources, so that kernels misread parameters;
- there is no driver, or the driver cannot load the kernels;
- the kernels' results differ from those of the torch backend (`h2o.backends.kernel_check`).

The outputs of long prompts may come from torch's own attention (`h2o.backends.prompt_attention`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from h2o import _core
from h2o.backends.check_result import AttentionByTokens, CheckResult, load_result, save_result

FATBIN = Path(__file__).parent.with_name("kernels.fatbin")
"""The kernels for all architectures. A plain build does not have this file."""

XZ = b"\xfd7zXZ\0"
"""First bytes of a file compressed by `tools/compile_kernels.py`."""

_lock = threading.Lock()
_backends: dict[int, SimpleNamespace] = {}
"""The operations chosen for each open device, by index."""
_reasons: dict[int, str] = {}
"""The reason why a device uses the torch backend, by index."""


def backend_for(index: int, by_torch: SimpleNamespace) -> SimpleNamespace:
    """The operations for torch's CUDA device `index`: the kernels, or `by_torch` if there are none.

    The first call loads the kernels, and checks them unless an earlier process has done so.
    """
    operations = _backends.get(index)
    if operations is None:
        with _lock:
            operations = _backends.get(index) or _choose(index, by_torch)
    return operations


def backend_if_open(index: int, by_torch: SimpleNamespace) -> SimpleNamespace:
    """`backend_for` for a decode step, which must not wait for a check or a file. If `backend_for`
    has not opened the device, return `by_torch`, with a warning."""
    operations = _backends.get(index)
    if operations is not None:
        return operations
    _warn_not_open(f"the torch backend is used for steps on {_device(index)}")
    return by_torch


def _warn_not_open(what: str) -> None:
    warnings.warn(
        f"{what}. The device is not open yet: call h2o.ops.open_device(tensor) first, or attend or "
        "evict on it",
        RuntimeWarning,
        stacklevel=5,
    )


def _choose(index: int, by_torch: SimpleNamespace) -> SimpleNamespace:
    if _is_capturing():
        _warn_not_open(
            "kernels cannot be checked while a CUDA graph is captured, so the torch backend is "
            f"used in this graph on {_device(index)}"
        )
        return by_torch
    chosen, kernels, result = by_torch, _kernels(by_torch), CheckResult([], {})
    try:
        reason = _load(index)
        if reason is None:
            result = load_result(_facts(index)) or _new_check(index, kernels, by_torch)
            reason = "; ".join(result.mistakes) or None
    except Exception as error:  # such as a lack of memory: says nothing about the kernels
        reason = f"they could not be checked; the next process will try again ({_line(error)})"
    if reason is None:
        chosen = _with_attention(index, kernels, by_torch, result.prompts)
    else:
        _reasons[index] = reason
        if FATBIN.is_file():
            warnings.warn(
                f"the torch backend is used for cuda:{index} instead of h2o's kernels: {reason}",
                RuntimeWarning,
                stacklevel=4,
            )
    _backends[index] = chosen
    return chosen


def _file_reason() -> str | None:
    """The reason why the file of kernels cannot be used, or None. Does not call the driver."""
    if not FATBIN.is_file():
        return "kernels not built"
    with FATBIN.open("rb") as file:
        file.seek(-min(len(_core.KERNELS), FATBIN.stat().st_size), os.SEEK_END)
        word = file.read()
    if word != _core.KERNELS.encode():
        return (
            "kernels.fatbin and the core were built from different sources: run `make cuda` again, "
            "or install h2o again"
        )
    return None


def _load(index: int) -> str | None:
    """Load the kernels on a device. Return the reason why they cannot be used, or None."""
    reason = _file_reason()
    if reason is not None:
        return reason
    try:
        _core.load("cuda", _image(FATBIN.read_bytes()), index)
    except (OSError, RuntimeError, MemoryError, ImportError) as error:
        return str(error)
    return None


def _image(file: bytes) -> bytes:
    """The kernels, decompressed if necessary, with the word at their end that names the sources."""
    if not file.startswith(XZ):
        return file
    import lzma  # optional in a Python built from source

    decompressor = lzma.LZMADecompressor()
    try:
        image = decompressor.decompress(file)
    except lzma.LZMAError as error:
        raise OSError(f"kernels.fatbin cannot be read: {error}") from error
    if not decompressor.eof:
        raise OSError("kernels.fatbin cannot be read: it is truncated")
    return image + decompressor.unused_data


def _line(error: Exception) -> str:
    text = str(error).strip() or "no details"
    return f"{type(error).__name__}: {text.splitlines()[0]}"


def _kernels(by_torch: SimpleNamespace) -> SimpleNamespace:
    """The operations of the kernels, with `by_torch` for calls that no kernel supports. Kernels get
    operands without offsets."""
    from h2o.backends.torch_backend import centered

    def operation(name: str) -> Any:
        otherwise = getattr(by_torch, name)

        def queue(leader: Any, operands: tuple[Any, ...], stream: int | None) -> bool:
            """Queue a call, and return whether a kernel supports it."""
            wanted = _core.call(name, "measure", *operands, stream)
            if wanted is None:
                return False
            _core.call(name, "launch", *operands, stream, _workspace(leader, wanted))
            return True

        def run(*operands: Any) -> None:
            if not centered.has_offsets(name, operands):
                by_kernel(*operands)
                return
            check_operands(name, *operands)
            changed = centered.without_offsets(name, operands)
            if changed is None:
                otherwise(*operands)
                return
            by_kernel(*changed)
            centered.restore_output(name, changed)

        def by_kernel(*operands: Any) -> None:
            leader = operands[0]
            if _has_table(leader):  # through which the core gets the stream, on any device
                is_supported = queue(leader, operands, None)
            else:
                with current(leader):
                    is_supported = queue(leader, operands, _stream(leader))
            if not is_supported:
                otherwise(*operands)

        return run

    return SimpleNamespace(**{name: operation(name) for name in vars(by_torch)})


def check_operands(name: str, *operands: Any) -> None:
    """Check the operands of an operation on their device, and raise the core's errors."""
    with current(operands[0]):
        _core.call(name, "check", *operands)


def _with_attention(
    index: int,
    kernels: SimpleNamespace,
    by_torch: SimpleNamespace,
    known: dict[int, AttentionByTokens],
) -> SimpleNamespace:
    """The kernels, with the fastest attention for long prompts. It is measured for each entry of
    `DEPTHS` when the first such prompt comes, unless `known` has it."""
    from h2o.backends.prompt_attention import LEAST_TOKENS, TORCH_ATTENTIONS, attend_by, depth_of

    def choose(call: Any) -> Any:
        tokens, D = call.query.shape[2:]
        depth = depth_of(D)
        if depth not in known:
            if _is_capturing():
                return None
            with _lock:
                if depth not in known:
                    known[depth] = _measure_attention(index, depth, kernels, by_torch)
        names = [name for least, name in known[depth].items() if tokens >= least]
        return TORCH_ATTENTIONS[names[-1]] if any(names[-1:]) else None

    by_choice = attend_by(choose, kernels.attend)

    def attend(*operands: Any) -> None:
        query = operands[0]
        if query.ndim == 4 and query.shape[2] >= LEAST_TOKENS:
            check_operands("attend", *operands)  # now, because torch's attention writes first
            by_choice(*operands)
        else:
            kernels.attend(*operands)

    return SimpleNamespace(**vars(kernels) | {"attend": attend})


# ---- State of torch ----------------------------------------------------------------------------


def is_fake(tensor: Any) -> bool:
    """Whether a compiler made the tensor, with a shape but without memory for a kernel to read."""
    return isinstance(tensor, _fake_types())


@functools.cache
def _fake_types() -> tuple[type, ...]:
    """Types for `is_fake`, cached because every step calls it in every layer."""
    from torch._subclasses import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return FakeTensor, FunctionalTensor


def _is_capturing() -> bool:
    """Whether a CUDA graph is being captured, so that nothing may wait for the device."""
    import torch

    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _has_table(tensor: Any) -> bool:
    """Whether the core borrows a tensor through DLPack's exchange table (torch 2.10 or later)."""
    return hasattr(type(tensor), "__dlpack_c_exchange_api__")


_NO_CHANGE = contextlib.nullcontext()


def current(tensor: Any) -> contextlib.AbstractContextManager[Any]:
    """Make a tensor's device torch's current one. On CUDA `__dlpack__` requires this before torch
    2.10, and models that accelerate distributes over devices do not set the current device."""
    if _has_table(tensor) or not getattr(tensor, "is_cuda", False):
        return _NO_CHANGE
    import torch

    return torch.cuda.device(tensor.device)


def _stream(tensor: Any) -> int:
    """torch's current stream on a tensor's device. 1 means the default stream in DLPack, and in the
    driver too."""
    import torch

    return torch.cuda.current_stream(tensor.device).cuda_stream or 1


def _workspace(tensor: Any, size: int) -> Any:
    """Memory for one call. torch's allocator reuses it on this stream, after the call."""
    import torch

    return torch.empty(size, dtype=torch.uint8, device=tensor.device) if size else None


def _synchronize(index: int) -> None:
    """Wait for work that the program has queued. Its errors say nothing about h2o's kernels."""
    import torch

    torch.cuda.synchronize(index)


# ---- The check ---------------------------------------------------------------------------------


def check(index: int, by_torch: SimpleNamespace) -> list[str]:
    """Check the kernels of a device again, and return their mistakes.

    Raises: RuntimeError if the kernels cannot be loaded or the check cannot be completed.
    """
    reason = _load(index)
    if reason is not None:
        raise RuntimeError(reason)
    try:
        return _new_check(index, _kernels(by_torch), by_torch).mistakes
    except Exception as error:
        text = f"the kernels of {_device(index)} could not be checked ({_line(error)})"
        raise RuntimeError(text) from error


def _device(index: int) -> str:
    return f"cuda:{index}"


def _new_check(index: int, kernels: SimpleNamespace, by_torch: SimpleNamespace) -> CheckResult:
    """Check a device's kernels, and store the result in the cache folder."""
    from h2o.backends import kernel_check

    facts = _facts(index)
    _synchronize(index)
    result = CheckResult(kernel_check.mistakes(kernels, by_torch, _device(index)), {})
    save_result(facts, result)
    return result


def _measure_attention(
    index: int, depth: int, kernels: SimpleNamespace, by_torch: SimpleNamespace
) -> AttentionByTokens:
    """Measure the fastest attention for prompts of a depth, and store it in the cache folder."""
    from h2o.backends import prompt_attention

    wait = functools.partial(_synchronize, index)
    try:
        facts = _facts(index)
        result = load_result(facts) or CheckResult([], {})
        if depth not in result.prompts:  # unless another process has measured it meanwhile
            attentions = prompt_attention.fastest(kernels, by_torch, depth, _device(index), wait)
            result.prompts[depth] = attentions
            save_result(facts, result)
        return result.prompts[depth]
    except (OSError, RuntimeError) as error:  # such as a lack of memory
        warnings.warn(
            "h2o's kernels compute prompts in this process, because torch's attention could not be "
            f"measured; the next process will try again ({_line(error)})",
            RuntimeWarning,
            stacklevel=6,
        )
        return {}


def _facts(index: int) -> dict[str, Any]:
    """Everything that the result of the check may depend on: the key of a stored result."""
    import torch

    version, devices = _core.devices("cuda")
    module = Path("/proc/driver/nvidia/version")
    return {
        "device": devices[index],
        "driver": [version, module.read_text() if module.is_file() else ""],
        "h2o": _core.info()["version"],
        "torch": torch.__version__,
        "kernels": hashlib.sha256(FATBIN.read_bytes()).hexdigest(),
    }


def _describe_attention(index: int) -> str:
    """The attention used for long prompts, as far as it has been measured, in words."""
    try:
        result = load_result(_facts(index))
    except (ImportError, OSError):  # torch or the kernels are missing
        return ""
    return result.prompts_in_words if result else ""


def describe() -> str:
    """The backend of CUDA devices and the reason, in one line."""
    reason = _file_reason()
    if reason is not None:
        return f"torch ({reason})"
    try:
        version, devices = _core.devices("cuda")
    except (RuntimeError, MemoryError) as error:
        return f"torch ({error})"
    if _reasons:
        return "torch (" + "; ".join(f"{i}: {why}" for i, why in sorted(_reasons.items())) + ")"
    names = ", ".join(
        f"{name}, compute capability {major}.{minor}"
        + (", torch for prompts in bfloat16 and heads above 128" if major < 8 else "")
        + (f", outputs of prompts by {text}" if (text := _describe_attention(index)) else "")
        for index, (name, major, minor) in enumerate(devices)
    )
    return f"C ({names or 'no device'}; driver for CUDA {version // 1000}.{version % 1000 // 10})"
