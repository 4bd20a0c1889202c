"""Operations on CPU arrays and tensors that another device computes.

With H2O_TEST_DEVICE=cuda in the environment the whole test suite runs this way: each call copies
its arguments to torch's first CUDA device, computes there, and copies the changes back. "fake" is
the device of tests/cuda/fake, and "cpu" copies within the CPU. These two test the switch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from h2o import _core, backends
from h2o.backends import cuda
from h2o.slots import Slots

__all__ = ["DEVICES", "carry", "flash", "mapped", "switch", "tensors"]


def mapped(arguments: Any, function: Callable[[Any], Any]) -> list[Any]:
    """Arguments of a call, with each tensor replaced by `function` of it."""
    kinds = torch.Tensor | np.ndarray
    changed = [function(x) if isinstance(x, kinds) else x for x in arguments]
    return [Slots(*mapped(x, function)) if isinstance(x, Slots) else x for x in changed]


def tensors(arguments: Any) -> Iterator[Any]:
    """Tensors among the arguments of a call, in order."""
    for x in arguments:
        if isinstance(x, Slots):
            yield from tensors(x)
        elif isinstance(x, torch.Tensor) or hasattr(x, "__dlpack__"):
            yield x


def carry(
    operations: SimpleNamespace,
    there: Callable[[torch.Tensor], Any],
    back: Callable[[Any], torch.Tensor],
) -> SimpleNamespace:
    """Operations on CPU tensors and arrays. `there` copies each tensor to the device, `operations`
    run, and the result of `back` is written to the original if it has changed. The core validates
    the originals first, because it does not read numbers in a device's memory."""

    def make(name: str) -> Any:
        def run(*arguments: Any) -> None:
            _core.call(name, "check", *arguments)
            sent = mapped(arguments, _copy)
            away = mapped(sent, there)
            getattr(operations, name)(*away)
            for original, before, after in zip(
                tensors(arguments), tensors(sent), tensors(away), strict=True
            ):
                _write(original, before, back(after))

        return run

    return SimpleNamespace(**{name: make(name) for name in backends.OPERATIONS})


def _copy(x: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(x)) if isinstance(x, np.ndarray) else x.detach().clone()


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _write(original: Any, before: torch.Tensor, after: torch.Tensor) -> None:
    if torch.equal(_bytes(before), _bytes(after)):  # the original may be read-only
        return
    if isinstance(original, np.ndarray):
        np.copyto(original, after.numpy())
    else:
        original.copy_(after)


def flash(query: Any, keys: Any, values: Any, scale: float) -> Any:
    """torch's flash attention for CPUs, with the signature of those in
    `h2o.backends.prompt_attention`."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attention(query, keys, values, 0.0, True, scale=scale)


# ---- The switch --------------------------------------------------------------------------------


def switch(device: str) -> None:
    """Make `h2o.ops` compute CPU tensors on this device.

    Raises: RuntimeError if the device does not exist, or if h2o's kernels do not support it.
    """
    if device not in DEVICES:
        raise RuntimeError(f"wanted one of {', '.join(DEVICES)}")
    carried = DEVICES[device]()

    def carrying(serving: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def chosen(tensor: Any) -> Any:
            on_cpu = getattr(tensor, "is_cpu", isinstance(tensor, np.ndarray))
            return carried if on_cpu and not backends.forced else serving(tensor)

        return chosen

    backends.backend_for, backends.backend_if_open = map(
        carrying, (backends.backend_for, backends.backend_if_open)
    )


def _cuda() -> SimpleNamespace:
    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no CUDA device here")
    torch.cuda.init()
    index = torch.cuda.current_device()
    operations = cuda.backend_for(index, backends._torch_backend())
    if operations is backends._torch_backend():
        raise RuntimeError(f"h2o's kernels do not serve cuda:{index}: {cuda.describe()}")
    return carry(operations, lambda x: x.to(f"cuda:{index}"), torch.Tensor.cpu)


def _cpu() -> SimpleNamespace:
    return carry(backends.core, torch.Tensor.clone, torch.Tensor.clone)


def _fake() -> SimpleNamespace:
    from tests.cuda import device

    path = device.build()
    if path is None:
        raise RuntimeError("the fake driver needs the sources, make and g++")
    driver = device.load(path)
    return device.carried(driver, device.operations(driver, setattr))


DEVICES = {"cuda": _cuda, "cpu": _cpu, "fake": _fake}
"""H2O_TEST_DEVICE -> operations computed on that device."""
