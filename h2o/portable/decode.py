"""One decode step: store, attend, score, choose who leaves."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o.portable.merging import Leavers, Receivers, merge_one
from h2o.portable.policy import Policy, budget_of, lowest
from h2o.portable.prefill import capped
from h2o.portable.store import Store, products
from h2o.rotary import rotated
from h2o.storage import dequantised

__all__ = ["Departure", "step"]


class Departure(NamedTuple):
    """Who left each head in a step; what `h2o.portable.simulation` goes by. [B, G] each."""

    leaves: Tensor
    """bool: somebody does"""
    position: Tensor
    """int32"""
    score: Tensor
    """float32"""


def step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    slots: Any,
    out: Tensor,
    scale: float,
    softcap: float,
    sinks: int,
    rank_by: str,
    decay: float,
    value_weighted: bool,
    merge: float | None,
    table: Tensor | None,
    ranks: Tensor | None,
) -> Departure:
    """See `h2o.ops.step`. All shapes are fixed by those of the slots."""
    B, H, _, D = query.shape
    G = key.shape[1]
    store = Store(slots)
    real = None if mask is None else mask.bool()  # [B, 1]
    lengths = slots.lengths[:, None]  # [B, 1]: without the new token, of which it is the position
    seen = lengths + 1
    budget = budget_of(slots.budget, sinks)
    place = store.place(slots.free)
    store.write_rows(slots.keys, place, key, real)
    store.write_rows(slots.values, place, value, real)
    store.write(slots.positions, place, lengths, real)
    store.write(slots.scores, place, 0.0, real)
    if merge is not None:
        store.write(slots.bias, place, 0.0, real)
    norms = None
    if value_weighted:
        norms = torch.linalg.vector_norm(value[:, :, 0].float(), dim=-1)
        store.write(slots.norms, place, norms, real)
        norms = store.by_head(slots.norms, 0)

    keys = store.rows("keys", D).float()  # scores are to be float32, and so must logits be
    asked = query[:, :, 0].float().unflatten(1, (G, H // G))  # [B, G, R, D]
    if table is not None:
        before = torch.minimum(lengths[..., None], budget.k)  # [B, 1 or G, 1] keys held
        store.write(ranks, place, before[..., 0], real)
        keys = rotated(keys, table[store.shaped(ranks).clamp(0, len(table) - 1)])
        asked = rotated(asked, table[before])
    positions = store.by_head(slots.positions, -1)
    empty = (positions < 0)[:, :, None]
    logits = capped(products(asked * scale, keys.mT), softcap)  # [B, G, R, S]
    if merge is not None:
        logits = logits + store.by_head(slots.bias, 0)[:, :, None]
    p = logits.masked_fill_(empty, -torch.inf).softmax(-1)
    answer = store.answers(p, store.rows("values", D)).view(B, 1, H, D)
    given = p.sum(2)
    if real is not None:
        answer = answer.masked_fill(~real[:, :, None, None], 0)
        given = given.masked_fill(~real[:, :, None], 0)
    out.copy_(answer)

    scores = store.by_head(slots.scores, 0)
    if decay != 1.0:
        aged = scores * decay
        scores = aged if real is None else torch.where(real[:, :, None], aged, scores)
    scores = scores + given
    store.take_back(slots.scores, scores)

    policy = Policy(sinks, rank_by, decay, value_weighted)
    order = policy.keys(scores, positions, norms, seen[..., None], budget)
    position, last = lowest(order, positions)
    leaves = seen > budget.k[..., 0]  # [B, 1 or G]
    if real is not None:
        leaves = leaves & real
    score = scores.gather(-1, last)[..., 0]
    gone = leaves
    if merge is not None:
        queries = policy.queries(positions, seen[..., None])
        left = Leavers(
            *(dequantised(store.read_rows(x, last), D).float() for x in (slots.keys, slots.values)),
            score[..., None], store.by_head(slots.bias, 0).gather(-1, last),
            queries.gather(-1, last), leaves[..., None],
        )  # fmt: skip
        others = Receivers.of(store, positions.scatter(-1, last, -1), sinks, queries)
        gone = leaves & ~merge_one(store, left, others, keys, merge)
    place = store.place_of(last)
    slots.lost.add_(torch.where(gone, score, 0))
    store.write(slots.positions, place, torch.where(leaves, -1, position[..., 0]), None)
    if merge is not None:
        store.write(slots.bias, place, 0.0, leaves)
    if ranks is not None:
        left = store.read(ranks, place)[..., None]
        after = store.by_head(ranks, -1)
        store.take_back(ranks, after - ((after > left) & leaves[..., None]).int())
        store.write(ranks, place, torch.where(leaves, -1, left[..., 0]), None)
    free = torch.where(leaves, store.counted(place), seen)
    slots.free.copy_(free if real is None else torch.where(real, free, slots.free))
    slots.lengths.add_(1 if real is None else real[:, 0])
    return Departure(leaves, position[..., 0], score)
