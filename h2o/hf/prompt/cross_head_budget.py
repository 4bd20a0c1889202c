"""One budget for all heads: the slots of a row go to the keys that rank highest in any head.

With `head_shares="echo"` all layers and heads of a row share one budget (compare Feng et al.,
"Ada-KV", 2024, and Kim et al., "KVzip", 2025). Each head keeps its sinks and recent keys. All other
slots form a pool, from which the keys with the highest echo get a slot each. Echo here is that of
`h2o.hf.prompt.echo_scorer`, times the norm of the key's value if the policy is value-weighted:
heads differ in the size of their values, and a key with a small value changes little, whatever its
attention. The slots that a head gets from the pool are added to its budget, and the head fills them
with the keys that it ranks highest. If the prompt is prefilled in chunks, the first chunk decides
the budgets.

The choice needs the echo of all layers, but not all of their keys. Suppose the pool of a row has N
slots. The N-th highest echo so far is the threshold. It never falls, because later layers only add
keys. A head gets at most as many slots as it has keys whose echo reaches the threshold. Beyond the
keys that it keeps anyway, it therefore needs only that many of its highest-ranked keys. All other
keys and values are dropped at once. Their scores stay, because the cache reports what it evicted.
During prefill the layers thus hold at most N keys of each row plus ties, an eighth more (`ROOM`),
and the keys that each head keeps anyway. If the policy ranks by a decaying mean, or layers differ
in the number or size of their heads, the layers hold the whole prompt.

Shape letters as in `h2o.hf`, and K tokens of the prompt, M keys in memory of all rows and heads of
a layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o.config.layer_plan import LayerPlan
from h2o.hf.cache_state.slot_layout import Budgets, positions_in
from h2o.hf.prompt.prompt_budget import PromptBudget
from h2o.policy import Policy
from h2o.quantization import CENTER_TOKENS
from h2o.spans import PINNED


class Prompt(NamedTuple):
    """A prompt that a layer has prefilled but not stored yet."""

    keys: Tensor
    """[B, G, K, D], or [M, D] once some were dropped"""
    values: Tensor | None
    """Shaped like `keys`; None if the keys are also the values"""
    mask: Tensor | None
    """[B, K] bool, False at padding"""
    scores: Tensor
    """[B, G, K] float32"""
    echo: Tensor | None
    """[B, G, K] float32; None if each head has its own budget"""
    counts: list[int]
    """Number of tokens in each row"""
    columns: int
    """Number of columns in the forward pass, without tokens converted from a DynamicCache"""
    column_mask: Tensor | None
    """[B, columns] bool, False at padding"""
    budget: PromptBudget
    """Budgets of the layer's heads before it gets slots from the pool"""
    centers_keys: bool = True
    """Whether slots get offsets if keys are quantized"""
    smoothing: Tensor | None = None
    """`Slots.smoothing` of the slots, [B, G, D]; None: they have none"""
    lost_pool: bool = False
    """Whether a head got no slots from the pool, so that it keeps `min_tokens` keys"""


ROOM = 1.125
"""Factor by which the number of keys held in all layers may grow before the threshold is applied to
every layer again. Applying it copies the keys that stay."""


