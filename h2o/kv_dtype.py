"""Bytes of stored keys and values by `kv_dtype`, and of a slot. Plain numbers, no torch."""

from __future__ import annotations

from typing import Literal

FIXED = 32
"""Bytes of a head beside its slots: free slot, budget, lost mass, a part of the row's length."""


QUANTIZED = ("int8", "int8-int4")
"""Quantized formats of keys and values. A `kv_dtype` of None stores them as they are."""

KvDtype = Literal["auto", "int8", "int8-int4"]
"""These, and "auto", which `fewest_bits` resolves."""


def stored_bytes(kv_dtype: str | None, D: int) -> tuple[int, int] | None:
    """Bytes of a stored key and value of D elements; None where they are stored as they are.

    Raises: ValueError for an unknown `kv_dtype`, or one that does not go with D.
    """
    if kv_dtype is None:
        return None
    if kv_dtype == "int8":
        return D + 2, D + 2
    if kv_dtype != "int8-int4":
        raise ValueError(f'kv_dtype must be None, "int8" or "int8-int4", not {kv_dtype!r}')
    if D % 32:
        raise ValueError(
            f'kv_dtype="int8-int4" needs a head dimension that is a multiple of 32, not {D}; '
            'use "int8"'
        )
    return D + 2, D // 2 + D // 8


def fewest_bits(D: int | None) -> str:
    """The `kv_dtype` that stores least of what goes with a head dimension."""
    return "int8-int4" if isinstance(D, int) and D % 32 == 0 else "int8"


def fitting(budget: int, slot: tuple[int, int], sinks: int) -> int:
    """Keys beside the sinks that fit, with a free slot, into so many bytes of a head; at least 1.
    `slot`: as `per_token`."""
    return max(1, (budget - FIXED) // slot[1] - 1 - sinks)


def per_token(
    D: int, element: int, rows: int, kv_dtype: str | None, value_weighted: bool
) -> tuple[int, int]:
    """Bytes of a token for one key/value head: in a full cache, whose elements have `element`
    bytes each, and in a slot with score, position and norm. `rows`: 2, key and value, or 1
    that is both."""
    full, stored = rows * D * element, stored_bytes(kv_dtype, D)
    held = full if stored is None else sum(stored[:rows])
    return full, held + 8 + 4 * value_weighted


def in_elements(slot: tuple[int, int], full: int, kv_dtype: str | None) -> tuple[int, int]:
    """Convert a slot to elements of another size, of which a token in a full cache takes `full`
    bytes."""
    before, each = slot
    if kv_dtype is None:
        each += full - before
    return full, each
