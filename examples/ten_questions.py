"""Process a document once, keep a fifth of its bytes, answer ten questions: time and bytes.

    python examples/ten_questions.py [--budget 0.2] [--read] [--tokens 24] [--dtype bfloat16]

Each question is answered in three ways in turn: with a full cache that processes the document
again, with a copy of a full cache that has processed it once, and with a fork of an `H2OCache`.
Then all are answered by forks in one batch, and from a file. A first question warms up and is not
counted. With --read the document is processed twice (`h2o.compress_document`), which at small
budgets keeps more of what the questions ask for.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import h2o

QUESTIONS = {
    "Who designed the tower?": "Brandt",
    "In which year was the tower finished?": "1846",
    "How high is the tower?": "thirty-eight",
    "What did the first lamp burn?": "colza",
    "When did electricity come to the headland?": "1931",
    "Who served as keeper for thirty-four years?": "Tobias",
    "Who was the first woman to be keeper?": "Ingrid",
    "What was the name of the coal ship that was wrecked in 1911?": "Sabrina",
    "Who was sent across the causeway on a horse?": "Lund",
    "When did the last keepers leave?": "1967",
}
"""Questions, each with a word that a correct answer contains."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=0.2, help="share of a full cache's bytes")
    parser.add_argument("--read", action="store_true", help="process the document twice")
    parser.add_argument("--tokens", type=int, default=24, help="new tokens of each answer")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    model, tokenizer = h2o.load_model(dtype=options.dtype)
    text = resources.files("h2o").joinpath("data/lighthouse.txt").read_text("utf-8")
    document = tokenizer(f"<|im_start|>user\n{text}\n", return_tensors="pt").input_ids
    asked = []
    for question in QUESTIONS:
        turn = f"Answer briefly. {question}<|im_end|>\n<|im_start|>assistant\n"
        asked.append(torch.cat([document, tokenizer(turn, return_tensors="pt").input_ids], dim=1))

    def answer(ids: Tensor, cache: Any, mask: Tensor | None = None) -> Tensor:
        model.set_attn_implementation("h2o" if isinstance(cache, h2o.H2OCache) else "sdpa")
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids) if mask is None else mask,
            cache=cache,
            max_new_tokens=options.tokens,
            do_sample=False,
        )
        return out[:, ids.shape[1] :]

    def read(cache: Any) -> float:
        model.set_attn_implementation("h2o" if isinstance(cache, h2o.H2OCache) else "sdpa")
        return timed(lambda: model(document, cache=cache, logits_to_keep=1))[0]

    config = h2o.H2OConfig.calibrated(options.budget, budget_unit="bytes")

    def ours_read() -> tuple[float, h2o.H2OCache]:
        if options.read:
            model.set_attn_implementation("h2o")
            return timed(
                lambda: h2o.compress_document(
                    model, document, config, readings=2, tokenizer=tokenizer
                )
            )
        cache = h2o.H2OCache(model.config, config)
        return read(cache), cache

    reads: dict[str, list[float]] = {
        "full, read again": [0.0],
        "full, copied": [],
        "h2o, forked": [],
    }
    with torch.no_grad():
        for _ in range(3):
            full = DynamicCache(config=model.config)
            reads["full, copied"].append(read(full))
            took, ours = ours_read()
            reads["h2o, forked"].append(took)
    reading = {name: statistics.median(times) for name, times in reads.items()}
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "full, read again": lambda ids: answer(ids, DynamicCache(config=model.config)),
        "full, copied": lambda ids: answer(ids, copy.deepcopy(full)),
        "h2o, forked": lambda ids: answer(ids, ours.fork()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    texts: dict[str, list[str]] = {name: [] for name in ways}
    for ids in [asked[0], *asked]:
        for name, way in ways.items():
            took, tokens = timed(lambda way=way, ids=ids: way(ids))
            seconds[name].append(took)
            texts[name].append(tokenizer.decode(tokens[0], skip_special_tokens=True))
    held = {
        "full, read again": bytes_of(full),
        "full, copied": bytes_of(full),
        "h2o, forked": bytes_of(ours),
    }

    right = {
        name: [
            word.lower() in text.lower()
            for word, text in zip(QUESTIONS.values(), answers[1:], strict=True)
        ]
        for name, answers in texts.items()
    }
    for row, (question, word) in enumerate(QUESTIONS.items(), start=1):
        print(f"{question}  ({word})")
        for name in ("full, copied", "h2o, forked"):
            print(f"    {name:14s} {' '.join(texts[name][row].split())}")
    print(f"\n{document.shape[1]} tokens, {options.dtype}, {options.tokens} tokens per answer")
    print("                   reading   a question      ten     bytes held    right")
    for name, times in seconds.items():
        total = reading[name] + sum(times[1:])
        print(
            f"{name:18s} {reading[name]:6.2f} s {statistics.median(times[1:]):10.2f} s "
            f"{total:7.1f} s {held[name] / 1e6:11.1f} MB {sum(right[name]):5d} of {len(QUESTIONS)}"
        )

    ids, mask = batched(asked, document.shape[1], tokenizer.pad_token_id or 0)
    took, _ = timed(lambda: answer(ids, ours.fork(rows=len(asked)), mask))
    print(f"ten forks in one batch: {took:.2f} s")
    print(f"a fork: {1000 * timed(ours.fork)[0]:.1f} ms, a copy of the full cache: "
          f"{1000 * timed(lambda: copy.deepcopy(full))[0]:.1f} ms")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "document.safetensors")
        saving = timed(lambda: ours.save(path, model))[0]
        loading, loaded = timed(lambda: h2o.H2OCache.load(path, model))
        size, part = path.stat().st_size / 1e6, held["full, copied"] / path.stat().st_size
        print(f"saved in {saving:.2f} s, {size:.2f} MB, 1/{part:.1f} of the full cache; "
              f"loaded in {loading:.2f} s")  # fmt: skip
        from_file = [
            tokenizer.decode(answer(ids, loaded.fork())[0], skip_special_tokens=True)
            for ids in asked
        ]
    assert from_file == texts["h2o, forked"][1:]
    both = zip(right["full, copied"], right["h2o, forked"], strict=True)
    print(f"right from the file among those that the full cache has right: "
          f"{sum(a and b for a, b in both)} of {sum(right['full, copied'])}")  # fmt: skip


def timed(do: Callable[[], Any]) -> tuple[float, Any]:
    """Call a function. Returns its seconds and its result."""
    start = time.perf_counter()
    result = do()
    return time.perf_counter() - start, result


def bytes_of(cache: Any) -> int:
    """Bytes of all tensors that a cache of one conversation holds."""
    if isinstance(cache, h2o.H2OCache):
        total = cache.report().total
        return total.bytes_held + total.bytes_bookkeeping
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))


def batched(asked: list[Tensor], n: int, pad: int) -> tuple[Tensor, Tensor]:
    """Batch rows that begin with the same n tokens. Padding separates these from the rest of a
    row."""
    longest = max(ids.shape[1] for ids in asked)
    ids = torch.full((len(asked), longest), pad)
    mask = torch.zeros_like(ids)
    for row, question in enumerate(asked):
        rest = question.shape[1] - n
        ids[row, :n], ids[row, longest - rest :] = question[0, :n], question[0, n:]
        mask[row, :n], mask[row, longest - rest :] = 1, 1
    return ids, mask


if __name__ == "__main__":
    main()
