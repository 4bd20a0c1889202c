"""One layer's work for a batch of requests: prompts, chunks of prompts and decode steps together.

`plan` divides the requests of a forward pass into these three kinds, and `PagedLayer` runs them in
each layer. With chunked prefill, a prompt stays uncompressed outside the pages until its last chunk
has been processed, and is then cut to its budget. The keys that a request keeps therefore depend
neither on how vLLM divides the prompt nor on other requests. The number of prompts that can stay
uncompressed is limited (`PartialPrompts`), and h2o's scheduler (`h2o.vllm.scheduler`) admits no
more.

Shape letters: n tokens of the batch, H query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Container, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o import ops
from h2o.quantization import smoothing_of
from h2o.slots import empty_row
from h2o.spans import PINNED, Row
from h2o.vllm.page_budget import PageBudget
from h2o.vllm.page_store import PageStore
from h2o.vllm.paged_request import PagedRequest
from h2o.vllm.worker_prompts import WorkerPrompts

PromptScores = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function that returns a prompt's scores and echo, [1, G, Q] each, given its query [1, H, Q, D],
its key and value [1, G, Q, D], and the attention [1, G, Q] that its keys have received."""


class Chunk(NamedTuple):
    """Consecutive tokens of one request: a prompt, or a part of one."""

    begin: int
    end: int
    page: int
    length: int
    """Number of tokens of the request, including this chunk"""
    request: PagedRequest
    opens: bool
    """Whether the prompt begins with this chunk"""
    ends: bool
    """Whether the prompt is cut to its budget after this chunk"""
    buffer: int | None
    """Row in which the prompt is kept whole, or None if it is not"""


class Steps(NamedTuple):
    """Requests with one new token each."""

    tokens: Tensor | slice
    """[rows] int64, indices of the tokens in the batch; a slice if they are consecutive"""
    pages: Tensor
    """[rows] int32"""


class Batch(NamedTuple):
    """The work of one forward pass in every layer, in the order of the fields."""

    chunks: list[Chunk]
    steps: Steps | None
    replayed: Sequence[tuple[int, int]] = ()
    """(page, token) of stored prompts that come again. The token gets its stored attention"""
    removed: Sequence[tuple[int, Row]] = ()
    """(page, spans) of requests that go on from a prefix without these tokens. They are removed
    before all other work"""


class PartialPrompts:
    """Prompts that are being prefilled in chunks, and the buffer in which each is kept whole."""

    def __init__(self, buffers: int) -> None:
        """`buffers` is 0 if no prompt is kept whole."""
        self.buffers = buffers
        self.by_page: dict[int, int] = {}
        """The buffer of each prompt, by page"""

    def take_buffer(self, page: int) -> int:
        """Give a free buffer to the prompt of a page.

        Raises: RuntimeError if there is none.
        """
        free = {*range(self.buffers)}.difference(self.by_page.values())
        if not free:
            raise RuntimeError(
                f"h2o: vLLM prefills more than {self.buffers} prompts in chunks at once: the "
                "scheduler is not h2o's"
            )
        self.by_page[page] = min(free)
        return self.by_page[page]


def plan(
    starts: Sequence[int],
    lengths: Sequence[int],
    pages: Sequence[int],
    requests: MutableMapping[int, PagedRequest],
    begun: PartialPrompts,
    device: torch.device | str = "cpu",
    replayed: Container[int] = (),
) -> Batch:
    """Sort the rows of a batch into prompts, chunks and decode steps.

    Args:
        starts: index of each row's first token in the batch, then the end of the last row.
        lengths: number of tokens of each row, including the new ones.
        requests: the known requests, by page. Those that forget tokens are updated.
        begun: the prompts that are being prefilled in chunks. Updated.
        device: device of the tensors in the result.
        replayed: pages of requests that repeat a whole stored prompt.

    Raises: RuntimeError for batches that h2o's scheduler never plans: a row with tokens of a prefix
        and of the rest of the prompt, and more prompts in chunks than can be kept whole.
    """
    later, opening, single, again, removed = [], [], [], [], []
    for row, (length, page) in enumerate(zip(lengths, pages, strict=True)):
        begin, end = starts[row], starts[row + 1]
        if begin == end:
            continue
        if page in replayed:
            again.append((page, begin))
            continue
        opens = length == end - begin
        request = requests.get(page) or PagedRequest(length if opens else 0)
        if length - (end - begin) == request.first and request.due:
            removed.append((page, request.due))
            requests[page] = request._replace(removed=request.evicted)
        if opens:
            begun.by_page.pop(page, None)  # left by another request
        elif end - begin == 1 and length > request.first:
            single.append((page, begin))
            continue
        # A prompt that was cut before its end is cut again after each further chunk.
        buffer = begun.by_page.get(page)
        is_first = opens or buffer is not None
        ends = length >= request.first or not is_first or begun.buffers == 0
        if is_first and length > request.first and request.prefix:
            raise RuntimeError(
                f"h2o: vLLM prefills a prompt up to token {length} at once, but its prefix of "
                f"{request.prefix} tokens must be cut first: the scheduler is not h2o's"
            )
        if ends:
            begun.by_page.pop(page, None)
        chunk = Chunk(begin, end, page, length, request, opens, ends, buffer)
        (opening if opens else later).append(chunk)
    for i, chunk in enumerate(opening):  # now, since chunks that end have made room
        if not chunk.ends:
            opening[i] = chunk._replace(buffer=begun.take_buffer(chunk.page))
    return Batch(later + opening, _steps(single, device), again, removed)


