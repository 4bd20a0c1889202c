"""`Scheduler`: admits the requests of `h2o.generate_all` to the rows of a batch, and decodes them.

A waiting request is admitted when a row is idle (`_admit`). Its prompt is prefilled in a cache of
its own, or together with other short prompts, and the result is copied into the row
(`h2o.hf.batching.row_batch`). Admission takes turns with decode steps.

A forward pass reads all weights, however few tokens it has, and on a GPU it takes as long as the
launch of its kernels. Consecutive short prompts therefore share a pass, padded on the left, in a
cache with one row for each prompt. Prefilled one by one they would take longer by these factors:

    8 prompts of   8 tokens: 2.7    32 tokens: 1.6    128 tokens: 1.15   (SmolLM2, one thread, AVX2)
    64 prompts of 16 tokens: 8.6    64 tokens: 6.9    128 tokens: 4.6    (Llama-3.1-8B's size, H200)

The keys that a row keeps depend on its own tokens only.

Shape letters: B prompts, n requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from h2o.compat import with_cache
from h2o.compat_calls import ModelCall
from h2o.errors import UnsupportedError
from h2o.hf.attention.attention_switch import use_attention
from h2o.hf.batching.prefix import PrefixError
from h2o.hf.batching.request import ActiveRequest, Prompt, Request, Result, Settings
from h2o.hf.batching.row_batch import RowBatch, row_report
from h2o.hf.cache.cache import H2OCache
from h2o.hf.model_traits.wrappers import forward_accepts, input_device, unwrap

TOKENS_A_STEP = 2048
"""Prompt tokens to prefill between two decode steps, like vLLM's `max_num_batched_tokens`. With
fewer, rows stay idle; with more, active rows wait."""


class Limits(NamedTuple):
    """Limits of a pass over several prompts."""

    tokens: int
    """Tokens, with padding, beyond which a larger pass makes a token hardly cheaper."""
    pads: int
    """Padding tokens that one more prompt may add. They take less time than a pass of its own."""


ON_CPU = Limits(tokens=512, pads=32)
ELSEWHERE = Limits(tokens=2048, pads=512)
"""On the H200 each pass that is avoided saves 34 ms, the time of 1,900 tokens in a large pass."""


class Scheduler:
    """Scheduler of one call: its rows, the active requests in them, and the waiting prompts."""

    def __init__(self, settings: Settings, prompts: Iterable[Prompt], batch: RowBatch) -> None:
        self.settings = settings
        self.waiting = enumerate(prompts)
        self.batch = batch
        self.running: dict[int, ActiveRequest] = {}
        """Requests of the active rows, by row number"""
        self.prefilling: list[ActiveRequest] = []
        """Requests whose prompts are being prefilled, together if several"""
        self.next: ActiveRequest | None = None
        """Request that was taken but cannot be prefilled together with those"""

    def run(self) -> Iterator[Result]:
        """Yield the results. While the caller handles one, the model has its own attention."""
        with contextlib.closing(self._results()) as results:
            while True:
                with use_attention("served", unwrap(self.settings.model), "h2o"):
                    result = next(results, None)
                if result is None:
                    return
                yield result

    def _results(self) -> Generator[Result, None, None]:
        while True:
            yield from self._admit()
            if self.running:
                yield from self._step()
            elif not self.prefilling:
                return

    def _admit(self) -> Iterator[Result]:
        """Prefill waiting prompts while a row is idle. Between two decode steps active rows wait
        for at most one chunk of a prompt or `TOKENS_A_STEP` tokens."""
        tokens = 0
        while self._idle_rows():
            if not self.prefilling:
                yield from self._begin()
            if not self.prefilling:
                return
            chunk_size = self.prefilling[0].generation_config.prefill_chunk_size
            limit = chunk_size or TOKENS_A_STEP
            tokens += (chunk := sum(x.chunk for x in self.prefilling))
            if self.running and tokens > max(limit, chunk):
                return
            yield from self._prefill()

    def _idle_rows(self) -> int:
        """Number of idle rows."""
        return len(self.batch.tokens) - len(self.running)

    def _begin(self) -> Iterator[Result]:
        """Choose the prompts to prefill next: one, or several short ones for the idle rows."""
        while len(self.prefilling) < self._idle_rows():
            if self.next is None:
                taken = next(self.waiting, None)
                if taken is None:
                    return
                yield from self._prepare(*taken)
            if self.next is None:
                continue
            if self.prefilling and not fits(self.next, self.prefilling):
                return
            self.prefilling.append(self.next)
            self.next = None
            if not can_share(self.prefilling[0]):
                return

    def _prepare(self, index: int, prompt: Prompt) -> Iterator[Result]:
        request = prompt if isinstance(prompt, Request) else Request(prompt)
        try:
            self.next = ActiveRequest(index, request, self.settings)
        except UnsupportedError:
            raise
        except Exception as error:  # concerns this prompt only; the others continue
            if index == 0 and isinstance(error, PrefixError):
                raise  # the caller has passed the questions alone
            self.next = None
            yield Result(index, [], None, 0, "error", {}, error)

    def _prefill(self) -> Iterator[Result]:
        """Prefill the next chunk of the prompt in `prefilling`, or all prompts if several."""
        group = self.prefilling
        cache, logits = group[0].cache, None
        try:
            if len(group) == 1:
                logits = group[0].prefill_next_chunk()
            else:
                cache, logits = prefill_together(group)
        except UnsupportedError:
            raise
        except Exception as error:
            self.prefilling = []
            if len(group) == 1:
                yield _error_result(group[0], error)
                return
            for running in group:  # one of them failed: prefill each alone to find out which
                self.prefilling = [running]
                yield from self._prefill()
            return
        if logits is not None:
            self.prefilling = []
            joining = yield from self._take_tokens(dict(enumerate(group)), logits, cache)
            if joining:
                self._join(joining, cache)

    def _take_tokens(
        self, requests: dict[int, ActiveRequest], logits: Tensor, cache: H2OCache
    ) -> Generator[Result, None, dict[int, ActiveRequest]]:
        """Choose the next token of each request, given by its row of `cache`, from logits
        [n, vocabulary]. Yield the results of requests that end, and return the others."""
        active = {}
        likeliest = logits.max(-1).indices.tolist()  # argmax takes five times as long in 16 bits
        for i, (row, running) in enumerate(requests.items()):
            try:
                if running.is_plain_greedy:
                    running.take(likeliest[i])
                else:
                    running.accept(logits[i : i + 1])
            except Exception as error:
                yield _error_result(running, error)
                continue
            if self.settings.on_token is not None:
                self.settings.on_token(running.index, running.new[-1])
            if running.finish_reason:
                yield running.result(row_report(cache, row))
            else:
                active[row] = running
        return active

    def _join(self, joining: dict[int, ActiveRequest], cache: H2OCache) -> None:
        """Copy prefilled prompts, given by their rows of `cache`, into idle rows of the batch."""
        settings, batch = self.settings, self.batch
        idle = [row for row, n in enumerate(batch.tokens) if n == 0][: len(joining)]
        tokens = [running.prompt_tokens + settings.virtual for running in joining.values()]
        batch.join(idle, cache, list(joining), tokens)
        for row, running in zip(idle, joining.values(), strict=True):
            running.cache = None  # its tensors were copied
            self.running[row] = running

    def _step(self) -> Iterator[Result]:
        """Decode one token in each active row."""
        yield from self._end_at_other_angles()
        if not self.running:
            return
        batch = self.batch
        before = int(batch.cache.get_seq_length())  # copied: steps change the tensor in place
        ids = {row: self.running[row].new[-1] for row in sorted(self.running)}
        try:
            logits = batch.step(ids)
        except IndexError as error:  # the longest row is past the end of the model's position table
            if int(batch.cache.get_seq_length()) != before:
                raise
            yield self._end_in_error(max(ids, key=batch.tokens.__getitem__), error)
            return
        requests = {row: self.running[row] for row in ids}
        active = yield from self._take_tokens(requests, logits, batch.cache)
        for row in requests.keys() - active:
            self._leave(row)

    def _end_at_other_angles(self) -> Iterator[Result]:
        """End the rows whose whole text `generate()` would prefill again at this length."""
        for row in sorted(self.running):
            try:
                self.batch.cache.guard.check_angles(self.batch.tokens[row], 1)
            except ValueError as error:
                yield self._end_in_error(row, error)

    def _end_in_error(self, row: int, error: Exception) -> Result:
        running = self.running[row]
        self._leave(row)
        return _error_result(running, error)

    def _leave(self, row: int) -> None:
        self.batch.leave(row)
        del self.running[row]


def _error_result(running: ActiveRequest, error: Exception) -> Result:
    return Result(running.index, [], None, running.prompt_tokens, "error", {}, error)


def can_share(request: ActiveRequest) -> bool:
    """Whether a prompt can be prefilled together with others: in one chunk, without prefix or pins,
    with the config of the call, and by a model that keeps padded rows apart."""
    guard, settings = request.cache.guard, request.settings
    return (
        request.tokens_prefilled == 0
        and request.generation_config.prefill_chunk_size is None
        and request.cache.config == settings.config
        and not (guard.pins or guard.has_states or guard.has_rope_deltas)
        and not (settings.virtual or settings.angles)
        and forward_accepts(settings.model, "position_ids")
    )


def fits(request: ActiveRequest, group: Sequence[ActiveRequest]) -> bool:
    """Whether a prompt is prefilled with a group of others that all can share a pass."""
    if not can_share(request):
        return False
    on_cpu = input_device(request.settings.model).type == "cpu"
    limits = ON_CPU if on_cpu else ELSEWHERE
    lengths = [x.prompt_tokens for x in group]
    longest = max(*lengths, request.prompt_tokens)
    before, after = len(group) * max(lengths), (len(group) + 1) * longest
    pads = after - before - request.prompt_tokens
    return after <= limits.tokens and pads <= limits.pads


@torch.no_grad()
def prefill_together(group: Sequence[ActiveRequest]) -> tuple[H2OCache, Tensor]:
    """Prefill the prompts of a group in one pass, padded on the left.

    Returns:
        A cache with a row for each prompt, and logits [B, vocabulary] of their first new tokens.
    """
    settings, lengths = group[0].settings, [x.prompt_tokens for x in group]
    rows = [x.ids[0] for x in group]
    ids, mask = (
        pad_sequence(x, batch_first=True, padding_side="left")
        for x in (rows, [torch.ones_like(row) for row in rows])
    )
    cache = H2OCache(settings.model.config, settings.config, prompt_length=lengths)
    padding = None if min(lengths) == max(lengths) else mask
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with cache.guard.telling(ModelCall.of(settings.model, ids, padding, positions)):
        output = settings.model(
            input_ids=ids,
            attention_mask=padding,
            position_ids=positions,
            use_cache=True,
            **with_cache(cache),
            **group[0].last_logits,
        )
    for request in group:
        request.tokens_prefilled = request.prompt_tokens
    logits: Tensor = output.logits[:, -1]
    return cache, logits
