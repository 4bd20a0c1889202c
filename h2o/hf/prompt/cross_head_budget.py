"""One budget for all heads: the slots of a row go to the keys with the highest echo in any head.

With `head_shares="echo"` all layers and heads of a row share one budget (compare Feng et al.,
"Ada-KV", 2024, and Kim et al., "KVzip", 2025). Each head keeps its sinks and recent keys. The other
slots, called places here, go to the keys with the highest claims, which are their echo
(`h2o.hf.prompt.prompt_echo`). The number of places that a head wins becomes its budget, and the
keys of its highest ranks fill them. In a prompt that is read in chunks the first chunk decides the
budgets.

The choice needs the claims of all layers, but not all of their keys. Suppose a row has N places.
The N-th highest claim so far is the bar. It never falls, because later layers only add claims. A
head wins at most as many places as it has claims above the bar, so it needs that many keys of its
highest ranks beyond those that it keeps anyway. The other keys and values are dropped at once;
their scores stay, because the cache reports what it evicted. During prefill the layers therefore
hold at most N keys of each row, those that tie with the last, and an eighth more (`ROOM`), in
addition to what each head keeps anyway. Where a mean decays, or layers differ in heads or sizes,
they hold the whole prompt.

Shape letters: B batch rows, G key/value heads of a layer, K tokens of the prompt, D head dimension,
M keys in memory of all rows and heads of a layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o.config.layer_plan import LayerPlan
from h2o.errors import UnsupportedError
from h2o.hf.families import tensor_parallel
from h2o.hf.prompt.prompt_budget import PromptBudget, prompt_budget
from h2o.hf.store.slot_layout import Budgets
from h2o.policy import Policy
from h2o.spans import PINNED


class Prompt(NamedTuple):
    """A prompt that a layer has read and not stored yet."""

    keys: Tensor
    """[B, G, K, D]; [M, D] where some were dropped"""
    values: Tensor | None
    """Like keys; None where the keys are the values"""
    mask: Tensor | None
    """[B, K] bool, False at a pad"""
    scores: Tensor
    """[B, G, K] float32"""
    claims: Tensor | None
    """[B, G, K] float32, what keys have to win a place; None: each head has its own budget"""
    counts: list[int]
    """Tokens of each row"""
    columns: int
    """Columns of the pass that are new"""
    column_mask: Tensor | None
    """[B, columns] bool"""
    budget: PromptBudget
    """Equal budgets of the heads"""


@dataclasses.dataclass
class Recipient:
    """Takes the place of an `H2OLayer` where a `CrossHeadBudget` is used without a cache."""

    layer_idx: int
    plan: LayerPlan
    store: Callable[[Prompt, Budgets], None]
    part: tuple[int, int] = tensor_parallel.WHOLE


ROOM = 1.125
"""Growth of what all layers hold, since the bar was last applied to all of them, after which it is
applied again. Applying it moves their keys."""


class CrossHeadBudget:
    """The budget that the layers of a cache share: collects their prompts and has them stored."""

    def __init__(self, plans: dict[int, LayerPlan], *, alike: bool) -> None:
        """`plans`: one for each layer that shares. `alike`: whether all of them have the same
        number of heads of the same size, so that the first one tells how many places there are."""
        self.plans, self.alike = plans, alike
        self.first, self.last = min(plans, default=-1), max(plans, default=-1)
        self.forget()

    def forget(self) -> None:
        """Discard the state of an interrupted pass."""
        self.waiting: dict[int, _Waiting] = {}
        self.places: list[int] = []  # of each row, in all layers
        self.best: list[Tensor] = []  # the highest claims of each row, at most one for each place
        self.left = 0  # keys in memory when the bar was last applied to all layers

    @property
    def keys_held(self) -> int:
        """Keys in memory of the waiting layers, with padding where nothing was dropped."""
        return sum(x.keys_held for x in self.waiting.values())

    def take(self, layer: Any, prompt: Prompt) -> None:
        """Add the prompt of an `H2OLayer`, with claims. The last layer's has all of them stored.

        Raises:
            UnsupportedError: this process has a part of the heads only.
        """
        if layer.part != tensor_parallel.WHOLE:
            raise UnsupportedError(
                'head_shares="echo" does not support a model that is cut over several processes: '
                'use H2OConfig.robust(budget, budget_unit="bytes")'
            )
        new = _Waiting(layer, prompt)
        if layer.layer_idx == self.first:
            self.forget()
            if self.alike:
                self._foresee(layer, prompt)
        self.waiting[layer.layer_idx] = new
        if layer.layer_idx == self.last:
            waiting, places = list(self.waiting.values()), self.places
            self.forget()
            spare = [sum(row) for row in zip(*(x.spare for x in waiting), strict=True)]
            _share(waiting, list(map(min, spare, places)) if self.alike else spare)
        elif self.places and new.is_ranked_alone:
            self._drop(new)

    def _foresee(self, layer: Any, prompt: Prompt) -> None:
        """Set the number of places of all layers from what the first one knows."""
        B, G, _ = prompt.scores.shape
        self.places = [0] * B
        self.best = [prompt.scores.new_empty(0)] * B
        for plan in self.plans.values():
            budget = prompt_budget(
                plan, layer.guard, prompt.counts, G, layer.part, layer.token_size
            )
            by_row = each_head(budget.by_row, G)
            _, left = reserve_for_heads(by_row, plan.sinks, plan.floor, prompt.budget.pinned)
            self.places = [x + y for x, y in zip(self.places, left, strict=True)]

    def _drop(self, new: _Waiting) -> None:
        """Raise the bar by the claims of a layer, and drop the keys that cannot win a place."""
        claims = new.claims.flatten(1)
        bar = []
        for b, places in enumerate(self.places):
            best = torch.cat([self.best[b], claims[b].to(self.best[b].device)])
            if len(best) > places:
                best = best.topk(places, sorted=False).values
            self.best[b] = best
            bar.append(-math.inf if len(best) < places else _lowest(best))
        if max(bar) == -math.inf:
            return
        new.drop_below(bar)
        if self.keys_held > ROOM * self.left:
            for waiting in self.waiting.values():
                if waiting is not new:
                    waiting.drop_below(bar)
            self.left = self.keys_held


def _lowest(best: Tensor) -> float:
    """The lowest claim; infinity where there is none. NaN, below which no claim is, if any is
    NaN."""
    return float(best.min()) if len(best) else math.inf


class _Waiting:
    """The prompt of a layer until its budgets are known."""

    def __init__(self, layer: Any, prompt: Prompt) -> None:
        self.layer = layer
        self.policy: Policy = layer.plan.policy
        G, sinks = prompt.scores.shape[1], self.policy.sinks
        by_row = each_head(prompt.budget.by_row, G)
        pinned = prompt.budget.pinned
        self.floor, self.spare = reserve_for_heads(by_row, sinks, layer.plan.floor, pinned)
        positions, tokens = positions_in(prompt.mask, prompt.scores)
        self.ranks = _ranks(prompt, positions, tokens, self.policy)
        assert prompt.claims is not None
        self.spared = _always_kept(positions, tokens, sinks, self.floor)
        self.lowest = self._spare_own()  # [B, G, 1], rank of the last key that is a head's own
        self.claims = prompt.claims.masked_fill(self.spared, -math.inf)
        self.prompt = prompt._replace(claims=None)
        self.held: Tensor | None = None  # [M] int32, rows of `prompt`, of B * G * K; None: all
        self._highest: Tensor | None = None  # see `_rank_of`

    def _spare_own(self) -> Tensor:
        """Add the highest ranks that are each head's own to `spared`, and return the lowest of them
        for each head, [B, G, 1]; infinity where a head has none."""
        own = self.ranks.new_tensor([[heavy for heavy, _ in row] for row in self.floor])[..., None]
        ranks = self.ranks.masked_fill(self.spared, -math.inf)
        best = ranks.topk(min(int(own.max()), ranks.shape[-1]))
        is_own = torch.arange(best.indices.shape[-1], device=own.device) < own
        self.spared = self.spared | torch.zeros_like(self.spared).expand_as(ranks).scatter(
            -1, best.indices, is_own
        )
        lowest = best.values.masked_fill(~is_own, math.inf)
        return torch.cat([lowest, torch.full_like(own, math.inf)], -1).amin(-1, keepdim=True)

    @property
    def is_ranked_alone(self) -> bool:
        """Whether the operation that stores the keys computes the same ranks, up to `_ROUNDED`."""
        return self.policy.score_by != "mean" or self.policy.decay == 1

    @property
    def keys_held(self) -> int:
        """Keys in memory, of all rows and heads."""
        return self.prompt.scores.numel() if self.held is None else len(self.prompt.keys)

    def drop_below(self, bar: list[float]) -> None:
        """Drop the keys for which no budget can have room once each row's bar is this high.

        A head wins at most as many places as it has claims above the bar.
        """
        prompt, policy = self.prompt, self.policy
        places = ~(self.claims < self.ranks.new_tensor(bar)[:, None, None])
        lowest = self._rank_of(places.sum(-1, keepdim=True)).minimum(self.lowest)
        if policy.score_by == "mean" or policy.value_weighted:
            lowest = lowest * _ROUNDED
        stay = (self.ranks >= lowest).logical_or_(self.spared)
        if prompt.mask is not None:
            stay &= prompt.mask.bool()[:, None]
        stay = stay.flatten()
        if self.held is None:
            rows = stay.nonzero()[:, 0]
            self.held = rows.int()
        else:
            rows = stay.index_select(0, self.held).nonzero()[:, 0]
            self.held = self.held.index_select(0, rows)

        def pick(x: Tensor) -> Tensor:
            return x.reshape(-1, x.shape[-1]).index_select(0, rows)

        values = None if prompt.values is None else pick(prompt.values)
        self.prompt = prompt._replace(keys=pick(prompt.keys), values=values)

    def _rank_of(self, count: Tensor) -> Tensor:
        """The count-th highest of the ranks that are not spared, count [B, G, 1]; infinity for 0.

        The ranks are sorted once, as far as the first count goes, because the bar rises several
        times. A bar that has become NaN drops nothing more.
        """
        if self._highest is None:
            ranks = self.ranks.masked_fill(self.spared, -math.inf).topk(int(count.max())).values
            self._highest = torch.cat([torch.full_like(self.lowest, math.inf), ranks], dim=-1)
        return self._highest.gather(-1, count.clamp(max=self._highest.shape[-1] - 1))

    def whole(self) -> Prompt:
        """The prompt as it was read, with zeros for the keys and values that were dropped."""
        prompt, held = self.prompt, self.held
        if held is None:
            return prompt

        def spread(rows: Tensor) -> Tensor:
            out = rows.new_zeros(self.ranks.numel(), rows.shape[-1])
            return out.index_copy_(0, held.long(), rows).view(*self.ranks.shape, -1)

        values = None if prompt.values is None else spread(prompt.values)
        return prompt._replace(keys=spread(prompt.keys), values=values)


_ROUNDED = 0.999
"""Factor of the bar where ranks are computed from scores, because the operation that stores the
keys may round them differently"""


def _share(waiting: list[_Waiting], places: list[int]) -> None:
    """Store the prompts of all layers, where the highest claims of each row win its places.

    Empties the list, so that no prompt is in memory twice.
    """
    more = deal_places(places, [x.spared for x in waiting], [x.claims for x in waiting])
    for counts in more:
        first = waiting.pop(0)
        budgets = [
            [(h + n, r) for (h, r), n in zip(*heads, strict=True)]
            for heads in zip(first.floor, counts, strict=True)
        ]
        prompt = first.whole()
        won_none = any(n == 0 for heads in counts for n in heads)
        if first.layer.plan.floor and won_none:
            prompt = prompt._replace(budget=prompt.budget._replace(floored=True))
        first.layer.store(prompt, budgets)


def positions_in(mask: Tensor | None, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of a prompt's columns, [B, 1, K] int64, -1 at padding; and tokens of each row,
    [B, 1, 1]. The mask is [B, K], the scores are [B, G, K]."""
    B, _, K = scores.shape
    if mask is None:
        positions = torch.arange(K, device=scores.device).expand(B, 1, K)
        return positions, positions.new_full((B, 1, 1), K)
    real = mask.bool()
    count = real.cumsum(1)[:, None]
    return (count - 1).masked_fill(~real[:, None], -1), count[..., -1:]


