"""New keys into the slots, and out with what the budget has no room for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o.backends.portable.merging import Leavers, Receivers, merge_all
from h2o.backends.portable.ranking import budget_of, queries_of, rank_keys, staying
from h2o.backends.portable.slot_rows import Store
from h2o.policy import Policy
from h2o.quantisation import dequantised, stored_like

__all__ = ["evict"]


def evict(
    keys: Tensor,
    values: Tensor,
    scores: Tensor,
    mask: Tensor | None,
    slots: Any,
    policy: Policy,
) -> None:
    """See `h2o.ops.evict`. Survivors lie in the lowest slots, stored ones before new ones."""
    B, G, Q, _ = keys.shape
    store = Store(slots)
    before = slots.lengths[:, None, None]
    order = torch.arange(Q, device=keys.device)[None]
    tokens = torch.full((1, 1), Q, device=keys.device)
    if mask is not None:
        real = mask.bool()
        order, tokens = (real.cumsum(1) - 1).masked_fill(~real, -1), real.sum(1, keepdim=True)
    new = (before + order[:, None]).masked_fill(order[:, None] < 0, -1).int()  # [B, 1, Q]
    positions = torch.cat([store.by_head(slots.positions, -1), new.expand(B, G, Q)], -1)
    held_scores = store.by_head(slots.scores, 0)
    norms = bias = None
    if policy.value_weighted:
        new_norms = torch.linalg.vector_norm(values.float(), dim=-1)
        norms = torch.cat([store.by_head(slots.norms, 0), new_norms], -1)
    if policy.merge is not None:
        bias = torch.cat([store.by_head(slots.bias, 0), torch.zeros_like(scores)], -1)
    all_scores = torch.cat([held_scores, scores], -1) + 0.0  # -0 becomes 0
    seen = before + tokens[..., None]
    budget = budget_of(slots.budget, policy.sinks)
    ranks = rank_keys(policy, all_scores, positions, norms, seen, budget)
    stay = staying(ranks, positions, budget.k)
    gone = (positions >= 0) & ~stay
    if policy.merge is None:
        leaving = all_scores.masked_fill(~gone, 0)
        _place(keys, values, slots, store, stay, positions, all_scores, norms, bias)
    else:
        queries = queries_of(policy, positions, seen)
        left = _leavers(keys, values, store, gone, positions, all_scores, bias, queries)
        _place(keys, values, slots, store, stay, positions, all_scores, norms, bias)
        kept = store.by_head(slots.positions, -1)
        receivers = Receivers.of(store, kept, policy.sinks, queries_of(policy, kept, seen))
        taken = merge_all(store, left, receivers, policy.merge)
        leaving = left.scores.masked_fill(taken | ~left.leave, 0)
    slots.lost.add_(leaving.sum(-1, dtype=slots.lost.dtype))
    slots.free.copy_(stay.sum(-1))
    slots.lengths.add_(tokens[:, 0])


def _leavers(
    keys: Tensor,
    values: Tensor,
    store: Store,
    gone: Tensor,
    positions: Tensor,
    scores: Tensor,
    bias: Tensor,
    queries: Tensor,
) -> Leavers:
    """Of the candidates [B, G, S + Q] those that are `gone`, as long as they are in the store: no
    more than come, since a store holds no more than its budget."""
    Q, D = keys.shape[2:]
    S = gone.shape[-1] - Q
    last = torch.iinfo(torch.int32).max
    which = torch.where(gone, positions, last).argsort(-1)[..., :Q]  # [B, G, Q]
    index = (which - S).clamp(min=0)[..., None].expand(-1, -1, -1, D)

    def rows(stored: Tensor, given: Tensor) -> Tensor:
        fresh = stored_like(given.gather(2, index), stored)
        held = store.read_rows(stored, which.clamp(max=S - 1))
        return dequantised(torch.where((which >= S)[..., None], fresh, held), D).float()

    numbers = (x.gather(-1, which) for x in (scores, bias, queries, gone))
    slots = store.slots
    return Leavers(rows(slots.keys, keys), rows(slots.values, values), *numbers)


def _place(
    keys: Tensor,
    values: Tensor,
    slots: Any,
    store: Store,
    stay: Tensor,
    positions: Tensor,
    scores: Tensor,
    norms: Tensor | None,
    bias: Tensor | None,
) -> None:
    """Writes the candidates [B, G, S + Q] that stay into the lowest slots of their heads; what
    is left of these becomes empty."""
    B, G, Q, _ = keys.shape
    C = positions.shape[-1]
    S = C - Q
    # Of each slot of a head, counted from its first, the candidate that goes there; S: nowhere.
    slot = torch.where(stay, stay.cumsum(-1) - 1, S).clamp(max=S)
    candidates = torch.arange(C, device=keys.device).expand_as(stay)
    come = slot.new_zeros(B, G, S + 1).scatter_(-1, slot, candidates)[..., :S]
    filled = torch.arange(S, device=keys.device) < stay.sum(-1, keepdim=True)
    if store.first is not None:  # by place on axis T instead
        local = (torch.arange(S, device=keys.device) - store.first[:, None]).clamp(min=0)
        local = local.expand_as(come)
        come, filled = come.gather(-1, local), filled.gather(-1, local)
    for numbers, found, empty in (
        (slots.positions, positions, -1),
        (slots.scores, scores, 0),
        (slots.norms, norms, 0),
        (slots.bias, bias, 0),
    ):
        if found is not None:
            store.take_back(numbers, torch.where(filled, found.gather(-1, come), empty))
    for rows, given in ((slots.keys, keys), (slots.values, values)):
        _place_rows(rows, given, store, come, filled)


def _place_rows(rows: Tensor, given: Tensor, store: Store, come: Tensor, filled: Tensor) -> None:
    """Keys or values of the candidates `come` [B, G, S] to the slots that are `filled`."""
    B, G, Q, D = given.shape
    S = come.shape[-1]
    index = (come - S).clamp(min=0)
    if store.first is None:
        taken = given.gather(2, index[..., None].expand(-1, -1, -1, D))
    else:
        own = store.head.expand(B, 1, S)
        come, filled = come.gather(1, own)[:, 0], filled.gather(1, own)[:, 0]  # [B, T]
        index = index.gather(1, own)[:, 0] + store.head * Q
        taken = given.reshape(B, G * Q, D).gather(1, index[..., None].expand(-1, -1, D))
    stayed = come.clamp(max=S - 1)[..., None].expand_as(rows)
    moved = rows.gather(-2, stayed)
    fresh = stored_like(taken, rows)
    found = torch.where((come >= S)[..., None], fresh, moved)
    found = found.masked_fill(~filled[..., None], 0)
    if store.first is not None:
        found = torch.where(store.own.any(0)[:, None], found, rows)
    rows.copy_(found)
