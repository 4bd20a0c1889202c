"""Bytes of stored keys and values by `kv_dtype`, and of a slot, as plain numbers without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

FIXED = 32
"""Bytes per head outside its slots, without offsets and smoothing: `next_slot`, `budget`,
`evicted_score`, and the head's part of the row's `seen_tokens`."""


KvDtype = Literal["auto", "int8", "int8-int4", "int4"]
"""The quantized formats, and "auto", which `choose_bits` resolves to one of them."""

QUANTIZED: tuple[str, ...] = tuple(name for name in get_args(KvDtype) if name != "auto")
"""Quantized formats of keys and values. A `kv_dtype` of None stores them in their own dtype."""


def stored_bytes(kv_dtype: str, D: int) -> tuple[int, int]:
    """(bytes of a quantized key, bytes of a quantized value) of D elements.

    Raises: ValueError for a `kv_dtype` that does not support D.
    """
    if kv_dtype == "int8":
        return D + 2, D + 2
    if D % 32:
        raise ValueError(
            f'kv_dtype="{kv_dtype}" needs a head dimension that is a multiple of 32, not {D}; '
            'use "int8"'
        )
    return (D + 2 if kv_dtype == "int8-int4" else D // 2 + 2), D // 2 + D // 8


def has_four_bit_values(kv_dtype: str | None) -> bool:
    """Whether values have four bits."""
    return kv_dtype in ("int8-int4", "int4")


def has_four_bit_keys(kv_dtype: str | None) -> bool:
    """Whether keys have four bits."""
    return kv_dtype == "int4"


def is_four_bit_key(size: int, D: int) -> bool:
    """Whether a stored key of D elements that takes so many bytes has four bits."""
    return D % 32 == 0 and size == stored_bytes("int4", D)[0]


TokenBytes = tuple[int, int, int]
"""Bytes of a token in a full cache, of a slot (stored key and value, score, position and norm), and
of what a head needs outside its slots; for one key/value head"""


def count_fitting(budget: int, sizes: TokenBytes, sinks: int) -> int:
    """Number of keys, besides the sinks and a free slot, that fit into `budget` bytes per head; at
    least 1."""
    return max(1, (budget - sizes[2]) // sizes[1] - 1 - sinks)


def bytes_per_token(
    D: int, element: int, rows: int, kv_dtype: str | None, value_weighted: bool
) -> TokenBytes:
    """Bytes of a head with elements of `element` bytes each in a full cache.

    `rows` is 2 (key and value) or 1 (a row that is both). Quantized keys with values have offsets,
    and those of four bits smoothing.
    """
    full = rows * D * element
    held = full if kv_dtype is None else sum(stored_bytes(kv_dtype, D)[:rows])
    of_keys = 0 if kv_dtype is None or rows == 1 else 1 + (kv_dtype == "int4")
    return full, held + 8 + 4 * value_weighted, FIXED + 2 * D * of_keys


FEW_KEYS = 0.25
"""Share of a text's keys up to which more keys are worth more than precise ones. (Measured:
docs/reference/results.md, "Keys in four bits".)"""


def choose_bits(
    D: int | None, element: int | None, shares: Sequence[Any], value_weighted: bool
) -> KvDtype:
    """The `kv_dtype` that "auto" stands for.

    Args:
        D: the head dimension; None for a latent or if it is not known.
        element: bytes of an element of a full cache; None for a budget in keys.
        shares: heavy and recent.
    """
    if not isinstance(D, int) or D % 32:
        return "int8"
    if element is None or not all(isinstance(x, float) for x in shares):
        return "int8-int4"
    full, slot, _ = bytes_per_token(D, element, 2, "int8-int4", value_weighted)
    return "int4" if sum(shares) * full < FEW_KEYS * slot else "int8-int4"
