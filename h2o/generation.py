"""One prompt, one model, one cache: a greedy generation that is timed, as `h2o generate` shows it.

Every run goes through the model's own generate(), with the cache and the
attention implementation that its users have: the full cache is transformers'
DynamicCache under sdpa. A streamer, which generate() calls for each new token,
takes the times: all up to the first new token is the prefill.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from h2o import backends
from h2o.config import H2OConfig
from h2o.config_fields import Pinned
from h2o.errors import UnsupportedError, UserError
from h2o.progress import Progress

__all__ = ["Run", "Streamer", "generate", "leading_agreement", "versions"]


@dataclass(frozen=True)
class Run:
    """One generation and what it took."""

    mode: str
    """its name"""
    text: str
    new_tokens: int
    prefill_seconds: float
    prefill_tokens_per_second: float
    decode_seconds: float
    decode_tokens_per_second: float
    """of the tokens after the first, which the prefill gives; 0 if there are none"""
    kv_bytes_held: int
    """keys and values at the end"""
    kv_bytes_full: int
    """what a full cache would hold then"""
    tokens_seen: int
    tokens_held: int
    """keys at the end, in each layer and key/value head; the mean where they differ"""
    tokens_evicted: int
    mass_evicted: float
    """share of all attention given that evicted keys had received, 0 to 1"""
    tokens_agree: int | None
    """leading tokens equal to the full cache's; None without a full run"""


def generate(
    mode: str,
    config: H2OConfig | None,
    model: Any,
    tokenizer: Any,
    ids: Any,
    *,
    max_new_tokens: int,
    progress: Progress,
    document: int | None = None,
    pinned: Pinned = None,
    compile: bool = False,
    stream: Callable[[str], None] | None = None,
) -> tuple[Run, list[int]]:
    """Generates greedily with a new cache, and takes the time.

    Args:
        mode: the name that the run gets, and the progress line shows.
        config: of the cache, None for transformers' own.
        ids: int64 [1, n], the prompt.
        document: tokens of the prompt that `h2o.compress_document` reads first, and twice; None: it
            does not.
        pinned: as of `H2OCache`.
        compile: compile the decode step of an H2OCache, before the clock starts.
        stream: is called with the text piece by piece as it grows; without it the progress line
            shows the text's end.

    Returns:
        (what it took, the new tokens)

    Raises: UserError for a cache that is to be compiled and cannot, and for pins that do not fit.
    """
    import torch

    from h2o.compat import with_cache

    compiled = compile and config is not None
    begin = time.perf_counter()
    cache = _new_cache(model, config, ids.shape[1], compiled, pinned)
    reading = 0.0
    if document is not None and config is not None:
        with _pins_fit(pinned):
            cache = _read(model, tokenizer, ids[:, :document], config, mode, progress, pinned)
        reading = time.perf_counter() - begin
    how: dict[str, Any] = {"do_sample": False}
    if compiled:
        progress.say(f"{mode}: compiling the decode step, which takes a minute or two")
        how |= compiling()
        few, warm = ids[:, :8], _new_cache(model, config, ids.shape[1], compiled)
        mask = torch.ones_like(few)
        model.generate(few, attention_mask=mask, max_new_tokens=3, **with_cache(warm), **how)
    streamer = Streamer(mode, tokenizer, progress, stream, max_new_tokens)
    hooks = [] if compiled else watch_layers(model, streamer.prefilling)
    try:
        with _pins_fit(pinned):
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                **with_cache(cache),
                streamer=streamer,
                max_new_tokens=max_new_tokens,
                **how,
            )
    finally:
        progress.update("")
        for hook in hooks:
            hook.remove()
    prefill, *steps = streamer.seconds
    prefill += reading
    run = Run(
        mode=mode,
        text=streamer.text,
        new_tokens=len(streamer.tokens),
        prefill_seconds=prefill,
        prefill_tokens_per_second=ids.shape[1] / prefill,
        decode_seconds=sum(steps),
        decode_tokens_per_second=len(steps) / sum(steps) if steps else 0.0,
        tokens_agree=None,
        **holdings(cache),
    )
    return run, streamer.tokens


def _new_cache(
    model: Any, config: H2OConfig | None, tokens: int, compiled: bool, pinned: Pinned = None
) -> Any:
    from h2o.hf.cache.new_cache import new_cache

    try:
        return new_cache(model, config, tokens, compiled, pinned)
    except UnsupportedError as error:
        if compiled:
            raise UserError(f"--compile: {error}") from error
        raise


