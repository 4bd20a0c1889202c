"""Former spellings of public names, which are served as long as there is this file."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["accepts_former", "warn"]

P = ParamSpec("P")
R = TypeVar("R")


def accepts_former(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: the function takes keywords by their former names too, former="present".

    Calls raise TypeError for both spellings at once.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for former in names.keys() & kwargs.keys():
                if names[former] in kwargs:
                    raise TypeError(f"{former} is the former name of {names[former]}: give one")
                warn(former, names[former])
                kwargs[names[former]] = kwargs.pop(former)
            return function(*args, **kwargs)

        return call

    return decorated


def warn(former: str, present: str) -> None:
    """A DeprecationWarning at the line that called the caller of this."""
    warnings.warn(f"{former} is now called {present}", DeprecationWarning, stacklevel=3)
