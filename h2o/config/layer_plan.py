"""`LayerPlan`: the budgets that an `H2OConfig` gives one layer, in tokens once the prompt is known.

This module works on plain numbers, without torch.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from h2o.budgets import (
    UNLIMITED,
    Amount,
    count_pair,
    flatten,
    mean_pair,
    pair_amounts,
    recent_part,
    truncate_pair,
)
from h2o.config import H2OConfig
from h2o.config.head_budgets import LEAST, SHARED_TWICE, allocate_tokens, check_shares
from h2o.kv_dtype import TokenBytes, bytes_per_token
from h2o.policy import Policy


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """The budgets of one layer of a model. Immutable."""

    config: H2OConfig
    """The config of all layers."""
    layer: int
    heavy: Amount | tuple[Amount, ...]
    """One amount, or one for each key/value head."""
    recent: Amount | tuple[Amount, ...]
    shares: Any
    """Shares of all heads of the model: a `Table` or a Profile. None: equal shares."""
    token_bytes: TokenBytes | None
    """Bytes of a token in a full cache and in a slot. None: the budget is not in bytes."""
    sinks: int = dataclasses.field(init=False, repr=False)
    policy: Policy = dataclasses.field(init=False, repr=False)
    pairs: tuple[tuple[Amount, Amount], ...] = dataclasses.field(init=False, repr=False)
    """(heavy, recent) as given: one pair for each head, or one for all."""
    needs_prompt_length: bool = dataclasses.field(init=False, repr=False)
    """Whether any amount is a fraction."""
    grows: bool = dataclasses.field(init=False, repr=False)
    """Whether the budget grows with the text: any amount is a fraction above 0 of the text so far.
    """
    floor: int = dataclasses.field(init=False, repr=False)
    """Minimum number of keys per head: `min_tokens`, or 0 if no amount is a fraction above 0."""

    def __post_init__(self) -> None:
        fractions = [x for x in flatten((self.heavy, self.recent)) if isinstance(x, float)]
        put = object.__setattr__  # frozen
        put(self, "sinks", self.config.sinks)
        put(self, "policy", self.config.policy)
        put(self, "pairs", tuple(pair_amounts((self.heavy, self.recent), "key/value head")))
        put(self, "needs_prompt_length", bool(fractions))
        put(self, "grows", any(fractions) and self.config.ratio_of == "seen")
        put(self, "floor", self.config.min_tokens if any(fractions) else 0)

    @classmethod
    def of(cls, config: H2OConfig, layer: int, layers: int) -> LayerPlan:
        """The plan of layer number `layer` (from 0) of a model with `layers` layers.

        Raises:
            ValueError: a list or `head_shares` does not have one entry for each layer,
                `head_shares` is combined with amounts by head, or it is still "shipped".
        """
        heavy, recent = config.layer_amounts(layer, layers)
        shares = config.head_shares
        if isinstance(shares, str):
            if shares == "shipped":
                raise ValueError(
                    'head_shares="shipped" depends on the model: call config.for_model(model) first'
                )
            shares = None  # "echo": heads share the budget once the prompt is known
        if shares is not None:
            check_shares(shares, layers)
        if config.head_shares is not None and isinstance(heavy, tuple) | isinstance(recent, tuple):
            raise ValueError(SHARED_TWICE)
        return cls(config, layer, heavy, recent, shares, config._token_bytes)

    def check_attention(self, module: Any) -> None:
        """Raise ValueError if the profile is of another model than this attention module."""
        if not isinstance(self.shares, tuple | None):
            self.shares.check_attention(module, self.layer)

    def for_keys(self, D: int, element: int, rows: int = 2) -> LayerPlan:
        """Adapt a budget in bytes to the keys that arrive: D elements of `element` bytes each.

        `rows` is 2 (key and value) or 1 (a row that is both). The model's config has the dtype in
        which the model was loaded, which `model.to` may have changed since.
        """
        if self.token_bytes is None or self.token_bytes[0] == rows * D * element:
            return self
        config = self.config
        sizes = bytes_per_token(D, element, rows, config.kv_dtype, config.value_weighted)
        return dataclasses.replace(self, token_bytes=sizes)

    def head_tokens(
        self, n: int, pinned: int = 0, min_tokens: int | None = None
    ) -> list[tuple[int, int]]:
        """(heavy, recent) in tokens if fractions are of n tokens: one pair for each key/value head,
        or a single pair for all.

        If heads have shares, the budget that all would have under equal shares is divided among
        them. Every head keeps the sinks. The rest of its budget is divided in the ratio of heavy to
        recent.

        Args:
            pinned: number of pinned keys beyond the sinks. Every head gets room for them if the
                mean budget has.
            min_tokens: overrides the config's.
        """
        min_tokens = self.config.min_tokens if min_tokens is None else min_tokens
        pairs = self._pair_tokens(n, min_tokens)
        heavy, recent = pairs[0]  # shares are never combined with amounts by head
        sinks, shares = self.sinks, self.shares
        k = sinks + heavy + recent
        if shares is None or k >= UNLIMITED or k == sinks:
            return pairs
        if not isinstance(shares, tuple):  # a Profile, whose shares depend on the budget
            fraction = k / n if self.needs_prompt_length and n else k / shares.window
            shares = shares.shares_for(fraction)
        min_tokens = min_tokens if self.floor else 0
        least, least_recent = max(LEAST, sinks + 1, min_tokens), recent_part(min_tokens)
        if pinned and heavy:
            in_proportion = math.ceil(pinned * (heavy + recent) / heavy)
            least = max(least, sinks + max(in_proportion, pinned + least_recent))
        rests = [keys - sinks for keys in allocate_tokens(k, shares, least)[self.layer]]
        recents = [max(x * recent // (heavy + recent), min(least_recent, x)) for x in rests]
        return [(x - r, r) for x, r in zip(rests, recents, strict=True)]

    def truncate_tokens(self, n: int) -> tuple[int, int]:
        """(heavy, recent) as in the authors' code: a fraction may round down to 0 tokens, and
        `min_tokens` has no effect."""
        return truncate_pair(self.pairs[0], n, self.sinks, self.token_bytes, self.grows)

    def is_rounded_up(self, n: int) -> bool:
        """Whether a fraction of n tokens is less than one token, so that `head_tokens` raises it to
        one. In bytes every head that keeps more than sinks has room for one."""
        if self.token_bytes is not None:
            return False
        for pair in self.pairs:
            tokens = truncate_pair(pair, n, self.sinks, None, self.grows)
            for amount, count in zip(pair, tokens, strict=True):
                if isinstance(amount, float) and amount > 0 and count == 0:
                    return True
        return False

    def is_floored(self, n: int) -> bool:
        """Whether `min_tokens` raises the budget of a head for a prompt of n tokens."""
        if not self.floor:
            return False
        held, fractions = self.head_tokens(n), self.head_tokens(n, min_tokens=0)
        return list(map(sum, held)) != list(map(sum, fractions))

    def explain_floor(self, n: int) -> str:
        """Explain how `min_tokens` raises the budget for a text of n tokens; empty if it does
        not."""
        if not self.is_floored(n):
            return ""
        fraction, raised = (
            self.sinks + sum(mean_pair(self.head_tokens(n, min_tokens=x))) for x in (0, self.floor)
        )
        return (
            f"{self.config.described_budget} of {n} tokens is {fraction} keys per head, but "
            f"min_tokens={self.floor} raises it to {raised}. Pass min_tokens=0 for the fraction "
            f"itself, or min_tokens={self.floor} to measure what a cache keeps by default"
        )

    def tokens(self, n: int) -> tuple[int, int]:
        """The mean (heavy, recent) of the heads in tokens, rounded down."""
        return mean_pair(self._pair_tokens(n, self.config.min_tokens))

    def _pair_tokens(self, n: int, min_tokens: int) -> list[tuple[int, int]]:
        """`pairs` in tokens."""
        if not self.needs_prompt_length:
            return list(self.pairs)  # type: ignore[arg-type]  # all are integers
        more = n, self.sinks, self.token_bytes, min_tokens, self.grows
        return [count_pair(pair, *more) for pair in self.pairs]


def expand_to_heads(
    rows: list[list[tuple[int, int]]], heads: int, part: tuple[int, int] = (0, 1)
) -> list[list[tuple[int, int]]]:
    """Expand the budgets of a layer's rows to one entry per head, if any row has one per head.

    `part`: (index, number of parts) of the heads of this process, under tensor parallelism
    (`h2o.hf.model_traits.tensor_parallel`).

    Raises: ValueError if the number of entries is not the layer's number of heads.
    """
    entries = max(map(len, rows))
    index, parts = part
    if entries == heads * parts:
        part_of_heads = slice(index * heads, (index + 1) * heads)
        rows = [row if len(row) == 1 else row[part_of_heads] for row in rows]
        entries = heads
    if entries not in (1, heads):
        raise ValueError(
            f"this layer has {heads} key/value heads, but heavy, recent or head_shares have "
            f"numbers for {entries} heads: give one number per key/value head"
        )
    return [row * entries if len(row) == 1 else row for row in rows]
