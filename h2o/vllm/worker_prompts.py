"""The worker's side of stored prompts: the outputs that belong to their pages, and the requests
that begin with one. The scheduler's side is `stored_prompts`.

If a request repeats a whole prompt, vLLM computes the prompt's last token again, since the first
token of the answer is sampled from it. By then the stored page already has that token's key, and
lacks other keys that the token attended to. Each layer therefore returns the attention output that
it has stored for the token.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from h2o.vllm.page_store import PageStore

Outputs = dict[int, Tensor]
"""Attention outputs [H, D] of a prompt's last token, by layer"""


class WorkerPrompts:
    """Stored prompts by page, and the requests of the next pass that begin with one."""

    def __init__(self) -> None:
        self.partial: list[dict[int, int]] = []
        """Buffers of the prompts that are kept whole, by page; one dict for each group of layers"""
        self.replayed: dict[int, Outputs] = {}
        """Outputs for requests of this pass that repeat a whole prompt, by page"""
        self.stored: dict[int, Outputs] = {}
        """Outputs of the stored prompts, by page"""
        self.requests = 0
        """Number of requests that have begun with a stored prompt so far"""
        self.tokens = 0
        """Number of tokens that these requests did not have to prefill"""
        self._last: dict[int, Outputs] = {}

    def begin(
        self, stores: Iterable[PageStore], page: int, other: int, tokens: int, *, whole: bool
    ) -> None:
        """Begin the request of page `other` with the `tokens` tokens that `page` has stored."""
        self.leave([other])
        if page != other:
            _copy(stores, page, other)
        if whole:
            self.replayed[other] = self.stored[page]
        self.requests += 1
        self.tokens += tokens

    def leave(self, pages: Iterable[int]) -> None:
        """Forget the unfinished prompts of pages whose requests have ended or are starting."""
        for page in pages:
            for buffers in self.partial:
                buffers.pop(page, None)

    def attention(self, page: int, layer: int) -> Tensor:
        """The stored attention output for a request that repeats a whole prompt."""
        return self.replayed[page][layer]

    def note(self, page: int, layer: int, out: Tensor) -> None:
        """Note the attention output of the last token of a prompt, or of its prefix."""
        self._last.setdefault(page, {})[layer] = out.clone()

    def store(self, stores: Iterable[PageStore], page: int, other: int) -> None:
        """Store the prompt or prefix that `page` holds in page `other`."""
        self.stored[other] = self._last[page]
        _copy(stores, page, other)

    def outputs_bytes(self) -> int:
        """Bytes of the stored attention outputs, which are outside the pages. Thread-safe."""
        return sum(out.nbytes for outs in [*self.stored.values()] for out in outs.values())

    def drop(self, pages: Iterable[int]) -> None:
        """Forget the stored prompts of pages that were given to requests."""
        for page in pages:
            self.stored.pop(page, None)

    def end(self) -> None:
        """End the pass."""
        self.replayed.clear()
        self._last.clear()


def _copy(stores: Iterable[PageStore], page: int, other: int) -> None:
    for store in stores:
        with store.lock:
            store.copy(page, other)
