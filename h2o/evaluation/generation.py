"""Timed greedy generation from one prompt with one cache, for `h2o generate` and `h2o recommend`.

Every run calls the model's own generate(), with the cache and the attention implementation that
users get. The full cache is transformers' DynamicCache with sdpa. The prefill time is the time to
the first new token.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm
from transformers import CompileConfig, DynamicCache, TextStreamer

from h2o.compat import compile_everywhere, with_cache
from h2o.config import H2OConfig
from h2o.config.fields import Pinned
from h2o.errors import UnsupportedError, UserError
from h2o.hf.cache.cache import H2OCache
from h2o.hf.model_traits.wrappers import input_device
from h2o.hf.rotary.length_dependent_rope import LengthDependentRope


@dataclass(frozen=True)
class Run:
    """One generation, its times and what the cache holds at the end."""

    mode: str
    """Name of the cache."""
    text: str
    new_tokens: int
    prefill_seconds: float
    prefill_tokens_per_second: float
    decode_seconds: float
    decode_tokens_per_second: float
    """Rate of the tokens after the first, which comes from the prefill. 0 if there are none."""
    kv_bytes_held: int
    """Bytes of keys and values."""
    kv_bytes_full: int
    """Bytes that a full cache would hold."""
    tokens_seen: int
    tokens_held: int
    """Number of keys in each layer and key/value head, or the mean if the numbers differ."""
    tokens_evicted: int
    mass_evicted: float
    """Share of all attention that evicted keys had received, 0 to 1."""


class Times(NamedTuple):
    """New tokens of one generation, and the seconds that they took."""

    tokens: list[int]
    prefill: float
    decode: float
    """Seconds for the tokens after the first."""


class Stopwatch:
    """A streamer for generate() that takes the time of each token.

    Args:
        listener: called with new tokens.
    """

    def __init__(self, device: Any, listener: Callable[[torch.Tensor], Any] | None = None) -> None:
        self.synchronize = torch.get_device_module(device).synchronize
        self.listener = listener
        self.seconds: list[float] = []
        """Times of the prompt, just before the prefill, and of each token."""
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.synchronize()
        self.seconds.append(time.perf_counter())
        if len(self.seconds) > 1:
            self.tokens += value.reshape(-1).tolist()
            if self.listener is not None:
                self.listener(value)

    def end(self) -> None:
        """Called by generate() after the last token."""


def time_tokens(
    model: Any,
    ids: Any,
    cache: Any,
    listener: Callable[[torch.Tensor], Any] | None = None,
    **how: Any,
) -> Times:
    """Generate greedily from ids [1, n] with a cache. `listener` is called with new tokens, and
    `how` has further arguments of generate(). A `generation_config` must be greedy."""
    device = input_device(model)
    stopwatch = Stopwatch(device, listener)
    mask = torch.ones_like(ids)
    if "generation_config" not in how:  # which is greedy by itself, unlike a model's own
        how["do_sample"] = False
    how |= {"streamer": stopwatch, **with_cache(cache)}
    LengthDependentRope(model).forget()  # the angles of an earlier run
    with without_cudnn(device):
        model.generate(ids, attention_mask=mask, **how)
    start, first, *_ = stopwatch.seconds
    return Times(stopwatch.tokens, first - start, stopwatch.seconds[-1] - first)


def without_cudnn(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Keep sdpa on CUDA from using cuDNN's attention, which makes a new plan for each number of
    keys. On an H200 this costs a full cache at least 40 ms of host time per token."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    others = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
    return sdpa_kernel([*others])


def generate(
    mode: str,
    config: H2OConfig | None,
    model: Any,
    tokenizer: Any,
    ids: Any,
    *,
    max_new_tokens: int,
    log: Callable[[str], None],
    pinned: Pinned = None,
    compile: bool = False,
    prints: bool = False,
    quiet: bool = False,
) -> Run:
    """Generate greedily with a new cache, and take the times.

    Args:
        mode: name of the cache.
        config: config of the cache, None for transformers' own.
        ids: int64 [1, n], the prompt.
        pinned: as for `H2OCache`.
        compile: compile the decode step of an H2OCache before the clock starts.
        log: called with a line before compilation.
        prints: print the text as it grows. Otherwise a progress bar counts tokens on a terminal.
        quiet: show no progress bar.

    Raises: UserError for a cache that cannot be compiled, and for pins that do not fit.
    """
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    if compile := compile and config is not None:
        log(f"{mode}: compiling the decode step, which takes a minute or two")
        how |= compile_arguments()
        with _name_option("--compile", UnsupportedError):
            warm = new_cache(model, config, ids.shape[1], compile)
        time_tokens(model, ids[:, :8], warm, **how | {"max_new_tokens": 3})
    printer = TextStreamer(tokenizer, skip_special_tokens=True)
    with contextlib.nullcontext() if pinned is None else _name_option("--pin", ValueError):
        cache = new_cache(model, config, ids.shape[1], compile, pinned)
        hide = quiet or prints or None  # None hides it unless this is a terminal
        with tqdm(desc=mode, total=max_new_tokens, unit="token", leave=False, disable=hide) as bar:
            listener = printer.put if prints else lambda _: bar.update()
            times = time_tokens(model, ids, cache, listener, **how)
    if prints:
        printer.end()
    prefill, count = times.prefill, len(times.tokens)
    return Run(
        mode=mode,
        text=tokenizer.decode(times.tokens, skip_special_tokens=True),
        new_tokens=count,
        prefill_seconds=prefill,
        prefill_tokens_per_second=ids.shape[1] / prefill,
        decode_seconds=times.decode,
        decode_tokens_per_second=(count - 1) / times.decode if count > 1 else 0.0,
        **_cache_facts(cache),
    )


def new_cache(
    model: Any,
    config: H2OConfig | None,
    prompt_tokens: int,
    compileable: bool = False,
    pinned: Pinned = None,
) -> DynamicCache | H2OCache:
    """Create an empty cache for a prompt of `prompt_tokens` tokens.

    Also switch the model to the attention implementation that the cache needs.

    Args:
        config: settings of an H2OCache; None makes a DynamicCache, which keeps every key.
        compileable, pinned: as for `H2OCache`.
    """
    cache: DynamicCache | H2OCache
    if config is None:
        cache = DynamicCache(config=model.config)
    else:
        cache = H2OCache(
            model.config,
            config.for_model(model),
            prompt_length=prompt_tokens,
            pinned=pinned,
            compileable=compileable,
        )
    model.set_attn_implementation("sdpa" if config is None else "h2o")
    return cache


def bytes_of_keys(cache: DynamicCache) -> int:
    """Bytes of the keys and values in transformers' own cache."""
    tensors = (getattr(x, name, None) for x in cache.layers for name in ("keys", "values"))
    return sum(x.nbytes for x in tensors if x is not None)