def _read(
    model: Any,
    tokenizer: Any,
    ids: Any,
    config: H2OConfig,
    mode: str,
    progress: Progress,
    pinned: Pinned,
) -> Any:
    from h2o.hf.document.compress import compress_document

    def say(done: int, columns: int) -> None:
        progress.update(f"{mode}: reading, {done} of {columns} tokens")

    return compress_document(
        model, ids, config, readings=2, tokenizer=tokenizer, pinned=pinned, progress=say
    )


@contextmanager
def _pins_fit(pinned: Pinned) -> Iterator[None]:
    """Raises UserError in the place of a ValueError, where something is pinned."""
    try:
        yield
    except ValueError as error:
        if pinned is None:
            raise
        raise UserError(f"--pin: {error}") from error


def compiling() -> dict[str, Any]:
    """What makes the model's generate() compile, also on a CPU."""
    from transformers import CompileConfig

    from h2o.compat import compile_everywhere

    config = CompileConfig(fullgraph=True, mode="default")
    compile_everywhere(config)
    return {"compile_config": config}


def warm_up(model: Any, ids: Any) -> None:
    """Read the weights from the disk, which the first run would have to wait for otherwise."""
    import torch

    with torch.no_grad():
        model(ids[:, :8], use_cache=False)


def holdings(cache: Any) -> dict[str, Any]:
    """The fields of a Run that tell what a cache holds."""
    if not hasattr(cache, "report"):
        from h2o.hf.cache.new_cache import bytes_of_keys

        held = bytes_of_keys(cache)
        seen = cache.get_seq_length()
        return {
            "kv_bytes_held": held,
            "kv_bytes_full": held,
            "tokens_seen": seen,
            "tokens_held": seen,
            "tokens_evicted": 0,
            "mass_evicted": 0.0,
        }
    report = cache.report()
    total, layers = report.total, sum(layer.kind == "h2o" for layer in report.layers)
    seen = held = cache.get_seq_length()
    if layers:  # otherwise all have a sliding window of their own
        seen, held = total.seen[0] // layers, total.kept[0] // layers
    return {
        "kv_bytes_held": total.bytes_held,
        "kv_bytes_full": total.bytes_full,
        "tokens_seen": seen,
        "tokens_held": held,
        "tokens_evicted": seen - held,
        "mass_evicted": total.share_evicted,
    }


def versions() -> dict[str, str]:
    """Of what a result depends on."""
    import torch
    import transformers

    installed = {package.__name__: package.__version__ for package in (torch, transformers)}
    return {"h2o": backends.VERSION, **installed}


def leading_agreement(tokens: list[int], others: list[int]) -> int:
    """How many tokens from the first on are the same in both."""
    pairs = list(zip(tokens, others, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def watch_layers(model: Any, passed: Callable[[int, int], None]) -> list[Any]:
    """Hooks that call `passed(layers done, layers)` whenever an attention layer is through."""
    attentions = [module for module in model.modules() if hasattr(module, "layer_idx")]
    layers = 1 + max((module.layer_idx for module in attentions), default=0)

    def after(module: Any, *_: Any) -> None:
        passed(module.layer_idx + 1, layers)

    return [module.register_forward_hook(after) for module in attentions]


class Streamer:
    """What generate() calls as it goes: put() with the prompt, put() with each token, end()."""

    def __init__(
        self,
        mode: str,
        tokenizer: Any,
        progress: Progress,
        stream: Callable[[str], None] | None,
        max_new_tokens: int,
    ) -> None:
        self.mode, self.tokenizer, self.progress = mode, tokenizer, progress
        self.stream, self.max_new_tokens = stream, max_new_tokens
        self.tokens: list[int] = []
        self.text = ""
        self.seconds: list[float] = []
        """from the prompt to the first token, then from token to token"""
        self.since: float | None = None

    def prefilling(self, layer: int, layers: int) -> None:
        if not self.tokens:
            self.progress.update(f"{self.mode}: prefill, layer {layer} of {layers}")

    def put(self, value: Any) -> None:
        now = time.perf_counter()
        if self.since is not None:
            self.seconds.append(now - self.since)
            self.tokens.extend(value.reshape(-1).tolist())
            self.show(final=False)
        # What showing takes is the terminal's time, not the model's.
        self.since = time.perf_counter()

    def end(self) -> None:
        self.show(final=True)

    def show(self, final: bool) -> None:
        """Stream what is new, but never half a character: the rest comes with later tokens."""
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if text.endswith("\ufffd") and not final:
            return
        if self.stream:
            self.progress.update("")
            self.stream(text[len(self.text) :])
        else:
            tail = " ".join(text[-60:].split())
            count = f"{len(self.tokens)} of {self.max_new_tokens}"
            self.progress.update(f"{self.mode}: {count}  ...{tail}")
        self.text = text
