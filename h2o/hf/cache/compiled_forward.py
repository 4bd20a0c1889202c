"""A model's forward pass by torch.compile, in one graph, or eagerly where none can be made."""

from __future__ import annotations

import functools
import textwrap
import warnings
from typing import Any

import torch

from h2o.compat import compile_errors

__all__ = ["CompiledForward", "warn_of_many_graphs"]


@torch.compiler.disable
def warn_of_many_graphs() -> None:
    """Warns, once in a process, of a cache that breaks a compiled model into many graphs."""
    _warn_once()


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        "torch.compile(model) cannot capture this H2OCache: the model falls into several graphs "
        "for each layer, which are compiled anew as its slots grow. Make the cache with "
        "H2OCache(..., compileable=True), or call the model without torch.compile",
        RuntimeWarning,
        stacklevel=3,
    )


class CompiledForward:
    """Called as the model is. From the first time on that the graph cannot be made, which is
    warned of, it is the model; `what` says to the reader which passes these are."""

    def __init__(self, model: Any, what: str) -> None:
        self.model, self.what = model, what
        self._graph = torch.compile(model.forward, fullgraph=True)

    def __call__(self, **inputs: Any) -> Any:
        if self._graph is not None:
            try:
                return self._graph(**inputs)
            except compile_errors() as error:  # nothing has run yet
                reason = textwrap.shorten(str(error), 300, placeholder=" ...")
                text = f"{self.what} are not compiled: {reason}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
                self._graph = None
        return self.model(**inputs)

    def __bool__(self) -> bool:
        """Whether there is a graph, or there may be one."""
        return self._graph is not None
