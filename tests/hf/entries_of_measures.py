"""The part of `tests/hf/entries.py` for measures, operations on tensors, and vLLM."""

from __future__ import annotations

import functools
from typing import Any

import torch

import h2o
from h2o import ops
from h2o.evaluation import protocols
from h2o.evaluation.setting import from_options, parse
from h2o.quantization import quantize
from h2o.vllm import config_entry, paged_request
from tests import odd_values as odd
from tests.hf.entry_calls import (
    CONFIG,
    IDS,
    INTEGER,
    MASK,
    MODEL,
    POLICY,
    SMALL,
    TEXT,
    A,
    Entry,
    for_row,
    model,
    plain,
    tokenizer,
)

WINDOWS = {"window": 20, "windows": 1, "fractions": [0.5], "refine": 0, "draws": 1}


@functools.cache
def analysis() -> Any:
    return h2o.analyze(model(), TEXT, **SMALL)


def calibrated(**given: Any) -> Any:
    given = {"input_ids": TEXT, "model": model(), **WINDOWS, **given}
    profile = h2o.calibrate(given.pop("model"), given.pop("input_ids"), **given)
    return profile.shares, profile.fractions, profile.window, profile.texts


def analyzed(**given: Any) -> Any:
    given = {"input_ids": TEXT, "model": model(), **given}
    given |= {} if "h2o_config" in given else SMALL
    made = h2o.analyze(**given)
    return [plain(made.scores(layer)) for layer in made.layers], plain(made.evicted_at(1))


def of_analysis(name: str, **first: Any) -> Any:
    return lambda **given: plain(getattr(analysis(), name)(**{**first, **given}))


PER = A("query", odd.choice)

AT = A(9, odd.integer, least=0)

OPERATION = ("query", "keys", "values", "slots", "mask", "scale", "softcap", "out", "scores",
             "sink_logits", "policy", "key", "value", "rotary", "prompt", "budget", "evicted_at",
             "kv_dtype", "offsets", "smoothing")  # fmt: skip
"""Operands of operations, which the core checks (tests/core), as it does the policy's fields"""


OF_MEASURES: dict[str, Entry] = {
    "analyze": Entry(
        analyzed,
        {
            **MODEL, **CONFIG, "input_ids": A(IDS, odd.ids), "attention_mask": A(MASK, odd.mask),
            "prompt_length": A(4, odd.lengths),
        },
    ),
    "Analysis.scores": Entry(of_analysis("scores", layer=1), {**INTEGER, "per": PER, "at": AT}),
    "Analysis.heavy": Entry(of_analysis("heavy"), INTEGER),
    "Analysis.evicted_at": Entry(of_analysis("evicted_at"), INTEGER),
    **{
        f"Analysis.{name}": Entry(
            of_analysis("tokens", layer=1, tokenizer=tokenizer()),
            {**INTEGER, "head": A(1, odd.integer, least=0), "per": PER, "at": AT},
            ("tokenizer",),
        )
        for name in ("tokens", "highlight")
    },
    "Analysis.sparsity": Entry(of_analysis("sparsity"), {"threshold": A(0.5, odd.fraction)}),
    "Analysis.power_law": Entry(
        lambda **x: plain([*vars(analysis().power_law(**x)).values()]), {"per": PER}
    ),
    "Analysis.overlap": Entry(of_analysis("overlap"), {"by": A("half", odd.choice), "per": PER}),
    "Analysis.frequency": Entry(of_analysis("frequency"), {}),
    "Analysis.removal": Entry(
        of_analysis("removal", shares=[0.5], limit=9),
        {
            "shares": A([0.25, 0.5], odd.numbers), "limit": A(9, odd.integer, least=2),
            "seed": A(7, odd.seed),
        },
    ),
    "Analysis.retained_mass": Entry(
        of_analysis("retained_mass", layer=1),
        {**INTEGER, **CONFIG, "per_token": A(True, odd.flag)},
    ),
    "Analysis.simulate_cache": Entry(
        lambda **x: plain(analysis().simulate_cache(**x)[1].evicted_at),
        {"config": CONFIG["h2o_config"]},
    ),
    "Analysis.plot": Entry(None, {}, ("figure", "ax")),
    "Analysis.table": Entry(of_analysis("table"), {"by": A("head", odd.choice)}),
    "calibrate": Entry(
        calibrated,
        {
            **MODEL,
            "input_ids": A(TEXT, odd.ids, texts=True),
            "window": A(18, odd.integer),
            "windows": A(1, odd.integer),
            "fractions": A([0.5], odd.numbers),
            "refine": A(0.25, odd.fraction),
            "draws": A(1, odd.integer),
            "seed": A(7, odd.seed),
        },
        ("resume", "progress"),
    ),
    "setting.from_options": Entry(from_options, {"variant": A("h2o", odd.choice), **POLICY}),
    "protocols.check": Entry(
        lambda **x: protocols.check(**{
            "setting": parse("h2o:0.2"), "protocol": "simulate", "prompt_length": 1, **x
        }),
        {"protocol": A("drop", odd.choice), "prompt_length": A(4, odd.integer)},
        ("setting",),
    ),
    # ---- operations ----------------------------------------------------------------------------
    **{
        f"ops.{name}": Entry(None, {}, (*OPERATION, *POLICY))
        for name in ("attend", "evict", "step", "simulate", "log_sums")
    },
    "ops.new_slots": Entry(
        lambda **x: [
            None if y is None else plain(y)
            for y in ops.new_slots(torch.zeros(1, 2, 3, 8), **{"capacity": 4, **x})
        ],
        {
            "capacity": A(4, odd.integer, single=False),
            "heavy": A(2, odd.integer, least=0), "recent": A(2, odd.integer, least=0),
            "value_weighted": A(True, odd.flag), "shared": A(True, odd.flag),
            "offsets": A(True, odd.flag),
            "kv_dtype": A("int8", odd.choice),
        },
        ("keys",),
    ),
    "ops.open_device": Entry(None, {}, ("tensor",)),
    "ops.info": Entry(lambda: None, {}),
    "quantization.quantize": Entry(
        lambda **x: plain(quantize(torch.linspace(-1, 1, 64).view(2, 32), **x)),
        {"size": A(20, odd.choice)},
        ("x",),
    ),
    # ---- vLLM ----------------------------------------------------------------------------------
    "config_entry.whole_prompts_of": Entry(
        lambda **x: config_entry.whole_prompts_of(x),
        {"cut": A("chunk", odd.choice), "whole_prompts": A(3, odd.integer)},
        ("entry",),
    ),
    "paged_request.with_budget": Entry(
        lambda **x: paged_request.with_budget(for_row(), x),
        {"h2o_heavy": A(0.5, odd.amount), "h2o_recent": A(64, odd.amount)},
        ("config", "arguments"),
    ),
    "paged_request.prefix_tokens": Entry(
        lambda **x: paged_request.prefix_tokens(x, 40),
        {"h2o_prefix": A(8, odd.integer), "h2o_context": A(8, odd.integer)},
        ("arguments", "prompt"),
    ),
    "paged_request.with_pins": Entry(
        lambda **x: paged_request.with_pins(for_row(), x, 40),
        {"h2o_pinned": A([(1, 3)], odd.spans_of_one_row)},
        ("config", "arguments", "prompt"),
    ),
    "paged_request.evicted_spans": Entry(
        lambda **x: paged_request.evicted_spans({"h2o_prefix": 40, **x}, 40),
        {"h2o_evict": A([(1, 3)], odd.spans_of_one_row)},
        ("arguments", "first"),
    ),
}  # fmt: skip
