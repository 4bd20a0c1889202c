"""A compiler that tells what would be recorded as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def recording(seen: set[Any]) -> Callable[..., Any]:
    """A backend of torch.compile that runs graphs as they are, and adds to `seen`.

    A CUDA graph is replayed where shapes, strides and plain numbers are those of its recording.
    Other ones are recorded anew, which takes longer than many steps.
    """

    def backend(graph: torch.fx.GraphModule, example: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            seen.add((graph, tuple(map(_form, arguments))))
            return graph.forward(*arguments)

        return run

    return backend


def _form(x: Any) -> Any:
    """What a recording depends on, of one argument."""
    return (x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x
