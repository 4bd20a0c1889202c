"""The operations of `h2o.ops` in plain torch, for devices that the C core has no kernels for.

`h2o.backends` calls them with the positional arguments of their namesakes in `_core`, after the
core's own checks. They work on any device that torch has and never wait for it: nothing
reads a tensor's numbers on the host, and shapes follow from shapes alone. What the checks cannot
read on such a device (lengths, budgets, free slots) is taken as it is.

Which keys are kept is decided in the order of `csrc/policy.h` (`ranking`). Scores and logits are
float32, memory is O(n): no matrix of queries and keys is ever whole.

A value that is infinite is so in the answers of `attend` and `simulate` whatever its weight; in
those of `step` it is NaN instead where the weight is 0 in the numbers that are multiplied, which
are 16-bit floats on a GPU whose slots hold them.

Empty slots must hold finite values (as `new_slots` and all operations here leave them): they are
multiplied by 0.

Shape letters as in `h2o.ops`, and M queries of a key/value head, C keys that compete.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from h2o.backends.portable.numbered_rows import by_number

__all__ = ["operation"]


def operation(name: str) -> Callable[..., Any]:
    """The operation of that name, which is in the file of that name.

    Raises: ModuleNotFoundError without torch.
    """
    function: Callable[..., Any] = getattr(importlib.import_module(f"{__name__}.{name}"), name)
    return _without_autocast(by_number(function, *(("scores",) if name == "attend" else ())))


def _without_autocast(operation: Callable[..., Any]) -> Callable[..., Any]:
    """An operation whose products keep their float32 under the caller's autocast."""
    import torch

    @functools.wraps(operation)
    def run(*operands: Any) -> Any:
        device = operands[0].device.type
        if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
            return operation(*operands)
        with torch.autocast(device, enabled=False):
            return operation(*operands)

    return run
