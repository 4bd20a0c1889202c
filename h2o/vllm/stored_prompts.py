"""The scheduler's record of which prompts are stored in which pages, and the choice of the stored
prompt with which a request begins.

The contents of a page after a prompt are determined by the prompt's tokens and the request's
settings, so prompts are identified by a hash of both. A request that could begin with a prompt or
prefix that another request is prefilling waits until it is stored.
"""

from __future__ import annotations

import array
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from h2o.vllm.paged_request import CONTEXT, PREFIX, reads_by_token


class PromptHashes(NamedTuple):
    """Hashes by which a request shares a prompt with others."""

    tokens: int
    """Number of tokens of the prompt"""
    whole: bytes
    """Hash of the whole prompt, including the length of the prefix that is cut first"""
    prefix: int
    """Number of tokens of the prefix, 0 if there is none"""
    beginning: bytes | None
    """Hash of the prefix"""


def identify(
    tokens: Sequence[int], prefix: int, arguments: Mapping[str, Any], salt: str | None
) -> PromptHashes:
    """Hash a request's tokens and those of its `vllm_xargs` that determine what its page holds.

    Args:
        prefix: number of tokens of the prefix that is cut separately, 0 if there is none.
        salt: the request's `cache_salt`. Only requests with the same salt share prompts.
    """
    settings = sorted(
        (name, repr(x))
        for name, x in arguments.items()
        if name.startswith("h2o_") and name not in (PREFIX, CONTEXT)
    )

    def hash_beginning(n: int, *cut: int) -> bytes:
        said = repr((settings, salt, cut)).encode()
        return hashlib.sha256(array.array("q", tokens[:n]).tobytes() + said).digest()

    beginning = hash_beginning(prefix) if prefix else None
    cut = (prefix, reads_by_token(arguments)) if prefix else ()
    return PromptHashes(len(tokens), hash_beginning(len(tokens), *cut), prefix, beginning)


class Begin(NamedTuple):
    """Instruction to begin a request with a stored prompt."""

    page: int
    """Page of the stored prompt"""
    other: int
    """Page of the request"""
    tokens: int
    """Number of tokens that need no prefill"""
    whole: bool
    """Whether the stored prompt is the request's whole prompt"""


class Store(NamedTuple):
    """Instruction to copy a request's page to another page after the pass."""

    page: int
    other: int


@dataclasses.dataclass
class Prefill:
    """A request whose prompt is being prefilled."""

    hashes: PromptHashes
    page: int
    """The request's page. Prompts are only stored if all layers are in one group"""
    tokens_prefilled: int
    """Number of tokens prefilled, including those of the pass that is planned"""
    exact: bool = True
    """Whether the prompt may be stored: not if the weights have changed during its prefill"""


class StoredPrompts:
    """The pages of stored prompts, and the prompts that are being prefilled."""

    def __init__(self) -> None:
        self.pages: dict[bytes, int] = {}
        self.prefilling: dict[str, Prefill] = {}
        """Prompts that are being prefilled, by request"""
        self._by_page: dict[int, bytes] = {}

    def find(self, wanted: PromptHashes) -> tuple[int, int, bool] | None:
        """(page, tokens, whole) of the longest stored beginning of a request. The last token of a
        whole prompt is not counted, since it is computed again."""
        if wanted.whole in self.pages and wanted.tokens > 1:
            return self.pages[wanted.whole], wanted.tokens - 1, True
        if wanted.beginning in self.pages:
            return self.pages[wanted.beginning], wanted.prefix, False
        return None

    def is_being_prefilled(self, request: str, wanted: PromptHashes) -> bool:
        """Whether another request is prefilling a prompt or prefix that this one could use."""
        keys = {wanted.whole, wanted.beginning} - {None}
        return any(
            other != request and one.exact and not keys.isdisjoint(_pending_hashes(one))
            for other, one in self.prefilling.items()
        )

    def advance(self, scheduled: Mapping[str, int]) -> list[tuple[int, bytes]]:
        """Advance by a pass with `scheduled` tokens of each request. Return (page, key) of each
        prompt and prefix that may be stored after the pass."""
        done = []
        for request, one in [*self.prefilling.items()]:
            new = scheduled.get(request, 0)
            before, one.tokens_prefilled = one.tokens_prefilled, one.tokens_prefilled + new
            wanted = one.hashes
            if before < wanted.prefix == one.tokens_prefilled and wanted.beginning is not None:
                done.append((one, wanted.beginning))
            if one.tokens_prefilled >= wanted.tokens:
                del self.prefilling[request]
                if new > 1:  # one token is a decode step, whose attention output is not noted
                    done.append((one, wanted.whole))
        return [(one.page, key) for one, key in done if one.exact]

    def put(self, key: bytes, page: int) -> None:
        self.pages[key] = page
        self._by_page[page] = key

    def drop(self, page: int) -> None:
        """Forget the prompt stored in a page that was given to a request."""
        key = self._by_page.pop(page, None)
        if key is not None:
            del self.pages[key]

    def clear(self) -> list[int]:
        """Forget all stored prompts, and do not store those that are being prefilled. Return the
        pages that held prompts."""
        for one in self.prefilling.values():
            one.exact = False
        pages = [*self._by_page]
        for page in pages:
            self.drop(page)
        return pages


def _pending_hashes(one: Prefill) -> set[bytes]:
    """Hashes of the prompt and prefix that a request in prefill will store."""
    beginning = one.hashes.beginning if one.tokens_prefilled < one.hashes.prefix else None
    return {one.hashes.whole} | ({beginning} if beginning is not None else set())
