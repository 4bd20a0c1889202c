"""The layout of a layer's slots: slots per head, enlarging slots, reading keys in order.

With per-head budgets, heads have different numbers of slots, which follow each other on one axis.
The layer keeps these numbers in a plain list, `Capacity.sizes`, because reading them from a device
would make each decode step wait for it.

Shape letters as in `h2o.hf`, and n columns of another cache.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from h2o import ops
from h2o.quantization import dequantize, from_stored
from h2o.slots import EMPTY, PER_ROW, PER_SLOT, empty_slots

Budgets = list[list[tuple[int, int]]]
"""(heavy, recent) by row and head. A row has one pair per head, or a single pair for all heads."""


@dataclasses.dataclass
class Capacity:
    """The capacity of a layer's slots. Lists have one entry per head, or one for all heads."""

    widest: list[int]
    """The largest budget k of any row."""
    sizes: list[int]
    """Number of slots. The list is empty before the prompt."""

    def __post_init__(self) -> None:
        pairs = zip(self.sizes, self.widest, strict=False)
        self.tokens: float = min([size - 1 for size, k in pairs if size <= k], default=math.inf)
        """Largest row length for which one more token fits."""

    @classmethod
    def of(
        cls,
        by_row: Budgets,
        sinks: int,
        tokens: int,
        size: Callable[[list[int], int], list[int]] | None = None,
    ) -> Capacity:
        """Capacity for these budgets and rows of `tokens` tokens. `size` is the `capacities` of a
        runner; None: that of an eager one."""
        widest = [sinks + max(map(sum, rows)) for rows in zip(*by_row, strict=True)]
        return cls(widest, (size or capacities)(widest, tokens))

    def larger(self, tokens: int) -> Capacity:
        """Capacity for rows of `tokens` tokens, the next token and a reserve.

        The reserve is at least a sixteenth of the slots, so that they are rarely copied."""
        needed = capacities(self.widest, tokens)
        pairs = zip(self.widest, self.sizes, strict=True)
        grown = [min(k + 1, s + max(min(s // 2, 48), s // 16)) for k, s in pairs]
        return Capacity(self.widest, list(map(max, needed, grown, self.sizes)))


NO_CAPACITY = Capacity([0], [])
"""Capacity before the prompt."""


def writable(tensor: Tensor) -> Tensor:
    """Copy a tensor that was created under `torch.inference_mode`; return others unchanged.

    Such a tensor must not be written to outside that mode."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


def capacities(widest: list[int], tokens: int) -> list[int]:
    """Number of slots that rows of `tokens` tokens and the next token need."""
    return [min(k, tokens) + 1 for k in widest]


def sizes(slots: ops.Slots) -> list[int]:
    """Slots per head, or one number if heads have the same. Waits for the device of `starts`."""
    if slots.starts is None:
        return [slots.scores.shape[-1]]
    return slots.starts.diff().tolist()


def create_slots(keys: Tensor, sizes: list[int], by_row: Budgets, **kind: Any) -> ops.Slots:
    """Create slots for keys like `keys` [B, G, any, D]. `sizes`: `Capacity.sizes`. `kind`: other
    arguments of `empty_slots`."""
    budget = keys.new_tensor(by_row, dtype=torch.int32).squeeze(1)
    return empty_slots(keys, sizes[0] if len(sizes) == 1 else sizes, budget=budget, **kind)


def heads(tensor: Tensor, slots: ops.Slots, sizes: list[int]) -> list[Tensor]:
    """Split a field of slots, or a tensor of the same layout, into views [B, S, ...] per head."""
    if slots.starts is None:
        return list(tensor.unbind(1))
    return list(tensor.split(sizes, dim=1))


def by_head(slots: ops.Slots, sizes: list[int], field: str, empty: float = 0) -> Tensor:
    """A field of `PER_SLOT` as [B, G, S, ...], for every layout of slots.

    The value is `empty` where a head has fewer slots than another."""
    tensor: Tensor = getattr(slots, field)
    if slots.starts is None:
        return tensor
    parts = heads(tensor, slots, sizes)
    out = tensor.new_full((len(tensor), len(parts), max(sizes), *tensor.shape[2:]), empty)
    for g, part in enumerate(parts):
        out[:, g, : part.shape[1]] = part
    return out


def keys_and_values(slots: ops.Slots, sizes: list[int], D: int) -> tuple[Tensor, Tensor]:
    """The model's own keys and values in the slots, in the layout of the slots. Do not write to
    them."""
    keys, values = dequantize(slots.keys, D), dequantize(slots.values, D)

    def by_slot(of_heads: Tensor | None) -> Tensor | None:
        if of_heads is None or slots.starts is None:
            return None if of_heads is None else of_heads[:, :, None]
        # Neither by torch.cat, which refuses float16 under autocast to bfloat16, nor by
        # repeat_interleave, which waits for the device.
        out = of_heads.new_empty(len(of_heads), sum(sizes), of_heads.shape[-1])
        for part, of_head in zip(heads(out, slots, sizes), of_heads.unbind(1), strict=True):
            part.copy_(of_head[:, None])
        return out

    return from_stored(keys, values, by_slot(slots.offsets), by_slot(slots.smoothing))


def gather_held_keys(slots: ops.Slots, sizes: list[int], **fields: float) -> list[Tensor]:
    """Gather fields of all held keys, [B, G, K, ...] by ascending position.

    K is the largest number of keys that any row and head holds. `fields` gives the names, and the
    values that fill up heads with fewer keys. Positions are int64."""
    positions = by_head(slots, sizes, "positions", -1).long()
    empty_last = positions.masked_fill(positions < 0, torch.iinfo(torch.int64).max)
    order = empty_last.argsort(dim=-1)[..., : int((positions >= 0).sum(-1).max())]
    is_empty = positions.gather(-1, order) < 0
    ordered = []
    for name, filler in fields.items():
        tensor = positions if name == "positions" else by_head(slots, sizes, name)
        shape = (*order.shape, *tensor.shape[3:])
        index, empty = (x.view(*x.shape, *[1] * (len(shape) - 3)) for x in (order, is_empty))
        ordered.append(tensor.gather(2, index.expand(shape)).masked_fill(empty, filler))
    return ordered


def enlarge(slots: ops.Slots, sizes: list[int], larger: list[int]) -> ops.Slots:
    """Copy to more slots. `larger` is the new number per head, or one number for all heads."""
    if larger == sizes:
        return slots
    grown = _empty_like(slots, larger)
    for name in PER_SLOT:
        if (old := getattr(slots, name)) is not None:
            pairs = heads(old, slots, sizes), heads(getattr(grown, name), slots, larger)
            for part, new in zip(*pairs, strict=True):
                new[:, : part.shape[1]] = part
    return grown


def renumber(slots: ops.Slots, sizes: list[int], left: list[int], positions: Tensor) -> ops.Slots:
    """Copy the keys that get a position to the lowest slots, in the order of these positions.

    Args:
        left: the new number of slots per head, or one number for all heads.
        positions: [B, G, S] int64, the new position of the key in each slot; -1: it is dropped.
    """
    renumbered = _empty_like(slots, left)
    last = positions.masked_fill(positions < 0, torch.iinfo(torch.int64).max)
    order = last.argsort(dim=-1)
    is_empty = positions.gather(-1, order) < 0
    for name in PER_SLOT:
        if (old := getattr(slots, name)) is None:
            continue
        pairs = heads(old, slots, sizes), heads(getattr(renumbered, name), slots, left)
        for g, (part, new) in enumerate(zip(*pairs, strict=True)):
            part = positions[:, g].to(part.dtype) if name == "positions" else part
            n = min(part.shape[1], new.shape[1])
            index, empty = order[:, g, :n].clamp(max=part.shape[1] - 1), is_empty[:, g, :n]
            index, empty = (x.view(*x.shape, *[1] * (part.ndim - 2)) for x in (index, empty))
            chosen = part.gather(1, index.expand(-1, -1, *part.shape[2:]))
            new[:, :n] = chosen.masked_fill(empty, EMPTY[name])
    return renumbered._replace(next_slot=(positions >= 0).sum(-1, dtype=torch.int32))


def _empty_like(slots: ops.Slots, sizes: list[int]) -> ops.Slots:
    """Slots of which each head has another number, all empty, with the fields of the rows."""
    B, G = slots.next_slot.shape
    shape, starts = (B, G, sizes[0]), None
    if slots.starts is not None:
        ends = slots.starts.new_tensor(sizes).cumsum(0, dtype=torch.int32)
        shape, starts = (B, sum(sizes)), torch.cat([slots.starts[:1], ends])
    fields: dict[str, Any] = {}
    for name in PER_SLOT:
        if (old := getattr(slots, name)) is not None:
            with_rest = (*shape, *old.shape[slots.scores.ndim :])
            fields[name] = old.new_full(with_rest, EMPTY[name])
    return slots._replace(**fields, starts=starts)


def change_rows(slots: ops.Slots, change: Callable[[Tensor], Tensor]) -> ops.Slots:
    """Apply a function to every field that has rows [B, ...]."""
    fields = {name: getattr(slots, name) for name in PER_ROW}
    changed = {name: None if x is None else change(x) for name, x in fields.items()}
    return slots._replace(**changed)


def row_index(rows: list[int], device: torch.device) -> slice | Tensor:
    """Convert row numbers to an index. Consecutive rows become a slice, which needs no copy to the
    device."""
    first, last = rows[0], rows[-1] + 1
    if rows == [*range(first, last)]:
        return slice(first, last)
    return torch.tensor(rows, dtype=torch.long, device=device)


def put_rows(slots: ops.Slots, index: slice | Tensor, source: ops.Slots) -> None:
    """Overwrite the rows `index` of `slots` with those of `source`, which has as many slots and the
    same fields."""
    for name in PER_ROW:
        to, rows = getattr(slots, name), getattr(source, name)
        if (to is None) != (rows is None):
            raise ValueError(f"rows with and without {name} cannot share slots")
        if to is not None:
            to[index] = rows


def row_bytes(slots: ops.Slots, sizes: list[int]) -> int:
    """Bytes of one row, over all tensors, if these slots had the given `sizes`."""
    wanted = sizes[0] * slots.next_slot.shape[1] if slots.starts is None else sum(sizes)
    here = slots.scores[0].numel()
    fields = {name: getattr(slots, name) for name in PER_ROW}
    bytes_now = {name: x[0].nbytes for name, x in fields.items() if x is not None}
    return sum(n // here * wanted if name in PER_SLOT else n for name, n in bytes_now.items())


def join_slots_and_tokens(
    slots: ops.Slots, key: Tensor, value: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Join slots from `BaseLayer.import_keys` and new tokens [B, G, Q, D] with a mask [B, Q].

    Returns keys and values [B, G, S + Q, D], and a bool mask [B, S + Q]."""
    B, _, Q, _ = key.shape
    real = key.new_ones(B, Q, dtype=torch.bool) if mask is None else mask.bool()
    return (
        torch.cat([slots.keys, key], dim=2),
        None if slots.values is None else torch.cat([slots.values, value], dim=2),
        torch.cat([slots.positions[:, 0] >= 0, real], dim=1),
    )


def positions_in(mask: Tensor | None, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of a prompt's columns, [B, 1, K] int64, -1 at padding, and the number of tokens in
    each row, [B, 1, 1]. The mask is [B, K], the scores are [B, G, K]."""
    B, _, K = scores.shape
    if mask is None:
        positions = torch.arange(K, device=scores.device).expand(B, 1, K)
        return positions, positions.new_full((B, 1, 1), K)
    real = mask.bool()
    count = real.cumsum(1)[:, None]
    return (count - 1).masked_fill(~real[:, None], -1), count[..., -1:]
