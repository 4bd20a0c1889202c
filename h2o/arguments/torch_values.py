"""Token ids, masks, numbers of batch rows, and devices, as torch tensors and devices.

Shape letters: B batch rows, n tokens or columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from h2o.arguments.plain_values import brief, is_integer, is_list, nested, plain, refuse_meta, wrong


def check_ids(
    name: str,
    value: Any,
    *,
    one_row: bool = False,
    vocabulary: float = math.inf,
    least: int = 1,
    hint: str = "",
) -> Tensor:
    """Check token ids, a tensor, an array or lists of integers, and return int64 [B, n].

    The result is on the device of a tensor, and on the CPU otherwise. [n] becomes [1, n].

    Args:
        one_row: whether B must be 1.
        vocabulary: ids must be below this number.
        least: the smallest n.
        hint: what to type instead of something that is not token ids.

    Raises:
        TypeError: the values are not integers.
        ValueError: the shape is another, there are too few tokens, or an id is out of range.
    """
    expected = f"token ids {'[n] or [1, n]' if one_row else '[B, n]'}"
    ids = _as_tensor(name, value, expected, hint)
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise TypeError(wrong(name, value, f"{expected}, which are integers", hint))
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or (one_row and len(ids) != 1):
        raise ValueError(wrong(name, value, expected, hint))
    if not len(ids) or ids.shape[1] < least:
        expected = f"at least {least}{hint and f': {hint}'}"
        raise ValueError(f"{name} has {ids.shape[1]} tokens; expected {expected}")
    ids = ids.to(torch.long)  # torch cannot compare uint16
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:  # on a GPU all later calls would fail
        raise ValueError(
            f"{name} has token ids {low} to {high}; expected ids of the vocabulary, "
            f"0 to {vocabulary - 1}"
        )
    return ids


def check_mask(
    name: str, value: Any, shape: Sequence[int | None], what: str, device: Any = None
) -> Tensor:
    """Check a mask of bools, integers or floats that are all 0 or 1, and return a bool tensor.

    Args:
        shape: the sizes that it must have, None for any.
        what: says what the shape is, for the error.
        device: device of the result; by default that of a tensor, and the CPU for lists.

    Raises:
        TypeError: the values are not numbers.
        ValueError: the shape is another, or a value is neither 0 nor 1.
    """
    sizes = ", ".join("n" if n is None else f"{n}" for n in shape)
    expected = f"a mask [{sizes}], {what}, with 0 at padding and 1 elsewhere"
    mask = _as_tensor(name, value, expected)
    pairs = zip(shape, mask.shape, strict=False)
    if mask.ndim != len(shape) or any(n not in (None, given) for n, given in pairs):
        raise ValueError(f"{name} has shape {list(mask.shape)}; expected {expected}")
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(f"{name} has other values than 0 and 1; expected {expected}")
    return mask.to(device=device, dtype=torch.bool)


def check_rows(name: str, value: Any) -> Tensor:
    """Check numbers of batch rows, int64 [n], or a bool mask [B], and return it as a tensor.

    Raises: TypeError for values that are neither, which would select by another axis or round,
    ValueError for another shape, and if no row is selected.
    """
    expected = "row numbers, such as [0, 2], or a bool mask with an entry for each row"
    rows = _as_tensor(name, value, expected)
    if rows.ndim != 1:
        raise ValueError(wrong(name, value, expected))
    if len(rows) == 0 or (rows.dtype == torch.bool and not bool(rows.any())):
        raise ValueError(f"{name} selects no row. To empty a cache call cache.reset()")
    if rows.is_floating_point() or rows.is_complex():
        raise TypeError(wrong(name, value, expected))
    return rows if rows.dtype == torch.bool else rows.long()


def check_device(name: str, value: Any) -> torch.device:
    """Check that a device exists on this machine, by its name, or its number as in torch.

    Raises: TypeError for anything but a name, a number or a torch.device, ValueError for a device
    that torch does not know, or that holds no values.
    """
    expected = 'a device of torch, such as "cpu", "cuda" or "cuda:1"'
    given = plain(value)
    if not isinstance(given, str | torch.device) and not is_integer(given):
        raise TypeError(wrong(name, value, expected))
    try:
        device = torch.device(given)
        torch.zeros(1, dtype=torch.uint8, device=device).cpu()  # fails for meta, which has no data
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = " ".join((str(error) or type(error).__name__).split())
        reason = reason if len(reason) <= 100 else f"{reason[:96]} ..."
        raise ValueError(f"{name} {given}: torch finds no such device here ({reason})") from error
    return device


def _as_tensor(name: str, value: Any, expected: str, hint: str = "") -> Tensor:
    """A tensor unchanged; arrays and nested lists as a tensor on the CPU."""
    refuse_meta(name, value)
    if isinstance(value, Tensor):
        return value
    rows = nested(value)
    if not is_list(rows):
        raise TypeError(wrong(name, value, expected, hint))
    try:
        return torch.as_tensor(rows, device="cpu")
    except (TypeError, RuntimeError, ValueError, OverflowError) as error:
        kind = ValueError if _is_numeric(rows) else TypeError  # ragged or too large, or a text
        raise kind(f"{name} is {brief(value)}; expected {expected} ({error})") from error


def _is_numeric(rows: Any) -> bool:
    """Whether nested lists have numbers only."""
    if is_list(rows):
        return all(map(_is_numeric, rows))
    return isinstance(plain(rows), bool | int | float | complex)
