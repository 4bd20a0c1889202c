"""Measure how vLLM's and h2o's caches change the next token.

    python -m benchmarks.serving_quality wikitext2_test.txt --skip 4 --limit 40

The measure is the KL divergence of the next token's distribution from that of vLLM with a full
cache in the model's dtype. The first tokens of each window are a context, which h2o cuts to its
budget. The divergence is measured at the tokens after it. vLLM's own 8-bit caches keep every token.
vLLM returns only the most likely tokens of each distribution, and all others count as one, so the
figures are close lower bounds. The engines run in a separate environment under h2o's cache folder.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from typing import Any

import torch

from h2o import models
from h2o.evaluation.text_table import table
from h2o.utils.progress import print_line

from . import text_windows
from .peers.environments import Peer, PeerMissing

TOP = 256
"""Number of most likely tokens of a distribution"""

TOGETHER = 10
"""Windows that an engine processes at a time"""


def by_h2o(**config: Any) -> dict[str, Any]:
    return {"additional_config": {"h2o": {"min_tokens": 0, **config}}}


def engines(dtype: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Name, share of the context's bytes in bfloat16 (for head dimension 64 as in SmolLM2,
    including bookkeeping of slots), and options of vLLM's engine."""

    def evicting(
        preset: str, share: float, kv_dtype: str | None
    ) -> tuple[str, str, dict[str, Any]]:
        # A share of a float32 cache's bytes holds twice as many quantized keys as one of bfloat16.
        part = share / 2 if kv_dtype and dtype == "float32" else share
        budget = {"preset": preset, "budget": part, "budget_unit": "bytes", "kv_dtype": kv_dtype}
        return f"h2o, {preset}, {kv_dtype or dtype}", f"{share:.0%}", by_h2o(**budget)

    return [
        (f"vLLM, {dtype}", "100%", {}),
        ("vLLM, fp8_e4m3", "50%", {"kv_cache_dtype": "fp8_e4m3"}),
        ("vLLM, fp8_e5m2", "50%", {"kv_cache_dtype": "fp8_e5m2"}),
        ("h2o, every key in int8", "56%", by_h2o(budget=1.0, kv_dtype="int8")),
        ("h2o, every key in int8-int4", "46%", by_h2o(budget=1.0, kv_dtype="int8-int4")),
        *(
            evicting(preset, share, None if share == 0.5 else "int8-int4")
            for preset in ("echo", "robust")
            for share in (0.5, 0.25, 0.2, 0.1)
        ),
    ]


def divergence(exact: dict[str, float], other: dict[str, float]) -> float:
    """KL divergence of two distributions in nats, from the log-probabilities of their most likely
    tokens.

    Tokens that are not in both count as one, so the result is at most the true divergence.
    """
    common = exact.keys() & other.keys()
    total = sum(math.exp(exact[token]) * (exact[token] - other[token]) for token in common)
    rest = [max(0.0, 1.0 - sum(math.exp(x[token]) for token in common)) for x in (exact, other)]
    if min(rest) > 0.0:
        total += rest[0] * math.log(rest[0] / rest[1])
    return max(0.0, total)


def likeliest(distribution: dict[str, float]) -> str:
    return max(distribution, key=distribution.__getitem__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text_windows.add_arguments(parser, limit=40)
    parser.add_argument("--context", type=int, default=768, help="tokens before the cut (768)")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="dtype of the model (%(default)s); with float32, faster on processors without "
        "bfloat16 instructions, caches hold as many keys as with bfloat16",
    )
    options = parser.parse_args()
    _, tokenizer = models.load_model(None, dtype=options.dtype, log=print_line)
    parts = text_windows.read(options, tokenizer)
    folder, threads = str(models.embedded_folder()), str(torch.get_num_threads())
    shared = {
        "dtype": options.dtype,
        "max_model_len": options.window + 1,
        "max_logprobs": TOP,
        "enforce_eager": True,
    }
    exact: list[dict[str, float]] = []
    lines = []
    for name, share, engine in engines(options.dtype):
        arguments = {"h2o_context": options.context} if "additional_config" in engine else None
        request = {"context": options.context, "top": TOP, "arguments": arguments}
        told: list[dict[str, float]] = []
        try:
            with Peer("vllm", folder, threads, json.dumps(shared | engine)) as peer:
                for first in range(0, len(parts), TOGETHER):
                    ids = parts[first : first + TOGETHER]
                    for one in peer.ask(ids=ids, **request)["logprobs"]:
                        told += one
        except PeerMissing as problem:
            print(f"{name}: left out: {problem}")
            continue
        exact = exact or told
        apart = [divergence(*pair) for pair in zip(exact, told, strict=True)]
        equal = [likeliest(x) == likeliest(y) for x, y in zip(exact, told, strict=True)]
        error = statistics.stdev(apart) / math.sqrt(len(apart))
        kl = f"{statistics.mean(apart):.4f} ±{error:.4f}"
        lines.append([name, share, kl, f"{statistics.mean(equal):.1%}"])
        print(*lines[-1], sep=", ", flush=True)
    print(f"{len(exact)} tokens")
    print(table(["cache", "bytes", "KL divergence", "same likeliest token"], lines))


if __name__ == "__main__":
    main()
