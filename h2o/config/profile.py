"""`Profile`: the share of a cache that each head of a model needs, measured by `h2o.calibrate`.

Like all of h2o/config, this module imports neither torch nor transformers.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from h2o.arguments.plain_values import check_count, check_fractions, is_number
from h2o.config.head_budgets import check_share
from h2o.model_identity import attention_difference, difference
from h2o.utils.filesystem import atomic_write

KIND = "h2o profile"
NO_PROFILE = "is not a profile made by h2o calibrate"
LAYOUT = 1
"""Version of the file format. Increment it when older versions of h2o cannot read the new files."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """Shares of a cache by layer and key/value head, calibrated at several budgets.

    A head's share is its budget divided by the mean budget of all heads. With a mean of `budget`
    keys per head, head h of layer l gets about budget * shares[l][h] keys, sinks included, but at
    least 8; the total stays the same. `h2o.calibrate` makes profiles. `Profile.save` and
    `Profile.load` write and read them.

    Raises: TypeError and ValueError for shares that are not such a table.
    """

    fractions: tuple[float, ...]
    """Budgets of the calibration as fractions of a text, ascending, in (0, 1]."""
    shares: tuple[tuple[tuple[float, ...], ...], ...]
    """Shares at each of these budgets, [layers, key/value heads], mean 1. Layers that have a
    sliding window anyway have ones and are ignored."""
    window: int
    """Length of a calibration window in tokens. A budget in tokens is taken as a fraction of it."""
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Shape of the model, from its config."""
    weights: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    """A few numbers from the model's parameters, which identify the model in any dtype."""
    texts: tuple[Mapping[str, Any], ...] = ()
    """The calibration texts: name, sha256 of the token ids, number of tokens, number of windows."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of the calibration."""
    versions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Versions of the packages."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "fractions", tuple(check_fractions("fractions", self.fractions, zero=False)))
        put(self, "shares", tuple(map(_check_table, self.shares)))
        put(self, "window", check_count("window", self.window))
        put(self, "texts", tuple(self.texts))
        for name in ("model", "weights", "settings", "versions"):
            if not isinstance(getattr(self, name), Mapping):
                raise TypeError(f"{name} must be a mapping, not {getattr(self, name)!r}")
        for name, numbers in self.weights.items():
            if not isinstance(numbers, list | tuple) or not all(map(is_number, numbers)):
                raise TypeError(f"weights of {name} must be a list of numbers, not {numbers!r}")
        bounds = zip((0.0, *self.fractions), self.fractions, strict=False)
        if not self.fractions or not all(a < b <= 1 for a, b in bounds):
            raise ValueError(
                f"fractions must rise and be in (0, 1], at least one, not {list(self.fractions)}"
            )
        if len(self.shares) != len(self.fractions):
            raise ValueError(
                f"shares has {len(self.shares)} tables for {len(self.fractions)} fractions: "
                "each needs one"
            )
        shapes = {tuple(map(len, table)) for table in self.shares}
        if len(shapes) != 1 or not all(next(iter(shapes))):
            raise ValueError("shares: all tables must have the same layers and heads, none empty")

    def __hash__(self) -> int:
        return hash((self.fractions, self.shares))

    def __repr__(self) -> str:
        table = self.shares[0]
        budgets = ", ".join(f"{fraction:g}" for fraction in self.fractions)
        return (
            f"<h2o.Profile of a {self.model.get('model_type', 'model')}, {len(table)} layers of "
            f"{len(table[0])} key/value heads, calibrated at {budgets}>"
        )

    def shares_for(self, budget_fraction: float) -> tuple[tuple[float, ...], ...]:
        """Shares [layers][key/value heads] for a budget, positive, with an overall mean of 1.

        Between two calibrated budgets, shares are interpolated linearly in the logarithm of the
        budget. Outside the calibrated range, the shares of the nearest budget apply.

        Args:
            budget_fraction: the budget as a fraction of the text, above 0.
        """
        budget_fraction = check_share("budget_fraction", budget_fraction)
        after = bisect.bisect_left(self.fractions, budget_fraction)
        if after == 0 or after == len(self.fractions):
            return _normalize(self.shares[min(after, len(self.fractions) - 1)])
        low, high = self.fractions[after - 1 : after + 1]
        part = math.log(budget_fraction / low) / math.log(high / low)
        mixed = tuple(
            tuple((1 - part) * a + part * b for a, b in zip(*rows, strict=True))
            for rows in zip(*self.shares[after - 1 : after + 1], strict=True)
        )
        return _normalize(mixed)

    def check(self, model: Any) -> None:
        """Check that this profile was made for a model, or may have been, given only its config.

        Args:
            model: a transformers model, whose shape and weights are compared, or its config, whose
                shape is compared. The model may have any dtype; quantized parameters are skipped.

        Raises: ValueError with the first difference.
        """
        shape = {**self.model, "num_hidden_layers": len(self.shares[0])}
        if reason := difference(model, shape, self.weights):
            raise ValueError(f"this profile is of another model: {reason}. {REMEDY}")

    def check_attention(self, attention: Any, layer: int) -> None:
        """Check this profile against the weights of one layer's attention module. A cache that was
        made from a config sees weights only then.

        Raises: ValueError with the first difference.
        """
        if reason := attention_difference(attention, layer, self.weights):
            raise ValueError(
                f"this profile is of another model: {reason}. {REMEDY}. If budget= chose the "
                "profile from a config, pass the model instead: H2OCache(model, budget=...)"
            )

    # ---- files ---------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """The profile as numbers, lists and strings, for JSON."""
        content = {"kind": KIND, "layout": LAYOUT, **dataclasses.asdict(self)}
        plain: dict[str, Any] = json.loads(json.dumps(content))
        return plain

    @classmethod
    def from_dict(cls, content: Any) -> Profile:
        """Make a profile from the result of `as_dict`. Raises: ValueError for anything else."""
        if not isinstance(content, dict) or content.get("kind") != KIND:
            raise ValueError(NO_PROFILE)
        if content.get("layout") != LAYOUT:
            raise ValueError(
                f"was written in layout {content.get('layout')}, but this version of h2o reads "
                f"{LAYOUT}: run h2o calibrate again"
            )
        names = [field.name for field in dataclasses.fields(cls)]
        try:
            return cls(**{name: content[name] for name in names})
        except (KeyError, TypeError) as error:
            raise ValueError(f"is incomplete or damaged ({error!r})") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file of a few kilobytes, atomically."""
        with atomic_write(Path(path)) as draft:
            draft.write_text(json.dumps(self.as_dict()) + "\n", "utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a file written by `save`. Raises: ValueError for any other file, OSError if the file
        cannot be read."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text("utf-8-sig")))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{path}: {NO_PROFILE}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def shipped(cls, model: Any) -> Profile | None:
        """The profile that h2o ships for this model or config, or None."""
        for profile in _load_shipped():
            try:
                profile.check(model)
            except ValueError:
                continue
            return profile
        return None


def _check_table(table: Any) -> tuple[tuple[float, ...], ...]:
    """Shares at one budget, [layers][heads]."""
    return tuple(tuple(check_share("shares", x) for x in row) for row in table)


REMEDY = "Run h2o calibrate on this model"


def _normalize(table: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    every = [x for row in table for x in row]
    mean = math.fsum(every) / len(every)
    return tuple(tuple(x / mean for x in row) for row in table)


@functools.cache
def _load_shipped() -> list[Profile]:
    files = resources.files("h2o").joinpath("data").iterdir()
    texts = [x.read_text("utf-8") for x in files if x.name.endswith(".profile.json")]
    return [Profile.from_dict(json.loads(text)) for text in texts]
