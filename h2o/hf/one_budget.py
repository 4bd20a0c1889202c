"""One budget for all heads: a prompt's slots go to the highest ranks, of whichever head.

With `shares="scores"` of all layers and heads of a row together, with "layer" of the heads of each
layer (compare Feng et al., "Ada-KV", 2024, and Kim et al., "KVzip", 2025). Each head keeps its
sinks and recent keys. What all have room for beyond that goes to the highest ranks, and how many
each has got is its budget from then on. The choice needs the ranks of all: until the last layer has
read the prompt, nothing of it is evicted.

Shape letters: B batch rows, G key/value heads of a layer, K tokens of the prompt, D head dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o.errors import Unsupported
from h2o.hf import tensor_parallel
from h2o.policy import Policy

__all__ = ["Budgets", "OneBudget", "Prompt", "each_head", "parted", "won"]

Budgets = list[list[tuple[int, int]]]
"""(heavy, recent) of each row and each head of a layer"""


class Prompt(NamedTuple):
    """What a layer has read and not stored yet."""

    keys: Tensor
    """[B, G, K, D]"""
    values: Tensor | None
    """[B, G, K, D]; None where the keys are the values"""
    mask: Tensor | None
    """[B, K] bool, False at a pad"""
    scores: Tensor
    """[B, G, K] float32"""
    counts: list[int]
    """Tokens of each row"""
    columns: int
    """New ones in the pass"""
    column_mask: Tensor | None
    """[B, columns] bool"""
    by_row: Budgets
    """Equal budgets of the heads: an entry for each, or one for all"""
    raised: bool
    """As of `h2o.hf.prompt_budget.PromptBudget`"""


class OneBudget:
    """Shared by the layers of a cache: takes their prompts, and gives them back with budgets."""

    def __init__(self, layers: list[int], *, within_layer: bool) -> None:
        """`layers`: those that share."""
        self.last, self.within_layer = layers[-1], within_layer
        self.waiting: dict[int, tuple[Any, Prompt]] = {}

    def forget(self) -> None:
        """Of a pass that broke off."""
        self.waiting = {}

    def take(self, layer: Any, prompt: Prompt) -> None:
        """The prompt of an `H2OLayer`. With the last one all are stored.

        Raises:
            Unsupported: this process has a part of the heads only.
        """
        if layer.part != tensor_parallel.WHOLE:
            raise Unsupported('shares="scores" does not serve a model cut over several processes')
        self.waiting[layer.layer_idx] = layer, prompt
        if self.within_layer or layer.layer_idx == self.last:
            waiting, self.waiting = self.waiting, {}
            _share(list(waiting.values()))


def _share(waiting: list[tuple[Any, Prompt]]) -> None:
    """Stores the prompts of layers, of which each row's places are one number."""
    fixed, spared, ranks, spare = [], [], [], []
    for layer, prompt in waiting:
        G = prompt.scores.shape[1]
        floor, left = parted(each_head(prompt.by_row, G), layer.policy.sinks, 0.0)
        position, tokens = _positions(prompt)
        fixed.append(floor)
        spare.append(left)
        ranks.append(_ranks(prompt, position, tokens, layer.policy))
        spared.append(_spared(position, tokens, layer.policy.sinks, floor))
    places = [sum(row) for row in zip(*spare, strict=True)]
    more = won(places, spared, ranks)
    for (layer, prompt), floor, counts in zip(waiting, fixed, more, strict=True):
        budgets = [
            [(h + n, r) for (h, r), n in zip(*heads, strict=True)]
            for heads in zip(floor, counts, strict=True)
        ]
        layer.store(prompt, budgets)


def _positions(prompt: Prompt) -> tuple[Tensor, Tensor]:
    """[B, 1, K] int64, -1 at a pad; and tokens [B, 1, 1] of each row."""
    B, _, K = prompt.scores.shape
    real = torch.ones(B, K, dtype=torch.bool, device=prompt.scores.device)
    if prompt.mask is not None:
        real = prompt.mask.bool()
    count = real.cumsum(1)[:, None]
    return (count - 1).masked_fill(~real[:, None], -1), count[..., -1:]


def _ranks(prompt: Prompt, positions: Tensor, tokens: Tensor, policy: Policy) -> Tensor:
    """[B, G, K]: the score, or what the policy makes of it."""
    ranks = prompt.scores
    if policy.rank_by == "mean":
        age = (tokens - positions).clamp(min=1)
        decay = policy.decay
        ranks = ranks / (age if decay == 1 else (1 - decay**age) / (1 - decay))
    if policy.value_weighted:
        values = prompt.keys if prompt.values is None else prompt.values
        ranks = ranks * values.float().norm(dim=-1)
    return ranks


def _spared(positions: Tensor, tokens: Tensor, sinks: int, budgets: Budgets) -> Tensor:
    """[B, G, K] bool: what is kept whatever its rank, and what is no key."""
    recent = torch.tensor([[r for _, r in row] for row in budgets], device=positions.device)
    return (positions < sinks) | (positions < 0) | (positions >= tokens - recent[..., None])


def each_head(by_row: Budgets, heads: int) -> Budgets:
    """With an entry for each head."""
    return [row * heads if len(row) == 1 else row for row in by_row]


def parted(
    budgets: Budgets, sinks: int, of_head: float, most_recent: int | None = None
) -> tuple[Budgets, list[int]]:
    """What each head has for itself, and how many places each row has left for the best of all.

    Args:
        of_head: part of what follows sinks and recent keys that stays each head's own, in [0, 1].
        most_recent: at most so many of the recent keys that the budgets have; None: all of these.
    """
    first, left = [], []
    for row in budgets:
        recents = [r if most_recent is None else min(r, most_recent) for _, r in row]
        rest = [h + r - recent for (h, r), recent in zip(row, recents, strict=True)]
        heavies = [
            int(n * of_head) or int(sinks + recent == 0)  # no head is left without a key
            for n, recent in zip(rest, recents, strict=True)
        ]
        first.append(list(zip(heavies, recents, strict=True)))
        left.append(sum(rest) - sum(heavies))
    return first, left


def won(places: list[int], kept: list[Tensor], ranks: list[Tensor]) -> list[list[list[int]]]:
    """How many more keys each layer keeps of each row and head, where a row has so many places.

    `kept`, `ranks`: [B, G, K] of each layer, what is kept or no key, and ranks from 0 on.
    """
    counted = []
    heads, device = [x.shape[1] for x in kept], kept[0].device  # layers may lie on several
    for b, count in enumerate(places):
        unkept = [
            x[b].masked_fill(kept_of[b], -1.0).to(device)
            for x, kept_of in zip(ranks, kept, strict=True)
        ]
        waiting = torch.cat(unkept)
        candidates = int((waiting >= 0).sum())
        best = waiting.flatten().topk(min(count, candidates)).indices
        counts = torch.bincount(best // waiting.shape[1], minlength=len(waiting))
        counts += max(0, count - candidates) // len(waiting)  # for what comes later
        counted.append([part.tolist() for part in counts.split(heads)])
    return list(map(list, zip(*counted, strict=True)))
