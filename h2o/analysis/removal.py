"""Measure the cost of removing keys: the heaviest, as many random ones, or as many of the newest.

A row loses the same number of keys for each kind: a share of the keys before its block of rows. The
heaviest keys are those by the attention of the rows before the block, as in a cache, never of later
rows. A token never loses its own key. The rows of the first block lose nothing, so a block has at
most a sixteenth of the rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from h2o.analysis.collect import Attention, watch
from h2o.attention_blocks import ROWS, attend_blocks
from h2o.sink_logits import softmax

KINDS = ("heavy", "random", "recent")


def perplexity_without(model: Any, ids: Tensor, kind: str, share: float, seed: int = 0) -> float:
    """Perplexity of a text [n] when every row has lost a share of the keys before it.

    Args:
        kind: "heavy", "random" or "recent".
        share: from 0, the unchanged model, to 1.
        seed: seed of "random". Each layer and key/value head draws its own keys.
    """
    generator = torch.Generator("cpu").manual_seed(seed)

    def visit(layer: int, seen: Attention) -> Tensor:
        G, n, _ = seen.keys.shape
        chance = torch.rand(G, n, generator=generator, dtype=torch.float32, device="cpu")
        chance = chance.to(seen.keys.device)
        return attend_without(seen, kind, share, chance)

    return perplexity(watch(model, ids, visit, logits=True), ids)


def attend_without(seen: Attention, kind: str, share: float, chance: Tensor) -> Tensor:
    """Attention [n, H, D] without the removed keys. `chance` [G, n] ranks the keys for "random"."""
    (H, n, _), G, device = seen.query.shape, len(seen.keys), seen.query.device
    received = torch.zeros(G, n, dtype=torch.float32, device=device)
    sinks = None if seen.sink_logits is None else seen.sink_logits[:, None, None]

    def hide(first: int, logits: Tensor) -> Tensor:
        columns, lost = logits.shape[2], int(share * first)
        if kind == "recent":
            row = torch.arange(first, columns, device=device)[:, None]
            age = row - torch.arange(columns, device=device)
            return (age >= 1) & (age <= lost)
        rank = received if kind == "heavy" else chance
        removed = torch.zeros(G, columns, dtype=torch.bool, device=device)
        removed.scatter_(1, rank[:, :first].topk(lost, dim=1).indices, True)
        if kind == "heavy":
            received[:, :columns] += softmax(logits, sinks).view(G, -1, columns).sum(1)
        return removed.repeat_interleave(H // G, dim=0)[:, None]

    return attend_blocks(
        seen.query, seen.keys, seen.values, hide,
        scale=seen.scale, softcap=seen.softcap, sinks=sinks, rows=min(ROWS, max(1, n // 16)),
    )  # fmt: skip


def perplexity(logits: Tensor, ids: Tensor) -> float:
    """Perplexity of the tokens [n] after the first, from logits [n, vocabulary]."""
    loss = torch.nn.functional.cross_entropy(logits[:-1].float(), ids[1:].to(logits.device))
    return math.exp(loss.item())
