"""Which prompts are stored in which pages, and which of them a request begins with: the part of the
scheduler's process.

What a page holds after a prompt follows from the prompt's tokens and the request's settings, so
requests are known by a hash of both. A request that wants a prompt, or a prefix, that another
reads at the moment waits until that is stored.
"""

from __future__ import annotations

import array
import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from h2o.vllm.paged_request import CONTEXT, PREFIX, reads_by_token


class Asked(NamedTuple):
    """Hashes by which a request shares a prompt with others."""

    tokens: int
    """of the prompt"""
    whole: bytes
    """known by this, with the prefix that is cut before the rest"""
    prefix: int
    """tokens of it; 0: there is none"""
    beginning: bytes | None
    """the prefix is known by this"""


def identify(
    tokens: Sequence[int], prefix: int, arguments: Mapping[str, Any], salt: str | None
) -> Asked:
    """Identify a request by its tokens and those of its `vllm_xargs` that say what its page holds.

    Args:
        prefix: tokens of the prefix that is cut by itself; 0: there is none.
        salt: which the request wants in common, beside the rest.
    """
    settings = sorted(
        (name, repr(x))
        for name, x in arguments.items()
        if name.startswith("h2o_") and name not in (PREFIX, CONTEXT)
    )

    def known_by(n: int, *cut: int) -> bytes:
        said = repr((settings, salt, cut)).encode()
        return hashlib.sha256(array.array("q", tokens[:n]).tobytes() + said).digest()

    beginning = known_by(prefix) if prefix else None
    cut = (prefix, reads_by_token(arguments)) if prefix else ()
    return Asked(len(tokens), known_by(len(tokens), *cut), prefix, beginning)


class Begin(NamedTuple):
    """A request begins with what was stored."""

    page: int
    """where that is"""
    other: int
    """the request's"""
    tokens: int
    """that are read by that"""
    whole: bool
    """whether the whole prompt is"""


class Store(NamedTuple):
    """A request's page is to be copied to another page after the pass."""

    page: int
    other: int


@dataclasses.dataclass
class Reading:
    """A request whose prompt is being read."""

    asked: Asked
    pages: list[int]
    """in each group of layers, of which there are several beside sliding windows"""
    read: int
    """tokens, with those of the pass that is planned"""
    exact: bool = True
    """False: the weights have changed since it began to be read"""


class StoredPrompts:
    """The pages of stored prompts, and the requests that read others."""

    def __init__(self) -> None:
        self.pages: dict[bytes, int] = {}
        self.reading: dict[str, Reading] = {}
        """Prompts that are being read, by request"""
        self._by_page: dict[int, bytes] = {}

    def find(self, wanted: Asked) -> tuple[int, int, bool] | None:
        """(page, tokens, whole) of the longest beginning of a request that is stored. Of a whole
        prompt the last token is computed again."""
        if wanted.whole in self.pages and wanted.tokens > 1:
            return self.pages[wanted.whole], wanted.tokens - 1, True
        if wanted.beginning in self.pages:
            return self.pages[wanted.beginning], wanted.prefix, False
        return None

    def is_read(self, request: str, wanted: Asked) -> bool:
        """Whether another request reads at the moment what this one could begin with."""
        keys = {wanted.whole, wanted.beginning} - {None}
        return any(
            other != request and one.exact and not keys.isdisjoint(_to_come(one))
            for other, one in self.reading.items()
        )

    def advance(self, scheduled: Mapping[str, int]) -> list[tuple[int, bytes]]:
        """Goes on by a pass with so many tokens of each request: (page, key) of what may be stored
        after it."""
        done = []
        for request, one in [*self.reading.items()]:
            new = scheduled.get(request, 0)
            before, one.read = one.read, one.read + new
            wanted = one.asked
            if before < wanted.prefix == one.read and wanted.beginning is not None:
                done.append((one, wanted.beginning))
            if one.read >= wanted.tokens:
                del self.reading[request]
                if new > 1:  # else it is a step, whose attention nobody notes
                    done.append((one, wanted.whole))
        return [(one.pages[0], key) for one, key in done if one.exact]

    def put(self, key: bytes, page: int) -> None:
        self.pages[key] = page
        self._by_page[page] = key

    def drop(self, page: int) -> None:
        """The page is another's."""
        key = self._by_page.pop(page, None)
        if key is not None:
            del self.pages[key]

    def clear(self) -> list[int]:
        """Nothing is stored any more, nor is what is read now: the pages that were."""
        for one in self.reading.values():
            one.exact = False
        pages = [*self._by_page]
        for page in pages:
            self.drop(page)
        return pages

    def leave(self, requests: Iterable[str]) -> set[int]:
        """Forget requests that have left in the middle of their prompts; returns their pages."""
        gone = [self.reading.pop(request) for request in requests if request in self.reading]
        return {page for one in gone for page in one.pages}


def _to_come(one: Reading) -> set[bytes]:
    """Hashes of what will be stored of a prompt that is being read."""
    beginning = one.asked.beginning if one.read < one.asked.prefix else None
    return {one.asked.whole} | ({beginning} if beginning is not None else set())
