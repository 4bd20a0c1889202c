"""R4: weights on disk (accelerate), as in the paper's comparison with FlexGen (section 5.3). A
forward pass takes as long as reading the weights, for any number of rows."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache

import h2o

from .model_tables import load, prompt
from .options import Options
from .throughput_tables import MB, Work, answer_batch, bytes_of_a_row, passages, token_bytes
from .timing import Row, Times

CONFIG = h2o.H2OConfig(
    heavy=78, recent=26, sinks=4, score_by="mean", value_weighted=True, kv_dtype="int8-int4"
)
"""`H2OConfig.robust(108)`, a fifth of the keys, in eight and four bits"""


def disk(options: Options) -> Iterator[Row]:
    """R4: prompts of 512 tokens and 32 new ones, with all keys and with a fifth of them. A batch
    has as many rows as fit into 64 MB with their keys and values."""
    from accelerate import disk_offload

    tokens, new, limit = (24, 3, 4 * MB) if options.quick else (512, 32, 64 * MB)
    model, tokenizer = load("bfloat16")
    text = prompt(tokenizer, 8192)[0]
    rows = {
        "DynamicCache": limit // ((tokens + new) * token_bytes(model)),
        "H2OCache": limit // bytes_of_a_row(model, CONFIG, text[None, :tokens]),
    }
    with tempfile.TemporaryDirectory() as folder:
        disk_offload(model, folder, execution_device=torch.device("cpu"))
        times = {}
        for name, count in rows.items():
            work = Work("R4", passages(text.tolist(), count, tokens), [new] * count, limit)
            samples = [seconds_a_token(model, work, name) for _ in range(options.rounds + 1)]
            times[name] = Times(name, samples[1:])
    yield Row(
        "R4", "SmolLM2, weights on the disk, a token / DynamicCache",
        f"bfloat16, {tokens} + {new}, {limit // MB} MB",
        ours=times["H2OCache"], peer=times["DynamicCache"],
        facts={
            **{f"rows of {name}": count for name, count in rows.items()},
            "tokens a second": 1 / times["H2OCache"].median,
            "of the peer": 1 / times["DynamicCache"].median,
        },
    )  # fmt: skip


def seconds_a_token(model: Any, work: Work, name: str) -> float:
    """Time of one batch, from its prompts to its last tokens, divided by the tokens of all rows."""
    ours = name == "H2OCache"
    model.set_attn_implementation("h2o" if ours else "sdpa")
    cache = h2o.H2OCache(model.config, CONFIG) if ours else DynamicCache(config=model.config)
    start = time.perf_counter()
    answer_batch(model, work, list(range(len(work.new))), cache)
    return (time.perf_counter() - start) / sum(work.new)
