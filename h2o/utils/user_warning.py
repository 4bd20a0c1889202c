"""Warnings that point to the line of the user's program, however deep inside h2o they are given."""

from __future__ import annotations

import inspect
import warnings
from types import FrameType

OWN = ("h2o", "contextlib", "torch", "transformers")
"""Packages whose frames are not the user's: h2o, and those that call it."""


def warn_user(text: str) -> None:
    """Give a UserWarning at the innermost frame outside `OWN`."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_back is not None and _is_own(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in OWN
