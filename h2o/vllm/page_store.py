"""The pages of requests, which are rows of one `Slots`: of a layer, or of all layers at once.

vLLM gives one piece of memory for all pages of a layer. In each page the fields of the slots lie
one after the other: each is a tensor [pages, ...] whose rows are a page apart, and `h2o.ops` finds
the rows of a batch by number. Where the places of a request are dealt over its layers, the pages
that it has in all of them are one: the layers' slots lie on one axis, wherever there is room.

Shape letters: L layers of a store, G key/value heads of each.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from h2o import ops
from h2o.slots import PER_ROW, empty_row
from h2o.spans import PINNED

ALIGNMENT = 16


def page_bytes(page: ops.Slots) -> int:
    """Bytes of a page that has the fields of slots of one row, rounded up, so that vectors of the
    next one begin where those of this one do."""
    return -(-sum(field.nbytes for _, field in _fields(page)) // ALIGNMENT) * ALIGNMENT


def _fields(page: ops.Slots) -> list[tuple[str, torch.Tensor]]:
    """The fields of a page, those of large elements first: so each begins at a multiple of them."""
    names = PER_ROW if page.starts is None or page.starts.ndim == 1 else (*PER_ROW, "starts")
    fields = [(name, getattr(page, name)) for name in names if getattr(page, name) is not None]
    return sorted(fields, key=lambda field: -field[1].element_size())


class Eviction(NamedTuple):
    """Totals of evicted and kept keys."""

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
    """The slots of all pages of a layer, or of several, in memory that is given."""

    def __init__(
        self, memory: torch.Tensor, page: ops.Slots, layers: int = 1, *, alone: bool = True
    ) -> None:
        """Empties all pages.

        Args:
            memory: [pages, bytes] of a dtype of one byte, each at an address that `ALIGNMENT`
                divides; at least `page_bytes` of each.
            page: slots of one row, empty; those of several layers as of one with all their heads,
                but seen_tokens [1, L] and starts [1, L * G + 1].
            alone: False: while no request of this store has a page others may write to it. Then
                none is emptied before a request has it, and nothing is counted.
        """
        self.alone = alone
        self._memory = memory
        parts, begin = {}, 0
        for name, field in _fields(page):
            end = begin + field.nbytes
            part = memory[:, begin:end].view(field.dtype).view(len(memory), *field.shape[1:])
            parts[name] = part.copy_(field.expand_as(part)) if alone else part
            begin = end
        self.pages = page._replace(**parts)
        self._layers = [self.pages] if layers == 1 else _by_layer(self.pages, layers)
        self.lock = threading.Lock()
        """Held by who writes to pages, and by who counts while another thread may write"""
        self.evicted: Any = 0
        """Keys, by requests whose pages have been taken by others since; a number of the device"""

    def empty(
        self, page: int, budgets: Sequence[tuple[int, int]], sizes: Sequence[int] | None = None
    ) -> None:
        """Makes a page that of a new request, with (heavy, recent) for all heads or for each; and
        the slots of each where pages differ in these."""
        if self.alone:
            self.evicted += self._evicted(slice(page, page + 1))
        empty_row(self.pages, page)
        _write(self.pages.budget[page], budgets)
        if sizes is not None:
            assert self.pages.starts is not None
            _write(self.pages.starts[page], list(itertools.accumulate(sizes, initial=0)))

    def copy(self, page: int, other: int) -> None:
        """Makes another page what a page is. What that has evicted counts once, as before."""
        self.evicted += self._evicted(slice(other, other + 1))
        self.evicted -= self._evicted(slice(page, page + 1))
        self._memory[other].copy_(self._memory[page])

    def _evicted(self, part: slice) -> Any:
        """Keys evicted by the requests that have some pages now, or had them last: a number of the
        device, which nothing waits for here."""
        lengths, positions = (
            _countable(x)[part] for x in (self.pages.seen_tokens, self.pages.positions)
        )
        heads = self.pages.next_slot.numel() // self.pages.seen_tokens.numel()  # of a layer
        return lengths.sum() * heads - (positions >= 0).sum()

    def eviction(self) -> Eviction:
        """Totals of all requests so far; attention of those whose pages no others have taken since.

        The store's pages must be its alone.
        """
        pages = self.pages
        library: Any = np if pages.scores.is_cpu else torch
        with self.lock:
            scores, positions, lost = map(
                _countable, (pages.scores, pages.positions, pages.evicted_score)
            )
            is_known = (positions >= 0) & (scores < PINNED)
            kept = library.where(is_known, scores, 0).sum(dtype=library.float64)
            keys = self.evicted + self._evicted(slice(None))
            return Eviction(int(keys), float(lost.sum()), float(kept))

    def rows(self, numbers: torch.Tensor, layer: int = 0) -> ops.Slots:
        """The slots of the pages of these numbers, [n] int32, of one of the store's layers."""
        return self._layers[layer]._replace(rows=numbers)


def _by_layer(pages: ops.Slots, layers: int) -> list[ops.Slots]:
    """Views of each layer's heads."""
    G = pages.next_slot.shape[1] // layers
    assert pages.starts is not None
    views = []
    for layer in range(layers):
        heads = slice(layer * G, (layer + 1) * G)
        own = {
            name: getattr(pages, name)[:, heads]
            for name in ("next_slot", "budget", "evicted_score")
        }
        own["seen_tokens"] = pages.seen_tokens[:, layer]
        own["starts"] = pages.starts[:, layer * G : (layer + 1) * G + 1]
        views.append(pages._replace(**own))
    return views


def _write(row: torch.Tensor, numbers: Sequence[Any]) -> None:
    """Numbers of the host into a row of the device, for which the host need not wait."""
    new = torch.tensor(numbers, dtype=row.dtype, device="cpu")
    row.copy_(new.view_as(row), non_blocking=True)
