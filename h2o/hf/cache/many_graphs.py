"""Models compiled by torch.compile, and caches that no graph can capture.

A cache without `compileable=True` runs between the graphs into which such a model falls.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def outside_graphs(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function between two graphs, which must not capture it."""
    return call(*args, **kwargs)


@torch.compiler.disable
@functools.cache
def warn_of_many_graphs() -> None:
    """Warn once per process that a cache breaks a compiled model into many graphs."""
    warnings.warn(
        "torch.compile(model) cannot capture this H2OCache: the model breaks into several graphs "
        "per layer, which are recompiled as the slots grow. Make the cache with "
        "H2OCache(..., compileable=True), or call the model without torch.compile",
        RuntimeWarning,
        stacklevel=2,
    )