class CrossHeadBudget:
    """The budget that the layers of a cache share for one prompt. Collects the prompt of each
    layer, and divides the budget after the last one."""

    def __init__(self, plans: dict[int, LayerPlan], *, alike: bool) -> None:
        """
        Args:
            plans: plans of the layers that share the budget, by layer number.
            alike: whether all these layers have the same number of heads of the same size, so that
                the size of the pool is known at the first layer.
        """
        self.plans, self.alike = plans, alike
        self.first, self.last = min(plans, default=-1), max(plans, default=-1)
        self.waiting: dict[int, _Waiting] = {}
        self.pool: list[int] = []  # number of pooled slots of each row, over all layers
        self.best: list[Tensor] = []  # highest echo in each row, at most one value a pooled slot
        self.left = 0  # keys left in memory when the threshold was last applied to all layers

    @property
    def keys_held(self) -> int:
        """Number of keys that the waiting layers have in memory. Padding counts in layers that have
        dropped nothing."""
        return sum(x.keys_held for x in self.waiting.values())

    def take(
        self, index: int, prompt: Prompt, layer: Any = None
    ) -> Iterable[tuple[Any, Prompt, Budgets]]:
        """Add the prompt of a layer, with its echo.

        Args:
            index: number of the layer.
            layer: returned with the prompt. If the layers are alike, an `H2OLayer`.

        Returns:
            After the last layer, the `layer`, prompt and budgets of each layer. Otherwise nothing.
        """
        new = _Waiting(layer, self.plans[index], prompt)
        if index == self.first and self.alike:
            self._count_pool(layer, prompt)
        self.waiting[index] = new
        if index == self.last:
            waiting, pool = list(self.waiting.values()), self.pool
            self.waiting, self.best = {}, []
            total = [sum(row) for row in zip(*(x.pool for x in waiting), strict=True)]
            return _share(waiting, list(map(min, total, pool)) if self.alike else total)
        policy = new.policy
        # A decaying mean is ranked otherwise by the operation that stores the keys.
        if self.pool and (policy.score_by != "mean" or policy.decay == 1):
            self._drop(new)
        return ()

    def _count_pool(self, layer: Any, prompt: Prompt) -> None:
        """Compute the size of the pool, over all layers, from the first layer's prompt."""
        B, G, _ = prompt.scores.shape
        rows = layer.guard.current.prompt
        self.pool = [0] * B
        self.best = [prompt.scores.new_empty(0)] * B
        for plan in self.plans.values():
            budget = rows.budget(plan, G, layer.facts.part, layer.token_size)
            by_row = each_head(budget.by_row, G)
            _, left = reserve_for_heads(by_row, plan.sinks, plan.floor, prompt.budget.pinned)
            self.pool = [x + y for x, y in zip(self.pool, left, strict=True)]

    def _drop(self, new: _Waiting) -> None:
        """Raise the threshold by a layer's echo, and drop keys that no budget can have room for."""
        echo = new.echo.flatten(1)
        thresholds = []
        for b, pool in enumerate(self.pool):
            best = torch.cat([self.best[b], echo[b].to(self.best[b].device)])
            if len(best) > pool:
                best = best.topk(pool, sorted=False).values
            self.best[b] = best
            thresholds.append(-math.inf if len(best) < pool else _lowest(best))
        if max(thresholds) == -math.inf:
            return
        new.drop_below(thresholds)
        if self.keys_held > ROOM * self.left:
            for waiting in self.waiting.values():
                if waiting is not new:
                    waiting.drop_below(thresholds)
            self.left = self.keys_held


def _lowest(best: Tensor) -> float:
    """The lowest echo, or infinity if there is none. A NaN among them gives NaN, and no echo
    compares as lower."""
    return float(best.min()) if len(best) else math.inf


