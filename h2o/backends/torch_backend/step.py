"""One decode step (`h2o.ops.step`) in plain torch: store key and value [B, G, 1, D] of a new token,
attend, update the scores, and evict one key if the budget is exceeded.

Shape letters as in `h2o.ops`, R = H / G.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o.backends.torch_backend.attend import apply_softcap
from h2o.backends.torch_backend.ranking import lowest, rank_keys, split_budget
from h2o.backends.torch_backend.slot_view import SlotView, products, quantize_like_slots, row_norms
from h2o.policy import Policy
from h2o.quantization import hadamard, smoothed_query
from h2o.sink_logits import softmax


def step(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    mask: Tensor | None,
    slots: Any,
    out: Tensor,
    scale: float,
    softcap: float,
    policy: Policy,
    table: Tensor | None,
    ranks: Tensor | None,
    sink_logits: Tensor | None,
) -> None:
    """See `h2o.ops.step`. All shapes follow from those of the slots."""
    B, H, _, D = query.shape
    G = key.shape[1]
    view = SlotView(slots)
    real = None if mask is None else mask.bool()[..., None]  # [B, 1, 1]
    lengths = slots.seen_tokens.view(B, 1, 1).int()  # the position of the new token
    seen = lengths + 1
    budget = split_budget(slots.budget, policy.sinks)
    held = (view.by_head(slots.positions, -1) >= 0).sum(-1, keepdim=True)  # [B, G, 1]
    index = view.index_of(slots.next_slot)
    for rows, new in quantize_like_slots(key, value, slots):
        view.write_rows(rows, index, new, real)
    view.write(slots.positions, index, lengths, real)
    view.write(slots.scores, index, 0.0, real)
    norms = None
    if policy.value_weighted:
        view.write(slots.norms, index, row_norms(key if value is None else value), real)
        norms = view.by_head(slots.norms, 0)

    keys = view.rows("keys", D)
    queries = query.reshape(B, G, H // G, D).float()
    if slots.offsets is not None and table is None:
        offsets = slots.offsets.float()
        if slots.smoothing is not None:
            offsets = offsets / slots.smoothing.float()
        keys = keys + view.by_slot(hadamard(offsets))
        queries = smoothed_query(query, slots.smoothing).view(queries.shape)
    elif slots.offsets is not None:
        keys = view.model_keys(D)
    if table is not None and ranks is not None:
        view.write(ranks, index, held, real)
        keys = rotate_by(keys.float(), table[view.add_head_axis(ranks).clamp(0, len(table) - 1)])
        queries = rotate_by(queries, table[held])
    positions = view.by_head(slots.positions, -1)
    # Logits [B, G, R, S] must be float32 because scores are.
    logits = apply_softcap(products(queries, keys.mT, exact=True) * scale, softcap)
    sinks = None if sink_logits is None else sink_logits.view(1, G, H // G, 1)
    p = softmax(logits.masked_fill_((positions < 0)[:, :, None], -torch.inf), sinks)
    answer = view.weighted_values(p, D).view(B, 1, H, D)
    answer = answer if slots.offsets is None else hadamard(answer)
    received = p.amax(2) if policy.scores_largest else p.sum(2)
    if real is not None:
        answer = answer.masked_fill(~real[..., None], 0)
        received = received.masked_fill(~real, 0)
    out.copy_(answer)
    before = view.by_head(slots.scores, 0)
    if policy.decay != 1.0:
        faded = before * policy.decay
        before = faded if real is None else torch.where(real, faded, before)
    scores = torch.maximum(before, received) if policy.scores_largest else before + received
    view.write_by_head(slots.scores, scores)

    ranks_now = rank_keys(policy, scores, positions, norms, seen, budget)
    position, last = lowest(ranks_now, positions)
    evicts = held >= budget.k
    if real is not None:
        evicts = evicts & real
    score = scores.gather(-1, last)
    slots.evicted_score.add_(torch.where(evicts, score, 0)[..., 0])
    view.write(slots.positions, last, position.masked_fill(evicts, -1))
    if ranks is not None:
        rank = view.read(ranks, last)
        after = view.by_head(ranks, -1)
        view.write_by_head(ranks, after - ((after > rank) & evicts).int())
        view.write(ranks, last, rank.masked_fill(evicts, -1))
    free = torch.where(evicts, view.slot_within_head(last), held + 1)[..., 0]
    slots.next_slot.copy_(
        free if real is None else torch.where(real[..., 0], free, slots.next_slot)
    )
    slots.seen_tokens.add_(1 if real is None else real[:, 0, 0])


def rotate_by(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate x [..., D] by angles [..., 2, F], given as cosines and sines.

    Elements i < F and F + i are rotated by angle i. Elements from 2 F on are unchanged.
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, section 3.
    """
    F = angles.shape[-1]
    cos, sin = angles.unbind(-2)
    a, b, rest = x[..., :F], x[..., F : 2 * F], x[..., 2 * F :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
