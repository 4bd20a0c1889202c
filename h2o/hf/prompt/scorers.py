"""Scorers: `AttentionScorer` for policies that rank keys by attention, and `RandomScorer`, a
baseline. `EchoScorer` is in `h2o.hf.prompt.echo_scorer`.

A layer passes its scorer the attention that its keys received, and stores the scores that the
scorer returns. Eviction then ranks keys by these scores, as the policy says (`h2o.policy`). A new
ranking that can be computed from the attention that each key has received belongs in the policy and
needs no scorer. CONTRIBUTING.md ("How to add") lists the files to change in both cases.

Shape letters as in `h2o.hf`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o import ops
from h2o.hf.attention.attention_call import NewTokens
from h2o.hf.prompt.cross_head_budget import Prompt, positions_in
from h2o.spans import PINNED


class AttentionScorer:
    """Scores keys by the attention that they receive."""

    uses_attention = True
    """Whether the operations compute the scores from attention. If not, layers call `scores`."""

    def after_prompt(self, tokens: NewTokens, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Turn the attention that a prompt's keys received in its forward pass into scores.

        Returns:
            The scores, and the echo by which the keys of all heads compete for pooled slots (None:
            they do not compete), each [B, G, Q].
        """
        return scores, None

    def store(self, layer: Any, prompt: Prompt) -> None:
        """Have the layer store a prompt once its budgets are known."""
        layer.store(prompt, prompt.budget.by_row)


class RandomScorer(AttentionScorer):
    """Scores keys at random, the baseline that every ranking has to beat.

    A key's rank is a hash of its layer, head and position. All keys are therefore equally likely to
    be kept, and a key has the same rank in a cache, in a simulation, in a chunked prompt and in any
    batch. Attention never changes a rank. Pinned keys keep their score.
    """

    uses_attention = False

    def scores(
        self, layer: Any, tokens: NewTokens, slots: ops.Slots | None, received: Tensor
    ) -> Tensor:
        """Draw the ranks [B, G, Q] of new keys, in place of the attention `received`. Also restore
        the ranks of the keys in the slots, to which attention was added."""
        positions, _ = positions_in(tokens.mask, received)
        heads = head_numbers(received.shape[1], layer.facts.part, received.device)
        if slots is not None:
            lengths = (
                slots.seen_tokens if slots.rows is None else slots.seen_tokens[slots.rows.long()]
            )
            positions = positions + lengths[:, None, None]
            of_slots = heads[:, None]
            if slots.starts is not None:  # the slots of all heads share one axis
                of_slots = heads.repeat_interleave(slots.starts.diff())
            ranks = draw_ranks(slots.positions, of_slots, layer.layer_idx)
            slots.scores.copy_(ranks.masked_fill(slots.scores == PINNED, PINNED))
        return draw_ranks(positions, heads[:, None], layer.layer_idx)


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
