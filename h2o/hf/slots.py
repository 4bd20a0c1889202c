"""Slots as wholes: given more room, filled with keys that came from elsewhere, taken apart again.

Shape letters: B batch rows, G key/value heads, S slots, Q new tokens, D head
dimension, n columns of another cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h2o import ops

__all__ = ["by_position", "enlarged", "filled", "together"]


def by_position(slots: ops.Slots) -> Tensor:
    """Slot numbers [B, G, K] int64 by ascending position, K as many as any row holds."""
    positions = slots.positions.long()
    last = positions.masked_fill(positions < 0, torch.iinfo(torch.int64).max)
    return last.argsort(dim=-1)[..., : int((positions >= 0).sum(-1).max())]


def enlarged(slots: ops.Slots, capacity: int) -> ops.Slots:
    """The same content in `capacity` slots."""
    larger = ops.new_slots(slots.keys, capacity, value_weighted=slots.norms is not None)
    for name in ("keys", "values", "scores", "positions", "norms"):
        old = getattr(slots, name)
        if old is not None:
            getattr(larger, name)[:, :, : old.shape[2]] = old
    same = {name: getattr(slots, name) for name in ("free", "lengths", "budget", "lost")}
    return larger._replace(**same)


def filled(keys: Tensor, values: Tensor, mask: Tensor | None, *, value_weighted: bool) -> ops.Slots:
    """Slots without a budget that hold keys and values [B, G, n, D] with scores of 0.

    Where the mask [B, n] is False there is a pad, which is not stored. In the lowest slots, by
    ascending position, lie those of each row.
    """
    longest = keys.shape[2] if mask is None else int(mask.sum(1).max())
    slots = ops.new_slots(keys, longest + 1, value_weighted=value_weighted)
    scores = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
    ops.evict(keys, values, scores, slots, mask=mask, value_weighted=value_weighted)
    return slots


def together(
    slots: ops.Slots, key: Tensor, value: Tensor, scores: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `filled` made, and new tokens after it, as if all of them were new.

    Args:
        key, value: [B, G, Q, D].
        scores: [B, G, Q].
        mask: [B, Q] bool, False at a pad, or None.

    Returns:
        keys, values [B, G, S + Q, D], scores [B, G, S + Q], mask [B, S + Q] bool.
    """
    real = mask
    if real is None:
        real = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
    return (
        torch.cat([slots.keys, key], dim=2),
        torch.cat([slots.values, value], dim=2),
        torch.cat([slots.scores, scores], dim=2),
        torch.cat([slots.positions[:, 0] >= 0, real.bool()], dim=1),
    )
