"""`h2o.generate_all`: many prompts through a fixed number of rows, refilled as they finish.

In a static batch every row waits for the longest answer. Here the next prompt takes a row as soon
as the row's answer is complete. The prompt is read in a cache of its own, or with other short ones
(`h2o.hf.batching.short_prompts`), between two decode steps of the others, and copied into the row
(`h2o.hf.batching.row_batch`). Under H2O the state of a row has a constant size, so no memory is
moved or freed in between. This is continuous batching (Yu et al., Orca, OSDI 2022) without pages.
`_Scheduler._admit` chooses which prompts are next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from numbers import Integral
from typing import Any, Literal

from torch import Tensor
from typing_extensions import Unpack

from h2o.config import PARAMETERS, H2OConfig, one_config
from h2o.config.fields import ConfigFields, Pinned
from h2o.errors import UnsupportedError
from h2o.hf.attention.attention_switch import use_attention
from h2o.hf.batching import short_prompts
from h2o.hf.batching.compiled_prefill import CompiledPrefill
from h2o.hf.batching.request import ActiveRequest, Prompt, Request, Result, Settings
from h2o.hf.batching.row_batch import RowBatch, h2o_layers, row_bytes, row_report
from h2o.hf.cache.cache import H2OCache
from h2o.hf.families.wrappers import unwrap

TOKENS_A_STEP = 2048
"""Prompt tokens read between two decode steps, like `max_num_batched_tokens` of vLLM: fewer leave
rows idle, more let running rows wait."""


def generate_all(
    model: Any,
    prompts: Iterable[Prompt],
    h2o_config: H2OConfig | None = None,
    *,
    rows: int | None = None,
    bytes: int | None = None,
    max_new_tokens: int | None = None,
    generation_config: Any = None,
    tokenizer: Any = None,
    prefix: H2OCache | None = None,
    seed: int = 0,
    pinned: Pinned | Literal["system"] = None,
    on_token: Callable[[int, int], Any] | None = None,
    as_completed: bool = False,
    compileable: bool = False,
    **parameters: Unpack[ConfigFields],
) -> Iterator[Result]:
    """Answers any number of prompts, a fixed number of them at a time.

    ```python
    for result in h2o.generate_all(
        model, prompts, heavy=128, recent=128, rows=16, max_new_tokens=256, tokenizer=tokenizer
    ):
        print(result.index, result.text)
    ```

    A request gets the tokens that `generate()` gives it alone with an `H2OCache` of the same
    config, up to rounding: nothing depends on its neighbors but in which order float sums of a
    larger matrix product are added. Short prompts are read together, others one at a time, in
    chunks with `generation_config.prefill_chunk_size`; rows that run decode a token after each
    chunk, or after prompts of 2,048 tokens. Several calls, also of threads, may share a model.

    Args:
        model: a causal language model of transformers, in eval mode.
        prompts: texts, chats, token ids or a `Request` each; may be an endless iterator, of which
            as many are taken as there are rows.
        h2o_config, parameters: as for `H2OCache`. Fractions are of each prompt.
        rows: how many requests at a time.
        bytes: instead of `rows`, what all rows may take together, all tensors of the cache counted.
            What is being read, a prompt or short ones of 512 tokens, needs its keys and values
            beside it. Not with budgets that depend on the prompt, nor with those of a request.
        max_new_tokens, generation_config: as for `generate()`.
        tokenizer: for prompts that are texts or chats, stop strings, and `Result.text`.
        prefix: what every prompt begins with, read before: a cache of one row of the same settings,
            such as a document's (`H2OCache.load`). Prompts contain its tokens.
        seed: request i samples as `generate()` does after `torch.manual_seed(seed + i)`.
        pinned: as of `H2OCache`, of each prompt whose `Request` has no pins of its own; "system" is
            the system turn of prompts that are chats.
        on_token: called with the index of a request and each new token.
        as_completed: results as they finish, not in the order of prompts.
        compileable: torch.compile takes the step of all rows, one graph for all steps, and prompts
            after the first one, one graph for all lengths. Each needs a minute at first, and
            budgets in tokens: under fractions longer prompts make rows wider, hence other graphs,
            and prompts are read eagerly, as after a prefix, with pins or a request's own budget. A
            model that cannot be compiled is served eagerly, with a warning.

    Yields:
        A `Result` for each prompt. One that cannot be answered has `finish_reason="error"`; the
        others go on. What `prompts` or `on_token` raise is raised.

    Raises:
        UnsupportedError: beams and assisted decoding; a model with sliding windows, or for images.
        ValueError: neither `rows` nor `bytes`, or too few of them; a prefix of other settings.
    """
    config = one_config(h2o_config, parameters).for_model(model)
    if (rows is None) == (bytes is None):
        raise ValueError("give either rows, how many requests at a time, or the bytes for them")
    for name, value in (("rows", rows), ("bytes", bytes), ("max_new_tokens", max_new_tokens)):
        if value is not None and (not isinstance(value, Integral) or value < 1):
            raise ValueError(f"{name} is {value!r}: wanted a whole number of at least 1")
    if isinstance(prompts, str | Mapping):
        raise ValueError(f"prompts is a single {type(prompts).__name__}: give a list of prompts")
    if bytes is not None and (config.needs_prompt_length or config.shares_by_echo):
        raise ValueError(
            "a row's bytes depend on its prompt where budgets are fractions or shared by echo: "
            "give heavy and recent as numbers of tokens, without such shares, or the number of rows"
        )
    batch = RowBatch(model, config, compileable)
    if prefix is not None:
        prefix = _check_prefix(prefix, config).fork()  # its owner may go on with it
    settings = Settings(
        model, config, generation_config, max_new_tokens, tokenizer, prefix, seed, pinned,
        on_token, batch.angles,
    )  # fmt: skip
    if rows is not None and isinstance(prompts, Sized):
        rows = max(1, min(rows, len(prompts)))
    results = _Scheduler(settings, prompts, batch, rows, bytes).run()
    return results if as_completed else _in_order(results)


def _check_prefix(prefix: H2OCache, config: H2OConfig) -> H2OCache:
    if (rows := h2o_layers(prefix)[0].batch_size) > 1:
        raise ValueError(f"a prefix is a cache of one row, not of {rows}")
    for name in PARAMETERS:
        read, wanted = getattr(prefix.config, name), getattr(config, name)
        if read != wanted:
            raise ValueError(
                f"the prefix was read with {name}={read!r} and the call has {wanted!r}: give "
                "h2o_config=prefix.config"
            )
    return prefix


def serves(model: Any, h2o_config: H2OConfig, request: Request, tokenizer: Any = None) -> bool:
    """Whether `generate_all` takes a request: the layers of its model, its way of decoding.

    Raises:
        ValueError: what no way of decoding could answer.
    """
    config = h2o_config.for_model(model)
    try:
        angles = RowBatch(model, config).angles
        settings = Settings(model, config, None, None, tokenizer, None, 0, None, None, angles)
        ActiveRequest(0, request, settings)
    except UnsupportedError:
        return False
    return True


class _Scheduler:
    """The rows, what runs in them, and the prompts that wait."""

    def __init__(
        self, settings: Settings, prompts: Iterable[Prompt], batch: RowBatch, rows: int | None,
        bytes: int | None,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.waiting = enumerate(prompts)
        self.batch = batch
        self.rows, self.bytes = rows, bytes
        self.graph_reads = (
            batch.compiled is not None
            and settings.prefix is None
            and CompiledPrefill.serves(settings.model, settings.config)
        )
        self.reader: CompiledPrefill | None = None
        """From the first prompt on, if a graph reads them"""
        self.running: list[ActiveRequest | None] = []
        """The request of each row; None: idle. No rows before the first prompt has been read"""
        self.reading: list[ActiveRequest] = []
        """The requests whose prompts are being read, together"""
        self.next: ActiveRequest | None = None
        """The request that was taken and could not be read with those"""

    def run(self) -> Iterator[Result]:
        """Between two results, while the caller has its turn, the model has its own attention."""
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
            elif not self.reading:
                return

    def _admit(self) -> Iterator[Result]:
        """Read waiting prompts while a row is idle. Between two decode steps the rows that run wait
        for at most one chunk of a prompt or `TOKENS_A_STEP` tokens."""
        read = 0
        while self._idle_rows():
            if not self.reading:
                yield from self._begin()
            if not self.reading:
                return
            limit = self.reading[0].generation_config.prefill_chunk_size or TOKENS_A_STEP
            read += (chunk := sum(x.chunk for x in self.reading))
            if any(self.running) and read > max(limit, chunk):
                return
            yield from self._prefill()

    def _idle_rows(self) -> int:
        """How many there are; before the bytes of a row are known one."""
        return self.running.count(None) if self.running else self.rows or 1

    def _begin(self) -> Iterator[Result]:
        """Take what is read next: a prompt, or short ones for the idle rows."""
        while len(self.reading) < self._idle_rows():
            if self.next is None:
                taken = next(self.waiting, None)
                if taken is None:
                    return
                yield from self._prepare(*taken)
            if self.next is None:
                continue
            if self.reading and not short_prompts.fits(self.next, self.reading):
                return
            self.reading.append(self.next)
            self.next = None
            if self.graph_reads or not short_prompts.can_share(self.reading[0]):
                return

    def _prepare(self, index: int, prompt: Prompt) -> Iterator[Result]:
        request = prompt if isinstance(prompt, Request) else Request(prompt)
        try:
            if self.bytes is not None and request.config is not None:
                raise ValueError("a budget of its own in rows of so many bytes: give rows instead")
            self.next = ActiveRequest(index, request, self.settings)
            pins = self.next.cache.guard.pins
            if self.bytes is not None and pins and self.settings.config.head_shares is not None:
                raise ValueError("pinned keys change the shares of heads: give rows, not bytes")
            if self.reader and request.config is None and not pins:
                self.next.read_by(self.reader)
        except UnsupportedError:
            raise
        except Exception as error:  # of this prompt; the others go on
            self.next = None
            yield _failed(index, 0, error)

    def _prefill(self) -> Iterator[Result]:
        if len(self.reading) > 1:
            yield from self._read_together()
            return
        (running,) = self.reading
        try:
            is_read = running.read()
        except UnsupportedError:
            raise
        except Exception as error:
            self.reading = []
            yield _failed(running.index, running.prompt_tokens, error)
            return
        if is_read:
            self.reading = []
            yield from self._start([(running, 0)], running.cache)

    def _read_together(self) -> Iterator[Result]:
        group, self.reading = self.reading, []
        try:
            cache, logits = short_prompts.read_together(group)
        except UnsupportedError:
            raise
        except Exception:  # of one of them, and alone it says of which
            for running in group:
                self.reading = [running]
                yield from self._prefill()
            return
        started = []
        for row, error in enumerate(_next_tokens(group, logits)):
            running = group[row]
            if error is None:
                started.append((running, row))
            else:
                yield _failed(running.index, running.prompt_tokens, error)
        yield from self._start(started, cache)

    def _start(self, started: list[tuple[ActiveRequest, int]], cache: H2OCache) -> Iterator[Result]:
        """After the first token of each, which a row of the cache has made."""
        joining = []
        for running, row in started:
            running.cache = None  # its tensors will be in a row of the batch
            self._tell(running)
            if running.finish_reason:
                yield running.result(row_report(cache, row))
            else:
                joining.append((running, row))
        if joining:
            self._join(joining, cache)

    def _join(self, joining: list[tuple[ActiveRequest, int]], cache: H2OCache) -> None:
        settings = self.settings
        if not self.running:
            rows = self.rows or _rows_in(self.bytes, row_bytes(cache))
            self.batch.make_rows(rows)
            self.running = [None] * rows
        idle = [row for row, x in enumerate(self.running) if x is None][: len(joining)]
        tokens = [running.prompt_tokens + settings.virtual for running, _ in joining]
        self.batch.join(idle, cache, [row for _, row in joining], tokens)
        if self.reader is None and self.graph_reads and cache.config == settings.config:
            self.reader = CompiledPrefill(settings.model, cache)
        for row, (running, _) in zip(idle, joining, strict=True):
            self.running[row] = running

    def _step(self) -> Iterator[Result]:
        """One token for each row that runs."""
        yield from self._end_at_other_angles()
        if not any(self.running):
            return
        before = int(self.batch.cache.get_seq_length())  # of a tensor that steps change
        try:
            logits = self.batch.step([0 if x is None else x.new[-1] for x in self.running])
        except IndexError as error:  # of a table of positions, which the longest row has left
            if int(self.batch.cache.get_seq_length()) != before:
                raise
            row = max(range(len(self.running)), key=self.batch.tokens.__getitem__)
            yield self._failed(row, error)
            return
        live = self.batch.live
        errors = _next_tokens([self.running[row] for row in live], logits)
        for row, error in zip(live, errors, strict=True):
            running = self.running[row]
            if error is not None:
                yield self._failed(row, error)
                continue
            self._tell(running)
            if running.finish_reason:
                yield running.result(row_report(self.batch.cache, row))
                self._leave(row)

    def _end_at_other_angles(self) -> Iterator[Result]:
        """Ends the rows whose text `generate()` would read anew now."""
        for row in self.batch.live:
            try:
                self.batch.cache.guard.check_angles(self.batch.tokens[row], 1)
            except ValueError as error:
                yield self._failed(row, error)

    def _tell(self, running: ActiveRequest) -> None:
        if self.settings.on_token is not None:
            self.settings.on_token(running.index, running.new[-1])

    def _failed(self, row: int, error: Exception) -> Result:
        running = self.running[row]
        self._leave(row)
        return _failed(running.index, running.prompt_tokens, error)

    def _leave(self, row: int) -> None:
        self.batch.leave(row)
        self.running[row] = None


def _next_tokens(requests: list[ActiveRequest], logits: Tensor) -> list[Exception | None]:
    """Each request chooses its next token by its row of logits [n, vocabulary]. Returns what that
    raised."""
    best = logits.float().argmax(-1).tolist()  # in 16 bits torch takes five times as long
    raised: list[Exception | None] = [None] * len(requests)
    for row, running in enumerate(requests):
        try:
            if running.by_number:
                running.take(best[row])
            else:
                running.accept(logits[row : row + 1])
        except Exception as error:
            raised[row] = error
    return raised


def _rows_in(bytes: int, each: int) -> int:
    if bytes < each:
        raise ValueError(f"bytes: {bytes:,} hold no row, which takes {each:,} under this config")
    return bytes // each


def _failed(index: int, prompt_tokens: int, error: Exception) -> Result:
    return Result(index, [], None, prompt_tokens, "error", {}, error)


def _in_order(results: Iterator[Result]) -> Iterator[Result]:
    """Results by their index, each as soon as all before it are there."""
    early: dict[int, Result] = {}
    wanted = 0
    for result in results:
        early[result.index] = result
        while wanted in early:
            yield early.pop(wanted)
            wanted += 1
