"""Dispatch of operations by device: to the C core, or to plain torch where it has no kernels.

The C core serves tensors of any library on the CPU, and those of torch on a CUDA device where it
has kernels (`h2o.backends.cuda`). Torch tensors on any other device are served by
`h2o.backends.portable`, in operations that torch has everywhere. `H2O_BACKEND=torch` in the
environment makes that serve all tensors of torch, those on the CPU too. In a build without the
core it serves everything (`h2o.backends.without_core`).
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
    raise ValueError(f'H2O_BACKEND={forced}: wanted "torch", or no such variable')

core = SimpleNamespace(**{name: functools.partial(_core.call, name, "run") for name in OPERATIONS})
"""The operations by the C core on the CPU; without it, by torch on any device."""


def serving(tensor: Any, *, opens: bool = True) -> SimpleNamespace:
    """The backend for such a tensor: `OPERATIONS` by name, with the operands of `_core.call`.

    The first call for a CUDA device opens it: loads the kernels, checks them, writes the verdict
    into the cache folder. Where it must not, a device that none has opened is left to torch.
    """
    on_cpu = getattr(tensor, "is_cpu", None)  # torch's word; others' tensors have none
    if on_cpu is None or not HAS_CORE or (on_cpu and not forced):
        return core
    if not forced and is_cuda(tensor) and not cuda.is_fake(tensor):
        choose = cuda.serving if opens else cuda.serving_if_open
        return choose(tensor.device.index, _portable())
    return _portable()


serving_if_open = functools.partial(serving, opens=False)
"""`serving` for a decode step, which opens no device."""


def is_cuda(tensor: Any) -> bool:
    """Whether a tensor of torch is on a device of NVIDIA's; torch calls those of AMD so too."""
    import torch

    return tensor.is_cuda and torch.version.hip is None


@contextlib.contextmanager
def by_torch() -> Iterator[None]:
    """Use the torch backend in all threads, like H2O_BACKEND=torch, to measure and to test."""
    global forced
    before, forced = forced, "torch"
    try:
        yield
    finally:
        forced = before


@functools.cache
def _portable() -> SimpleNamespace:
    """The torch backend, behind the checks of the core."""
    from h2o.backends import portable

    def checked(name: str) -> Any:
        run = portable.operation(name)

        def operation(*operands: Any) -> None:
            cuda.check_operands(name, *operands)
            run(*operands)

        return operation

    return SimpleNamespace(**{name: checked(name) for name in OPERATIONS})


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
    """Check the kernels of each CUDA device of torch anew, and return their mistakes.

    Raises: RuntimeError where there is no such device or kernels cannot be loaded.
    """
    if not HAS_CORE:
        raise RuntimeError(packages.without_core())
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        raise RuntimeError("torch has no CUDA device here")
    return {f"cuda:{index}": cuda.check(index, _portable()) for index in range(count)}
