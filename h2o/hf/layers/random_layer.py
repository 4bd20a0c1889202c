"""`score_by="random"`: the keys to keep are drawn, the baseline that every ranking has to beat.

A key's rank is a hash of its layer, head and position. The rank is therefore the same in a cache,
in a simulation, in chunks and in any batch, and keys are kept with equal probability. Attention
changes no rank; a pinned key keeps its own.

Shape letters: B batch rows, G key/value heads, S slots, N columns of a text, D head dimension.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from h2o import ops
from h2o.errors import UnsupportedError
from h2o.hf.call.attend_and_evict import evicting
from h2o.hf.call.attention_call import NewTokens
from h2o.hf.layers.layer import H2OLayer
from h2o.hf.layers.visible_keys import VisibleKeys
from h2o.hf.prompt.one_budget import positions_in
from h2o.hf.prompt.prompt_echo import as_stored
from h2o.hf.store.pins import Pins
from h2o.hf.store.report import LayerReport
from h2o.spans import PINNED

__all__ = ["RandomLayer", "drawn", "simulate"]

BITS = 0xFFFFFFFF


def drawn(positions: Tensor, heads: Tensor, layer: int) -> Tensor:
    """Ranks in [0, 1), float32, of integer positions in heads that can be broadcast to them."""
    seeds = _hashed(heads.long() + (layer << 16))
    return (_hashed(positions.long() ^ seeds) >> 8).float() * 2.0**-24


def _hashed(x: Tensor) -> Tensor:
    """Finalizer of MurmurHash3 (Appleby, public domain) of the lower 32 bits of int64 numbers."""
    x = x & BITS
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        x = ((x ^ (x >> shift)) * factor) & BITS
    return x ^ (x >> 16)


def _heads(G: int, part: tuple[int, int], device: torch.device) -> Tensor:
    """Numbers of this process's heads among those of the model, [G]."""
    return torch.arange(G, device=device) + part[0] * G


class RandomLayer(H2OLayer):
    """An `H2OLayer` whose scores are `drawn` numbers instead of attention."""

    def report(self) -> LayerReport:
        """Numbers of this layer. Attention is not counted, so its sums are NaN."""
        report = super().report()
        return dataclasses.replace(report, mass_evicted=math.nan, mass_kept=math.nan)

    def _attention(self, tokens: NewTokens, slots: ops.Slots | None) -> tuple[Tensor, Tensor]:
        out, received = super()._attention(tokens, slots)
        positions, _ = positions_in(tokens.mask, received)
        heads = _heads(received.shape[1], self.part, received.device)
        if slots is not None:
            lengths = slots.lengths if slots.rows is None else slots.lengths[slots.rows.long()]
            positions = positions + lengths[:, None, None]
            of_slots = heads[:, None]
            if slots.starts is not None:  # the slots of all heads lie on one axis
                of_slots = heads.repeat_interleave(slots.starts.diff())
            ranks = drawn(slots.positions, of_slots, self.layer_idx)
            slots.scores.copy_(ranks.masked_fill(slots.scores == PINNED, PINNED))
        return out, drawn(positions, heads[:, None], self.layer_idx)

    def _step(
        self, tokens: NewTokens, slots: ops.Slots, out: Tensor | None, **rotary: ops.Rotary
    ) -> Tensor:
        # Attention and eviction in one operation would rank the new key by attention.
        return evicting(
            lambda: self._attention(as_stored(tokens, slots), slots), tokens, slots, self.policy
        )


def simulate(
    text: NewTokens,
    prompts: Sequence[int],
    by_row: list[list[tuple[int, int]]],
    sinks: int,
    kv_dtype: str | None,
    layer: int,
    part: tuple[int, int],
    pins: Pins,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a `RandomLayer` does with a text. As `h2o.ops.simulate`.

    Args:
        text: N tokens.
        prompts: tokens of each row that are read before the first eviction, at least 1.
        by_row: (heavy, recent) of each row and each head, or one for all heads.
        part: which part of the model's heads this process has.
        pins: which know the prompts.

    Returns:
        Output [B, N, H, D], evicted_at int32 [B, G, N], ranks float32 [B, G, N].
    """
    if text.value is None:
        raise UnsupportedError('score_by="random" does not go with multi-head latent attention')
    B, G, N, _ = text.key.shape
    positions, _count = positions_in(text.mask, text.key[..., 0])
    ranks = drawn(positions, _heads(G, part, text.key.device)[:, None], layer)
    ranks = pins.score(ranks, positions)
    evicted_at = torch.zeros(B, G, N, dtype=torch.int32, device=text.key.device)
    for b, prompt in enumerate(prompts):
        columns = (positions[b, 0] >= 0).nonzero()[:, 0]
        first = max(1, min(prompt, len(columns)))
        # By the number of tokens seen at its eviction, the first column that lacks a key.
        after = columns.new_tensor([N, *(columns + 1).tolist()])
        for g, ranked in enumerate(ranks[b][:, columns].tolist()):
            heavy, recent = by_row[b][g % len(by_row[b])]
            seen = columns.new_tensor(_evictions(ranked, sinks, heavy, recent, first))
            evicted_at[b, g, columns] = after[seen].int()
    visible = VisibleKeys(evicted_at, prompts, kv_dtype)
    return visible.attend(text), evicted_at, ranks.masked_fill(positions < 0, 0.0)


def _evictions(ranks: list[float], sinks: int, heavy: int, recent: int, prompt: int) -> list[int]:
    """By position, how many tokens a row has seen when it evicts the key; 0: the key stays."""
    seen = [0] * len(ranks)
    held: list[tuple[float, int]] = []  # heavy hitters; of equal ranks the newest is the lowest
    for position in range(sinks, len(ranks) - recent):
        heapq.heappush(held, (ranks[position], -position))
        if len(held) > heavy:
            seen[-heapq.heappop(held)[1]] = max(prompt, position + recent + 1)
    return seen
