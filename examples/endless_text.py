"""Measure perplexity over a text of unlimited length with caches of a fixed size.

    python examples/endless_text.py book.txt --tokens 20000 --chunk 16
    tail -f log.txt | python examples/endless_text.py -

Three caches of 512 keys per head process the same text: heavy hitters ranked by the mean attention
that each key received, attention sinks with recent keys (StreamingLLM), and a sliding window. Each
line of the output is a stretch of `--every` tokens and has its perplexity with each cache. The last
lines give each cache's perplexity over all stretches and its bytes. With cache-relative positions
no position exceeds the budget, so the text may be longer than the model's context.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from typing import Any, TextIO

import torch

import h2o


def configs(tokens: int) -> dict[str, h2o.H2OConfig]:
    """Configs of caches of equal size, which is `tokens` keys per KV head."""
    half = tokens // 2
    budgets = {
        "heavy hitters": {"heavy": half, "recent": tokens - half, "sinks": 4, "score_by": "mean"},
        "sinks": {"heavy": 0, "recent": tokens - 4, "sinks": 4},
        "window": {"heavy": 0, "recent": tokens},
    }
    return {
        name: h2o.H2OConfig(**budget, positions="cache_relative", min_tokens=0)
        for name, budget in budgets.items()
    }


class Reader:
    """Processes a text with one cache and sums up how well the model predicts each stretch."""

    def __init__(self, model: Any, config: h2o.H2OConfig) -> None:
        self.model, self.cache = model, h2o.H2OCache(model, config)
        self.logits: torch.Tensor | None = None  # [1, vocabulary], for the next token
        self.loss, self.predicted = 0.0, 0  # of the current stretch
        self.nats, self.tokens = 0.0, 0  # of all earlier stretches

    @torch.no_grad()
    def feed(self, ids: list[int]) -> None:
        """Process the next tokens in one forward pass."""
        text = torch.tensor([ids], device=self.model.device)
        out = self.model(
            text,
            cache=self.cache,
            position_ids=torch.zeros_like(text),  # the cache rotates keys by their ranks itself
        )
        logits = out.logits[0].float()
        predicted = logits[:-1] if self.logits is None else torch.cat([self.logits, logits[:-1]])
        wanted = text[0, len(ids) - len(predicted) :]
        self.loss += torch.nn.functional.cross_entropy(predicted, wanted, reduction="sum").item()
        self.predicted += len(wanted)
        self.logits = logits[-1:].clone()

    def close_stretch(self) -> float:
        """End the current stretch and return its perplexity."""
        mean = self.loss / max(self.predicted, 1)
        self.nats, self.tokens = self.nats + self.loss, self.tokens + self.predicted
        self.loss, self.predicted = 0.0, 0
        return math.exp(mean)

    @property
    def perplexity(self) -> float:
        """Perplexity of all stretches as one text."""
        return math.exp(self.nats / max(self.tokens, 1))


def chunks(file: TextIO, tokenizer: Any, size: int, limit: int) -> Iterator[list[int]]:
    """Yield the token ids of a text, `size` at a time. Each line is encoded as soon as it is
    complete, so a pipe may stay open."""
    waiting: list[int] = []
    count = 0
    for line in file:
        waiting += tokenizer(line, add_special_tokens=False)["input_ids"]
        while len(waiting) >= size and count < limit:
            yield waiting[:size]
            waiting, count = waiting[size:], count + size
        if count >= limit:
            return
    if waiting:
        yield waiting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", help="a file, or - for standard input")
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--keys", type=int, default=512, help="keys per head (%(default)s)")
    parser.add_argument("--tokens", type=int, default=10**9, help="number of tokens to stop after")
    parser.add_argument("--chunk", type=int, default=1, help="tokens per forward pass")
    parser.add_argument("--every", type=int, default=500, help="tokens per line (%(default)s)")
    options = parser.parse_args()
    model, tokenizer = h2o.load_model(options.model)
    readers = {name: Reader(model, config) for name, config in configs(options.keys).items()}
    print("tokens", *(f"{name:>14}" for name in readers))
    count = since = 0

    def close() -> None:
        print(f"{count:6}", *(f"{x.close_stretch():14.2f}" for x in readers.values()), flush=True)

    with sys.stdin if options.text == "-" else open(options.text, encoding="utf-8") as file:
        try:
            for ids in chunks(file, tokenizer, options.chunk, options.tokens):
                for reader in readers.values():
                    reader.feed(ids)
                count, since = count + len(ids), since + len(ids)
                if since >= options.every:
                    close()
                    since = 0
        except KeyboardInterrupt:  # the way to end an open pipe
            pass
    if since:
        close()
    for name, reader in readers.items():
        held = reader.cache.report().total
        megabytes = (held.bytes_held + held.bytes_bookkeeping) / 1e6
        print(f"{name}: perplexity {reader.perplexity:.2f}, KV cache {megabytes:.1f} MB")


if __name__ == "__main__":
    main()
