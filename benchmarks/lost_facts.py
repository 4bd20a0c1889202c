"""Measure when the keys of facts are evicted, by layer and head, and which keys are kept instead.

    python -m benchmarks.lost_facts wikitext2_test.txt --compare robust-bytes:0.1

The trials are those of `h2o eval --needle`. Each text is processed and the cache is cut. Then come
its question and, token by token, the correct answer. The cache records when each key is evicted.

The first table is about the keys of the answer's tokens in the text: the shares that are evicted at
each time, and that are held throughout. "places" is the share of the heavy hitters that belong to
tokens of the question and the answer in the end, "found" the share of facts that are found. For
"frozen" the heavy hitters stay as they are after the cut, so that later tokens have only the window
of recent keys.

The second table is about the tokens of the texts and about the heavy hitters after the cut: the
shares without a letter or digit, of tokens that occurred in the text before, and of others. The
third table has the share of the answers' keys that each head of each layer holds after the cut.
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
from h2o.evaluation import needles
from h2o.evaluation.facts import Fact
from h2o.evaluation.setting import parse_all
from h2o.evaluation.text_table import table
from h2o.hf.layers.layer import H2OLayer

ABOVE_ALL = 1e30
"""A score that no attention reaches"""
WHEN = ("at the cut", "by the question", "by the answer", "held")
WHO = ("marks", "seen before", "others")


def place(tokenizer: Any, document: str, fact: Fact) -> slice:
    """The tokens of a document that are the answer to a fact, within the fact's sentence."""
    answer = fact.answer.strip()
    sentence = document.index(fact.sentence)
    begin = sentence + fact.sentence.rindex(answer)
    offsets = tokenizer(document, return_offsets_mapping=True)["offset_mapping"]
    inside = [i for i, (a, b) in enumerate(offsets) if a < begin + len(answer) and b > begin]
    return slice(inside[0], inside[-1] + 1)


def sorts(tokenizer: Any, document: Tensor) -> Tensor:
    """For each token of a document [1, n] the index in `WHO` of its kind, [n]."""
    tokens, seen = document[0].tolist(), set()
    which = []
    for token in tokens:
        is_mark = not any(map(str.isalnum, tokenizer.decode([token])))
        which.append(0 if is_mark else 1 if token in seen else 2)
        seen.add(token)
    return torch.tensor(which)


def h2o_layers(cache: H2OCache) -> list[H2OLayer]:
    return [layer for layer in cache.layers if isinstance(layer, H2OLayer)]


def freeze(cache: H2OCache) -> None:
    """Let all keys that are held outrank every later key."""
    for layer in h2o_layers(cache):
        layer.slots.scores.fill_(ABOVE_ALL)


def hitters(cache: H2OCache) -> list[tuple[Tensor, Tensor]]:
    """For each layer the positions [G, slots], and whether each is a heavy hitter."""
    pairs = []
    for layer in h2o_layers(cache):
        positions = layer.kept().positions[0]
        recent = layer.slots.budget[0].expand(len(positions), 2)[:, 1:]
        oldest_recent = layer.seen - recent
        pairs.append((positions, (positions >= layer.policy.sinks) & (positions < oldest_recent)))
    return pairs


def finds(model: Any, cache: H2OCache, asked: needles.Asked) -> tuple[bool, int]:
    """Ask for the one fact. Returns whether it is found, and the columns seen with the question."""
    ((question, answer),) = asked
    decoded = []
    for ids in (question, *answer[:, :-1].split(1, dim=1)):
        logits = model(ids, cache=cache, use_cache=True).logits
        decoded.append(logits[0, -1].argmax().item())
        if len(decoded) == 1:
            columns = cache.get_seq_length()
    return decoded == answer[0].tolist(), columns


