"""The slots of a layer by head: how many each head has, enlarging them, reading them in order.

With per-head budgets heads have different numbers of slots, one head after the other on one axis.
The layer keeps these numbers as a plain list, `Capacity.sizes`: to read them from a device would
make a decode step wait for the device.

Shape letters: B batch rows, G key/value heads, S slots, Q new tokens, D head
dimension, n columns of another cache, K keys held.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from h2o import ops
from h2o.slots import PER_ROW, PER_SLOT, empty_value
from h2o.spans import PINNED

Budgets = list[list[tuple[int, int]]]
"""(heavy, recent) of each row, and of each head of a layer or of all"""


@dataclasses.dataclass
class Capacity:
    """The capacity of a layer's slots. Lists have an entry for each head, or one for all."""

    widest: list[int]
    """The largest budget k of any row."""
    sizes: list[int]
    """Slots; none before the prompt."""

    def __post_init__(self) -> None:
        pairs = zip(self.sizes, self.widest, strict=False)
        self.tokens: float = min([size - 1 for size, k in pairs if size <= k], default=math.inf)
        """Largest row length for which one more token fits."""

    def larger(self, tokens: int) -> Capacity:
        """Capacity for rows of so many tokens, the next one and some more: a sixteenth of many
        slots, which are copied so rarely that it costs next to nothing."""
        needed = capacities(self.widest, tokens)
        pairs = zip(self.widest, self.sizes, strict=True)
        grown = [min(k + 1, s + max(min(s // 2, 48), s // 16)) for k, s in pairs]
        return Capacity(self.widest, list(map(max, needed, grown, self.sizes)))


NO_CAPACITY = Capacity([0], [])
"""Before the prompt."""


def writable_slots(slots: ops.Slots) -> ops.Slots:
    """The slots, with copies of tensors that were made under `torch.inference_mode`."""
    for name, x in zip(slots._fields, slots, strict=True):
        if x is not None and x.is_inference():
            slots = slots._replace(**{name: writable(x)})
    return slots


def writable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one that was made under `torch.inference_mode`, which nothing may
    write to once that mode has ended."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


def capacities(widest: list[int], tokens: int) -> list[int]:
    """Slots that rows of so many tokens and the next one need."""
    return [min(k, tokens) + 1 for k in widest]


def sizes(slots: ops.Slots) -> list[int]:
    """Slots of each head, or of all where they have the same; waits for the device of `starts`."""
    if slots.starts is None:
        return [slots.scores.shape[-1]]
    each: list[int] = slots.starts.diff().tolist()
    return each


def widest_budgets(by_row: Budgets, sinks: int) -> list[int]:
    """The largest budget k of any row, for each head or for all."""
    return [sinks + max(map(sum, rows)) for rows in zip(*by_row, strict=True)]


def with_budgets(keys: Tensor, sizes: list[int], by_row: Budgets, **kind: Any) -> ops.Slots:
    """New slots for keys like [B, G, any, D]; `sizes`: `Capacity.sizes`; others as `new_slots`."""
    slots = ops.new_slots(keys, sizes[0] if len(sizes) == 1 else sizes, **kind)
    put_budgets(slots, by_row)
    return slots


def put_budgets(slots: ops.Slots, by_row: Budgets) -> None:
    """Give each row and head, or all heads of a row, its (heavy, recent)."""
    slots.budget.copy_(torch.tensor(by_row, dtype=torch.int32, device="cpu").squeeze(1))


def heads(tensor: Tensor, slots: ops.Slots, sizes: list[int]) -> list[Tensor]:
    """Views of a field of slots, or of a tensor like one, by head: [B, S, ...] each."""
    if slots.starts is None:
        return list(tensor.unbind(1))
    return list(tensor.split(sizes, dim=1))


def by_head(slots: ops.Slots, sizes: list[int], field: str, empty: float = 0) -> Tensor:
    """[B, G, S, ...]: a field of `PER_SLOT` by head, whatever the store;
    `empty` where a head has fewer slots than another."""
    tensor: Tensor = getattr(slots, field)
    if slots.starts is None:
        return tensor
    parts = heads(tensor, slots, sizes)
    out = tensor.new_full((len(tensor), len(parts), max(sizes), *tensor.shape[2:]), empty)
    for g, part in enumerate(parts):
        out[:, g, : part.shape[1]] = part
    return out


def gather_held(slots: ops.Slots, sizes: list[int], **fields: float) -> list[Tensor]:
    """The named fields of what is held, [B, G, K, ...] by ascending position, K as many as any head
    of any row holds, with the value that is given where one holds fewer. Positions are int64."""
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


def figures(slots: ops.Slots, sizes: list[int], sinks: int) -> dict[str, Any]:
    """Numbers of the slots for a report: fields of `LayerReport`."""
    B, G = slots.next_slot.shape
    filled = slots.positions >= 0
    budget = slots.budget if slots.budget.ndim == 3 else slots.budget[:, None].expand(B, G, 2)
    stored = [0 if x is None else x.numel() * x.element_size() for x in slots]
    kept = by_head(slots, sizes, "positions", -1) >= 0
    pinned = kept & (by_head(slots, sizes, "scores") == PINNED)
    scores = slots.scores[filled]
    return {
        "seen": slots.seen_tokens.tolist(),
        "kept_by_head": kept.sum(-1).tolist(),
        "pinned_by_head": pinned.sum(-1).tolist(),
        "budget_by_head": (budget.sum(-1) + sinks).tolist(),
        "bytes_held": sum(stored[:2]),
        "bytes_bookkeeping": sum(stored[2:]),
        "mass_evicted": slots.evicted_score.sum().item(),
        "mass_kept": scores[scores < PINNED].cpu().double().sum().item(),
    }


def enlarge(slots: ops.Slots, sizes: list[int], larger: list[int]) -> ops.Slots:
    """Copy to more slots: `larger` has their number for each head, or for all."""
    B, G = slots.next_slot.shape
    shape, starts = (B, G, larger[0]), None
    if slots.starts is not None:
        ends = slots.starts.new_tensor(larger).cumsum(0, dtype=torch.int32)
        shape, starts = (B, sum(larger)), torch.cat([slots.starts[:1], ends])
    grown: dict[str, Any] = {}
    for name in PER_SLOT:
        old = getattr(slots, name)
        if old is None:
            continue
        with_rest = (*shape, *old.shape[slots.scores.ndim :])
        grown[name] = old.new_full(with_rest, empty_value(name))
        before = heads(old, slots, sizes)
        for part, new in zip(before, heads(grown[name], slots, larger), strict=True):
            new[:, : part.shape[1]] = part
    return slots._replace(**grown, starts=starts)


def change_rows(slots: ops.Slots, change: Callable[[Tensor], Tensor]) -> ops.Slots:
    """The slots, with every field of rows [B, ...] changed."""
    fields = {name: getattr(slots, name) for name in PER_ROW}
    changed = {name: None if x is None else change(x) for name, x in fields.items()}
    return slots._replace(**changed)


def rows_like(slots: ops.Slots, rows: int) -> ops.Slots:
    """Slots for so many rows, of which each has what the first row of `slots` has."""
    return change_rows(slots, lambda x: x[:1].expand(rows, *x.shape[1:]).clone())


def row_index(rows: list[int], device: torch.device) -> slice | Tensor:
    """An index of rows: a slice where they follow one another, for which nothing goes to the
    device."""
    first, last = rows[0], rows[-1] + 1
    if rows == [*range(first, last)]:
        return slice(first, last)
    return torch.tensor(rows, dtype=torch.long, device=device)


def put_rows(slots: ops.Slots, index: slice | Tensor, source: ops.Slots) -> None:
    """Copies the rows of `source`, with as many slots each, over those rows of `slots`."""
    for name in PER_ROW:
        to, x = getattr(slots, name), getattr(source, name)
        if (to is None) != (x is None):
            raise ValueError(f"slots.{name}: one row has it and the other has not")
        if to is not None:
            to[index] = x


def row_bytes(slots: ops.Slots, sizes: list[int]) -> int:
    """Bytes that a row takes in all tensors of slots of this kind, of which each head, or all, has
    as many as `sizes` says."""
    wanted = sizes[0] * slots.next_slot.shape[1] if slots.starts is None else sum(sizes)
    here = slots.scores[0].numel()
    total = 0
    for name in PER_ROW:
        x = getattr(slots, name)
        if x is not None:
            size = x[0].numel() * x.element_size()
            total += size // here * wanted if name in PER_SLOT else size
    return total


def fill_slots(
    keys: Tensor, values: Tensor | None, mask: Tensor | None, *, value_weighted: bool
) -> ops.Slots:
    """Slots without a budget that hold keys and values [B, G, n, D] with scores of 0, by ascending
    position. Pads, where the mask [B, n] is False, are not stored."""
    longest = keys.shape[2] if mask is None else int(mask.sum(1).max())
    slots = ops.new_slots(keys, longest + 1, value_weighted=value_weighted, shared=values is None)
    scores = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
    ops.evict(keys, values, scores, slots, mask=mask, value_weighted=value_weighted)
    return slots


def together(
    slots: ops.Slots, key: Tensor, value: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Join slots of `fill_slots` and new tokens [B, G, Q, D] with a mask [B, Q]: keys and values
    [B, G, S + Q, D], mask [B, S + Q] bool."""
    real = mask
    if real is None:
        real = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
    return (
        torch.cat([slots.keys, key], dim=2),
        None if slots.values is None else torch.cat([slots.values, value], dim=2),
        torch.cat([slots.positions[:, 0] >= 0, real.bool()], dim=1),
    )
