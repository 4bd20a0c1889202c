"""The pages of requests. They are the rows of one `Slots`, for one layer or for all layers at once.

vLLM allocates the memory for all pages of a layer at once. Within a page the fields of the slots
follow one another, so each field is a tensor [pages, ...] with a stride of one page. `h2o.ops`
finds the rows of a batch by number. If the budget of a request is divided across layers, its pages
in all layers are one page: the slots of all layers are on one axis, and a layer can start anywhere
on it.

Shape letters: L layers of a store, G key/value heads of each.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from h2o import ops
from h2o.slots import PER_ROW, PER_SLOT, empty_row
from h2o.spans import PINNED

ALIGNMENT = 16


def page_bytes(page: ops.Slots) -> int:
    """Bytes of a page with the fields of `page`, slots of one row. Rounded up to `ALIGNMENT`, so
    that the fields of all pages are aligned alike."""
    return -(-sum(field.nbytes for _, field in _fields(page)) // ALIGNMENT) * ALIGNMENT


def _fields(page: ops.Slots) -> list[tuple[str, torch.Tensor]]:
    """The fields of a page by decreasing size of their elements, so that each is aligned."""
    names = PER_ROW if page.starts is None or page.starts.ndim == 1 else (*PER_ROW, "starts")
    fields = [(name, getattr(page, name)) for name in names if getattr(page, name) is not None]
    return sorted(fields, key=lambda field: -field[1].element_size())


class Eviction(NamedTuple):
    """Totals of evicted and kept keys."""

    keys: int
    """Number of keys evicted so far, over all heads"""
    lost: float
    """Attention that the evicted keys had received"""
    kept: float
    """Attention that the kept keys have received, without pinned keys"""


def _countable(x: torch.Tensor) -> Any:
    """A CPU tensor as a NumPy array, any other tensor unchanged. With NumPy a thread that counts
    does not start a second thread pool."""
    return x.numpy() if x.is_cpu else x


class PageStore:
    """The slots of all pages of one or several layers, in memory that the caller provides."""

    def __init__(
        self, memory: torch.Tensor, page: ops.Slots, layers: int = 1, *, alone: bool = True
    ) -> None:
        """Empty all pages.

        Args:
            memory: [pages, bytes] of a one-byte dtype. Each page has at least `page_bytes` bytes
                and an address that is a multiple of `ALIGNMENT`.
            page: empty slots of one row. For several layers they have the heads of all layers,
                seen_tokens [1, L] and starts [1, L * G + 1].
            alone: whether only this store writes to the memory. If False, others may write to a
                page while no request of this store has it. A page is then emptied only when a
                request gets it, and evictions are not counted.
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
        """Held while pages are written, and while keys are counted if another thread may write"""
        self.evicted: Any = 0
        """Number of keys evicted by requests whose pages now belong to others, on the device"""

    def empty(
        self, page: int, budgets: Sequence[tuple[int, int]], sizes: Sequence[int] | None = None
    ) -> None:
        """Empty a page for a new request.

        Args:
            budgets: (heavy, recent) of each head, or one pair for all.
            sizes: number of slots of each head, if it differs between pages.
        """
        if self.alone:
            self.evicted += self._evicted(slice(page, page + 1))
        empty_row(self.pages, page)
        _write(self.pages.budget[page], budgets)
        if sizes is not None:
            assert self.pages.starts is not None
            _write(self.pages.starts[page], list(itertools.accumulate(sizes, initial=0)))

    def release(self, page: int) -> None:
        """Zero a page whose request has left, if others may write to it. The fields of slots can be
        NaN or infinite as keys, and vLLM's attention multiplies masked keys by 0."""
        if not self.alone:
            self._memory[page].zero_()

    def copy(self, page: int, other: int) -> None:
        """Copy a page to page `other`. The evictions of `page` are still counted only once."""
        self.evicted += self._evicted(slice(other, other + 1))
        self.evicted -= self._evicted(slice(page, page + 1))
        self._memory[other].copy_(self._memory[page])

    def _evicted(self, part: slice) -> Any:
        """Number of keys evicted by the requests that have these pages now, or had them last. It
        stays on the device, so that the host does not wait."""
        lengths, positions = (
            _countable(x)[part] for x in (self.pages.seen_tokens, self.pages.positions)
        )
        heads = self.pages.next_slot.numel() // self.pages.seen_tokens.numel()  # heads per layer
        return lengths.sum() * heads - (positions >= 0).sum()

    def eviction(self) -> Eviction:
        """Totals of all requests so far. The attention is only that of requests whose pages have
        not been given to others since. The store must be `alone`.
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

    def row(self, page: int, layer: int = 0) -> tuple[ops.Slots, list[int]]:
        """One of the store's layers in one page: views [1, ...] of its slots, and the number of
        slots per head, or one number for all heads."""
        slots = self._layers[layer]
        fields = {name: getattr(slots, name) for name in PER_ROW}
        views = {name: None if x is None else x[page : page + 1] for name, x in fields.items()}
        if slots.starts is None:
            return slots._replace(**views), [slots.scores.shape[-1]]
        starts = slots.starts if slots.starts.ndim == 1 else slots.starts[page]
        begin, end = int(starts[0]), int(starts[-1])
        for name in PER_SLOT:
            if views[name] is not None:
                views[name] = views[name][:, begin:end]
        return slots._replace(**views, starts=starts - begin), starts.diff().tolist()

    @contextlib.contextmanager
    def keeping_evictions(self, page: int) -> Iterator[None]:
        """Within the block tokens leave a page. Those of them that were evicted are counted on."""
        part = slice(page, page + 1)
        before = self._evicted(part)
        yield
        self.evicted += before - self._evicted(part)

    def rows(self, numbers: torch.Tensor, layer: int = 0) -> ops.Slots:
        """The slots of one of the store's layers in the pages `numbers`, [n] int32."""
        return self._layers[layer]._replace(rows=numbers)


def _by_layer(pages: ops.Slots, layers: int) -> list[ops.Slots]:
    """The slots of each layer, as views of its heads."""
    G = pages.next_slot.shape[1] // layers
    assert pages.starts is not None
    views = []
    for layer in range(layers):
        heads = slice(layer * G, (layer + 1) * G)
        own = {
            name: getattr(pages, name)[:, heads]
            for name in ("next_slot", "budget", "evicted_score", "offsets", "smoothing")
            if getattr(pages, name) is not None
        }
        own["seen_tokens"] = pages.seen_tokens[:, layer]
        own["starts"] = pages.starts[:, layer * G : (layer + 1) * G + 1]
        views.append(pages._replace(**own))
    return views


def _write(row: torch.Tensor, numbers: Sequence[Any]) -> None:
    """Write numbers to a row on the device, without making the host wait."""
    new = torch.tensor(numbers, dtype=row.dtype, device="cpu")
    row.copy_(new.view_as(row), non_blocking=True)
