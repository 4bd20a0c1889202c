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

from h2o.vllm.paged_request import CONTEXT, EVICT, PREFIX, evicted_spans, reads_by_token


class Beginning(NamedTuple):
    """Tokens with which a request begins, and which it shares with others: its whole prompt, or the
    prefix that is cut separately."""

    tokens: int
    key: bytes
    """Hash of the tokens and of everything else that determines what a page holds after them"""


def identify(
    tokens: Sequence[int], prefix: int, arguments: Mapping[str, Any], salt: str | None
) -> list[Beginning]:
    """The beginnings of a request, the longest first: its prompt, and its prefix if it has one.

    Args:
        prefix: number of tokens of the prefix that is cut separately, 0 if there is none.
        arguments: the request's `vllm_xargs`.
        salt: the request's `cache_salt`. Only requests with the same salt share prompts.
    """
    settings = sorted(
        (name, repr(x))
        for name, x in arguments.items()
        if name.startswith("h2o_") and name not in (PREFIX, CONTEXT, EVICT)
    )

    def beginning(n: int, *cut: Any) -> Beginning:
        said = repr((settings, salt, cut)).encode()
        return Beginning(n, hashlib.sha256(array.array("q", tokens[:n]).tobytes() + said).digest())

    if not prefix:
        return [beginning(len(tokens))]
    how = prefix, reads_by_token(arguments), *evicted_spans(arguments)
    return [beginning(len(tokens), *how), beginning(prefix)]


@dataclasses.dataclass
class Prefill:
    """A request whose prompt is being prefilled, and stored afterwards."""

    beginnings: list[Beginning]
    tokens_prefilled: int
    """Number of tokens prefilled, including those of the pass that is planned"""


class StoredPrompts:
    """The pages of stored prompts, and the prompts that are being prefilled."""

    def __init__(self) -> None:
        self.pages: dict[bytes, int] = {}
        self.prefilling: dict[str, Prefill] = {}
        """Prompts that are being prefilled and will be stored, by request"""
        self._by_page: dict[int, bytes] = {}

    def find(self, wanted: list[Beginning]) -> tuple[int, int, bool] | None:
        """(page, tokens, whole) of the longest stored beginning of a request. The last token of a
        whole prompt is not counted, since it is computed again."""
        for tokens, key in wanted:
            if key in self.pages:
                is_whole = tokens == wanted[0].tokens
                return self.pages[key], tokens - is_whole, is_whole
        return None

    def is_being_prefilled(self, request: str, wanted: list[Beginning]) -> bool:
        """Whether another request is prefilling a prompt or prefix that this one could use."""
        keys = {key for _, key in wanted}
        return any(
            tokens > one.tokens_prefilled and key in keys
            for other, one in self.prefilling.items()
            if other != request
            for tokens, key in one.beginnings
        )

    def advance(self, scheduled: Mapping[str, int]) -> list[tuple[str, bytes]]:
        """Advance by a pass with `scheduled` tokens of each request. Return (request, key) of each
        prompt and prefix that may be stored after the pass."""
        done = []
        for request, one in [*self.prefilling.items()]:
            new, prompt = scheduled.get(request, 0), one.beginnings[0].tokens
            before, one.tokens_prefilled = one.tokens_prefilled, one.tokens_prefilled + new
            for tokens, key in one.beginnings:
                # One token at a prompt's end is a decode step, whose attention output is not noted.
                if before < tokens <= one.tokens_prefilled and (new > 1 or tokens < prompt):
                    done.append((request, key))
            if one.tokens_prefilled >= prompt:
                del self.prefilling[request]
        return done

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
        pages = [*self._by_page]
        for known in (self.pages, self.prefilling, self._by_page):
            known.clear()
        return pages
