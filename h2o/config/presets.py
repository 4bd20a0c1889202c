"""Presets: configs by name, as class methods of `H2OConfig`. `budget=` alone stands for `echo`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from h2o.budgets import UNLIMITED, Amount, Budget, BudgetUnit, check_amount, split_heavy_recent
from h2o.kv_dtype import KvDtype

if TYPE_CHECKING:
    from typing_extensions import Self

PRESETS = ("authors", "robust", "echo", "calibrated")
"""Names of configs that accept a budget in keys or in bytes; see `H2OConfig.preset`."""


class Presets:
    """The part of `H2OConfig` that makes configs."""

    if TYPE_CHECKING:

        def __init__(self, **fields: Any) -> None: ...

    @classmethod
    def preset(
        cls,
        name: str,
        budget: Amount,
        budget_unit: BudgetUnit = "keys",
        profile: Any = None,
    ) -> Self:
        """One of `PRESETS` by its name; `profile` is for `calibrated`.

        Raises: ValueError for another name, and for a profile without "calibrated"."""
        if name not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}, not {name!r}")
        if name == "calibrated":
            return cls.calibrated(budget, profile, budget_unit)
        if profile is not None:
            raise ValueError(f"a profile goes with the preset calibrated, not with {name}")
        made: Self = getattr(cls, name)(budget, budget_unit)
        return made

    @classmethod
    def authors(cls, budget: Amount, budget_unit: BudgetUnit = "keys") -> Self:
        """The published algorithm at this budget: half heavy hitters, half recent tokens, and no
        `min_tokens`."""
        heavy, recent = split_heavy_recent(check_amount("budget", budget), 0.5)
        return cls(heavy=heavy, recent=recent, budget_unit=budget_unit, min_tokens=0)

    @classmethod
    def robust(cls, budget: Amount, budget_unit: BudgetUnit = "keys") -> Self:
        """Preset for any model: the least loss in our measurements among those that need neither
        a prompt to rank nor a profile.

        Keeps four sinks, and three heavy hitters for each recent token. Heavy hitters are ranked by
        the mean attention that they received, times the norm of their value. A budget in tokens
        includes the sinks. To a fraction they are added. With budget_unit="bytes" the budget is a
        fraction of a full cache's bytes. Keys are then stored in eight bits and values in four, so
        that 2.2 times as many fit as in bfloat16. (Values have eight bits too where the head
        dimension is no multiple of 32.)
        """
        budget = check_amount("budget", budget)
        sinks = 4 if isinstance(budget, float) else min(4, budget // 4)
        heavy, recent = split_heavy_recent(
            budget if isinstance(budget, float) else budget - sinks, 0.75
        )
        stored: KvDtype | None = "auto" if budget_unit == "bytes" else None
        return cls(
            heavy=heavy,
            recent=recent,
            sinks=sinks,
            score_by="mean",
            value_weighted=True,
            budget_unit=budget_unit,
            kv_dtype=stored,
        )

    @classmethod
    def calibrated(
        cls, budget: Amount, profile: Any = None, budget_unit: BudgetUnit = "keys"
    ) -> Self:
        """`robust`, with the budget shared among the heads as a profile says (`h2o calibrate`), and
        with echo in the prompt (`score_by="mean-echo"`).

        Without a profile the one that comes with h2o for the model, or a ValueError of the cache.
        """
        ranked = {"score_by": "mean-echo", "head_shares": profile or "shipped"}
        return dataclasses.replace(cls.robust(budget, budget_unit), **ranked)

    @classmethod
    def echo(cls, budget: Amount, budget_unit: BudgetUnit = "keys") -> Self:
        """`robust` with the prompt's keys ranked by echo, which predicts what a later question asks
        for (docs/understand/policies.md).

        In each head echo decides most of a key's score (`score_by="mean-echo"`). The heavy hitters
        of all layers and heads together are the keys with the highest echo (`head_shares="echo"`).
        Decode steps are those of `robust`.
        """
        return dataclasses.replace(
            cls.robust(budget, budget_unit), score_by="mean-echo", head_shares="echo"
        )

    @classmethod
    def full(cls) -> Self:
        """No budget: every token is kept. The baseline."""
        return cls(heavy=UNLIMITED, recent=0)

    @classmethod
    def local(cls, recent: Budget) -> Self:
        """Only the `recent` newest tokens: a sliding window."""
        return cls(heavy=0, recent=recent)

    @classmethod
    def heavy_only(cls, heavy: Budget) -> Self:
        """No reserved window: the newest token competes like any other."""
        return cls(heavy=heavy, recent=0)

    @classmethod
    def streaming(cls, recent: Budget, sinks: int = 4) -> Self:
        """First and newest tokens, nothing by rank: StreamingLLM (Xiao et al., ICLR 2024)."""
        return cls(heavy=0, recent=recent, sinks=sinks)
