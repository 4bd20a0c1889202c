"""Removal of named tokens from slots: they look as if their rows had never seen these tokens.

Shape letters as in `h2o.hf`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from h2o import ops
from h2o.hf.cache_state import slot_layout
from h2o.policy import Policy
from h2o.spans import Row, size


def remove_tokens(
    slots: ops.Slots, sizes: list[int], left: list[int], rows: Sequence[Row], policy: Policy
) -> ops.Slots:
    """Copy slots without some tokens. Positions count the tokens that stay, which are in the lowest
    slots. Keys are copied as they are, with the rotation that they have.

    Args:
        sizes: number of slots per head, or one number for all heads.
        left: that of the copy.
        rows: spans of token positions of each row.
    """
    before = slot_layout.by_head(slots, sizes, "positions", -1).long()
    after = _positions_after(before, rows)
    removed = [size(row) for row in rows]
    seen = slots.seen_tokens - slots.seen_tokens.new_tensor(removed)
    if policy.score_by == "mean":  # a key's mean is over as many queries as positions say
        scores = slot_layout.by_head(slots, sizes, "scores")
        numbers = (before, slots.seen_tokens), (after, seen)
        then, now = (policy.queries_of(p, n[:, None, None]) for p, n in numbers)
        slots = _with_scores(slots, sizes, scores * now / then)
    return slot_layout.renumber(slots, sizes, left, after)._replace(seen_tokens=seen)


def _positions_after(positions: Tensor, rows: Sequence[Row]) -> Tensor:
    """Positions [B, G, S] in the text without the removed tokens; -1 for those and empty slots."""
    after = positions.clone()
    for row, spans in enumerate(rows):
        for start, stop in spans:
            is_inside = (positions[row] >= start) & (positions[row] < stop)
            after[row] -= (stop - start) * (positions[row] >= stop).long()
            after[row].masked_fill_(is_inside, -1)
    return after


def _with_scores(slots: ops.Slots, sizes: list[int], scores: Tensor) -> ops.Slots:
    """Slots with other scores [B, G, S]."""
    new = torch.empty_like(slots.scores)
    for g, part in enumerate(slot_layout.heads(new, slots, sizes)):
        part.copy_(scores[:, g, : part.shape[1]])
    return slots._replace(scores=new)
