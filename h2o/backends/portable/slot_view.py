"""`Store`: a view of one call's slots by head, whichever their layout: it reads, writes and
dequantizes them, and multiplies by their values.

In a store with `starts` the slots of all heads lie on one axis T. What has one number a slot
(scores, positions) is small, so it is spread there to [B, G, T], with slots of other heads empty,
and a head's index is one on axis T. Keys and values are not spread: products go over all slots of a
row, [B, 1, T, D], for every head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o.quantization import codes, dequantize, floats, stored_like

FEW = 64
"""On a CPU products of up to so many rows with a 16-bit matrix are computed in float32."""

BLOCK = 1 << 17
"""Elements that such a product converts to float32 at a time, so that they stay in cache."""


class Store:
    """The slots of one call, by head: S is T where there are `starts`."""

    def __init__(self, slots: Any) -> None:
        self.slots = slots
        self.first: Tensor | None = None
        if slots.starts is None:
            return
        starts = torch.atleast_2d(slots.starts.long())  # one row for all, or each its own
        index = torch.arange(slots.scores.shape[-1], device=starts.device)
        self.first = starts[:, :-1]
        """[B or 1, G]"""
        begun = index >= starts[:, :-1, None]
        self.of_head = begun & (index < starts[:, 1:, None])
        """[B or 1, G, T] bool: a head's slots"""
        self.of_any = self.of_head.any(1)
        """[B or 1, T] bool: slots of some head"""
        self.head = begun[:, 1:].sum(1)
        """[B or 1, T] int64: the head of each slot; any for slots of none"""

    def by_head(self, numbers: Tensor, empty: float) -> Tensor:
        """[B, G, S] of scores, positions or norms."""
        if self.first is None:
            return numbers
        return torch.where(self.of_head, numbers[:, None], empty)

    def write_by_head(self, numbers: Tensor, new: Tensor) -> None:
        """Write `by_head` numbers [B, G, S] into the store's."""
        if self.first is not None:
            new = torch.where(self.of_any, self.of_slots(new), numbers)
        numbers.copy_(new)

    def of_slots(self, by_head: Tensor) -> Tensor:
        """[B, T]: of each slot what [B, G, T] has for its head."""
        return by_head.gather(1, self.head[:, None].expand(len(by_head), 1, -1))[:, 0]

    def add(self, numbers: Tensor, new: Tensor, *, largest: bool = False) -> Tensor:
        """Add `by_head` numbers [B, G, S], 0 in slots of other heads, to the store's, and return
        the sums. With `largest` take the larger numbers instead."""
        if self.first is not None:
            new = self.of_slots(new)
        both = torch.maximum(numbers, new, out=numbers) if largest else numbers.add_(new)
        return self.by_head(both, 0)

    def fade(self, scores: Tensor, decay: float, where: Tensor | None) -> None:
        """Multiply the store's scores by a factor, in the rows `where` [B, 1, 1] bool."""
        faded = scores * decay
        if where is not None:
            faded = torch.where(where if self.first is None else where[..., 0], faded, scores)
        if self.first is not None:
            faded = torch.where(self.of_any, faded, scores)
        scores.copy_(faded)

    def rows(self, name: str, D: int) -> Tensor:
        """Keys or values [B, G or 1, S, D], floats."""
        return self.shaped(dequantize(getattr(self.slots, name), D))

    def values(self, D: int) -> Tensor:
        """Values [B, G or 1, S, D], floats: the keys where the slots have none."""
        return self.rows("keys" if self.slots.values is None else "values", D)

    def shaped(self, x: Tensor) -> Tensor:
        """[B, G or 1, S, ...]: what is by slot, not spread over heads."""
        return x if self.first is None else x[:, None]

    def answers(self, p: Tensor, values: Tensor) -> Tensor:
        """p @ values: [B, G, M, D] float32 from probabilities p [B, G, M, S], 0 in slots of other
        heads, and values [B, G or 1, S, D].

        On axis T the product covers the values of all heads, and 0 times one that is not finite
        would be NaN. So these are left out of it, and added for the head that they belong to.
        """
        if self.first is None:
            return products(p, values)
        finite, beyond = self.split(values)
        return products(p, finite) + beyond

    def split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Values [B, G or 1, S, D] with 0 for what is not finite, and its sums by head
        [B, G, 1, D]."""
        finite = values.nan_to_num(0.0, 0.0, 0.0)
        beyond = values - finite  # 0 where it is finite
        if self.first is None:
            return finite, beyond.sum(2, keepdim=True)
        beyond = beyond[:, 0].masked_fill(~self.of_any[..., None], 0)
        head = self.head[..., None].expand_as(beyond)
        by_head = beyond.new_zeros(len(values), self.first.shape[1], values.shape[-1])
        return finite, by_head.scatter_add_(1, head, beyond)[:, :, None]

    def answers_stored(self, p: Tensor, D: int) -> Tensor:
        """`answers` for the values that the slots hold.

        In a quantized store a scale of NaN marks a row that was not finite, so that only the
        scales have to be searched.
        """
        stored = self.slots.keys if self.slots.values is None else self.slots.values
        if self.first is None or stored.dtype != torch.uint8:
            return self.answers(p, self.values(D))
        q, scale, least = codes(stored, D)
        lost = scale.isnan().any(-2)[:, None, :, 0]  # [B, 1, T]
        values = floats(q, scale.nan_to_num(0.0), least)
        return products(
            p.masked_fill((lost & self.of_head)[:, :, None], torch.nan), values[:, None]
        )

    # ---- One slot of each head: index [B, G, 1] on axis S ------------------------------------

    def index_of(self, free: Tensor) -> Tensor:
        """Index of slots [B, G] counted in their heads."""
        return (free.long() if self.first is None else free + self.first)[..., None]

    def counted(self, index: Tensor) -> Tensor:
        """[B, G, 1]: where in its head an index is."""
        return index if self.first is None else index - self.first[..., None]

    def read(self, numbers: Tensor, index: Tensor) -> Tensor:
        """[B, G, 1] of scores, positions or norms."""
        if self.first is None:
            return numbers.gather(-1, index)
        return numbers.gather(-1, index[..., 0])[..., None]

    def write(
        self, numbers: Tensor, index: Tensor, new: Tensor | float, where: Tensor | None = None
    ) -> None:
        """Scores, positions or norms [B, 1 or G, 1], or one for all; `where` [B, 1 or G, 1] bool:
        of these rows and heads, None: of all."""
        if where is not None:
            new = torch.where(where, new, self.read(numbers, index))
        if isinstance(new, Tensor):
            new = new.to(numbers.dtype)
            new = new if new.shape == index.shape else new.expand(index.shape)
        if self.first is not None:
            index = index[..., 0]
            new = new[..., 0] if isinstance(new, Tensor) else new
        numbers.scatter_(-1, index, new)

    def read_rows(self, rows: Tensor, index: Tensor) -> Tensor:
        """Keys or values [B, G, n, D or bytes], as stored; index [B, G, n]."""
        flat = index if self.first is None else index.flatten(1)
        picked = rows.gather(-2, flat[..., None].expand(*flat.shape, rows.shape[-1]))
        return picked if self.first is None else picked.view(*index.shape, -1)

    def write_rows(
        self, rows: Tensor, index: Tensor, new: Tensor, where: Tensor | None = None
    ) -> None:
        """Keys or values [B, G, 1, D or bytes], as stored; `where` as in `write`."""
        if where is not None:
            new = torch.where(where[..., None], new, self.read_rows(rows, index))
        if rows.element_size() == 2:  # of 16-bit floats torch's CPU build copies all to write one
            rows, new = rows.view(torch.int16), new.view(torch.int16)
        index = index[..., None].expand(new.shape)
        if self.first is not None:
            index, new = index[:, :, 0], new[:, :, 0]
        rows.scatter_(-2, index, new)


def quantize_like_slots(
    key: Tensor, value: Tensor | None, slots: Any
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values [B, G, n, D] as the slots hold them, each after the slots' rows of its kind;
    both at once where they are quantized alike, since that takes fifty operations, however few the
    rows."""
    if value is None:  # then the slots have none either
        return [(slots.keys, stored_like(key, slots.keys))]
    if slots.keys.dtype == torch.uint8 and slots.keys.shape == slots.values.shape:
        stored = stored_like(torch.cat([key, value]), slots.keys)
        return [(slots.keys, stored[: len(key)]), (slots.values, stored[len(key) :])]
    return [(x, stored_like(new, x)) for x, new in ((slots.keys, key), (slots.values, value))]