def _steps(rows: list[tuple[int, int]], device: torch.device | str) -> Steps | None:
    if not rows:
        return None
    pages, tokens = zip(*rows, strict=True)
    numbers = torch.tensor(pages, dtype=torch.int32, device=device)
    if tokens[-1] - tokens[0] == len(tokens) - 1:  # tokens ascend, so they are consecutive
        return Steps(slice(tokens[0], tokens[-1] + 1), numbers)
    return Steps(torch.tensor(tokens, dtype=torch.long, device=device), numbers)


def _number(row: int, like: Tensor) -> Tensor:
    """`row` as a tensor [1] on the device of `like`, without making the host wait."""
    return torch.full((1,), row, dtype=torch.int32, device=like.device)


def _with_pins(chunk: Chunk, scores: Tensor) -> Tensor:
    """Set the scores of pinned keys among the scores [1, G, Q] of a chunk's last Q tokens."""
    if not chunk.request.pinned:
        return scores
    scores, begin = scores.clone(), chunk.length - scores.shape[2]
    for start, stop in chunk.request.pinned:
        scores[..., max(0, start - begin) : max(0, stop - begin)] = PINNED
    return scores


class PagedLayer:
    """One layer: its pages, and the prompts that are kept whole outside the pages."""

    def __init__(
        self, store: PageStore, budget: PageBudget, layer: int, scale: float, softcap: float,
        worker_prompts: WorkerPrompts, prompt_scores: PromptScores | None = None,
        cross_layer: Any = None,
    ) -> None:  # fmt: skip
        """
        Args:
            store: the pages of this layer, or of all layers if `cross_layer` is given.
            worker_prompts: shared by all layers, the prompts that are stored for later requests.
            prompt_scores: computes the scores by which a prompt is cut. By default these are the
                attention that its keys have received.
            cross_layer: `CrossLayerBudget`, shared by all layers, if they share their budget.
        """
        self.store = store
        self.budget = budget
        self.layer = layer
        self.logits = {"scale": scale, "softcap": softcap}
        self.policy = budget.config.policy
        self.prompt_scores = prompt_scores
        self.cross_layer = cross_layer
        self.worker_prompts = worker_prompts
        self.whole: ops.Slots | None = None
        """[buffers, ...], the prompts that are kept whole: without a budget, ordered by position"""
        self.queries: Tensor | None = None
        """[buffers, H, n, D], the queries of their first tokens (`PageBudget.kept_queries`)"""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, batch: Batch, out: Tensor) -> None:
        """Compute the attention of a batch's tokens, and evict.

        Args:
            query: [n, H, D].
            key, value: [n, G, D].
            out: [n, H, D], contiguous. Receives the output.
        """
        with self.store.lock:
            for page, spans in batch.removed:
                self._remove(page, spans)
            for chunk in batch.chunks:
                part = slice(chunk.begin, chunk.end)
                tokens = [x[part].transpose(0, 1)[None] for x in (query, key, value)]
                self._chunk(chunk, *tokens, out[part][None])
            if batch.steps is not None:
                self._step(batch.steps, query, key, value, out)
        for page, token in batch.replayed:
            out[token] = self.worker_prompts.attention(page, self.layer)
        for chunk in batch.chunks:
            if chunk.length in (chunk.request.first, chunk.request.prompt):
                self.worker_prompts.note(chunk.page, self.layer, out[chunk.end - 1])

    def _remove(self, page: int, spans: Row) -> None:
        """Remove tokens from this layer's slots in a page."""
        from h2o.vllm.page_removal import remove_spans  # imports h2o.hf

        remove_spans(self.store, page, self._layer_of_store, spans, self.policy)

    @property
    def _layer_of_store(self) -> int:
        """The number of this layer among those of its store."""
        return 0 if self.cross_layer is None else self.layer

    def _chunk(self, chunk: Chunk, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        """Run a chunk: query [1, H, Q, D], key and value [1, G, Q, D], out [1, Q, H, D]."""
        tokens = query, key, value
        if chunk.buffer is not None:
            self._keep_whole(chunk, tokens, out)
        elif chunk.opens:
            self._put(chunk, *tokens, self._attend(tokens, None, out))
        else:  # the prompt has been cut already
            page = self._rows(_number(chunk.page, key))
            scores = _with_pins(chunk, self._attend(tokens, page, out))
            ops.evict(key, value, scores, page, policy=self.policy)

    def _keep_whole(self, chunk: Chunk, tokens: tuple[Tensor, Tensor, Tensor], out: Tensor) -> None:
        query, key, value = tokens
        buffer = chunk.buffer
        if self.whole is None:  # shorter prompts leave the rest of the longest rows untouched
            self.whole = self.budget.whole(key)
            kept = self.budget.longest if self.prompt_scores else self.budget.kept_queries
            if kept:
                size = self.budget.buffers, query.shape[1], kept, query.shape[3]
                self.queries = query.new_zeros(size)
        assert buffer is not None
        if chunk.opens:
            empty_row(self.whole, buffer)
        held = self.whole._replace(rows=_number(buffer, key))
        scores = self._attend(tokens, held, out)
        ops.evict(key, value, scores, held, policy=self.policy)
        if self.queries is not None:
            place = self.queries[buffer, :, chunk.length - query.shape[2] : chunk.length]
            place.copy_(query[0, :, : place.shape[1]])
        if chunk.ends:
            whole, end = self.whole, chunk.length
            prompt = (x[buffer, :, :end][None] for x in (whole.keys, whole.values, whole.scores))
            queries = None if self.queries is None else self.queries[buffer, :, :end][None]
            self._put(chunk, queries, *prompt)

    def _attend(
        self, tokens: tuple[Tensor, Tensor, Tensor], seen: ops.Slots | None, out: Tensor
    ) -> Tensor:
        scores: Tensor
        _, scores = ops.attend(*tokens, seen, out=out, policy=self.policy, **self.logits)
        return scores

    def _rows(self, numbers: Tensor) -> ops.Slots:
        """This layer's slots in the pages `numbers`."""
        return self.store.rows(numbers, self._layer_of_store)

    def _put(
        self, chunk: Chunk, query: Tensor | None, keys: Tensor, values: Tensor, scores: Tensor
    ) -> None:
        """Write the part of a prompt that the budget keeps to its page. If budgets are divided
        across layers, the call for the last layer writes all layers."""
        request, echo = chunk.request, None
        if self.prompt_scores is not None:
            assert query is not None
            scores, echo = self.prompt_scores(query, keys, values, scores)
        scores, smoothing = _with_pins(chunk, scores), None
        if self.store.pages.smoothing is not None:
            smoothing = smoothing_of(query, keys, None)
        if self.cross_layer is None:
            budgets = self.budget.by_head(self.layer, keys, request)
            self.store.empty(chunk.page, budgets)
            self._evict(chunk.page, 0, keys, values, scores, smoothing)
            return
        prompt = keys, values, scores, echo, smoothing
        if divided := self.cross_layer.take(chunk.page, self.layer, request, *prompt):
            budgets = [budget for _, by_head in divided for budget in by_head]
            sizes = [self.budget.slots(self.budget.config.sinks + sum(x)) for x in budgets]
            self.store.empty(chunk.page, budgets, sizes)
            for layer, (part, _) in enumerate(divided):
                self._evict(chunk.page, layer, part.keys, part.values, part.scores, part.smoothing)

    def _evict(
        self, page: int, layer: int, keys: Tensor, values: Tensor, scores: Tensor,
        smoothing: Tensor | None,
    ) -> None:  # fmt: skip
        """Write the part of a prompt that the budget keeps to an empty page. `layer`: its number
        in the store."""
        slots = self.store.rows(_number(page, keys), layer)
        if smoothing is not None:
            slots.smoothing[page] = smoothing[0]
        ops.evict(keys, values, scores, slots, policy=self.policy)

    def _step(self, steps: Steps, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        """Run a decode step of each request."""
        q, k, v = (x[steps.tokens].unsqueeze(2) for x in (query, key, value))
        slots, in_place = self._rows(steps.pages), isinstance(steps.tokens, slice)
        answer = ops.step(
            q, k, v, slots,
            out=out[steps.tokens].unsqueeze(1) if in_place else None,
            policy=self.policy, **self.logits,
        )  # fmt: skip
        if not in_place:
            out[steps.tokens] = answer[:, 0]
