"""The operations of `h2o.ops` in plain torch, for devices that the C core has no kernels for.

`h2o.backends` calls them with the positional arguments of their namesakes in `_core`, after the
core's own checks. They work on any device of torch and never wait for it: shapes follow from
shapes, and no number of a tensor is read on the host. Numbers that cannot be checked without
waiting (lengths, budgets, free slots) are trusted.

The order of ranks is that of `csrc/policy.h` (`ranking`). Scores and logits are float32. Memory is
O(n): no matrix of queries and keys is ever whole.

An infinite value makes the outputs of `attend` and `simulate` infinite whatever its weight. In
`step` the output is NaN where the weight rounds to 0.

Empty slots must hold finite values, as `new_slots` and all operations here leave them, since they
are multiplied by 0.

Shape letters as in `h2o.ops`, and M queries of a key/value head, C keys that compete.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from h2o.backends.portable.numbered_rows import by_number


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