def _ranks(prompt: Prompt, positions: Tensor, tokens: Tensor, policy: Policy) -> Tensor:
    """Ranks of keys by the policy, [B, G, K]. Pinned keys are the highest. NaN is the lowest: such
    a key is evicted first."""
    ranks = prompt.scores
    if policy.score_by == "mean":
        ranks = ranks / policy.queries_of(positions, tokens)
    if policy.value_weighted:
        values = prompt.keys if prompt.values is None else prompt.values
        ranks = ranks * values.float().norm(dim=-1)
    ranks = ranks.masked_fill(ranks.isnan(), -math.inf)
    return ranks.masked_fill(prompt.scores == PINNED, PINNED)


def _always_kept(positions: Tensor, tokens: Tensor, sinks: int, budgets: Budgets) -> Tensor:
    """Whether a column is kept whatever its rank, or is padding, [B, G, K] bool."""
    recent = positions.new_tensor([[r for _, r in row] for row in budgets])
    return (positions < sinks) | (positions < 0) | (positions >= tokens - recent[..., None])


def each_head(by_row: Budgets, heads: int) -> Budgets:
    """Expand one budget for all heads of a row to one for each."""
    return [row * heads if len(row) == 1 else row for row in by_row]


def reserve_for_heads(
    budgets: Budgets,
    sinks: int,
    least: int,
    pinned: list[int],
    of_head: float = 0.0,
    most_recent: int | None = None,
) -> tuple[Budgets, list[int]]:
    """The budget that each head keeps, and the places of each row that all heads compete for.

    Args:
        least: keys that each head keeps at least, sinks included, if its budget is as many.
        pinned: keys of each row for which each head keeps room, likewise.
        of_head: part of what follows sinks and recent keys that stays each head's own, in [0, 1].
        most_recent: at most so many of the recent keys that the budgets have; None: all of these.
    """
    first, left = [], []
    for row, pins in zip(budgets, pinned, strict=True):
        recents = [r if most_recent is None else min(r, most_recent) for _, r in row]
        rest = [h + r - recent for (h, r), recent in zip(row, recents, strict=True)]
        heavies = [
            min(
                n, max(int(n * of_head), max(least, 1) - sinks - recent, pins)
            )  # none without a key
            for n, recent in zip(rest, recents, strict=True)
        ]
        first.append(list(zip(heavies, recents, strict=True)))
        left.append(sum(rest) - sum(heavies))
    return first, left


def deal_places(
    places: list[int], kept: list[Tensor], claims: list[Tensor]
) -> list[list[list[int]]]:
    """Give each row's places to its highest claims: for each layer, row and head how many it wins.

    `kept`: [B, G, K] bool for each layer, True for keys that are kept anyway and for padding.
    `claims`: [B, G, K] for each layer, at least 0.
    """
    counted = []
    heads, device = [x.shape[1] for x in kept], kept[0].device  # layers may lie on several
    for b, count in enumerate(places):
        unkept = [
            x[b].masked_fill(kept_of[b], -1.0).to(device)
            for x, kept_of in zip(claims, kept, strict=True)
        ]
        waiting = torch.cat(unkept)
        candidates = int((waiting >= 0).sum())
        best = waiting.flatten().topk(min(count, candidates)).indices
        counts = torch.bincount(best // waiting.shape[1], minlength=len(waiting))
        counts += max(0, count - candidates) // len(waiting)  # for what comes later
        counted.append([part.tolist() for part in counts.split(heads)])
    return list(map(list, zip(*counted, strict=True)))
