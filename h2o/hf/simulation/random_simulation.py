"""`score_by="random"` in a simulated text: when a cache with a `RandomScorer` evicts each key.

Shape letters: B batch rows, G key/value heads, N columns of a text, D head dimension.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from h2o.errors import UnsupportedError
from h2o.hf.attention.attention_call import NewTokens
from h2o.hf.prompt.cross_head_budget import Budgets, positions_in
from h2o.hf.prompt.scorers import draw_ranks, head_numbers
from h2o.hf.simulation.visible_keys import VisibleKeys
from h2o.hf.store.pins import Pins
from h2o.layer_plan import LayerPlan


def simulate(
    text: NewTokens,
    prompts: Sequence[int],
    by_row: Budgets,
    plan: LayerPlan,
    pins: Pins,
    part: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Simulate a layer with a `RandomScorer`; `part`: this process's of the model's heads.

    Other arguments and the result are those of `echo_simulation.simulate`, with ranks for scores.
    """
    if text.value is None:
        raise UnsupportedError('score_by="random" does not go with multi-head latent attention')
    B, G, N, _ = text.key.shape
    positions, _count = positions_in(text.mask, text.key[..., 0])
    ranks = draw_ranks(positions, head_numbers(G, part, text.key.device)[:, None], plan.layer)
    ranks = pins.score(ranks, positions)
    evicted_at = torch.zeros(B, G, N, dtype=torch.int32, device=text.key.device)
    for b, prompt in enumerate(prompts):
        columns = (positions[b, 0] >= 0).nonzero()[:, 0]
        first = max(1, min(prompt, len(columns)))
        # By the number of tokens seen at its eviction, the first column that lacks a key.
        after = columns.new_tensor([N, *(columns + 1).tolist()])
        for g, ranked in enumerate(ranks[b][:, columns].tolist()):
            heavy, recent = by_row[b][g % len(by_row[b])]
            seen = columns.new_tensor(_evictions(ranked, plan.sinks, heavy, recent, first))
            evicted_at[b, g, columns] = after[seen].int()
    visible = VisibleKeys(evicted_at, prompts, plan.config.kv_dtype)
    return visible.attend(text), evicted_at, ranks.masked_fill(positions < 0, 0.0)


def _evictions(ranks: list[float], sinks: int, heavy: int, recent: int, prompt: int) -> list[int]:
    """Tokens that a row has seen when it evicts each key, by position; 0: the key stays."""
    seen = [0] * len(ranks)
    held: list[tuple[float, int]] = []  # heavy hitters; of equal ranks the newest is the lowest
    for position in range(sinks, len(ranks) - recent):
        heapq.heappush(held, (ranks[position], -position))
        if len(held) > heavy:
            seen[-heapq.heappop(held)[1]] = max(prompt, position + recent + 1)
    return seen
