"""Presets: named configs, as class methods of `H2OConfig`. `budget=` alone selects `echo`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from h2o.arguments.plain_values import check_choice
from h2o.budgets import (
    DEFAULT_BUDGET,
    UNLIMITED,
    Amount,
    Budget,
    BudgetUnit,
    check_whole_budget,
    explain_few_keys,
    split_heavy_recent,
)
from h2o.utils.user_warning import warn_user

if TYPE_CHECKING:
    from typing_extensions import Self

PRESETS = ("authors", "robust", "echo", "calibrated")
"""Names of the presets that accept a budget in keys or in bytes; see `H2OConfig.preset`."""


def warn_of_few_keys(amounts: dict[str, Any]) -> None:
    """Give the UserWarning of `h2o.budgets.explain_few_keys`, if there is one."""
    if text := explain_few_keys(amounts):
        warn_user(text)


def robust_fields(budget: Amount, budget_unit: BudgetUnit) -> dict[str, Any]:
    """The fields of `Presets.robust`."""
    sinks = 4 if isinstance(budget, float) else min(4, budget // 4)
    heavy, recent = split_heavy_recent(
        budget if isinstance(budget, float) else budget - sinks, 0.75
    )
    return {
        "heavy": heavy,
        "recent": recent,
        "sinks": sinks,
        "score_by": "mean",
        "value_weighted": True,
        "budget_unit": budget_unit,
        "kv_dtype": "auto" if budget_unit == "bytes" else None,
    }


def recommended_unit(budget: Amount) -> BudgetUnit:
    """The unit of a `budget` that is given alone."""
    return "bytes" if isinstance(budget, float) else "keys"


def echo_fields(budget: Amount, budget_unit: BudgetUnit) -> dict[str, Any]:
    """The fields of `Presets.echo`."""
    echo = {"score_by": "mean-echo", "head_shares": "echo"}
    return robust_fields(budget, budget_unit) | echo


class Presets:
    """Constructors of `H2OConfig`."""

    if TYPE_CHECKING:

        def __init__(self, **fields: Any) -> None: ...

    @classmethod
    def preset(
        cls,
        name: str,
        budget: Amount = DEFAULT_BUDGET,
        budget_unit: BudgetUnit = "keys",
        profile: Any = None,
    ) -> Self:
        """Make one of `PRESETS` by name. Only "calibrated" accepts a `profile`.

        Raises: ValueError for an unknown name, and for a profile with another preset."""
        name = check_choice("preset", name, PRESETS)
        if name == "calibrated":
            return cls.calibrated(budget, profile, budget_unit)
        if profile is not None:
            raise ValueError(f"only the preset calibrated accepts a profile, not {name}")
        made: Self = getattr(cls, name)(budget, budget_unit)
        return made

    @classmethod
    def _make(cls, budget: Amount, fields: dict[str, Any]) -> Self:
        """Make a config with fields computed from `budget`, and warn of few keys in terms of it."""
        warn_of_few_keys({"budget": budget})
        return cls(**fields, _token_bytes=None)

    @classmethod
    def authors(cls, budget: Amount, budget_unit: BudgetUnit = "keys") -> Self:
        """The published algorithm: half of the budget for heavy hitters, half for recent tokens, no
        `min_tokens`. A fraction is one of the prompt."""
        budget = check_whole_budget(budget)
        heavy, recent = split_heavy_recent(budget, 0.5)
        fields = {"heavy": heavy, "recent": recent, "budget_unit": budget_unit}
        return cls._make(budget, fields | {"ratio_of": "prompt", "min_tokens": 0})

    @classmethod
    def robust(cls, budget: Amount, budget_unit: BudgetUnit = "keys") -> Self:
        """Preset for any model. It lost least in our measurements among the presets that need
        neither a prompt to rank nor a profile.

        It keeps four sinks, and three heavy hitters for each recent token. Heavy hitters are ranked
        by the mean attention that they received, times the norm of their value. A budget in tokens
        includes the sinks; they are added to a fraction. With budget_unit="bytes" the budget is a
        fraction of a full cache's bytes, and keys are stored in eight bits and values in four, so
        that 2.2 times as many fit as in bfloat16. (Values take eight bits too if the head dimension
        is not a multiple of 32.)
        """
        budget = check_whole_budget(budget)
        return cls._make(budget, robust_fields(budget, budget_unit))

    @classmethod
    def calibrated(
        cls, budget: Amount, profile: Any = None, budget_unit: BudgetUnit = "keys"
    ) -> Self:
        """`robust`, with the budget divided among the heads by a profile (`h2o calibrate`), and
        with echo in the prompt (`score_by="mean-echo"`).

        Without `profile` the cache uses the one that h2o ships for the model, and raises ValueError
        if there is none.
        """
        ranked = {"score_by": "mean-echo", "head_shares": "shipped" if profile is None else profile}
        return dataclasses.replace(cls.robust(budget, budget_unit), **ranked)

    @classmethod
    def echo(cls, budget: Amount, budget_unit: BudgetUnit = "keys") -> Self:
        """`robust`, with the prompt's keys ranked by echo, which predicts which keys a later
        question will need (docs/understand/policies.md).

        Within a head, echo makes up most of a key's score (`score_by="mean-echo"`). Across all
        layers and heads, the heavy hitters are the keys with the highest echo times the norm of the
        value (`head_shares="echo"`). Decode steps work as in `robust`.
        """
        budget = check_whole_budget(budget)
        return cls._make(budget, echo_fields(budget, budget_unit))

    @classmethod
    def full(cls) -> Self:
        """Unlimited budget: every token is kept. The baseline."""
        return cls(heavy=UNLIMITED, recent=0)

    @classmethod
    def local(cls, recent: Budget) -> Self:
        """Sliding window: only the `recent` newest tokens are kept."""
        return cls(heavy=0, recent=recent)

    @classmethod
    def heavy_only(cls, heavy: Budget) -> Self:
        """Heavy hitters only: the newest token competes like any other."""
        return cls(heavy=heavy, recent=0)

    @classmethod
    def streaming(cls, recent: Budget, sinks: int = 4) -> Self:
        """StreamingLLM (Xiao et al., ICLR 2024): the first and the newest tokens, none by rank."""
        return cls(heavy=0, recent=recent, sinks=sinks)
