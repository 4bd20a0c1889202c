"""Checks of numbers and flags that users give. A bool is not a number here, although Python's is an
int."""

from __future__ import annotations

import numbers
from typing import Any


def is_integer(value: Any) -> bool:
    """Whether a value is an integer of any library, and not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a real number of any library, and not a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_count(name: str, value: Any) -> None:
    """Raise ValueError unless an argument is an integer of at least 1."""
    if not is_integer(value) or value < 1:
        raise ValueError(f"{name} is {value!r}; expected an integer of at least 1")


def check_seed(seed: Any) -> None:
    """Raise ValueError unless a seed is an integer that torch's generators accept."""
    if not is_integer(seed) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed is {seed!r}; expected an integer from -(2**63) to 2**63 - 1")


def check_flag(name: str, value: Any) -> None:
    """Raise TypeError unless an argument is a bool. The text "no" counts as true in Python."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
