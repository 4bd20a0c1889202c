"""The fields of an `H2OConfig` as keyword arguments, for type checkers and editors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from h2o.budgets import Budget
from h2o.kv_dtype import KvDtype
from h2o.policy import PolicyFields

__all__ = ["CacheFields", "ConfigFields", "Of", "Positions"]

Of = Literal["keys", "bytes"]
Positions = Literal["original", "rolled"]


class ConfigFields(PolicyFields, total=False):
    """Of a function that takes an `H2OConfig` or its fields; those of the policy come first."""

    heavy: Budget
    recent: Budget
    kv_dtype: KvDtype | None
    shares: Any
    of: Of
    slot: tuple[int, ...] | None
    positions: Positions


class CacheFields(ConfigFields, total=False):
    """What an `H2OCache` takes by name."""

    prompt_length: int | Sequence[int] | None
    trace: bool
    compileable: bool
