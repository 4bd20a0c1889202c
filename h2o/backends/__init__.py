"""Dispatch of operations by device: to the C core, or to torch operations where it has no kernels.

The C core handles tensors of any library on the CPU, and torch tensors on CUDA devices for which it
has kernels (`h2o.backends.cuda`). `h2o.backends.torch_backend` handles torch tensors on all other
devices, with operations that torch has everywhere. The environment variable `H2O_BACKEND=torch`
selects it for all torch tensors, including those on the CPU. In a build without the core it handles
everything (`h2o.backends.without_core`).
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from h2o import packages

HAS_CORE = packages.has_core()
if HAS_CORE:
    from h2o import _core
    from h2o.backends import cuda
else:
    from h2o.backends import without_core as _core

VERSION: str = _core.info()["version"]
OPERATIONS: tuple[str, ...] = _core.OPERATIONS

forced = os.environ.get("H2O_BACKEND", "")
if forced not in ("", "torch"):
    raise ValueError(f'H2O_BACKEND={forced}: wanted "torch", or the variable not set')

core = SimpleNamespace(**{name: functools.partial(_core.call, name, "run") for name in OPERATIONS})
"""The operations of the C core on the CPU, or, without the core, those of torch on any device."""


def backend_for(tensor: Any, *, opens: bool = True) -> SimpleNamespace:
    """The backend for a tensor: `OPERATIONS` by name, with the operands of `_core.call`.

    The first call for a CUDA device opens the device: it loads and checks the kernels and writes
    the result to the cache folder. If `opens` is False, torch handles devices that are not open.
    """
    on_cpu = getattr(tensor, "is_cpu", None)  # only torch tensors have it
    if on_cpu is None or not HAS_CORE or (on_cpu and not forced):
        return core
    if not forced and tensor.is_cuda and not cuda.is_fake(tensor):
        import torch

        if torch.version.hip is None:  # not an AMD device
            choose = cuda.backend_for if opens else cuda.backend_if_open
            return choose(tensor.device.index, _torch_backend())
    return _torch_backend()


backend_if_open = functools.partial(backend_for, opens=False)
"""`backend_for` for a decode step, which opens no device."""


@contextlib.contextmanager
def by_torch() -> Iterator[None]:
    """Use the torch backend in all threads, like H2O_BACKEND=torch, for tests and measurements."""
    global forced
    before, forced = forced, "torch"
    try:
        yield
    finally:
        forced = before


@functools.cache
def _torch_backend() -> SimpleNamespace:
    """The torch backend, preceded by the core's checks."""
    from h2o.backends import torch_backend

    def with_checks(name: str) -> Any:
        run = torch_backend.operation(name)

        def operation(*operands: Any) -> None:
            if operands[0].is_meta:
                leader = "keys" if name == "evict" else "query"
                raise BufferError(
                    f'{leader}: is on the device "meta", so it has no values; if a model made it, '
                    "load its weights, as with h2o.load_model(name) or from_pretrained(name)"
                )
            cuda.check_operands(name, *operands)
            run(*operands)

        return operation

    return SimpleNamespace(**{name: with_checks(name) for name in OPERATIONS})


def info() -> dict[str, Any]:
    """See `h2o.ops.info`."""
    facts = _core.info()
    compiled = HAS_CORE and not forced
    served = {
        "cpu": "C" if compiled else "torch",
        "cuda": cuda.describe() if compiled else "torch",
        "any other device of torch": "torch",
    }
    level = facts["level"] if HAS_CORE else "torch"
    return facts | {"operations": dict.fromkeys(OPERATIONS, level), "backends": served}


def check() -> dict[str, list[str]]:
    """Check the kernels of each CUDA device of torch again, and return their mistakes.

    Raises: RuntimeError if there is no CUDA device or the kernels cannot be loaded.
    """
    if not HAS_CORE:
        raise RuntimeError(packages.without_core())
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        raise RuntimeError("torch has no CUDA device here")
    return {f"cuda:{index}": cuda.check(index, _torch_backend()) for index in range(count)}