@torch.no_grad()
def measured(model: Any, tokenizer: Any, setting: Any, trial: needles.Trial) -> dict[str, Any]:
    """Run one trial. Returns numbers, and tensors by layer and head."""
    document, asked = needles.encode(tokenizer, trial.document, trial.questions)
    fact, n = place(tokenizer, trial.document, trial.facts[0]), document.shape[1]
    cache = H2OCache(model.config, setting.config, prompt_length=n, trace=True)
    model.base_model(document, cache=cache, use_cache=True)
    which, kept = sorts(tokenizer, document), torch.zeros(len(WHO))
    for positions, are_hitters in hitters(cache):
        kept += torch.bincount(which[positions[are_hitters].long()], minlength=len(WHO))
    frozen = cache.fork()
    freeze(frozen)
    is_found, asked_at = finds(model, cache, asked)
    layers = [i for i, layer in enumerate(cache.layers) if isinstance(layer, H2OLayer)]
    at = torch.stack([cache.evicted_at(i)[0, :, fact] for i in layers])  # [layers, G, tokens]
    tokens = torch.arange(fact.start, fact.stop)[:, None]
    held = torch.stack([(x[:, None] == tokens).any(-1) for x, _ in hitters(cache)])
    cut, by_question = ~held & (at <= n), ~held & (at > n) & (at <= asked_at)
    when = [cut, by_question, ~held & (at > asked_at), held]
    places = torch.stack([
        torch.stack([are_hitters.sum(), (are_hitters & (positions >= n)).sum()])
        for positions, are_hitters in hitters(cache)
    ]).sum(0)  # fmt: skip
    return {
        "when": [x.float().mean().item() for x in when],
        "places": (places[1] / places[0]).item(),
        "found": float(is_found),
        "frozen": float(finds(model, frozen, asked)[0]),
        "texts": torch.bincount(which, minlength=len(WHO)) / n,
        "kept": kept / kept.sum(),
        "by head": 1 - cut.float().mean(-1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="a long plain text")
    parser.add_argument("--compare", default="robust-bytes:0.1", help="settings of h2o eval")
    parser.add_argument("--lengths", default="512", help="tokens of the texts (512)")
    parser.add_argument("--facts", default="all", help="kinds of h2o eval --needle (all)")
    parser.add_argument(
        "--limit", type=int, default=2, help="trials of each length, depth and kind (2)"
    )
    parser.add_argument("--model", help="default: the embedded SmolLM2-135M")
    parser.add_argument("--dtype", default="bfloat16", choices=models.DTYPES)
    options = parser.parse_args()
    settings = parse_all(options.compare)
    model, tokenizer = models.load_model(
        options.model, attn_implementation=None, dtype=options.dtype, say=models.say
    )
    model.set_attn_implementation("h2o")
    lengths = [int(x) for x in options.lengths.split(",")]
    text = options.text.read_text("utf-8")
    trials = needles.make_trials(
        text, tokenizer, lengths, options.limit, needles.parse_kinds(options.facts)
    )
    first, second, heads = [], [], []
    for setting in settings:
        rows = [
            measured(model, tokenizer, setting, trial) for trial in tqdm(trials, desc=setting.name)
        ]
        when = [statistics.fmean(x) for x in zip(*(row["when"] for row in rows), strict=True)]
        more = [statistics.fmean(row[x] for row in rows) for x in ("places", "found", "frozen")]
        first.append([setting.name, *(f"{x:.2f}" for x in when + more)])
        texts, kept, by_head = (
            torch.stack([row[x] for row in rows]).mean(0) for x in ("texts", "kept", "by head")
        )
        second = second or [["the texts", *(f"{x:.2f}" for x in texts)]]
        second.append([setting.name, *(f"{x:.2f}" for x in kept)])
        heads += ["", f"{setting.name}, layers down, heads across, held after the cut"]
        heads += ["  ".join(f"{x:.2f}" for x in row) for row in by_head.tolist()]
    print(f"{len(trials)} facts")
    print(table(["setting", *WHEN, "places", "found", "frozen"], first))
    print()
    print(table(["heavy hitters", *WHO], second))
    print("\n".join(heads))


if __name__ == "__main__":
    main()
