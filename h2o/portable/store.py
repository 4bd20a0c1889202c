"""Where the slots of each head are, in stores of both layouts; what is stored, read as floats.

In a store with `starts` the slots of all heads lie on one axis T. Numbers of slots (scores,
positions) are small, so they are spread there to [B, G, T], with slots of other heads empty, and a
head's index is one on axis T. Keys and values are not spread: products go over all slots of a row,
[B, 1, T, D], for every head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o.storage import dequantised, stored_like

__all__ = ["Store", "products"]


class Store:
    """The slots of one call, by head: S is T where there are `starts`."""

    def __init__(self, slots: Any) -> None:
        self.slots = slots
        self.first: Tensor | None = None
        if slots.starts is None:
            return
        starts = slots.starts.long()
        place = torch.arange(slots.scores.shape[-1], device=starts.device)
        self.first = starts[:-1]
        """[G]"""
        self.own = (place >= starts[:-1, None]) & (place < starts[1:, None])
        """[G, T] bool: a head's slots"""
        self.head = self.own.int().argmax(0)
        """[T] int64: whose each slot is; 0 for what is nobody's"""

    def by_head(self, numbers: Tensor, empty: float) -> Tensor:
        """[B, G, S] of scores, positions or norms."""
        if self.first is None:
            return numbers
        return torch.where(self.own, numbers[:, None], empty)

    def take_back(self, numbers: Tensor, found: Tensor) -> None:
        """Writes `by_head` numbers [B, G, S] found into the store's."""
        if self.first is not None:
            index = self.head.expand(len(found), 1, -1)
            found = torch.where(self.own.any(0), found.gather(1, index)[:, 0], numbers)
        numbers.copy_(found)

    def rows(self, name: str, D: int) -> Tensor:
        """Keys or values [B, G or 1, S, D], floats."""
        return self.shaped(dequantised(getattr(self.slots, name), D))

    def shaped(self, x: Tensor) -> Tensor:
        """[B, G or 1, S, ...]: what is by slot, not spread over heads."""
        return x if self.first is None else x[:, None]

    def answers(self, p: Tensor, values: Tensor) -> Tensor:
        """What slots give to queries by probabilities p [B, G, M, S], 0 in slots of other heads:
        [B, G, M, D] float32, of values [B, G or 1, S, D].

        On axis T the product meets the values of all heads. One that is not finite, times 0, would
        be NaN there, so its own head is given it apart.
        """
        if self.first is None:
            return products(p, values)
        finite = values.nan_to_num(0.0, 0.0, 0.0)
        beyond = (values - finite)[:, 0].float()  # [B, T, D]: 0 where it is finite
        own = p.new_zeros(*p.shape[:2], values.shape[-1]).index_add_(1, self.head, beyond)
        return products(p, finite) + own[:, :, None]

    # ---- One slot of each head ---------------------------------------------------------------

    def place(self, free: Tensor) -> Tensor:
        """Index for `read` and `write` of slots [B, G] counted in their heads."""
        return free.long()[..., None] if self.first is None else free + self.first

    def place_of(self, index: Tensor) -> Tensor:
        """Index for `read` and `write` of indices [B, G, 1] on axis S."""
        return index if self.first is None else index[..., 0]

    def counted(self, place: Tensor) -> Tensor:
        """[B, G]: an index of `place` as the number of a slot in its head."""
        return place[..., 0] if self.first is None else place - self.first

    @staticmethod
    def read(numbers: Tensor, place: Tensor) -> Tensor:
        """The numbers of one slot of each head, [B, G]."""
        return numbers.gather(-1, place).view(place.shape[:2])

    @staticmethod
    def write(numbers: Tensor, place: Tensor, given: Tensor | float, where: Tensor | None) -> None:
        """Scores, positions or norms [B, G], or one for all, into one slot of each head; `where`
        [B, 1 or G] bool: of these rows and heads, None: of all."""
        if isinstance(given, Tensor):
            given = given.to(numbers.dtype).expand(place.shape[:2]).reshape(place.shape)
        if where is not None:
            kept = numbers.gather(-1, place)
            given = torch.where(_deep(where, place.ndim), given, kept)
        numbers.scatter_(-1, place, given)

    @staticmethod
    def write_rows(rows: Tensor, place: Tensor, given: Tensor, where: Tensor | None) -> None:
        """Keys or values [B, G, 1, D] into one slot of each head, `where` as in `write`."""
        given = stored_like(given, rows).reshape(*place.shape, -1)
        if rows.element_size() == 2:  # of 16-bit floats torch's CPU build copies all to write one
            rows, given = rows.view(torch.int16), given.view(torch.int16)
        index = place[..., None].expand(given.shape)
        if where is not None:
            given = torch.where(_deep(where, index.ndim), given, rows.gather(-2, index))
        rows.scatter_(-2, index, given)

    def read_rows(self, rows: Tensor, index: Tensor) -> Tensor:
        """Keys or values [B, G, n, D or bytes], as stored, at indices [B, G, n] on axis S."""
        place = index if self.first is None else index.flatten(1)
        return rows.gather(-2, place[..., None].expand(*place.shape, rows.shape[-1])).view(
            *index.shape, -1
        )


def _deep(where: Tensor, dimensions: int) -> Tensor:
    """[B, 1 or G], with further dimensions of 1."""
    return where.view(*where.shape, *[1] * (dimensions - 2))


def products(left: Tensor, right: Tensor) -> Tensor:
    """left [B, G, M, X] @ right [B, G or 1, X, Y]: [B, G, M, Y], float32; left has the dtype of
    right for it."""
    left = left.to(right.dtype)
    if right.shape[1] == left.shape[1]:
        return (left @ right).float()
    return (left.flatten(1, 2)[:, None] @ right)[:, 0].unflatten(1, left.shape[1:3]).float()
