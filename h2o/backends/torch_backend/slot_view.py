"""`SlotView`: a view by head of one call's slots in either layout. It reads, writes and dequantizes
them, and multiplies by their values.

In slots with `starts` those of all heads are on one axis T. Fields with one number per slot
(scores, positions) are small, so they are expanded to [B, G, T], where slots of other heads are
empty, and a head's slot is an index on axis T. Keys and values are not expanded: products cover all
slots of a row, [B, 1, T, D], for every head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o.quantization import codes, dequantize, floats, from_stored, stored_like, to_stored

FEW = 64
"""On a CPU, products of up to this many rows with a 16-bit matrix are computed in float32."""

BLOCK = 1 << 17
"""Number of elements that such a product converts to float32 at a time, so that they stay in cache.
"""


class SlotView:
    """The slots of one call, by head. In the shapes below, S is T if there are `starts`."""

    def __init__(self, slots: Any) -> None:
        self.slots = slots
        self.first: Tensor | None = None
        if slots.starts is None:
            return
        starts = torch.atleast_2d(slots.starts.long())  # one for all rows, or one for each
        index = torch.arange(slots.scores.shape[-1], device=starts.device)
        self.first = starts[:, :-1]
        """[B or 1, G]"""
        begun = index >= starts[:, :-1, None]
        self.in_head = begun & (index < starts[:, 1:, None])
        """[B or 1, G, T] bool: slots of each head"""
        self.in_any_head = self.in_head.any(1)
        """[B or 1, T] bool: slots of any head"""
        self.head = begun[:, 1:].sum(1)
        """[B or 1, T] int64: the head of each slot; arbitrary for slots of no head"""

    def by_head(self, numbers: Tensor, empty: float) -> Tensor:
        """Scores, positions or norms as [B, G, S]."""
        if self.first is None:
            return numbers
        return torch.where(self.in_head, numbers[:, None], empty)

    def write_by_head(self, numbers: Tensor, new: Tensor) -> None:
        """Write numbers [B, G, S], as from `by_head`, to a field of the slots."""
        if self.first is not None:
            new = torch.where(self.in_any_head, self.take_own_head(new), numbers)
        numbers.copy_(new)

    def take_own_head(self, by_head: Tensor) -> Tensor:
        """Convert [B, G, T] to [B, T], taking the entry of each slot's head."""
        return by_head.gather(1, self.head[:, None].expand(len(by_head), 1, -1))[:, 0]

    def rows(self, name: str, D: int) -> Tensor:
        """Dequantized keys or values [B, G or 1, S, D], transformed if the slots have offsets."""
        return self.add_head_axis(dequantize(getattr(self.slots, name), D))

    def by_slot(self, by_head: Tensor) -> Tensor:
        """Rows [B, G, D] as [B, G, 1, D], or as [B, 1, T, D], where each slot has its head's."""
        if self.first is None:
            return by_head[:, :, None]
        head = self.head.expand(len(by_head), -1)[..., None]
        return by_head.gather(1, head.expand(-1, -1, by_head.shape[-1]))[:, None]

    def keys_and_values(self, D: int) -> tuple[Tensor, Tensor]:
        """The model's own keys and values, [B, G or 1, S, D] each. The keys are the values too if
        the slots have no values."""
        if self.slots.values is None:
            keys = self.rows("keys", D)
            return keys, keys
        return self._restored(self.rows("keys", D), self.rows("values", D))

    def model_keys(self, D: int) -> Tensor:
        """The keys of `keys_and_values` alone."""
        return self._restored(self.rows("keys", D), None)[0]

    def _restored(self, keys: Tensor, values: Tensor | None) -> tuple[Tensor, Any]:
        changes = (self.slots.offsets, self.slots.smoothing)
        each = (None if x is None else self.by_slot(x) for x in changes)
        return from_stored(keys, values, *each)

    def add_head_axis(self, x: Tensor) -> Tensor:
        """Tensor by slot as [B, G or 1, S, ...], not expanded over heads."""
        return x if self.first is None else x[:, None]

    def split_nonfinite(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Values [B, G or 1, S, D] with 0 in place of elements that are not finite, and the sums of
        these elements by head, [B, G, 1, D]."""
        finite = values.nan_to_num(0.0, 0.0, 0.0)
        beyond = values - finite  # 0 for finite elements
        if self.first is None:
            return finite, beyond.sum(2, keepdim=True)
        beyond = beyond[:, 0].masked_fill(~self.in_any_head[..., None], 0)
        head = self.head[..., None].expand_as(beyond)
        by_head = beyond.new_zeros(len(values), self.first.shape[1], values.shape[-1])
        return finite, by_head.scatter_add_(1, head, beyond)[:, :, None]

    def weighted_values(self, p: Tensor, D: int) -> Tensor:
        """p @ values, [B, G, M, D] float32, for probabilities p [B, G, M, S], which are 0 in slots
        of other heads. If the slots have offsets, the result is transformed as their values are.

        On axis T the product covers the values of all heads, and 0 times a value that is not finite
        would be NaN. Such values are left out of the product and added to their own head. In
        quantized slots a NaN scale marks a row that was not finite, so that only the scales have to
        be searched.
        """
        name = "keys" if self.slots.values is None else "values"
        stored = getattr(self.slots, name)
        if self.first is None:
            return products(p, self.rows(name, D))
        if stored.dtype != torch.uint8:
            finite, beyond = self.split_nonfinite(self.rows(name, D))
            return products(p, finite) + beyond
        q, scale, least = codes(stored, D)
        lost = scale.isnan().any(-2)[:, None, :, 0]  # [B, 1, T]
        values = floats(q, scale.nan_to_num(0.0), least)
        return products(
            p.masked_fill((lost & self.in_head)[:, :, None], torch.nan), values[:, None]
        )

    # ---- One slot of each head: index [B, G, 1] on axis S ------------------------------------

    def index_of(self, free: Tensor) -> Tensor:
        """Index on axis S of slots [B, G] that are counted within their heads."""
        return (free.long() if self.first is None else free + self.first)[..., None]

    def slot_within_head(self, index: Tensor) -> Tensor:
        """The slot within its head, [B, G, 1], of an index on axis S."""
        return index if self.first is None else index - self.first[..., None]

    def read(self, numbers: Tensor, index: Tensor) -> Tensor:
        """Read scores, positions or norms [B, G, 1]."""
        if self.first is None:
            return numbers.gather(-1, index)
        return numbers.gather(-1, index[..., 0])[..., None]

    def write(
        self, numbers: Tensor, index: Tensor, new: Tensor | float, where: Tensor | None = None
    ) -> None:
        """Write scores, positions or norms [B, 1 or G, 1], or one number for all. `where`, bool
        [B, 1 or G, 1], selects the rows and heads to write; None: all."""
        if where is not None:
            new = torch.where(where, new, self.read(numbers, index))
        if isinstance(new, Tensor):
            new = new.to(numbers.dtype)
            new = new if new.shape == index.shape else new.expand(index.shape)
        if self.first is not None:
            index = index[..., 0]
            new = new[..., 0] if isinstance(new, Tensor) else new
        numbers.scatter_(-1, index, new)

    def write_rows(
        self, rows: Tensor, index: Tensor, new: Tensor, where: Tensor | None = None
    ) -> None:
        """Write keys or values [B, G, 1, D or bytes] in stored format. `where` is as in `write`."""
        if self.first is not None:
            index, new = index[:, :, 0], new[:, :, 0]
            where = None if where is None else where[..., 0]
        index = index[..., None].expand(new.shape)
        if where is not None:
            new = torch.where(where[..., None], new, rows.gather(-2, index))
        if rows.element_size() == 2:  # on CPUs torch copies all 16-bit floats to write one
            rows, new = rows.view(torch.int16), new.view(torch.int16)
        rows.scatter_(-2, index, new)


def quantize_like_slots(
    key: Tensor, value: Tensor | None, slots: Any
) -> list[tuple[Tensor, Tensor]]:
    """Convert keys and values [B, G, n, D] to the slots' format. Return pairs (field of the slots,
    converted rows).

    Keys and values with the same quantized format are converted together, since this takes fifty
    torch operations for any number of rows.
    """
    key, value = to_stored(key, value, slots.offsets, slots.smoothing)
    if value is None:  # the slots have no values either
        return [(slots.keys, stored_like(key, slots.keys))]
    if slots.keys.dtype == torch.uint8 and slots.keys.shape == slots.values.shape:
        stored = stored_like(torch.cat([key, value.to(key.dtype)]), slots.keys)
        return [(slots.keys, stored[: len(key)]), (slots.values, stored[len(key) :])]
    return [(x, stored_like(new, x)) for x, new in ((slots.keys, key), (slots.values, value))]


def row_norms(values: Tensor) -> Tensor:
    """L2 norms [B, G, n], float32, of values [B, G, n, D]."""
    return torch.linalg.vector_norm(values.float(), dim=-1)


def products(left: Tensor, right: Tensor, *, exact: bool = False) -> Tensor:
    """left [B, G, M, X] @ right [B, G or 1, X, Y], as [B, G, M, Y] float32.

    left, float32, is converted to the dtype of right unless `exact` is set, or there are few rows
    on a CPU: many CPUs have no 16-bit products, and a decode step is limited by memory anyway.
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
