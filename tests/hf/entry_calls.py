"""Calls of the functions that take arguments from users, with one argument given at a time.

Each returns a plain answer, which can be compared. `tests/hf/entries.py` lists the functions and
the kinds of their arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig

import h2o
from h2o import H2OCache, H2OConfig, Request
from h2o.compat import with_cache
from tests import odd_values as odd
from tests.hf import tiny
from tests.hf.chat_templates import TURNS, byte_tokenizer

IDS = [5, 9, 3, 60, 7, 22, 41, 8, 13, 30, 2, 77, 51, 4, 19, 66, 35, 6, 12, 90]
N = len(IDS)
TEXT = torch.tensor([IDS])
PAIR = torch.tensor([IDS, IDS[::-1]])
MASK = torch.tensor([[False] * 2 + [True] * (N - 2)])
MASKS = torch.cat([MASK, ~MASK ^ ~MASK[:, :1]])
SMALL = {"heavy": 4, "recent": 4}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where?"}]


class Argument(NamedTuple):
    """An argument of a function."""

    good: Any
    odd: list[odd.Odd]


class Entry(NamedTuple):
    """A function that users call."""

    call: Callable[..., Any]
    """Called with one keyword. Returns the answer as plain values."""
    arguments: dict[str, Argument]
    others: tuple[str, ...] = ()
    """Arguments whose kind has no odd values here: functions, paths, tensors of operations and
    objects that are used as they are"""
    error: type[Exception] | None = None
    """Class of all errors, if it is another than that of the kind"""
    state: Callable[[], Any] | None = None
    """Returns what an error must leave unchanged"""


def A(good: Any, kind: Callable[..., list[odd.Odd]], **how: Any) -> Argument:
    return Argument(good, kind(good, **how))


@functools.cache
def model() -> Any:
    return tiny.model("llama")


@functools.cache
def tokenizer() -> Any:
    made = byte_tokenizer()
    made.chat_template = TURNS
    return made


def read(cache: Any, ids: torch.Tensor = TEXT, **more: Any) -> Any:
    """Read a text, and return which keys are held."""
    with torch.no_grad():
        model()(ids, **with_cache(cache), **more)
    return held(cache)


def held(cache: Any) -> Any:
    return [[x.tolist() for x in cache.kept(layer)] for layer in range(len(cache.layers))]


@functools.cache
def _filled() -> H2OCache:
    cache = H2OCache(model(), **SMALL, trace=True)
    cache.activate_past_recording()
    read(cache, PAIR)
    return cache


class Current:
    """The cache that a call of a cache's method changes, made anew for each call."""

    cache: Any = None

    @classmethod
    def begin(cls) -> None:
        cls.cache = _filled().fork()

    @classmethod
    def state(cls) -> Any:
        return held(cls.cache), int(cls.cache.get_seq_length())


def of_cache(change: Callable[..., Any]) -> Callable[..., Any]:
    """A call that changes `Current.cache`, and returns its keys or what the method returns."""

    def call(**argument: Any) -> Any:
        returned = change(Current.cache, **argument)
        return held(Current.cache) if returned is None else plain(returned)

    return call


def without_span(cache: H2OCache, **given: Any) -> None:
    for layer in cache.layers:
        layer.trace = None  # which evict() does not support
    cache.evict(**{"spans": [(1, 3)], **given})


def plain(value: Any) -> Any:
    """Nested lists of numbers for tensors, arrays and caches; all other values unchanged."""
    if isinstance(value, H2OCache):
        return held(value)
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(x) for name, x in value.items()}
    return [plain(x) for x in value] if isinstance(value, list | tuple) else value


def with_block(block: Any, **more: Any) -> Any:
    """What a model answers within a block of `patched` or `simulated`."""
    with block, torch.no_grad():
        return model()(TEXT, **more).logits.tolist()


def is_patched() -> Any:
    return "_h2o_patches" in vars(model()), model().config._attn_implementation


def enabled(**given: Any) -> Any:
    given = {"model": model(), **given}
    subject = given.pop("model")
    h2o.enable(subject, **given)
    try:
        return with_block(torch.no_grad())
    finally:
        h2o.disable(subject)


def answers(*prompts: Any, **given: Any) -> Any:
    """The answers of generate_all. Raises the error of a prompt that could not be answered."""
    given = {"rows": 2, "max_new_tokens": 3, "tokenizer": tokenizer(), **given}
    given |= {} if "h2o_config" in given else SMALL
    subject = given.pop("model", model())
    results = list(h2o.generate_all(subject, given.pop("prompts", prompts or [IDS]), **given))
    for result in results:
        if result.error:
            raise result.error
    return [result.ids for result in results]


def asked(**given: Any) -> Any:
    """The answer to a `Request`."""
    sampling = GenerationConfig(do_sample=True)
    given = {"prompt": IDS, "generation_config": sampling, **given}
    prefix = None
    if "evict" in given:
        read(prefix := H2OCache(model(), **SMALL), TEXT[:, :-1])
    return answers(Request(**given), prefix=prefix)


def full_cache() -> DynamicCache:
    cache = DynamicCache(config=model().config)
    with torch.no_grad():
        model()(PAIR, **with_cache(cache))
    return cache


def compressed(**given: Any) -> Any:
    given = {"input_ids": TEXT, "model": model(), **given}
    if "by_attention" in given or "repeat" in given:
        given = {"readings": 2, "repeat": [5, 6], **given}
    given |= {} if "h2o_config" in given else SMALL
    return held(h2o.compress_document(given.pop("model"), given.pop("input_ids"), **given))


def from_dynamic_cache(**given: Any) -> Any:
    given = {"cache": full_cache(), "config": model(), **given}
    given |= {} if "h2o_config" in given else SMALL
    made = H2OCache.from_dynamic_cache(given.pop("cache"), given.pop("config"), **given)
    return held(made)


def loaded(folder: Any) -> Callable[..., Any]:
    def call(**given: Any) -> Any:
        path = folder / "cache.safetensors"
        if not path.exists():
            _filled().save(path)
        given = {"model": model(), **given}
        return held(H2OCache.load(path, given.pop("model"), **given))

    return call


CONFIG = {"h2o_config": A(H2OConfig(**SMALL), odd.config)}
MODEL = {"model": A(model(), odd.model)}
CACHE = {
    **CONFIG,
    "prompt_length": A(N, odd.lengths),
    "pinned": A([(1, 3)], odd.spans),
    "trace": A(True, odd.flag),
}
INTEGER = {"layer": A(1, odd.integer, least=0)}
"""A layer of an `Analysis`, which need not have all layers"""
POLICY = {
    "sinks": A(2, odd.integer, least=0),
    "score_by": A("mean", odd.choice),
    "decay": A(0.5, odd.fraction),
    "value_weighted": A(True, odd.flag),
}


def for_row(**given: Any) -> Any:
    return H2OConfig(heavy=0.5, recent=0.25, min_tokens=0)