class _Waiting:
    """The prompt of a layer until its budgets are known."""

    def __init__(self, layer: Any, plan: LayerPlan, prompt: Prompt) -> None:
        self.layer, self.plan = layer, plan
        self.policy: Policy = plan.policy
        G, sinks = prompt.scores.shape[1], self.policy.sinks
        by_row = each_head(prompt.budget.by_row, G)
        pinned = prompt.budget.pinned
        self.floor, self.pool = reserve_for_heads(by_row, sinks, plan.floor, pinned)
        positions, tokens = positions_in(prompt.mask, prompt.scores)
        norms = None
        if self.policy.value_weighted:
            values = prompt.keys if prompt.values is None else prompt.values
            norms = values.float().norm(dim=-1)
        self.ranks = _ranks(prompt.scores, positions, tokens, self.policy, norms)
        assert prompt.echo is not None
        echo = prompt.echo if norms is None else prompt.echo * norms
        self.protected = _always_kept(positions, tokens, sinks, self.floor)
        self.lowest = self._protect_highest()  # [B, G, 1], lowest rank among each head's own keys
        self.echo = echo.masked_fill(self.protected, -math.inf)
        centered = CENTER_TOKENS if plan.config.kv_dtype is not None else 0
        self.first = (positions >= 0) & (positions < centered)
        """Keys that stay in memory because they determine the offsets of quantized keys"""
        self.prompt = prompt._replace(echo=None)
        self.held: Tensor | None = None  # [M] int32, which of B * G * K keys are held; None: all
        self._highest: Tensor | None = None  # see `_rank_of`

    def _protect_highest(self) -> Tensor:
        """Add to `protected` the highest ranks of each head, as many as the head's own budget has
        room for. Return the lowest of them for each head, [B, G, 1], infinity if there are none."""
        own = self.ranks.new_tensor([[heavy for heavy, _ in row] for row in self.floor])[..., None]
        ranks = self.ranks.masked_fill(self.protected, -math.inf)
        best = ranks.topk(min(int(own.max()), ranks.shape[-1]))
        is_own = torch.arange(best.indices.shape[-1], device=own.device) < own
        self.protected = self.protected | torch.zeros_like(self.protected).expand_as(ranks).scatter(
            -1, best.indices, is_own
        )
        lowest = best.values.masked_fill(~is_own, math.inf)
        return torch.cat([lowest, torch.full_like(own, math.inf)], -1).amin(-1, keepdim=True)

    @property
    def keys_held(self) -> int:
        """Number of keys in memory, over all rows and heads."""
        return self.prompt.scores.numel() if self.held is None else len(self.prompt.keys)

    def drop_below(self, thresholds: list[float]) -> None:
        """Drop the keys that no budget can have room for, given the threshold of each row.

        A head gets at most as many pooled slots as it has keys whose echo reaches the threshold.
        """
        prompt, policy = self.prompt, self.policy
        candidates = ~(self.echo < self.ranks.new_tensor(thresholds)[:, None, None])
        lowest = self._rank_of(candidates.sum(-1, keepdim=True)).minimum(self.lowest)
        if policy.score_by == "mean" or policy.value_weighted:
            lowest = lowest * _ROUNDED
        stay = (self.ranks >= lowest).logical_or_(self.protected).logical_or_(self.first)
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
        """The count-th highest rank of each head among keys that are not protected, for counts
        [B, G, 1]; infinity for a count of 0.

        Ranks are sorted once, up to the first count, because counts only shrink as the threshold
        rises. A threshold that has become NaN drops no further keys.
        """
        if self._highest is None:
            ranks = self.ranks.masked_fill(self.protected, -math.inf).topk(int(count.max())).values
            self._highest = torch.cat([torch.full_like(self.lowest, math.inf), ranks], dim=-1)
        return self._highest.gather(-1, count.clamp(max=self._highest.shape[-1] - 1))

    def whole(self) -> Prompt:
        """The whole prompt, with zeros in place of the keys and values that were dropped."""
        prompt, held = self.prompt, self.held
        if held is None:
            return prompt

        def spread(rows: Tensor) -> Tensor:
            out = rows.new_zeros(self.ranks.numel(), rows.shape[-1])
            return out.index_copy_(0, held.long(), rows).view(*self.ranks.shape, -1)

        values = None if prompt.values is None else spread(prompt.values)
        return prompt._replace(keys=spread(prompt.keys), values=values)


_ROUNDED = 0.999
"""Factor of the lowest rank that stays, for ranks that are computed from scores. The operation that
stores the keys may round such ranks differently."""


def _share(waiting: list[_Waiting], pool: list[int]) -> Iterator[tuple[Any, Prompt, Budgets]]:
    """Allocate each row's pool to the highest echo. Yield the layer, prompt and budgets of each.

    Empties `waiting`, so that no prompt is in memory twice.
    """
    more = allocate_slots(pool, [x.protected for x in waiting], [x.echo for x in waiting])
    for counts in more:
        first = waiting.pop(0)
        budgets = add_slots(first.floor, counts)
        prompt = first.whole()
        has_none = any(n == 0 for heads in counts for n in heads)
        yield first.layer, prompt._replace(lost_pool=bool(first.plan.floor and has_none)), budgets