def row_norms(values: Tensor) -> Tensor:
    """L2 norms [B, G, n] of values [B, G, n, D], float32."""
    return torch.linalg.vector_norm(values.float(), dim=-1)


def products(left: Tensor, right: Tensor, *, exact: bool = False) -> Tensor:
    """left [B, G, M, X] @ right [B, G or 1, X, Y]: [B, G, M, Y], float32.

    left float32 is converted to the dtype of right, unless `exact`, or for few rows on a CPU: many
    CPUs have no 16-bit products, and a decode step is bound by memory anyway.
    """
    right, rows = right.flatten(0, 1), left.shape[:-1]
    left = left.reshape(len(right), rows.numel() // len(right), -1)
    if right.is_cpu and right.element_size() == 2 and (exact or left.shape[1] <= FEW):
        return _widen(left, right).view(*rows, -1)
    right = right.float() if exact else right
    return torch.bmm(left.to(right.dtype), right).view(*rows, -1).float()


def _widen(left: Tensor, right: Tensor) -> Tensor:
    """left float32 [N, M, X] @ right [N, X, Y] in float32, converting part of right at a time."""
    N, X, Y = right.shape
    n = max(1, BLOCK // (X * Y))
    if n >= N:
        return torch.bmm(left, right.float())
    out = left.new_empty(N, left.shape[1], Y)
    for start in range(0, N, n):
        part = slice(start, start + n)
        torch.bmm(left[part], right[part].float(), out=out[part])
    return out
