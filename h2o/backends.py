"""Who carries an operation out: the C core, or plain torch where the core has no kernels.

The C core serves tensors of any library on the CPU. Torch tensors on any other device are served by
`h2o.portable`, in operations that torch has everywhere. `H2O_BACKEND=torch` in the environment
makes that serve all tensors of torch, those on the CPU too.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from h2o import _core

__all__ = ["OPERATIONS", "by_torch", "info", "serving"]

OPERATIONS = ("attend", "evict", "step", "simulate")

forced = os.environ.get("H2O_BACKEND", "")
if forced not in ("", "torch"):
    raise ValueError(f'H2O_BACKEND={forced}: wanted "torch", or no such variable')


def serving(tensor: Any) -> Any:
    """What has `OPERATIONS`, with the arguments of those of `_core`, for tensors like this one."""
    on_cpu = getattr(tensor, "is_cpu", None)  # torch's word; others' tensors have none
    if on_cpu is None or (on_cpu and not forced):
        return _core
    return _portable()


@contextlib.contextmanager
def by_torch() -> Iterator[None]:
    """As with H2O_BACKEND=torch, in all threads: to measure and to test."""
    global forced
    before, forced = forced, "torch"
    try:
        yield
    finally:
        forced = before


@functools.cache
def _portable() -> SimpleNamespace:
    """The torch backend, behind the checks of the core."""
    from h2o import portable

    def checked(name: str) -> Any:
        check, run = getattr(_core, f"check_{name}"), getattr(portable, name)

        def operation(*arguments: Any) -> None:
            check(*arguments)
            run(*arguments)

        return operation

    return SimpleNamespace(**{name: checked(name) for name in OPERATIONS})


def info() -> dict[str, Any]:
    """See `h2o.ops.info`."""
    facts = _core.info()
    served = {"cpu": "torch" if forced else "C", "any other device of torch": "torch"}
    return facts | {"operations": dict.fromkeys(OPERATIONS, facts["level"]), "backends": served}
