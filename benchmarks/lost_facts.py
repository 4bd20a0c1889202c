"""When facts that nothing asks for leave a cache, by layer, and to whom.

    python -m benchmarks.lost_facts wikitext2_test.txt --compare robust-bytes:0.1

The trials are those of `h2o eval --needle`. Each prompt is read and cut, then its question comes
and the answer. Of the keys of the hidden number the table has what is held after the cut, in
the first, middle and last third of the layers, and after the question; of the places for heavy
hitters what the question's tokens hold then; and how many facts are found. "frozen" is the same
cache, its heavy hitters kept as they are after the cut, so that what follows lives in the window of
recent keys alone.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from h2o import H2OCache, models
from h2o.evaluate import needle
from h2o.evaluate.presentation import table
from h2o.evaluate.setting import parse_all
from h2o.hf.layer import H2OLayer

ABOVE_ALL = 1e30
"""A score that no attention reaches."""


def place(document: Tensor, answer: Tensor) -> range:
    """The positions in a document [1, n] at which an answer [1, m] stands first."""
    text, words = document[0].tolist(), answer[0].tolist()
    starts = range(len(text) - len(words) + 1)
    start = next(i for i in starts if text[i : i + len(words)] == words)
    return range(start, start + len(words))


def shares_held(cache: H2OCache, fact: range) -> list[float]:
    """Of each H2O layer, the part of the fact's keys that its heads hold."""
    layers = [layer for layer in cache.layers if isinstance(layer, H2OLayer)]
    held = [layer.kept().positions[0] for layer in layers]
    return [((x >= fact.start) & (x < fact.stop)).sum().item() / len(fact) / len(x) for x in held]


def share_behind(cache: H2OCache, end: int) -> float:
    """Of all places for heavy hitters, the part that tokens from position `end` on hold."""
    behind = places = 0
    for layer in cache.layers:
        if isinstance(layer, H2OLayer):
            positions = layer.kept().positions[0]
            budget = layer.slots.budget[0].expand(len(positions), 2)
            oldest_recent = layer.seen - budget[:, 1:]
            behind += ((positions >= end) & (positions < oldest_recent)).sum().item()
            places += budget[:, 0].sum().item()
    return behind / places


def freeze(cache: H2OCache) -> None:
    """Whatever is held outranks all that comes."""
    for layer in cache.layers:
        if isinstance(layer, H2OLayer):
            layer.slots.scores.fill_(ABOVE_ALL)


def finds(model: Any, cache: H2OCache, question: Tensor, answer: Tensor, fact: range, end: int):
    """(whether it is found, what is held of it after the question, the question's places)."""
    decoded = []
    for index, ids in enumerate((question, *needle.fed(answer))):
        logits = model(ids, past_key_values=cache, use_cache=True).logits
        decoded.append(logits[0, -1].argmax().item())
        if index == 0:
            held, behind = statistics.fmean(shares_held(cache, fact)), share_behind(cache, end)
    return decoded == answer[0].tolist(), held, behind


@torch.no_grad()
def measured(model: Any, setting: Any, document: Tensor, question: Tensor, answer: Tensor) -> dict:
    """One trial, as columns of the table."""
    fact, n = place(document, answer), document.shape[1]
    cache = H2OCache(model.config, setting.config, prompt_length=n)
    model.base_model(document, past_key_values=cache, use_cache=True)
    by_layer = shares_held(cache, fact)
    third = len(by_layer) / 3
    thirds = [by_layer[round(i * third) : round((i + 1) * third)] for i in range(3)]
    frozen = cache.fork()
    freeze(frozen)
    is_found, held, behind = finds(model, cache, question, answer, fact, n)
    names = ("first third", "middle", "last")
    return {
        **{name: statistics.fmean(part) for name, part in zip(names, thirds, strict=True)},
        "after the question": held,
        "question's places": behind,
        "found": float(is_found),
        "found, frozen": float(finds(model, frozen, question, answer, fact, n)[0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="a long plain text")
    parser.add_argument("--compare", default="robust-bytes:0.1", help="settings of h2o eval")
    parser.add_argument("--lengths", default="512", help="tokens of the texts (512)")
    parser.add_argument("--limit", type=int, default=1, help="facts of each length and depth (1)")
    parser.add_argument("--model", help="the default one")
    options = parser.parse_args()
    settings = parse_all(options.compare)
    model, tokenizer = models.load(options.model, dtype="bfloat16", say=models.say)
    model.set_attn_implementation("h2o")
    lengths = [int(x) for x in options.lengths.split(",")]
    trials = needle.trials(options.text.read_text("utf-8"), tokenizer, lengths, options.limit)
    encoded = [needle.encode(tokenizer, model.config, trial) for trial in trials]
    lines = []
    for setting in settings:
        rows = [measured(model, setting, *ids) for ids in tqdm(encoded, desc=setting.name)]
        means = [statistics.fmean(row[name] for row in rows) for name in rows[0]]
        lines.append([setting.name, *(f"{mean:.2f}" for mean in means)])
    print(f"{len(trials)} facts")
    print(table(["setting", *rows[0]], lines))


if __name__ == "__main__":
    main()
