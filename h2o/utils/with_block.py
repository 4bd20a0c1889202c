"""Context managers that warn if they are called without `with`, which would change nothing."""

from __future__ import annotations

import contextlib
import functools
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
    is_used = False

    def __enter__(self) -> Any:
        self.is_used = True
        return super().__enter__()

    def __call__(self, function: Any) -> Any:
        """Decorate a function, which then runs in a new block."""
        self.is_used = True
        return super().__call__(function)

    def __del__(self) -> None:
        if not self.is_used:
            name = self.func.__name__
            warnings.warn(
                f"h2o.{name}() was called without `with`, so it changed nothing. Write "
                f"`with h2o.{name}(...):`",
                stacklevel=2,
            )
