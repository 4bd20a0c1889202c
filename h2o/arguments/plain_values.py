"""Numbers, flags, names, and lists of numbers.

A number may be Python's or NumPy's, or a tensor or array without dimensions. A bool is not a
number here, although Python's is an int, and a text is none either.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

SHOWN = 60
"""Number of characters that errors show of a value."""

_DIGITS = {2: 3, 4: 7}
"""Decimal digits that a float of this many bytes has for sure."""


def plain(value: Any) -> Any:
    """Convert a NumPy scalar, or a tensor or array without dimensions, to Python's number or bool.
    All other values are returned unchanged.

    A float of fewer bits than Python's becomes the decimal number that it stands for:
    `np.float32(0.7)` is 0.7 and not 0.699999988. As a fraction of 10 tokens the latter would be 6.
    """
    if getattr(value, "ndim", None) != 0 or not hasattr(value, "item") or _is_meta(value):
        return value
    number = value.item()
    if isinstance(number, float) and (digits := _DIGITS.get(value.dtype.itemsize)):
        return float(f"{number:.{digits}g}")
    return number


def brief(value: Any) -> str:
    """A value for an error: its repr, shortened, or its shape and dtype if it is a tensor or
    array. A model and other objects of several lines appear by their type."""
    if getattr(value, "shape", None) is not None and hasattr(value, "dtype"):
        where = " on the device meta" if _is_meta(value) else ""
        if where or value.ndim:
            what = "a tensor" if hasattr(value, "requires_grad") else "an array"
            return f"{what} of shape {list(value.shape)} and {value.dtype}{where}"
        value = value.item()
    text = repr(value)
    if "\n" in text:
        return f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 4]} ..."


def wrong(name: str, value: Any, expected: str, hint: str = "") -> str:
    """The message of all errors about arguments: what was given, what is expected, what to type."""
    return f"{name} is {brief(value)}; expected {expected}{hint and f': {hint}'}"


def is_integer(value: Any) -> bool:
    """Whether a value is an integer of any library, and not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a real number of any library, and not a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_count(
    name: str, value: Any, least: int = 1, most: int | None = None, *, hint: str = ""
) -> int:
    """Check an integer from `least` to `most`, and return an int. 8.0 is not one.

    Raises: TypeError for anything but an integer, ValueError for one out of range.
    """
    given = plain(value)
    expected = f"an integer of at least {least}"
    if most is not None:
        expected = f"an integer from {least} to {most}"
    if not is_integer(given):
        refuse_meta(name, value)
        raise TypeError(wrong(name, value, expected, hint or _as_integer(given)))
    number = int(given)
    if number < least or (most is not None and number > most):
        raise ValueError(wrong(name, value, expected, hint))
    return number


def check_integer(name: str, value: Any) -> int:
    """Check an integer of any size, and return an int. Raises: TypeError for anything else."""
    given = plain(value)
    if not is_integer(given):
        refuse_meta(name, value)
        raise TypeError(wrong(name, value, "an integer", _as_integer(given)))
    return int(given)


def check_fraction(
    name: str, value: Any, *, zero: bool = True, expected: str = "", hint: str = ""
) -> float:
    """Check a number in [0, 1], or in (0, 1] without `zero`, and return a float.

    Raises: TypeError for anything but a number, ValueError for one out of range and for NaN.
    """
    given = plain(value)
    expected = expected or f"a number in {'[' if zero else '('}0, 1]"
    if not is_number(given):
        refuse_meta(name, value)
        raise TypeError(wrong(name, value, expected, _without_quotes(given)))
    if not 0 <= given <= 1 or (given == 0 and not zero):  # NaN fails the first
        raise ValueError(wrong(name, value, expected, hint))
    return float(given)


def check_seed(seed: Any, name: str = "seed") -> int:
    """Check an integer that torch's generators accept, and return an int.

    Raises: TypeError for anything but an integer, ValueError for one out of range.
    """
    number = check_integer(name, seed)
    if not -(2**63) <= number < 2**63:
        raise ValueError(wrong(name, seed, "an integer from -(2**63) to 2**63 - 1"))
    return number