def _ranks(
    scores: Tensor, positions: Tensor, tokens: Tensor, policy: Policy, norms: Tensor | None
) -> Tensor:
    """Ranks of keys by the policy, [B, G, K]. Pinned keys rank highest. A rank of NaN becomes the
    lowest, because such a key is evicted first. `norms`: those of the values, [B, G, K], if the
    policy is value-weighted."""
    ranks = scores
    if policy.score_by == "mean":
        ranks = ranks / policy.queries_of(positions, tokens)
    if norms is not None:
        ranks = ranks * norms
    ranks = ranks.masked_fill(ranks.isnan(), -math.inf)
    return ranks.masked_fill(scores == PINNED, PINNED)


def _always_kept(positions: Tensor, tokens: Tensor, sinks: int, budgets: Budgets) -> Tensor:
    """Whether a column is a sink, a recent key or padding (position -1), [B, G, K] bool."""
    recent = positions.new_tensor([[r for _, r in row] for row in budgets])
    return (positions < sinks) | (positions >= tokens - recent[..., None])


def each_head(by_row: Budgets, heads: int) -> Budgets:
    """Expand rows that have a single budget for all heads to one budget per head."""
    return [row * heads if len(row) == 1 else row for row in by_row]


def reserve_for_heads(
    budgets: Budgets,
    sinks: int,
    least: int,
    pinned: list[int],
    of_head: float = 0.0,
    most_recent: int | None = None,
) -> tuple[Budgets, list[int]]:
    """Split budgets into the part that each head keeps and the slots that go to the pool.

    Args:
        budgets: (heavy, recent) of each row and head.
        least: minimum number of keys of a head, sinks included, if its budget is that large.
        pinned: number of keys in each row that every head has room for, if its budget is that
            large.
        of_head: fraction of a head's budget beyond sinks and recent keys that stays its own, in
            [0, 1].
        most_recent: maximum number of recent keys that a head keeps; None: as many as its budget
            says.

    Returns:
        Each head's own budget, and the number of slots that this layer adds to the pool of
        each row.
    """
    first, left = [], []
    for row, pins in zip(budgets, pinned, strict=True):
        recents = [r if most_recent is None else min(r, most_recent) for _, r in row]
        rest = [h + r - recent for (h, r), recent in zip(row, recents, strict=True)]
        heavies = [
            # max(least, 1): each head keeps at least one key.
            min(n, max(int(n * of_head), max(least, 1) - sinks - recent, pins))
            for n, recent in zip(rest, recents, strict=True)
        ]
        first.append(list(zip(heavies, recents, strict=True)))
        left.append(sum(rest) - sum(heavies))
    return first, left


def add_slots(budgets: Budgets, counts: list[list[int]]) -> Budgets:
    """Budgets with more heavy hitters, by row and head."""
    return [
        [(heavy + n, recent) for (heavy, recent), n in zip(*heads, strict=True)]
        for heads in zip(budgets, counts, strict=True)
    ]


def allocate_slots(
    pool: list[int], kept: list[Tensor], scores: list[Tensor]
) -> list[list[list[int]]]:
    """Allocate the pooled slots of each row to the keys with the highest scores in any head.

    Args:
        pool: number of slots in each row.
        kept: [B, G, K] bool for each layer, True for keys that are kept anyway and for padding.
        scores: [B, G, K] for each layer, such as the echo of keys; not negative.

    Returns:
        Number of slots for each head, by layer, row and head.
    """
    counted = []
    heads, device = [x.shape[1] for x in kept], kept[0].device  # layers may differ in device
    for b, count in enumerate(pool):
        unkept = [
            x[b].masked_fill(kept_of[b], -1.0).to(device)
            for x, kept_of in zip(scores, kept, strict=True)
        ]
        waiting = torch.cat(unkept)
        candidates = int((waiting >= 0).sum())
        best = waiting.flatten().topk(min(count, candidates)).indices
        counts = torch.bincount(best // waiting.shape[1], minlength=len(waiting))
        counts += max(0, count - candidates) // len(waiting)  # slots left over, for later tokens
        counted.append([part.tolist() for part in counts.split(heads)])
    return list(map(list, zip(*counted, strict=True)))
