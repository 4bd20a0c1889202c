"""Prompts that stay stored when they have been read, each in a page of its own, and the requests
that begin with one: the part of a process that holds pages.

A request that repeats a whole prompt has its last token computed again, since the first token of
the answer is drawn from that. Its keys are in the stored page by then, and others are not that it
has attended to, so each layer gives it the attention that it had.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from h2o.vllm.page_store import PageStore

Outputs = dict[int, Tensor]
"""Attention [H, D] of a prompt's last token, by layer"""


class Forks:
    """Stored prompts by page, and the requests of the coming pass that begin with one."""

    def __init__(self) -> None:
        self.partial: list[dict[int, Any]] = []
        """Chunks of the prompts that are kept whole, by page; one of each group of layers"""
        self.replayed: dict[int, Outputs] = {}
        """Attention for requests that repeat a whole prompt, in this pass"""
        self.stored: dict[int, Outputs] = {}
        """Attention by the pages that hold prompts"""
        self.requests = 0
        """that have begun with a stored prompt so far"""
        self.tokens = 0
        """that these did not have to read"""
        self._last: dict[int, Outputs] = {}

    def begin(
        self, stores: Iterable[PageStore], page: int, other: int, tokens: int, *, whole: bool
    ) -> None:
        """The request of another page begins with what a page holds, `tokens` read tokens."""
        self.leave([other])
        if page != other:
            _copy(stores, page, other)
        if whole:
            self.replayed[other] = self.stored[page]
        self.requests += 1
        self.tokens += tokens

    def leave(self, pages: Iterable[int]) -> None:
        """Forget the prompts of pages whose requests have ended, or have not begun to be read."""
        for page in pages:
            for chunks in self.partial:
                chunks.pop(page, None)

    def attention(self, page: int, layer: int) -> Tensor:
        """The attention of the last token of a prompt that a request repeats."""
        return self.replayed[page][layer]

    def note(self, page: int, layer: int, out: Tensor) -> None:
        """The attention of the last token of a prompt, or of its prefix, which has been read."""
        self._last.setdefault(page, {})[layer] = out.clone()

    def store(self, stores: Iterable[PageStore], page: int, other: int) -> None:
        """Keeps what a page holds in another page: a prompt, or the prefix of one."""
        self.stored[other] = self._last[page]
        _copy(stores, page, other)

    def outputs_bytes(self) -> int:
        """Bytes of the attention that is kept beside the pages; for any thread."""
        return sum(out.nbytes for outs in [*self.stored.values()] for out in outs.values())

    def drop(self, pages: Iterable[int]) -> None:
        """Forget pages that other requests have got."""
        for page in pages:
            self.stored.pop(page, None)

    def end(self) -> None:
        """The pass is over."""
        self.replayed.clear()
        self._last.clear()


def _copy(stores: Iterable[PageStore], page: int, other: int) -> None:
    for store in stores:
        with store.lock:
            store.copy(page, other)