def check_flag(name: str, value: Any) -> bool:
    """Check True or False, also NumPy's, and return a bool.

    Raises: TypeError for anything else. The text "no" counts as true in Python.
    """
    given = plain(value)
    if not isinstance(given, bool):
        refuse_meta(name, value)
        raise TypeError(wrong(name, value, "True or False"))
    return given


def check_choice(name: str, value: Any, choices: Sequence[Any], hint: str = "") -> Any:
    """Check one of a few names or numbers, and return the one among `choices`.

    Raises: ValueError for anything else, whatever its type.
    """
    given = plain(value)
    for choice in () if isinstance(given, bool) else choices:
        if isinstance(given, type(choice)) and given == choice:
            return choice
    *others, last = (f'"{x}"' if isinstance(x, str) else f"{x}" for x in choices)
    wanted = f"{', '.join(others)} or {last}" if others else last
    raise ValueError(wrong(name, value, wanted, hint))


def check_index(name: str, value: Any, length: int, what: str) -> int:
    """Check the number of one of `length` things, each called `what`. As in a list, -1 is the
    last.

    Returns:
        A number from 0 to `length` - 1.

    Raises: TypeError for anything but an integer, IndexError for one out of range.
    """
    number = check_integer(name, value)
    if not -length <= number < length:
        raise IndexError(
            f"there is no {what} {number}: "
            + (f"expected 0 to {length - 1}" if length else f"there is no {what} yet")
        )
    return number % length


def check_numbers(name: str, value: Any) -> list[Any]:
    """Check a list of numbers, an array or tensor [n] of them, or another iterable, and return a
    list of Python's numbers, each of which remains to be checked.

    Raises: TypeError for a single number, a text, a mapping and a set, which has no order.
    ValueError for no numbers.
    """
    refuse_meta(name, value)
    rows = nested(value)
    if not isinstance(rows, Iterable) or isinstance(rows, str | bytes | Mapping | Set):
        raise TypeError(wrong(name, value, "a list of numbers", "write it in brackets, [...]"))
    listed = [plain(x) for x in rows]
    if not listed:
        raise ValueError(wrong(name, value, "a list with at least one number"))
    return listed


def check_fractions(name: str, value: Any, *, zero: bool = True) -> list[float]:
    """Check a list of `check_fraction`. Raises: the errors of that and of `check_numbers`."""
    return [check_fraction(name, x, zero=zero) for x in check_numbers(name, value)]


def nested(value: Any) -> Any:
    """Nested lists for a tensor or array with dimensions; `plain` for everything else."""
    is_array = hasattr(value, "tolist") and getattr(value, "ndim", 0) and not _is_meta(value)
    if not is_array:
        return plain(value)
    digits = _DIGITS.get(value.dtype.itemsize) if "float" in str(value.dtype) else None
    return value.tolist() if digits is None else _rounded(value.tolist(), digits)


def is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def refuse_meta(name: str, value: Any) -> None:
    """Raise ValueError for a tensor on the device "meta", which has no values."""
    if _is_meta(value):
        raise ValueError(wrong(name, value, "a tensor with values, on another device"))


def _is_meta(value: Any) -> bool:
    return getattr(getattr(value, "device", None), "type", None) == "meta"


def _rounded(rows: Any, digits: int) -> Any:
    if isinstance(rows, list):
        return [_rounded(row, digits) for row in rows]
    return float(f"{rows:.{digits}g}")


def _as_integer(value: Any) -> str:
    """What to type instead of a value that stands for an integer."""
    if isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    return _without_quotes(value, int)


def _without_quotes(value: Any, kind: Any = float) -> str:
    """What to type instead of a text with a number."""
    if isinstance(value, str):
        try:
            kind(value)
        except ValueError:
            return ""
        return f"write {value.strip()} without quotes"
    return ""
