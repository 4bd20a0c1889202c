"""A batch of requests through a layer: prompts, pieces of prompts and decode steps at once.

`plan` says once a forward pass what the rows of the batch are, `PagedLayer` does that in each
layer. A prompt that comes in pieces is kept whole until its end, then cut to its budget, so that
what a request keeps does not depend on how vLLM cut it, hence not on other requests; or each piece
is taken as an end (`h2o.vllm.page_budget.cuts_chunks`).

Letters: n tokens of the batch, H query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from h2o import ops
from h2o.config import H2OConfig
from h2o.policy import Policy
from h2o.vllm.page_budget import PageBudget
from h2o.vllm.page_store import PageStore

__all__ = ["Batch", "PagedLayer", "Piece", "Request", "Steps", "plan"]

GAP = 64
"""A call of `step` passes over pages without a request of the batch up to a gap of so many. A row
that is masked costs next to nothing, a call some sixty microseconds."""

IDLE = 4
"""Prompts begun that may wait for their next piece outside the batch before the oldest is cut."""


class Request(NamedTuple):
    """What is known of a request besides its tokens."""

    prompt: int
    """tokens of the prompt"""
    config: H2OConfig | None = None
    """its own, where the request says one"""


class Piece(NamedTuple):
    """Tokens of one request that come together: a prompt, or a part of one."""

    begin: int
    end: int
    page: int
    length: int
    """tokens of the request with these"""
    request: Request
    opens: bool
    """whether the prompt begins here"""
    ends: bool
    """whether it is cut to its budget now"""


class Steps(NamedTuple):
    """Requests with one new token each, in a range of pages."""

    first: int
    end: int
    tokens: Tensor | slice
    """[rows] int64: which tokens of the batch; a slice where they and their pages follow one
    another without a gap"""
    places: Tensor
    """[rows] int64: their pages, counted from `first`"""
    mask: Tensor | None
    """[end - first, 1] bool: pages of the batch; None: all"""


class Batch(NamedTuple):
    """What one forward pass has to do in every layer."""

    pieces: list[Piece]
    steps: list[Steps]
    late: list[int]
    """pages whose prompts are cut before their end"""


def plan(
    starts: Sequence[int],
    lengths: Sequence[int],
    pages: Sequence[int],
    requests: Callable[[int], Request | None],
    begun: dict[int, None],
    cuts_chunks: bool = False,
) -> Batch:
    """What the rows of a batch are.

    Args:
        starts: where each row's tokens begin in the batch, and where the last one's end.
        lengths: tokens of each row with the new ones.
        requests: the request of a row, if it is known.
        begun: pages of prompts that are kept whole, the oldest first; kept up to date.
        cuts_chunks: none is kept whole.
    """
    pieces, single = [], []
    for row, (length, page) in enumerate(zip(lengths, pages, strict=True)):
        begin, end = starts[row], starts[row + 1]
        opens = length == end - begin
        if begin == end:
            continue
        if opens:
            begun.pop(page, None)
        elif end - begin == 1 and page not in begun:
            single.append((page, begin))
            continue
        request = requests(row) or Request(length)
        ends = cuts_chunks or length >= request.prompt
        if ends:
            begun.pop(page, None)
        elif opens:
            begun[page] = None
        pieces.append(Piece(begin, end, page, length, request, opens, ends))
    here = set(pages)
    late = [page for page in begun if page not in here][:-IDLE]
    for page in late:
        del begun[page]
    return Batch(pieces, _ranges(sorted(single)), late)


def _ranges(rows: list[tuple[int, int]]) -> list[Steps]:
    """Rows (page, token) by ascending page, in ranges without large gaps."""
    ranges: list[Steps] = []
    begin = 0
    for i in range(1, len(rows) + 1):
        if i < len(rows) and rows[i][0] - rows[i - 1][0] <= GAP:
            continue
        part, begin = rows[begin:i], i
        first, end = part[0][0], part[-1][0] + 1
        places = torch.tensor([page - first for page, _ in part], dtype=torch.long, device="cpu")
        tokens = [token for _, token in part]
        dense = len(part) == end - first
        mask = None
        if not dense:
            mask = torch.zeros(end - first, 1, dtype=torch.bool, device="cpu")
            mask[places] = True
        if dense and tokens == list(range(tokens[0], tokens[-1] + 1)):
            ranges.append(Steps(first, end, slice(tokens[0], tokens[-1] + 1), places, None))
        else:
            at = torch.tensor(tokens, dtype=torch.long, device="cpu")
            ranges.append(Steps(first, end, at, places, mask))
    return ranges


class PagedLayer:
    """One layer: its pages, and the prompts that are not yet whole."""

    def __init__(
        self, store: PageStore, budget: PageBudget, layer: int, scale: float, softcap: float
    ) -> None:
        self.store = store
        self.budget = budget
        self.layer = layer
        self.scale = scale
        self.softcap = softcap
        self.policy = budget.config.policy
        self.uncut: dict[int, tuple[ops.Slots, Request]] = {}

    def forward(self, query: Tensor, key: Tensor, value: Tensor, batch: Batch, out: Tensor) -> None:
        """Attention of a batch's tokens, and eviction.

        Args:
            query: [n, H, D].
            key, value: [n, G, D].
            out: [n, H, D], contiguous, written.
        """
        with self.store.lock:
            for page in batch.late:
                if page in self.uncut:
                    self._cut(page, *self.uncut.pop(page))
            for piece in batch.pieces:
                part = slice(piece.begin, piece.end)
                q, k, v = (x[part].transpose(0, 1)[None] for x in (query, key, value))
                self._piece(piece, q, k, v, out[part][None])
            for steps in batch.steps:
                self._steps(steps, query, key, value, out)

    def _piece(self, piece: Piece, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        """Tokens of one request. query [1, H, Q, D], key, value [1, G, Q, D], out [1, Q, H, D]."""
        page, request = piece.page, piece.request
        held, _ = self.uncut.pop(page, (None, None))
        if piece.opens:
            held = None
        elif held is None:  # of a request whose prompt has been cut
            held = self.store.rows(page, page + 1)
            self._attend(query, key, value, held, out, held)
            return
        if piece.opens and piece.ends:
            self._attend(query, key, value, None, out, self._new_page(page, key, request))
            return
        held = self._room_for(max(request.prompt, piece.length), key, held)
        self._attend(query, key, value, held, out, held)
        if piece.ends:
            self._cut(page, held, request)
        else:
            self.uncut[page] = held, request

    def _room_for(self, tokens: int, keys: Tensor, held: ops.Slots | None) -> ops.Slots:
        """Slots for so many tokens, none of which is evicted, with what is held. More than the
        prompt come where vLLM has a request that it had put off read again, with its answer."""
        if held is not None and held.scores.shape[-1] >= tokens:
            return held
        slots = ops.new_slots(keys, tokens, value_weighted=self.policy.value_weighted)
        if held is not None:
            self._store(held, slots, self.policy._replace(merge=None))
        return slots

    def _store(self, held: ops.Slots, slots: ops.Slots, policy: Policy) -> None:
        """Takes what is held, of which nothing was evicted, into empty slots."""
        n = int(held.lengths[0])
        keys, values, scores = (x[:, :, :n] for x in (held.keys, held.values, held.scores))
        ops.evict(keys, values, scores, slots, policy=policy)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor,
        seen: ops.Slots | None, out: Tensor, slots: ops.Slots,
    ) -> None:  # fmt: skip
        # What is kept whole has no bias, and nothing is merged there.
        policy = self.policy if slots.bias is not None else self.policy._replace(merge=None)
        _, scores = ops.attend(
            query, key, value, seen,
            scale=self.scale, softcap=self.softcap, out=out, policy=policy,
        )  # fmt: skip
        ops.evict(key, value, scores, slots, policy=policy)

    def _new_page(self, page: int, keys: Tensor, request: Request) -> ops.Slots:
        budgets = self.budget.by_head(self.layer, keys, request.prompt, request.config)
        self.store.empty(page, budgets)
        return self.store.rows(page, page + 1)

    def _cut(self, page: int, held: ops.Slots, request: Request) -> None:
        """Puts what the budget keeps of a prompt into its page."""
        self._store(held, self._new_page(page, held.keys, request), self.policy)

    def _steps(self, steps: Steps, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        slots = self.store.rows(steps.first, steps.end)
        if isinstance(steps.tokens, slice):
            q, k, v = (x[steps.tokens].unsqueeze(2) for x in (query, key, value))
            self._step(q, k, v, slots, None, out[steps.tokens].unsqueeze(1))
            return
        rows = steps.end - steps.first
        q, k, v = (
            x.new_zeros(rows, x.shape[1], 1, x.shape[2]).index_copy_(
                0, steps.places, x[steps.tokens].unsqueeze(2)
            )
            for x in (query, key, value)
        )
        result = out.new_empty(rows, 1, *out.shape[1:])
        self._step(q, k, v, slots, steps.mask, result)
        out[steps.tokens] = result[steps.places, 0]

    def _step(
        self, query: Tensor, key: Tensor, value: Tensor,
        slots: ops.Slots, mask: Tensor | None, out: Tensor,
    ) -> None:  # fmt: skip
        ops.step(
            query, key, value, slots,
            mask=mask, scale=self.scale, softcap=self.softcap, out=out, policy=self.policy,
        )  # fmt: skip
