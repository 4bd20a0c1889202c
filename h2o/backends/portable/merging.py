"""Keys that leave go into kept ones like them, for all rows and heads at once.

A cosine is compared as `csrc/cpu/merge.inc` does it, by the squared product over the squared norm
of the kept key. Whom each key finds depends on what those before it have changed, so several that
leave a head follow one another; the rows and heads of a batch go together.

Shape letters: N keys that leave a head, at most; n of these in a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from h2o.backends.portable.slot_rows import Store, as_stored, products
from h2o.quantisation import dequantised

__all__ = ["Leavers", "Receivers", "merge_all", "merge_one"]

BLOCK = 32
"""Keys that are compared with all kept ones by one product."""

_FLOOR = 1e-9
"""Of `csrc/policy.h`: keys without attention have weights as well."""

_NOBODY = 2**31 - 1


class Leavers(NamedTuple):
    """Keys on their way out, by ascending position."""

    keys: Tensor
    """[B, G, N, D] float32, as they were stored"""
    values: Tensor
    """as keys"""
    scores: Tensor
    """[B, G, N] float32"""
    bias: Tensor
    """[B, G, N] float32"""
    queries: Tensor
    """[B, G, N] float32: how many have seen the key, decayed as scores are"""
    leave: Tensor
    """[B, G or 1, N] bool: False is no key, and finds nobody"""

    def part(self, start: int, stop: int) -> Leavers:
        return Leavers(*(x[:, :, start:stop] for x in self))

    def least(self, threshold: float) -> Tensor:
        """[B, G, N]: only likenesses above it are like enough."""
        squares = self.keys.square().sum(-1) * threshold**2
        return squares.masked_fill(~self.leave, torch.inf)


class Receivers(NamedTuple):
    """The kept keys of each head, S as in `Store`."""

    open: Tensor
    """[B, G, S] bool: may take another in"""
    order: Tensor
    """[B, G, S] int32: their positions. Other slots of the head come after all of them, and slots
    of other heads last."""
    queries: Tensor
    """[B, G, S] float32: as in `Leavers`"""

    @classmethod
    def of(cls, store: Store, positions: Tensor, sinks: int, queries: Tensor) -> Receivers:
        """From positions [B, G, S], -1 where there is no kept key; sinks take nobody in."""
        may = positions >= sinks
        order = positions.masked_fill(~may, _NOBODY - 1)
        if store.first is not None:
            order = torch.where(store.own, order, _NOBODY)
        return cls(may, order, queries)


def merge_one(
    store: Store,
    last: Tensor,
    leaves: Tensor,
    positions: Tensor,
    queries: Tensor,
    keys: Tensor,
    sinks: int,
    threshold: float,
) -> Tensor:
    """The key at index `last` [B, G, 1] is to leave its head where `leaves` [B, 1 or G, 1]:
    [B, G, 1] bool, whether it lives on in another. The bias of its slot is reset.

    Args:
        positions, queries: [B, G, S], of all that the head holds; see `Receivers`.
        keys: float32 [B, G or 1, S, D], what the store holds.
    """
    slots = store.slots
    rows = (store.read_rows(x, last) for x in (slots.keys, slots.values))
    left = Leavers(
        *(dequantised(x, keys.shape[-1]).float() for x in rows),
        *(store.read(x, last) for x in (slots.scores, slots.bias)),
        queries.gather(-1, last),
        leaves,
    )
    store.write(slots.bias, last, 0.0, leaves)
    receivers = Receivers.of(store, positions.scatter(-1, last, -1), sinks, queries)
    dots = products(left.keys, keys.mT)[:, :, 0]
    squares = keys.square().sum(-1)
    index, found = _most_similar(dots, squares, left.least(threshold), receivers)
    return _take_in(store, left, receivers, index, found)


def merge_all(store: Store, left: Leavers, receivers: Receivers, threshold: float) -> Tensor:
    """One after the other: [B, G, N] bool, which of them live on in others."""
    B, G, N, D = left.keys.shape
    least = left.least(threshold)
    taken = []
    for start in range(0, N, BLOCK):
        block = left.part(start, min(start + BLOCK, N))
        keys = store.rows("keys", D).float()
        dots = products(block.keys, keys.mT)  # [B, G, n, S]
        squares = keys.square().sum(-1).expand(B, G, -1).clone()
        for i in range(dots.shape[2]):
            bar = least[:, :, start + i : start + i + 1]
            index, found = _most_similar(dots[:, :, i], squares, bar, receivers)
            taken.append(_take_in(store, block.part(i, i + 1), receivers, index, found))
            # What has changed is compared with the others of the block anew.
            key = dequantised(store.read_rows(store.slots.keys, index), D).float()
            dots.scatter_(3, index[:, :, None].expand(*dots.shape[:3], 1), block.keys @ key.mT)
            squares.scatter_(2, index, key.square().sum(-1))
    return torch.cat(taken, -1)


def _most_similar(
    dots: Tensor, squares: Tensor, least: Tensor, receivers: Receivers
) -> tuple[Tensor, Tensor]:
    """The kept key most like each that leaves, of equal ones the lowest position: index on axis S
    [B, G, 1] and whether there is one [B, G, 1]; without one the index is any slot of the head.

    Args:
        dots: [B, G, S], products with the key that leaves.
        squares: [B, G or 1, S], squared norms.
        least: [B, G, 1], see `Leavers.least`.
    """
    likeness = dots * dots.abs() / squares
    # Where one of the two is 0 or no number so is this, and not above anything.
    likeness = torch.where((likeness > least) & receivers.open, likeness, -1.0)
    best = likeness.amax(-1, keepdim=True)
    order = torch.where(likeness == best, receivers.order, _NOBODY)
    return order.min(-1, keepdim=True).indices, best > 0


def _take_in(
    store: Store, left: Leavers, receivers: Receivers, index: Tensor, found: Tensor
) -> Tensor:
    """Merges one key of each head into the slot at `index` [B, G, 1] where it is `found`: [B, G, 1]
    bool, whether it was, which takes scores that are numbers."""
    slots = store.slots
    D = left.keys.shape[-1]
    score, bias = store.read(slots.scores, index), store.read(slots.bias, index)
    queries = receivers.queries.gather(-1, index)
    mine, other = score / queries + _FLOOR, left.scores / left.queries + _FLOOR
    whole = mine + other
    mine, other = mine / whole, other / whole
    taken = found & (mine + other).isfinite()

    both = slots.keys, slots.values
    own = [store.read_rows(rows, index) for rows in both]
    key, value = (
        mine[..., None] * dequantised(row, D).float() + other[..., None] * leaving
        for row, leaving in zip(own, (left.keys, left.values), strict=True)
    )
    for rows, new, old in zip(both, as_stored(key, value, slots), own, strict=True):
        store.write_rows(rows, index, torch.where(taken[..., None], new, old))
    if slots.norms is not None:
        store.write(slots.norms, index, torch.linalg.vector_norm(value, dim=-1), taken)
    grown = score + left.scores * (queries / left.queries)
    store.write(slots.scores, index, torch.where(taken, grown, score))
    store.write(slots.bias, index, torch.where(taken, torch.logaddexp(bias, left.bias), bias))
    return taken
