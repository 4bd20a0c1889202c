"""Simulation of a layer that keeps keys at random, the baseline that every ranking has to beat.

A key's rank is a hash of its layer, head and position, and attention never changes a rank. All keys
are therefore equally likely to be kept, and a key has the same rank in any batch and any text. All
ranks are known in advance, so a layer is simulated without going through the tokens one by one.

Shape letters as in `h2o.hf`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from h2o.config.layer_plan import LayerPlan
from h2o.hf.attention.attention_call import NewTokens
from h2o.hf.cache_state.slot_layout import Budgets, positions_in
from h2o.hf.conversation.pins import PinnedRows
from h2o.hf.simulation.simulated_layer import VisibleKeys, prompt_smoothing


def simulate_random(
    text: NewTokens,
    prompts: Sequence[int],
    by_row: Budgets,
    plan: LayerPlan,
    pins: PinnedRows,
    part: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Simulate a layer that keeps keys at random; `part`: the heads of this process.

    Other arguments and the result are those of `simulate_tokenwise`, with ranks as scores.
    """
    B, G, N, _ = text.key.shape
    positions, _count = positions_in(text.mask, text.key[..., 0])
    ranks = draw_ranks(positions, head_numbers(G, part, text.key.device)[:, None], plan.layer)
    ranks = pins.score(ranks, positions)
    evicted_at = torch.zeros(B, G, N, dtype=torch.int32, device=text.key.device)
    for b, prompt in enumerate(prompts):
        columns = (positions[b, 0] >= 0).nonzero()[:, 0]
        first = max(1, min(prompt, len(columns)))
        # Maps the number of tokens seen at a key's eviction to the first column without the key.
        after = columns.new_tensor([N, *(columns + 1).tolist()])
        for g, ranked in enumerate(ranks[b][:, columns].tolist()):
            heavy, recent = by_row[b][g % len(by_row[b])]
            seen = columns.new_tensor(_evictions(ranked, plan.sinks, heavy, recent, first))
            evicted_at[b, g, columns] = after[seen].int()
    kv_dtype = plan.config.kv_dtype
    smoothing = prompt_smoothing(text, prompts, kv_dtype)
    visible = VisibleKeys(evicted_at, prompts, kv_dtype, smoothing)
    return visible.attend(text), evicted_at, ranks.masked_fill(positions < 0, 0.0)


def _evictions(ranks: list[float], sinks: int, heavy: int, recent: int, prompt: int) -> list[int]:
    """Number of tokens that a row has seen when it evicts the key at each position; 0 if never."""
    seen = [0] * len(ranks)
    held: list[tuple[float, int]] = []  # heap of heavy hitters; among equal ranks the newest leaves
    for position in range(sinks, len(ranks) - recent):
        heapq.heappush(held, (ranks[position], -position))
        if len(held) > heavy:
            seen[-heapq.heappop(held)[1]] = max(prompt, position + recent + 1)
    return seen


BITS = 0xFFFFFFFF


def draw_ranks(positions: Tensor, heads: Tensor, layer: int) -> Tensor:
    """Ranks in [0, 1), float32, of keys at integer positions. `heads` is broadcast to them."""
    seeds = _hash(heads.long() + (layer << 16))
    return (_hash(positions.long() ^ seeds) >> 8).float() * 2.0**-24


def _hash(x: Tensor) -> Tensor:
    """MurmurHash3 finalizer (Appleby, public domain) of the lower 32 bits of int64 numbers."""
    x = x & BITS
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        x = ((x ^ (x >> shift)) * factor) & BITS
    return x ^ (x >> 16)


def head_numbers(G: int, part: tuple[int, int], device: torch.device) -> Tensor:
    """Indices of this process's heads among all heads of the model's layer, [G]."""
    return torch.arange(G, device=device) + part[0] * G
