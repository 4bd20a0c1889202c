"""Loss, bytes and time per token over a long text after a short prompt.

    python -m benchmarks.long_text wikitext2_test.txt --tokens 4000

The prompt is shorter than the smallest budget. All caches read the same text token by token, in
turn, so that times are comparable. It compares a full cache, and for each budget a fraction of the
text so far (`ratio_of="seen"`) with a fraction of the prompt. The loss is the mean over all tokens
after the prompt, and in "second half" over the later half of them. A standard error is that of the
paired differences from the full cache, over blocks of 250 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from h2o import H2OCache, H2OConfig, models
from h2o.compat import with_cache
from h2o.evaluation.text_table import table
from h2o.utils.progress import print_line

BLOCK = 250
"""Tokens of a block. Losses of neighboring tokens are not independent, those of blocks nearly."""


class Reader:
    """A cache that reads the text, with what was measured."""

    def __init__(self, name: str, model: Any, cache: Any) -> None:
        self.name, self.model, self.cache = name, model, cache
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.shares: list[float] = []

    def read(self, ids: torch.Tensor, target: torch.Tensor) -> None:
        """Process tokens [1, n], and score the token after them."""
        begin = time.perf_counter()
        logits = self.model(ids, **with_cache(self.cache)).logits[:, -1]
        self.seconds.append(time.perf_counter() - begin)
        self.losses.append(torch.nn.functional.cross_entropy(logits.float(), target).item())
        if len(self.losses) % BLOCK == 0:
            total = self.cache.report().total
            self.shares.append((total.bytes_held + total.bytes_bookkeeping) / total.bytes_full)

    def row(self, full: Reader) -> list[str]:
        """The reader's line of the table."""
        lost = [mine - theirs for mine, theirs in zip(self.losses, full.losses, strict=True)]
        half = lost[len(lost) // 2 :]
        shares = [min(self.shares), max(self.shares)]
        return [
            self.name,
            f"{statistics.fmean(self.losses):.3f}",
            f"{statistics.fmean(lost):.3f} ({error(lost):.3f})",
            f"{statistics.fmean(half):.3f} ({error(half):.3f})",
            " to ".join(f"{100 * share:.1f}%" for share in shares),
            f"{1e3 * statistics.median(self.seconds[1:]):.1f}",
            f"{1e3 * statistics.fmean(self.seconds[1:]):.1f}",
        ]


def error(values: Sequence[float]) -> float:
    """Standard error of the mean, from the means of blocks."""
    means = [statistics.fmean(values[i : i + BLOCK]) for i in range(0, len(values), BLOCK)]
    return statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else 0.0


def readers(model: Any, budgets: Sequence[float]) -> list[Reader]:
    """A full cache, and two caches for each budget."""
    listed = [Reader("full", model, H2OCache(model, H2OConfig.full()))]
    for budget in budgets:
        for base in ("seen", "prompt"):
            config = H2OConfig(budget=budget, ratio_of=base)
            listed.append(Reader(f"{budget:g} of {base}", model, H2OCache(model, config)))
    return listed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="a long plain text")
    parser.add_argument("--model", help="default: the embedded SmolLM2-135M")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt (64)")
    parser.add_argument("--tokens", type=int, default=4000, help="tokens after it (4000)")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.1, 0.2])
    options = parser.parse_args()

    if options.tokens < BLOCK:
        parser.error(f"--tokens is {options.tokens}; expected at least {BLOCK}, a block")
    model, tokenizer = models.load_model(options.model, dtype="bfloat16", log=print_line)
    wanted = options.prompt + options.tokens
    ids = tokenizer(options.text.read_text("utf-8"), verbose=False)["input_ids"][:wanted]
    if len(ids) < wanted:
        parser.error(f"{options.text} has {len(ids)} tokens; --prompt and --tokens need {wanted}")
    row = torch.tensor([ids])
    compared = readers(model, options.budgets)
    parts = [(0, options.prompt), *((i, i + 1) for i in range(options.prompt, wanted - 1))]
    with torch.inference_mode():
        for start, stop in tqdm(parts):
            for reader in compared:
                reader.read(row[:, start:stop], row[:, stop])
    names = ["cache", "loss", "lost", "second half", "bytes", "ms per token", "mean"]
    print(table(names, [reader.row(compared[0]) for reader in compared]))


if __name__ == "__main__":
    main()
