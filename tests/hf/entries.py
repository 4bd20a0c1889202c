"""The functions that take arguments from users, and the kind of each argument.

`tests/hf/test_arguments.py` gives each argument every odd value of its kind, and fails for a public
function or an argument that is not listed here.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

import h2o
from h2o import H2OCache, H2OConfig, Profile
from h2o.errors import UserError
from h2o.hf.simulation.simulation import simulated
from tests import odd_values as odd
from tests.hf.chat_templates import TURNS
from tests.hf.entries_of_measures import OF_MEASURES
from tests.hf.entry_calls import (
    CACHE,
    CHAT,
    CONFIG,
    IDS,
    INTEGER,
    MASK,
    MASKS,
    MODEL,
    PAIR,
    POLICY,
    SMALL,
    TEXT,
    A,
    Current,
    Entry,
    answers,
    asked,
    compressed,
    enabled,
    for_row,
    from_dynamic_cache,
    is_patched,
    loaded,
    model,
    of_cache,
    plain,
    read,
    tokenizer,
    with_block,
    without_span,
)  # fmt: skip

_HOME = tempfile.TemporaryDirectory()
FOLDER = Path(_HOME.name)
SHARES = (((0.5, 1.5), (1.25, 0.75)),)


@functools.cache
def simulation() -> Any:
    with simulated(model(), **SMALL, trace=True, mass=True) as made, torch.no_grad():
        model()(TEXT, use_cache=False)
    return made


@functools.cache
def kept() -> Any:
    cache = H2OCache(model(), **SMALL)
    read(cache, PAIR)
    return cache.kept(1)


@functools.cache
def saved_model() -> str:
    model().save_pretrained(FOLDER / "model")
    tokenizer().save_pretrained(FOLDER / "model")
    return str(FOLDER / "model")


def disabled(**given: Any) -> None:
    h2o.enable(model(), **SMALL)
    try:
        h2o.disable(**given)
    except TypeError:
        h2o.disable(model())
        raise


def config(**fields: Any) -> Any:
    return H2OConfig(**fields)


def of_kept(name: str) -> Any:
    def call(**given: Any) -> Any:
        given = {"input_ids": PAIR, **given}
        return [tuple(x) for x in kept().tokens(tokenizer(), **given)]

    return call


def next_turn(**given: Any) -> Any:
    given = {"ids": IDS, "message": "And now?", **given}
    return plain(h2o.next_turn(tokenizer(), given.pop("ids"), given.pop("message"), **given))


def span(**given: Any) -> Any:
    begin = tokenizer().apply_chat_template(CHAT, tokenize=True, return_dict=False)
    given = {"messages": CHAT, "ids": begin, **given}
    return h2o.system_span(tokenizer(), **given)


def load(**given: Any) -> Any:
    made, _ = h2o.load_model(saved_model(), **given)
    return str(made.dtype), str(made.device), made.config._attn_implementation


def profile(**given: Any) -> Any:
    return Profile(**{"fractions": [0.5], "shares": SHARES, "window": 20, **given})


AMOUNTS = {"budget": A(0.5, odd.amount), "budget_unit": A("bytes", odd.choice)}
FIELDS = {
    "budget": A(0.7, odd.amount),
    "heavy": A(0.7, odd.amount_or_list),
    "recent": A(64, odd.amount_or_list),
    **POLICY,
    "kv_dtype": A("int8", odd.choice),
    "head_shares": A([[1.0, 2.0], [3.0, 0.5]], odd.table),
    "budget_unit": A("keys", odd.choice),
    "min_tokens": A(0, odd.integer, least=0),
    "positions": A("cache_relative", odd.choice),
}
OF_TOKENS = {
    "row": A(1, odd.index, length=2),
    "head": A(1, odd.index, length=2),
    "input_ids": A(PAIR.tolist(), odd.batch_of_ids),
    "attention_mask": A(torch.ones_like(PAIR).bool(), odd.mask_of_any_length),
}


ENTRIES: dict[str, Entry] = {
    "H2OConfig": Entry(config, FIELDS),
    "H2OConfig.preset": Entry(
        lambda **x: H2OConfig.preset(**{"name": "robust", **x}),
        {"name": A("authors", odd.choice), **AMOUNTS},
        ("profile",),
    ),
    **{
        f"H2OConfig.{name}": Entry(
            lambda name=name, **x: getattr(H2OConfig, name)(**{"budget": 0.5, **x}), AMOUNTS,
            ("profile",),
        )
        for name in ("authors", "robust", "echo", "calibrated")
    },
    "H2OConfig.recommended": Entry(H2OConfig.recommended, {"budget": AMOUNTS["budget"]}),
    "H2OConfig.full": Entry(H2OConfig.full, {}),
    "H2OConfig.local": Entry(H2OConfig.local, {"recent": FIELDS["recent"]}),
    "H2OConfig.heavy_only": Entry(H2OConfig.heavy_only, {"heavy": FIELDS["heavy"]}),
    "H2OConfig.streaming": Entry(
        lambda **x: H2OConfig.streaming(**{"recent": 64, **x}),
        {"recent": FIELDS["recent"], "sinks": POLICY["sinks"]},
    ),
    "H2OConfig.for_model": Entry(for_row().for_model, MODEL),
    "H2OConfig.tokens": Entry(for_row().tokens, {"n": A(20, odd.integer, least=0)}),
    "H2OConfig.count_held": Entry(
        lambda **x: for_row().count_held(**{"n": 20, **x}),
        {"n": A(30, odd.integer, least=0), "prompt": A(9, odd.integer, least=0)},
    ),
    "H2OConfig.layer_amounts": Entry(
        lambda **x: for_row().layer_amounts(**{"layer": 0, "layers": 2, **x}),
        {"layer": A(1, odd.index, length=2), "layers": A(2, odd.integer)},
    ),
    "Profile": Entry(
        profile,
        {"fractions": A([0.5], odd.numbers), "window": A(20, odd.integer)},
        ("shares", "model", "weights", "texts", "settings", "versions"),
    ),
    "Profile.shares_for": Entry(
        profile().shares_for, {"budget_fraction": A(0.5, odd.positive)},
    ),
    "Profile.check": Entry(profile().check, MODEL),
    "Profile.check_attention": Entry(None, {}, ("attention", "layer")),
    "Profile.as_dict": Entry(profile().as_dict, {}),
    "Profile.from_dict": Entry(Profile.from_dict, {}, ("content",)),
    "Profile.save": Entry(None, {}, ("path",)),
    "Profile.load": Entry(None, {}, ("path",)),
    "Profile.shipped": Entry(Profile.shipped, MODEL),
    # ---- caches --------------------------------------------------------------------------------
    "H2OCache": Entry(
        lambda **x: read(H2OCache(**{"config": model(), **x, **fields_beside(x)})),
        {**CACHE, "config": MODEL["model"], "compileable": A(False, odd.flag)},
    ),
    "H2OCache.from_dynamic_cache": Entry(
        from_dynamic_cache,
        {**CONFIG, "config": MODEL["model"], "attention_mask": A(MASKS, odd.mask)},
        ("cache",),
    ),
    "H2OCache.fork": Entry(
        of_cache(lambda x, **n: x.fork(**n)), {"rows": A(2, odd.integer)}, state=Current.state
    ),
    "H2OCache.save": Entry(None, {}, ("path", "model")),
    "H2OCache.load": Entry(loaded(FOLDER), {**MODEL, "device": A("cpu", odd.device)}, ("path",)),
    "H2OCache.reset": Entry(of_cache(H2OCache.reset), {}),
    "H2OCache.crop": Entry(
        of_cache(H2OCache.crop),
        {"tokens": A(-1, odd.any_integer)},
        state=Current.state,
    ),
    "H2OCache.evict": Entry(
        of_cache(without_span),
        {
            "spans": A([(1, 3)], odd.unnamed_spans),
            "ids": A(PAIR.tolist(), odd.batch_of_ids_or_none),
            "attention_mask": A(torch.ones_like(PAIR).bool(), odd.mask_of_any_length),
        },
        state=Current.state,
    ),
    "H2OCache.activate_past_recording": Entry(of_cache(H2OCache.activate_past_recording), {}),
    "H2OCache.reorder_cache": Entry(
        of_cache(H2OCache.reorder_cache), {"beam_idx": A([1, 0], odd.rows)}, state=Current.state
    ),
    "H2OCache.batch_select_indices": Entry(
        of_cache(H2OCache.batch_select_indices), {"indices": A([1], odd.rows)}, state=Current.state
    ),
    "H2OCache.batch_repeat_interleave": Entry(
        of_cache(H2OCache.batch_repeat_interleave), {"repeats": A(2, odd.integer)},
        state=Current.state,
    ),
    "H2OCache.kept": Entry(of_cache(H2OCache.kept), {"layer": A(1, odd.index, length=2)}),
    "H2OCache.evicted_at": Entry(
        of_cache(H2OCache.evicted_at), {"layer": A(1, odd.index, length=2)}
    ),
    "H2OCache.tokens": Entry(
        of_cache(lambda x, **y: x.tokens(tokenizer(), **{"input_ids": PAIR, "layer": 1, **y})),
        {"layer": A(1, odd.index, length=2), **OF_TOKENS},
        ("tokenizer",),
    ),
    "H2OCache.report": Entry(of_cache(lambda x: x.report().as_dict()), {}),
    "H2OCache.is_prompt_only": Entry(of_cache(lambda x: x.is_prompt_only()), {}),
    "Kept.columns": Entry(
        lambda **x: plain(kept().columns(**x)), {"attention_mask": A(MASKS, odd.mask_of_any_length)}
    ),
    **{
        f"Kept.{name}": Entry(
            of_kept(name), OF_TOKENS, ("tokenizer",),
        )
        for name in ("tokens", "highlight")
    },
    "Kept.plot": Entry(None, {}, ("ax", "row")),
    # ---- models --------------------------------------------------------------------------------
    "enable": Entry(
        enabled, {**MODEL, **CONFIG, "pinned": CACHE["pinned"], "trace": CACHE["trace"]},
        state=is_patched,
    ),
    "disable": Entry(disabled, MODEL),
    "patched": Entry(
        lambda **x: with_block(h2o.patched(**{"model": model(), **x})),
        {**MODEL, **CONFIG, "pinned": CACHE["pinned"], "trace": CACHE["trace"]},
        state=is_patched,
    ),
    "simulated": Entry(
        lambda **x: with_block(
            simulated(**{"model": model(), **x, **fields_beside(x)}), use_cache=False
        ),
        {
            **MODEL, **CACHE, "ratio_of": A("prompt", odd.choice), "mass": A(True, odd.flag),
            "evict": A({8: [(1, 3)]}, odd.mapping),
        },
        ("masks",),
        state=is_patched,
    ),
    "Simulation.evicted_at": Entry(lambda **x: plain(simulation().evicted_at(**x)), INTEGER),
    "Simulation.scores": Entry(lambda **x: plain(simulation().scores(**x)), INTEGER),
    "Simulation.retained_mass": Entry(
        lambda **x: str(plain(simulation().retained_mass(**{"layer": 1, **x}))),
        {**INTEGER, "per_token": A(True, odd.flag)},
    ),
    "packed_weights": Entry(lambda **x: with_block(h2o.packed_weights(**x)), {
        "model": A(model(), odd.module),
    }),
    "supports": Entry(h2o.supports, MODEL),
    "load_model": Entry(
        load,
        {"dtype": A("bfloat16", odd.dtype), "device": A("cpu", odd.device)},
        ("name", "attn_implementation", "log", "check"),
        error=UserError,
    ),
    "generate_all": Entry(
        answers,
        {
            **MODEL, **CONFIG,
            "prompts": A([IDS, IDS[:9]], odd.prompts),
            "rows": A(1, odd.integer),
            "max_new_tokens": A(2, odd.integer),
            "seed": A(7, odd.seed),
            "pinned": CACHE["pinned"],
            "on_token": A(print, odd.function),
            "as_completed": A(False, odd.flag),
            "compileable": A(False, odd.flag),
            "chat_template_kwargs": A({"tools": None}, odd.mapping),
            "generation_config": A(GenerationConfig(), odd.config),
            "prefix": A(None, odd.config),
            "tokenizer": A(tokenizer(), odd.function),
        },
        ("bytes",),
    ),
    "Request": Entry(
        asked,
        {
            "prompt": A(IDS, odd.ids),
            "max_new_tokens": A(2, odd.integer),
            "seed": A(7, odd.seed),
            "config": A(H2OConfig(heavy=4, recent=5), odd.config),
            "generation_config": A(GenerationConfig(), odd.config),
            "stopping_criteria": A([], odd.functions),
            "chat_template_kwargs": A(None, odd.mapping),
            "pinned": CACHE["pinned"],
            "evict": A([(0, 1)], odd.unnamed_spans, several=False),
        },
        (),
    ),
    "compress_document": Entry(
        compressed,
        {
            **MODEL, **CONFIG,
            "input_ids": A(TEXT.tolist(), odd.batch_of_ids),
            "readings": A(1, odd.choice),
            "attention_mask": A(MASK, odd.mask),
            "repeat": A([5, 6], odd.ids),
            "by_attention": A(0.25, odd.fraction),
            "pinned": CACHE["pinned"],
            "progress": A(lambda done, total: None, odd.function),
        },
        ("tokenizer",),
    ),
    "next_turn": Entry(
        next_turn, {"ids": A(IDS, odd.ids, vocabulary=False), "eos_token_id": A(3, odd.end_tokens)},
        ("tokenizer", "message"),
    ),
    "thought_spans": Entry(
        lambda **x: h2o.thought_spans(tokenizer(), **x),
        {"ids": A(IDS, odd.ids, vocabulary=False)}, ("tokenizer",),
    ),
    "tool_spans": Entry(
        lambda **x: h2o.tool_spans(
            tokenizer(), **{"ids": IDS, "chat_template": TURNS.replace("}}\n", "}}<end>"), **x}
        ),
        {"ids": A(IDS, odd.ids, vocabulary=False), "keep_last": A(2, odd.integer, least=0)},
        ("tokenizer",),
    ),
    "dropped_spans": Entry(
        lambda **x: h2o.dropped_spans(tokenizer(), **{"ids": IDS, "new_ids": IDS, **x}),
        {
            "ids": A(IDS, odd.ids, vocabulary=False),
            "new_ids": A(IDS, odd.ids, vocabulary=False),
        },
        ("tokenizer",),
    ),
    "without_spans": Entry(
        lambda **x: plain(h2o.without_spans(**{"ids": IDS, "spans": [(0, 1)], **x})),
        {
            "ids": A(IDS, odd.ids, vocabulary=False),
            "spans": A([(0, 1)], odd.unnamed_spans, several=False),
        },
    ),
    "system_span": Entry(
        span, {"messages": A(CHAT, odd.messages)}, ("tokenizer", "ids"),
    ),
    **OF_MEASURES,
}  # fmt: skip


def fields_beside(given: dict[str, Any]) -> dict[str, Any]:
    """The config's fields beside other arguments, unless a config is among them."""
    return {} if "h2o_config" in given else SMALL
