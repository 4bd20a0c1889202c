"""The operations of `h2o.ops` in plain torch, for devices for which the C core has no kernels.

`h2o.backends` calls them with the positional arguments of their namesakes in `_core`, after the
core's checks. They work on any torch device and never wait for it: all shapes follow from shapes of
operands, and the host reads no value of a tensor. Values that cannot be checked without waiting
(lengths, budgets, free slots) are trusted.

Keys are ranked as in `csrc/policy.h` (see `ranking`). Scores and logits are float32. Memory is
O(n): the matrix of queries and keys is never complete.

An infinite value makes the outputs of `attend` and `simulate` infinite regardless of its weight. In
`step` the output is NaN if the weight rounds to 0.

Empty slots must hold finite values, because they are multiplied by 0. `new_slots` and all
operations here ensure this.

Shape letters as in `h2o.ops`, and M queries of a key/value head, C candidate keys.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from h2o.backends.torch_backend.selected_rows import with_selected_rows


def operation(name: str) -> Callable[..., Any]:
    """The operation with this name, from the module with the same name.

    Raises: ModuleNotFoundError if torch is missing.
    """
    function: Callable[..., Any] = getattr(importlib.import_module(f"{__name__}.{name}"), name)
    written = ("scores",) if name == "attend" else ()
    return _without_autocast(with_selected_rows(function, *written))


def _without_autocast(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Disable the caller's autocast inside an operation, so that float32 products stay float32."""
    import torch

    @functools.wraps(operation)
    def run(*operands: Any) -> Any:
        device = operands[0].device.type
        if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
            return operation(*operands)
        with torch.autocast(device, enabled=False):
            return operation(*operands)

    return run
