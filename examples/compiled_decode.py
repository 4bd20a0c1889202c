"""Decode steps, eager and compiled, in turn: milliseconds a token of SmolLM2-135M.

    python examples/compiled_decode.py [--tokens 512 4096] [--weights float32 bfloat16 int8]

int8: bfloat16 with torchao's int8 weights (pip install torchao). The budget is a fifth of the
prompt. Both ways go on from the same prompt; each round times some steps of one, then of the other,
and what is printed is the median over all rounds, with the quartiles. Compiling takes a minute.
"""

from __future__ import annotations

import argparse
import statistics
import time
from importlib import resources
from typing import Any

import torch
from torch import Tensor

import h2o


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096], help="of the prompt")
    parser.add_argument("--weights", nargs="+", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12, help="of each way in a round")
    options = parser.parse_args()
    text = resources.files("h2o").joinpath("data/lighthouse.txt").read_text("utf-8")
    for weights in options.weights:
        model, tokenizer = loaded(weights)
        ids = tokenizer(text, return_tensors="pt").input_ids.repeat(
            1, 1 + max(options.tokens) // 2000
        )
        for tokens in options.tokens:
            measure(model, ids[:, :tokens], weights, options)


def loaded(weights: str) -> tuple[Any, Any]:
    """The default model under h2o's attention, with these weights."""
    model, tokenizer = h2o.load_default(dtype="bfloat16" if weights == "int8" else weights)
    model.set_attn_implementation("h2o")
    if weights == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig())
    return model, tokenizer


@torch.no_grad()
def measure(model: Any, ids: Tensor, weights: str, options: argparse.Namespace) -> None:
    """One line of the table."""
    torch._dynamo.reset()  # graphs of another length
    n = ids.shape[1]
    budget = {"heavy": n // 10, "recent": n // 10}
    ways = {"eager": model.forward, "compiled": torch.compile(model.forward, fullgraph=True)}
    caches, tokens, times = {}, {}, {name: [] for name in ways}
    for name in ways:
        caches[name] = h2o.H2OCache(model.config, **budget, compileable=name == "compiled")
        logits = model(ids, past_key_values=caches[name], logits_to_keep=1).logits
        tokens[name] = [logits.argmax(-1)]

    def step(name: str) -> float:
        at = torch.tensor([[n + len(tokens[name]) - 1]])
        start = time.perf_counter()
        out = ways[name](tokens[name][-1], past_key_values=caches[name], position_ids=at)
        took = time.perf_counter() - start
        tokens[name].append(out.logits.argmax(-1))
        return took

    first = {name: sum(step(name) for _ in range(3)) for name in ways}
    for _ in range(options.rounds):
        for name in ways:
            times[name] += [step(name) for _ in range(options.steps)]
    same = sum(torch.equal(a, b) for a, b in zip(*tokens.values(), strict=True))
    row = f"{weights:9s} {n:5d} tokens"
    for name, own in times.items():
        low, middle, high = (1000 * x for x in statistics.quantiles(own, n=4))
        row += f"  {name} {middle:6.1f} ms ({low:.1f} to {high:.1f})"
    print(f"{row}  compiled in {first['compiled']:.0f} s, {same} of {len(tokens['eager'])} alike")


if __name__ == "__main__":
    main()
