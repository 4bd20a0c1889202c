"""The fields of an `H2OConfig` as keyword arguments, for type checkers and editors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from h2o.budgets import Amount, Budget, BudgetUnit, RatioOf
from h2o.kv_dtype import KvDtype
from h2o.policy import PolicyFields

Positions = Literal["original", "cache_relative"]


class Numbers(Protocol):
    """A tensor or array of any library."""

    def tolist(self) -> Any: ...


PromptLength = int | Sequence[int] | Numbers | None
"""Length of the prompt in tokens: one number for all rows, or one for each row."""

Pinned = Literal["prompt"] | Sequence[Any] | Numbers | None
"""Pinned tokens: spans (start, stop) for all rows, a list of spans for each row, or a bool mask."""


class FieldsOfTexts(PolicyFields, total=False):
    """The fields of an `H2OConfig`, for a function that has a `ratio_of` of its own."""

    budget: Amount | None
    heavy: Budget
    recent: Budget
    kv_dtype: KvDtype | None
    head_shares: Any
    budget_unit: BudgetUnit
    min_tokens: int
    positions: Positions


class ConfigFields(FieldsOfTexts, total=False):
    """Keyword arguments of a function that takes an `H2OConfig` or its fields."""

    ratio_of: RatioOf


class CacheFields(ConfigFields, total=False):
    """Keyword arguments of an `H2OCache`."""

    prompt_length: PromptLength
    pinned: Pinned
    trace: bool
    compileable: bool
