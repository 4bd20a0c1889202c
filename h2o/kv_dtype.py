"""Bytes: of a stored key or value, and of a slot with everything that belongs to it.

Plain numbers, no torch.
"""

from __future__ import annotations

from typing import Any

from h2o.profile import describe

__all__ = ["FIXED", "fewest_bits", "per_token", "stored_bytes"]

FIXED = 32
"""Bytes of a head beside its slots: free slot, budget, lost mass, a part of the row's length."""


def stored_bytes(kv_dtype: str | None, D: int) -> tuple[int, int] | None:
    """Bytes of a stored key and value of D elements; None where they are stored as they are.

    Errors: ValueError for an unknown `kv_dtype`, or one that does not go with D.
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


def fewest_bits(config: Any) -> str:
    """The `kv_dtype` that stores least of what goes with a model's head dimension."""
    D = describe(config).get("head_dim")
    return "int8-int4" if isinstance(D, int) and D % 32 == 0 else "int8"


def per_token(
    config: Any, kv_dtype: str | None, value_weighted: bool, merges: bool
) -> tuple[int, int]:
    """Bytes of a token for one key/value head: in a full cache in the model's dtype, and in a slot
    with score, position, norm and bias.

    `config`: a model's. Errors: ValueError for one that does not tell its head dimension.
    """
    D = describe(config).get("head_dim")
    if not isinstance(D, int):
        raise ValueError('of="bytes" needs a model whose config tells its head dimension')
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    dtype = str(getattr(text, "dtype", None) or getattr(config, "dtype", None))
    element = 2 if dtype.endswith(("float16", "half")) else 4
    full = 2 * D * element
    stored = stored_bytes(kv_dtype, D)
    return full, (full if stored is None else sum(stored)) + 8 + 4 * (value_weighted + merges)
