"""`Scheduler`: admits the requests of `h2o.generate_all` to the rows of a batch, and decodes them.

A waiting request is admitted when a row is idle (`_admit`). Its prompt is prefilled in a cache of
its own, or together with other short prompts (`h2o.hf.batching.joint_prefill`), and the result is
copied into the row (`h2o.hf.batching.row_batch`). Admission takes turns with decode steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator

from torch import Tensor

from h2o.errors import UnsupportedError
from h2o.hf.attention.attention_switch import use_attention
from h2o.hf.batching import joint_prefill
from h2o.hf.batching.compiled_prefill import CompiledPrefill
from h2o.hf.batching.request import ActiveRequest, Prompt, Request, Result, Settings, likeliest
from h2o.hf.batching.row_batch import RowBatch, row_bytes, row_report
from h2o.hf.cache.cache import H2OCache
from h2o.hf.model_traits.wrappers import unwrap


class Scheduler:
    """Scheduler of one call: its rows, the active requests in them, and the waiting prompts."""

    def __init__(
        self, settings: Settings, prompts: Iterable[Prompt], batch: RowBatch, rows: int | None,
        bytes: int | None,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.waiting = enumerate(prompts)
        self.batch = batch
        self.rows, self.bytes = rows, bytes
        self.uses_graph_prefill = (
            batch.compiled is not None
            and settings.prefix is None
            and CompiledPrefill.can_compile(settings.model, settings.config)
        )
        self.compiled_prefill: CompiledPrefill | None = None
        """Made after the first prompt, if later prompts are prefilled by a graph"""
        self.running: list[ActiveRequest | None] = []
        """Request of each row, None if idle. Empty until the first prompt has been prefilled"""
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
            if any(self.running):
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
            limit = chunk_size or joint_prefill.TOKENS_A_STEP
            tokens += (chunk := sum(x.chunk for x in self.prefilling))
            if any(self.running) and tokens > max(limit, chunk):
                return
            yield from self._prefill()

    def _idle_rows(self) -> int:
        """Number of idle rows. Until the bytes of a row are known, one row is assumed."""
        return self.running.count(None) if self.running else self.rows or 1

    @property
    def _waits_for_graph(self) -> bool:
        """Whether later prompts are prefilled by a graph, which needs a first prompt's budgets."""
        return self.uses_graph_prefill and self.compiled_prefill is None

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
            if self.prefilling and not joint_prefill.fits(self.next, self.prefilling):
                return
            self.prefilling.append(self.next)
            self.next = None
            if self._waits_for_graph or not joint_prefill.can_share(self.prefilling[0]):
                return

    def _prepare(self, index: int, prompt: Prompt) -> Iterator[Result]:
        request = prompt if isinstance(prompt, Request) else Request(prompt)
        try:
            if self.bytes is not None and request.config is not None:
                raise ValueError(
                    "a request with its own budget needs rows=: bytes= fixes the size of a row"
                )
            self.next = ActiveRequest(index, request, self.settings)
            pins = self.next.cache.guard.pins
            if self.bytes is not None and pins and self.settings.config.head_shares is not None:
                raise ValueError("pinned keys change head_shares: give rows= instead of bytes=")
            if self.compiled_prefill and request.config is None and not pins:
                self.next.use_compiled_prefill(self.compiled_prefill)
        except UnsupportedError:
            raise
        except Exception as error:  # concerns this prompt only; the others continue
            self.next = None
            yield _error_result(index, 0, error)

    def _prefill(self) -> Iterator[Result]:
        if len(self.prefilling) > 1:
            yield from self._prefill_together()
            return
        (running,) = self.prefilling
        try:
            is_done = running.prefill_next_chunk()
        except UnsupportedError:
            raise
        except Exception as error:
            self.prefilling = []
            yield _error_result(running.index, running.prompt_tokens, error)
            return
        if is_done:
            self.prefilling = []
            yield from self._start([(running, 0)], running.cache)

    def _prefill_together(self) -> Iterator[Result]:
        group, self.prefilling = self.prefilling, []
        try:
            cache, logits = joint_prefill.prefill_together(group)
        except UnsupportedError:
            raise
        except Exception:  # one of the prompts failed: prefill each alone to find out which
            for running in group:
                self.prefilling = [running]
                yield from self._prefill()
            return
        started = []
        for row, error in enumerate(_next_tokens(group, logits)):
            running = group[row]
            if error is None:
                started.append((running, row))
            else:
                yield _error_result(running.index, running.prompt_tokens, error)
        yield from self._start(started, cache)

    def _start(self, started: list[tuple[ActiveRequest, int]], cache: H2OCache) -> Iterator[Result]:
        """Start requests whose first token is chosen. A prompt is in row `row` of `cache`."""
        joining = []
        for running, row in started:
            running.cache = None  # the tensors will be copied into a row of the batch
            self._call_on_token(running)
            if running.finish_reason:
                yield running.result(row_report(cache, row))
            else:
                joining.append((running, row))
        if joining:
            self._join(joining, cache)

    def _join(self, joining: list[tuple[ActiveRequest, int]], cache: H2OCache) -> None:
        settings = self.settings
        if not self.running:
            each = row_bytes(cache)
            rows = self.rows or self.bytes // each
            if rows == 0:
                raise ValueError(
                    f"bytes={self.bytes:,} cannot hold a row, which takes {each:,} in this config"
                )
            self.batch.make_rows(rows)
            self.running = [None] * rows
        idle = [row for row, x in enumerate(self.running) if x is None][: len(joining)]
        tokens = [running.prompt_tokens + settings.virtual for running, _ in joining]
        self.batch.join(idle, cache, [row for _, row in joining], tokens)
        if self._waits_for_graph and cache.config == settings.config:
            self.compiled_prefill = CompiledPrefill(settings.model, cache, len(self.running))
        for row, (running, _) in zip(idle, joining, strict=True):
            self.running[row] = running

    def _step(self) -> Iterator[Result]:
        """Decode one token in each active row."""
        yield from self._end_at_other_angles()
        if not any(self.running):
            return
        before = int(self.batch.cache.get_seq_length())  # copied: steps change the tensor in place
        try:
            logits = self.batch.step([0 if x is None else x.new[-1] for x in self.running])
        except IndexError as error:  # the longest row is past the end of the model's position table
            if int(self.batch.cache.get_seq_length()) != before:
                raise
            row = max(range(len(self.running)), key=self.batch.tokens.__getitem__)
            yield self._end_in_error(row, error)
            return
        active = self.batch.active_rows
        errors = _next_tokens([self.running[row] for row in active], logits)
        for row, error in zip(active, errors, strict=True):
            running = self.running[row]
            if error is not None:
                yield self._end_in_error(row, error)
                continue
            self._call_on_token(running)
            if running.finish_reason:
                yield running.result(row_report(self.batch.cache, row))
                self._leave(row)

    def _end_at_other_angles(self) -> Iterator[Result]:
        """End the rows whose whole text `generate()` would prefill again at this length."""
        for row in self.batch.active_rows:
            try:
                self.batch.cache.guard.check_angles(self.batch.tokens[row], 1)
            except ValueError as error:
                yield self._end_in_error(row, error)

    def _call_on_token(self, running: ActiveRequest) -> None:
        if self.settings.on_token is not None:
            self.settings.on_token(running.index, running.new[-1])

    def _end_in_error(self, row: int, error: Exception) -> Result:
        running = self.running[row]
        self._leave(row)
        return _error_result(running.index, running.prompt_tokens, error)

    def _leave(self, row: int) -> None:
        self.batch.leave(row)
        self.running[row] = None


def _next_tokens(requests: list[ActiveRequest], logits: Tensor) -> list[Exception | None]:
    """Choose each request's next token from its row of logits [n, vocabulary]. Returns for each
    request the exception that this raised, or None."""
    best = likeliest(logits).tolist()
    raised: list[Exception | None] = [None] * len(requests)
    for row, running in enumerate(requests):
        try:
            if running.is_plain_greedy:
                running.take(best[row])
            else:
                running.accept(logits[row : row + 1])
        except Exception as error:
            raised[row] = error
    return raised


def _error_result(index: int, prompt_tokens: int, error: Exception) -> Result:
    return Result(index, [], None, prompt_tokens, "error", {}, error)