@contextlib.contextmanager
def _name_option(option: str, refusal: type[ValueError]) -> Iterator[None]:
    """Turn an error about an option's value into a UserError that names the option."""
    try:
        yield
    except refusal as error:
        raise UserError(f"{option}: {error}") from error


def compile_arguments() -> dict[str, Any]:
    """Arguments for the model's generate() that make it compile, also on a CPU."""
    config = CompileConfig(fullgraph=True, mode="default")
    compile_everywhere(config)
    return {"compile_config": config}


def warm_up(model: Any, ids: Any) -> None:
    """Load the weights from disk, so that the first run does not have to wait for them."""
    with torch.no_grad():
        model(ids[:, :8], use_cache=False)


def _cache_facts(cache: Any) -> dict[str, Any]:
    """The fields of a `Run` about what a cache holds."""
    seen = held = cache.get_seq_length()
    if not hasattr(cache, "report"):
        kv = full = bytes_of_keys(cache)
        mass = 0.0
    else:
        report = cache.report()
        total, layers = report.total, sum(layer.kind == "h2o" for layer in report.layers)
        kv, full, mass = total.bytes_held, total.bytes_full, total.share_evicted
        if layers:  # otherwise every layer has its own sliding window
            seen, held = total.seen[0] // layers, total.kept[0] // layers
    return {
        "kv_bytes_held": kv,
        "kv_bytes_full": full,
        "tokens_seen": seen,
        "tokens_held": held,
        "tokens_evicted": seen - held,
        "mass_evicted": mass,
    }
