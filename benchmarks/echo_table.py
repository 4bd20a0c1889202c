"""P24: the time that echo adds to a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import h2o
from h2o.evaluation.setting import parse

from .correctness import WrongResult
from .model_tables import load, prompt
from .options import Options
from .timing import Contender, Row, race

ROBUST = parse("robust-bytes:0.1").config
CONFIGS = {
    "robust": ROBUST,
    "mean-echo": replace(ROBUST, score_by="mean-echo"),
    "echo": parse("echo-bytes:0.1").config,
}
"""The others are compared with the first."""

BOUND = 1e-3
"""Limit of the difference between hidden states of a prompt, relative to the largest element. The
ranking of keys does not change them."""


def echo(options: Options) -> Iterator[Row]:
    """P24: SmolLM2 without its head processes a prompt and keeps a tenth of the bytes."""
    for dtype, _ in options.wanted("float32", "bfloat16"):
        model, tokenizer = load(dtype)
        model.set_attn_implementation("h2o")
        for length in options.prompts:
            ids = prompt(tokenizer, length)
            times = race(
                [Contender(name, partial(read, model, ids, name)) for name in CONFIGS],
                options.rounds,
            )
            expected = read(model, ids, "robust")[0]
            for name in list(CONFIGS)[1:]:
                answer, cache = read(model, ids, name)
                total = cache.report().total
                facts = {"bytes held": total.bytes_held, "bytes of a full cache": total.bytes_full}
                difference = float((answer - expected).abs().max() / expected.abs().max())
                if difference > BOUND:
                    raise WrongResult(f"{name}: hidden states differ by {difference:.1e}")
                yield Row(
                    "P24", f"SmolLM2, prefill, {name} / robust", f"{dtype}, {length} tokens",
                    ours=times[name], peer=times["robust"], error=f"{difference:.1e}", facts=facts,
                )  # fmt: skip


def read(model: Any, ids: Tensor, name: str) -> tuple[Tensor, h2o.H2OCache]:
    """Process a prompt [1, n]. Returns its hidden states and the cache."""
    cache = h2o.H2OCache(model.config, CONFIGS[name])
    with torch.no_grad():
        out = model.base_model(ids, cache=cache, use_cache=True)
    return out.last_hidden_state, cache
