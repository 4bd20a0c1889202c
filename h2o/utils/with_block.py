"""Context managers that warn if they are called without `with`, which would change nothing."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def with_block(
    function: Callable[P, Iterator[T]],
) -> Callable[P, contextlib.AbstractContextManager[T]]:
    """Do what `contextlib.contextmanager` does, and warn of a block that is never entered."""

    @functools.wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> contextlib.AbstractContextManager[T]:
        return _Block(function, args, kwargs)  # type: ignore[arg-type]

    return make


class _Block(contextlib._GeneratorContextManager[Any]):
    def __call__(self, function: Any) -> Any:
        """Decorate a function, each call of which runs in a new block."""
        self.gen.close()
        return super().__call__(function)

    def __del__(self) -> None:
        block = getattr(self, "gen", None)  # None: the function was called with wrong arguments
        if block is not None and inspect.getgeneratorstate(block) == inspect.GEN_CREATED:
            warnings.warn(
                f"h2o.{block.__name__}() was called without `with`, so it changed nothing. Write "
                f"`with h2o.{block.__name__}(...):`",
                stacklevel=2,
            )
