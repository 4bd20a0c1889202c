"""The pages of a layer, which are rows of one `Slots`.

vLLM gives a layer one piece of memory for all its pages. In each page the fields of the slots lie
one after the other: each is a tensor [pages, ...] whose rows are a page apart, and `h2o.ops` finds
the rows of a batch by number.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from h2o import ops
from h2o.slots import PER_ROW, empty_row
from h2o.spans import PINNED

__all__ = ["Eviction", "PageStore", "page_bytes"]

ALIGNMENT = 16


def page_bytes(page: ops.Slots) -> int:
    """Bytes of a page that has the fields of slots of one row, rounded up, so that vectors of the
    next one begin where those of this one do."""
    return -(-sum(field.nbytes for _, field in _fields(page)) // ALIGNMENT) * ALIGNMENT


def _fields(page: ops.Slots) -> list[tuple[str, torch.Tensor]]:
    """The fields of a page, those of large elements first: so each begins at a multiple of them."""
    fields = [(name, getattr(page, name)) for name in PER_ROW if getattr(page, name) is not None]
    return sorted(fields, key=lambda field: -field[1].element_size())


class Eviction(NamedTuple):
    """What became of the keys of requests."""

    keys: int
    """evicted so far, over all heads"""
    lost: float
    """attention that those had received"""
    kept: float
    """attention that the others have received, but for pinned keys"""


def _countable(x: torch.Tensor) -> Any:
    """On the CPU in NumPy, for which no second team of threads is started where another thread
    asks; elsewhere on the device."""
    return x.numpy() if x.is_cpu else x


class PageStore:
    """The slots of all pages of a layer, in memory that is given."""

    def __init__(self, memory: torch.Tensor, page: ops.Slots, *, alone: bool = True) -> None:
        """Empties all pages.

        Args:
            memory: [pages, bytes] of a dtype of one byte, each at an address that `ALIGNMENT`
                divides; at least `page_bytes` of each.
            page: slots of one row, empty.
            alone: False: while no request of this store has a page others may write to it. Then
                none is emptied before a request has it, and nothing is counted.
        """
        self.alone = alone
        parts, begin = {}, 0
        for name, field in _fields(page):
            end = begin + field.nbytes
            part = memory[:, begin:end].view(field.dtype).view(len(memory), *field.shape[1:])
            parts[name] = part.copy_(field.expand_as(part)) if alone else part
            begin = end
        self.pages = page._replace(**parts)
        self.lock = threading.Lock()
        """Held by who writes to pages, and by who counts while another thread may write"""
        self.evicted: Any = 0
        """Keys, by requests whose pages have been taken by others since; a number of the device"""

    def empty(self, page: int, budgets: Sequence[tuple[int, int]]) -> None:
        """Makes a page that of a new request, with (heavy, recent) for all heads or for each."""
        budget = self.pages.budget[page]
        if self.alone:
            self.evicted += self._evicted(slice(page, page + 1))
        empty_row(self.pages, page)
        numbers = torch.tensor(budgets, dtype=budget.dtype, device="cpu")
        budget.copy_(numbers.view_as(budget), non_blocking=True)

    def _evicted(self, part: slice) -> Any:
        """Keys evicted by the requests that have some pages now, or had them last: a number of the
        device, which nothing waits for here."""
        lengths, positions = (
            _countable(x)[part] for x in (self.pages.lengths, self.pages.positions)
        )
        return lengths.sum() * self.pages.free.shape[1] - (positions >= 0).sum()

    def eviction(self) -> Eviction:
        """Of all requests so far; attention: of those whose pages no others have taken since.

        Of a store whose pages are its alone.
        """
        pages = self.pages
        library: Any = np if pages.scores.is_cpu else torch
        with self.lock:
            scores, positions, lost = map(_countable, (pages.scores, pages.positions, pages.lost))
            is_known = (positions >= 0) & (scores < PINNED)
            kept = library.where(is_known, scores, 0).sum(dtype=library.float64)
            keys = self.evicted + self._evicted(slice(None))
            return Eviction(int(keys), float(lost.sum()), float(kept))

    def rows(self, numbers: torch.Tensor) -> ops.Slots:
        """The slots of the pages of these numbers, [n] int32."""
        return self.pages._replace(rows=numbers)
