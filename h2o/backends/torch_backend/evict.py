"""`h2o.ops.evict` in plain torch. The stored and the new keys of a head are S + Q candidates, of
which the policy keeps k. They are written to the lowest slots; the others are evicted.

Shape letters as in `h2o.ops`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o.backends.torch_backend.ranking import highest, rank_keys, split_budget
from h2o.backends.torch_backend.slot_view import SlotView, row_norms
from h2o.policy import Policy
from h2o.quantization import set_offsets, stored_like, to_stored


def evict(
    keys: Tensor,
    values: Tensor | None,
    scores: Tensor,
    mask: Tensor | None,
    slots: Any,
    policy: Policy,
) -> None:
    """See `h2o.ops.evict`. The keys kept are in the lowest slots, stored keys before new ones."""
    B, G, Q, _ = keys.shape
    values = keys if values is None else values
    view = SlotView(slots)
    before = slots.seen_tokens[:, None, None]
    if slots.offsets is not None:
        set_offsets(slots.offsets, slots.seen_tokens == 0, keys, mask)
    order = torch.arange(Q, device=keys.device)[None]
    tokens = torch.full((1, 1), Q, dtype=torch.long, device=keys.device)
    if mask is not None:
        real = mask.bool()
        order, tokens = (real.cumsum(1) - 1).masked_fill(~real, -1), real.sum(1, keepdim=True)
    new = (before + order[:, None]).masked_fill(order[:, None] < 0, -1).int()  # [B, 1, Q]
    positions = torch.cat([view.by_head(slots.positions, -1), new.expand(B, G, Q)], -1)
    held_scores = view.by_head(slots.scores, 0)
    norms = None
    if policy.value_weighted:
        norms = torch.cat([view.by_head(slots.norms, 0), row_norms(values)], -1)
    all_scores = torch.cat([held_scores, scores], -1) + 0.0  # -0 becomes 0
    seen = before + tokens[..., None]
    budget = split_budget(slots.budget, policy.sinks)
    ranks = rank_keys(policy, all_scores, positions, norms, seen, budget)
    is_kept = highest(ranks, positions, budget.k)
    lost = all_scores.masked_fill(is_kept | (positions < 0), 0)
    _write_kept(keys, values, slots, view, is_kept, positions, all_scores, norms)
    slots.evicted_score.add_(lost.sum(-1, dtype=slots.evicted_score.dtype))
    slots.next_slot.copy_(is_kept.sum(-1))
    slots.seen_tokens.add_(tokens[:, 0])


def _write_kept(
    keys: Tensor,
    values: Tensor,
    slots: Any,
    view: SlotView,
    is_kept: Tensor,
    positions: Tensor,
    scores: Tensor,
    norms: Tensor | None,
) -> None:
    """Write the candidates [B, G, S + Q] that are kept to the lowest slots of their heads, and
    empty the other slots."""
    B, G, Q, _ = keys.shape
    C = positions.shape[-1]
    S = C - Q
    # The slot of each candidate, counted within its head (S: evicted), and the inverse: `source`.
    slot = torch.where(is_kept, is_kept.cumsum(-1) - 1, S).clamp(max=S)
    candidates = torch.arange(C, device=keys.device).expand_as(is_kept)
    source = slot.new_zeros(B, G, S + 1).scatter_(-1, slot, candidates)[..., :S]
    filled = torch.arange(S, device=keys.device) < is_kept.sum(-1, keepdim=True)
    if view.first is not None:  # slots are on axis T
        local = (torch.arange(S, device=keys.device) - view.first[..., None]).clamp(min=0)
        local = local.expand_as(source)
        source, filled = source.gather(-1, local), filled.gather(-1, local)
    for numbers, values_by_key, empty in (
        (slots.positions, positions, -1),
        (slots.scores, scores, 0),
        (slots.norms, norms, 0),
    ):
        if values_by_key is not None:
            view.write_by_head(
                numbers, torch.where(filled, values_by_key.gather(-1, source), empty)
            )
    new_rows = to_stored(keys, values, slots.offsets, slots.smoothing)
    for rows, incoming in zip((slots.keys, slots.values), new_rows, strict=True):
        if rows is not None:
            _write_kept_rows(rows, incoming, view, source, filled)


def _write_kept_rows(
    rows: Tensor, incoming: Tensor, view: SlotView, source: Tensor, filled: Tensor
) -> None:
    """Write keys or values of the candidates `source` [B, G, S] to the slots in `filled`."""
    B, G, Q, D = incoming.shape
    S = source.shape[-1]
    index = (source - S).clamp(min=0)
    if view.first is None:
        new = incoming.gather(2, index[..., None].expand(-1, -1, -1, D))
    else:
        source, filled, index = map(view.take_own_head, (source, filled, index))  # [B, T]
        index = index + view.head * Q
        new = incoming.reshape(B, G * Q, D).gather(1, index[..., None].expand(-1, -1, D))
    stored = source.clamp(max=S - 1)[..., None].expand_as(rows)
    moved = rows.gather(-2, stored)
    fresh = stored_like(new, rows)
    result = torch.where((source >= S)[..., None], fresh, moved)
    result = result.masked_fill(~filled[..., None], 0)
    if view.first is not None:
        result = torch.where(view.in_any_head[..., None], result, rows)
    rows.copy_(result)
