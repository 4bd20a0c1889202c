"""Decode steps, eager and compiled, with three kinds of weights: milliseconds a token.

    python examples/compiled_decode.py [--tokens 512 4096] [--weights float32 bfloat16 int8]

SmolLM2-135M; int8 is bfloat16 with torchao's int8 weights (pip install torchao). The budget is a
fifth of the prompt. All ways go on from the same prompt and take turns, some steps of each in every
round; what is printed is the median over all rounds, with the quartiles. To compile takes a minute
each time.
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


class Way:
    """A model, a cache that has read the prompt, and how a step is run."""

    def __init__(self, model: Any, ids: Tensor, compiled: bool) -> None:
        n = ids.shape[1]
        budget = {"heavy": n // 10, "recent": n // 10}
        self.cache = h2o.H2OCache(model.config, **budget, compileable=compiled)
        logits = model(ids, past_key_values=self.cache, logits_to_keep=1).logits
        self.tokens = [logits.argmax(-1)]
        self.seconds: list[float] = []
        self.at = n
        self.forward = torch.compile(model.forward, fullgraph=True) if compiled else model.forward

    def step(self) -> None:
        start = time.perf_counter()
        out = self.forward(
            self.tokens[-1], past_key_values=self.cache, position_ids=torch.tensor([[self.at]])
        )
        self.seconds.append(time.perf_counter() - start)
        self.tokens.append(out.logits.argmax(-1))
        self.at += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096], help="of the prompt")
    parser.add_argument("--weights", nargs="+", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of each way in a round")
    options = parser.parse_args()
    text = resources.files("h2o").joinpath("data/lighthouse.txt").read_text("utf-8")
    models = {weights: loaded(weights) for weights in options.weights}
    for tokens in options.tokens:
        tokenizer = models[options.weights[0]][1]
        ids = tokenizer(text, return_tensors="pt").input_ids
        ids = ids.repeat(1, 1 + tokens // ids.shape[1])[:, :tokens]
        with torch.no_grad():
            measure({name: model for name, (model, _) in models.items()}, ids, options)


def loaded(weights: str) -> tuple[Any, Any]:
    """The default model under h2o's attention, with these weights, and its tokenizer."""
    model, tokenizer = h2o.load_default(dtype="bfloat16" if weights == "int8" else weights)
    model.set_attn_implementation("h2o")
    if weights == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig())
    return model, tokenizer


def measure(models: dict[str, Any], ids: Tensor, options: argparse.Namespace) -> None:
    """The lines of one prompt."""
    torch._dynamo.reset()  # graphs of another length
    ways = {
        f"{weights:9s} {('eager', 'compiled')[compiled]:8s}": Way(model, ids, compiled)
        for weights, model in models.items()
        for compiled in (False, True)
    }
    for name, way in ways.items():
        for _ in range(3):
            way.step()
        print(f"    {name} first steps {sum(way.seconds):6.1f} s", flush=True)
        way.seconds.clear()
    for _ in range(options.rounds):
        for way in ways.values():
            for _ in range(options.steps):
                way.step()
    for name, way in ways.items():
        low, middle, high = (1000 * x for x in statistics.quantiles(way.seconds, n=4))
        print(f"{ids.shape[1]:5d} tokens  {name} {middle:6.1f} ms ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()
