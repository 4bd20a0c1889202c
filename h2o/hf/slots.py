"""Slots as wholes: given more room, filled with keys that came from elsewhere, taken apart again.

Shape letters: B batch rows, G key/value heads, S slots, Q new tokens, D head
dimension, n columns of another cache, K keys held.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from h2o import ops
from h2o.slots import PER_SLOT

__all__ = [
    "Room",
    "by_head",
    "capacities",
    "enlarged",
    "figures",
    "filled",
    "heads",
    "held",
    "sizes",
    "together",
    "with_capacities",
]


@dataclasses.dataclass
class Room:
    """How far slots reach. Lists have an entry for each head, or one for all."""

    widest: list[int]
    """The largest budget k of any row."""
    sizes: list[int]
    """Slots."""

    def __post_init__(self) -> None:
        pairs = zip(self.sizes, self.widest, strict=False)
        short = (size - 1 for size, k in pairs if size <= k)
        self.tokens: float = min(short, default=math.inf)
        """Rows may have so many tokens, and the next one still fits."""

    def larger(self, tokens: int) -> list[int]:
        """Sizes for rows of so many tokens and the next one, with room to grow."""
        needed = capacities(self.widest, tokens)
        grown = [min(k + 1, s + s // 2) for k, s in zip(self.widest, self.sizes, strict=True)]
        return [max(three) for three in zip(needed, grown, self.sizes, strict=True)]


def capacities(widest: list[int], tokens: int) -> list[int]:
    """Slots that rows of so many tokens and the next one need."""
    return [min(k, tokens) + 1 for k in widest]


def sizes(slots: ops.Slots) -> list[int]:
    """Slots of each head, or of all where they have the same.

    Noted on `starts`, as a decode step should not wait for the numbers of another device.
    """
    if slots.starts is None:
        return [slots.scores.shape[-1]]
    if not hasattr(slots.starts, _SIZES):
        setattr(slots.starts, _SIZES, slots.starts.diff().tolist())
    each: list[int] = getattr(slots.starts, _SIZES)
    return each


_SIZES = "h2o_sizes"


def with_capacities(keys: Tensor, each: list[int], **kind: Any) -> ops.Slots:
    """New slots for keys like [B, G, any, D]; `each` as `Room.sizes`, others as `new_slots`."""
    slots = ops.new_slots(keys, each[0] if len(each) == 1 else each, **kind)
    if slots.starts is not None:
        setattr(slots.starts, _SIZES, each)
    return slots


def heads(tensor: Tensor, slots: ops.Slots) -> list[Tensor]:
    """Views of a field of slots, or of a tensor like one, by head: [B, S, ...] each."""
    if slots.starts is None:
        return list(tensor.unbind(1))
    return list(tensor.split(sizes(slots), dim=1))


def by_head(slots: ops.Slots, field: str, empty: float = 0) -> Tensor:
    """[B, G, S, ...]: a field of `PER_SLOT` by head, whatever the store;
    `empty` where a head has fewer slots than another."""
    tensor: Tensor = getattr(slots, field)
    if slots.starts is None:
        return tensor
    parts = heads(tensor, slots)
    most = max(part.shape[1] for part in parts)
    out = tensor.new_full((len(tensor), len(parts), most, *tensor.shape[2:]), empty)
    for g, part in enumerate(parts):
        out[:, g, : part.shape[1]] = part
    return out


def held(slots: ops.Slots, **fields: float) -> list[Tensor]:
    """The named fields of what is held, [B, G, K, ...] by ascending position, K as many as any head
    of any row holds, with the value that is given where one holds fewer. Positions are int64."""
    positions = by_head(slots, "positions", -1).long()
    last = positions.masked_fill(positions < 0, torch.iinfo(torch.int64).max)
    order = last.argsort(dim=-1)[..., : int((positions >= 0).sum(-1).max())]
    empty = positions.gather(-1, order) < 0
    found = []
    for name, filler in fields.items():
        tensor = positions if name == "positions" else by_head(slots, name)
        shape = (*order.shape, *tensor.shape[3:])
        index, gone = (x.view(*x.shape, *[1] * (len(shape) - 3)) for x in (order, empty))
        found.append(tensor.gather(2, index.expand(shape)).masked_fill(gone, filler))
    return found


def figures(slots: ops.Slots, sinks: int) -> dict[str, Any]:
    """What a report says of the slots: fields of `LayerReport`."""
    B, G = slots.free.shape
    filled = slots.positions >= 0
    budget = slots.budget if slots.budget.ndim == 3 else slots.budget[:, None].expand(B, G, 2)
    sizes = [0 if x is None else x.numel() * x.element_size() for x in slots]
    return {
        "seen": slots.lengths.tolist(),
        "kept_by_head": (by_head(slots, "positions", -1) >= 0).sum(-1).tolist(),
        "budget_by_head": (budget.sum(-1) + sinks).tolist(),
        "bytes_held": sum(sizes[:2]),
        "bytes_bookkeeping": sum(sizes[2:]),
        "merged": 0 if slots.bias is None else round(slots.bias[filled].expm1().sum().item()),
        "mass_evicted": slots.lost.sum().item(),
        "mass_kept": slots.scores[filled].cpu().double().sum().item(),
    }


def enlarged(slots: ops.Slots, each: list[int]) -> ops.Slots:
    """The same content in more slots; `each` as `Room.sizes`."""
    B, G = slots.free.shape
    shape, starts = (B, G, each[0]), None
    if slots.starts is not None:
        ends = slots.starts.new_tensor(each).cumsum(0, dtype=torch.int32)
        shape, starts = (B, sum(each)), torch.cat([slots.starts[:1], ends])
        setattr(starts, _SIZES, each)
    grown = {}
    for name in PER_SLOT:
        old = getattr(slots, name)
        more = () if old is None else old.shape[slots.scores.ndim :]
        empty = -1 if name == "positions" else 0
        grown[name] = None if old is None else old.new_full((*shape, *more), empty)
    larger = slots._replace(**grown, starts=starts)
    for name in PER_SLOT:
        if grown[name] is None:
            continue
        for old, new in zip(
            heads(getattr(slots, name), slots), heads(grown[name], larger), strict=True
        ):
            new[:, : old.shape[1]] = old
    return larger


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
