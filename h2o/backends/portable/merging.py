"""Evicted keys are merged into the kept keys most like them, for all rows and heads at once.

A cosine is compared as `csrc/cpu/merge.inc` does it, by the squared product over the squared norm
of the kept key. Which key is the nearest depends on the merges before, so several evicted keys of a
head follow one another; the rows and heads of a batch go together.

Shape letters: N evicted keys of a head, at most; n of these in a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from h2o.backends.portable.slot_rows import Store, as_stored, products
from h2o.policy import Policy
from h2o.quantisation import dequantised

__all__ = ["EvictedKeys", "MergeTargets", "merge_all", "merge_one"]

BLOCK = 32
"""Keys that are compared with all kept ones by one product."""

_FLOOR = 1e-9
"""Of `csrc/policy.h`: keys without attention have weights as well."""

_LAST = 2**31 - 1
"""Comes after every position."""


class EvictedKeys(NamedTuple):
    """Keys that the policy evicts, by ascending position."""

    keys: Tensor
    """[B, G, N, D] float32, as they were stored"""
    values: Tensor
    """as keys"""
    scores: Tensor
    """[B, G, N] float32"""
    bias: Tensor
    """[B, G, N] float32"""
    queries: Tensor
    """[B, G, N] float32: how many have made up the score, decayed as scores are"""
    is_key: Tensor
    """[B, G or 1, N] bool: what is False is merged into none"""

    def part(self, start: int, stop: int) -> EvictedKeys:
        return EvictedKeys(*(x[:, :, start:stop] for x in self))

    def weights(self) -> Tensor:
        """[B, G, N], which say how much of a merged key is theirs."""
        return self.scores / self.queries + _FLOOR

    def least(self, threshold: float) -> Tensor:
        """[B, G, N]: `_most_similar` takes what is above it."""
        squares = self.keys.square().sum(-1) * threshold**2
        return squares.masked_fill(~self.is_key, torch.inf)


class MergeTargets(NamedTuple):
    """The kept keys of each head, S as in `Store`."""

    mergeable: Tensor
    """[B, G, S] bool: another key may be merged into it"""
    order: Tensor
    """[B, G, S] int32: their positions. Other slots of the head come after all of them, and slots
    of other heads last."""
    queries: Tensor
    """[B, G, S] float32: as in `EvictedKeys`"""
    scores_largest: bool
    """as in `Policy`"""

    @classmethod
    def of(cls, store: Store, positions: Tensor, policy: Policy, queries: Tensor) -> MergeTargets:
        """From positions [B, G, S], -1 where there is no kept key; nothing is merged into sinks."""
        mergeable = positions >= policy.sinks
        order = positions.masked_fill(~mergeable, _LAST - 1)
        if store.first is not None:
            order = torch.where(store.of_head, order, _LAST)
        return cls(mergeable, order, queries, policy.scores_largest)


def merge_one(
    store: Store,
    last: Tensor,
    evicts: Tensor,
    score: Tensor,
    positions: Tensor,
    queries: Tensor,
    keys: Tensor,
    policy: Policy,
) -> Tensor:
    """Merges the key at index `last` [B, G, 1] of each head where `evicts` [B, 1 or G, 1] says so.
    The bias of its slot is reset. Returns [B, G, 1] bool: whether it was merged.

    Args:
        score: [B, G, 1], that key's.
        positions, queries: [B, G, S], of all that the head holds; see `MergeTargets`.
        keys: float32 [B, G or 1, S, D], what the store holds.
    """
    slots = store.slots
    rows = (store.read_rows(x, last) for x in (slots.keys, slots.values))
    key, value = (dequantised(x, keys.shape[-1]).float() for x in rows)
    bias = store.read(slots.bias, last)
    evicted = EvictedKeys(key, value, score, bias, queries.gather(-1, last), evicts)
    store.write(slots.bias, last, bias.masked_fill(evicts, 0))
    targets = MergeTargets.of(store, positions.scatter(-1, last, -1), policy, queries)
    dots = products(evicted.keys, keys.mT)[:, :, 0]
    squares = keys.square().sum(-1)
    assert policy.merge is not None
    index, is_near = _most_similar(dots, squares, evicted.least(policy.merge), targets)
    return _merge_into(store, evicted, evicted.weights(), targets, index, is_near)[0]


def merge_all(
    store: Store, evicted: EvictedKeys, targets: MergeTargets, threshold: float
) -> Tensor:
    """One after the other: [B, G, N] bool, which of them were merged."""
    B, G, N, D = evicted.keys.shape
    least, weights = evicted.least(threshold), evicted.weights()
    merged = []
    for start in range(0, N, BLOCK):
        block = evicted.part(start, min(start + BLOCK, N))
        keys = store.rows("keys", D).float()
        dots = products(block.keys, keys.mT)  # [B, G, n, S]
        squares = keys.square().sum(-1).expand(B, G, -1).clone()
        n = dots.shape[2]
        for i in range(n):
            now = slice(start + i, start + i + 1)
            index, is_near = _most_similar(dots[:, :, i], squares, least[:, :, now], targets)
            one = block.part(i, i + 1), weights[:, :, now]
            is_merged, row = _merge_into(store, *one, targets, index, is_near)
            merged.append(is_merged)
            if i == n - 1:
                break
            # What has changed is compared with the others of the block anew.
            key = dequantised(row, D).float()
            dots.scatter_(3, index[:, :, None].expand(*dots.shape[:3], 1), block.keys @ key.mT)
            squares.scatter_(2, index, key.square().sum(-1))
    return torch.cat(merged, -1)


def _most_similar(
    dots: Tensor, squares: Tensor, least: Tensor, targets: MergeTargets
) -> tuple[Tensor, Tensor]:
    """The kept key most like each evicted one, of equal ones the lowest position: index on axis S
    [B, G, 1] and whether there is one [B, G, 1]; without one the index is any slot of the head.

    Args:
        dots: [B, G, S], products with the evicted key.
        squares: [B, G or 1, S], squared norms.
        least: [B, G, 1], see `EvictedKeys.least`.
    """
    similarity = dots * dots.abs() / squares
    # Where one of the two is 0 or no number so is this, and not above anything.
    similarity = torch.where((similarity > least) & targets.mergeable, similarity, -1.0)
    best = similarity.amax(-1, keepdim=True)
    order = torch.where(similarity == best, targets.order, _LAST)
    return order.min(-1, keepdim=True).indices, best > 0


def _merge_into(
    store: Store,
    evicted: EvictedKeys,
    evicted_weight: Tensor,
    targets: MergeTargets,
    index: Tensor,
    is_near: Tensor,
) -> tuple[Tensor, Tensor]:
    """Merges one key of each head, of these `EvictedKeys.weights`, into the slot at `index`
    [B, G, 1] where it `is_near`: [B, G, 1] bool, whether it was, which takes scores that are
    numbers; and the rows of keys [B, G, 1, D or bytes] that these slots now hold."""
    slots = store.slots
    D = evicted.keys.shape[-1]
    score, bias = store.read(slots.scores, index), store.read(slots.bias, index)
    queries = targets.queries.gather(-1, index)
    kept_weight = score / queries + _FLOOR
    weights = torch.stack([kept_weight, evicted_weight]) / (kept_weight + evicted_weight)
    total = torch.add(*weights.unbind())
    merged = is_near & (total - total == 0)  # which says that it is finite

    before = [store.read_rows(rows, index) for rows in (slots.keys, slots.values)]
    kept = (dequantised(row, D).float() for row in before)
    # Kept and evicted, of each key and value: [2, 2, B, G, 1, D].
    pairs = torch.stack([*kept, evicted.keys, evicted.values]).unflatten(0, (2, 2))
    key, value = torch.add(*(pairs * weights[:, None, ..., None]).unbind()).unbind()
    after = []
    for (rows, new), old in zip(as_stored(key, value, slots), before, strict=True):
        after.append(torch.where(merged[..., None], new, old))
        store.write_rows(rows, index, after[-1])
    if slots.norms is not None:
        store.write(slots.norms, index, torch.linalg.vector_norm(value, dim=-1), merged)
    if targets.scores_largest:
        grown = torch.maximum(score, evicted.scores)
    else:
        grown = score + evicted.scores * (queries / evicted.queries)
    store.write(slots.scores, index, torch.where(merged, grown, score))
    store.write(slots.bias, index, torch.where(merged, torch.logaddexp(bias, evicted.bias), bias))
    return merged, after[0]
