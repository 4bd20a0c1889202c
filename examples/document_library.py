"""A library of compressed documents. A question loads the saved cache of the one it is about.

    python examples/document_library.py build LIBRARY [--documents FOLDER] [--budget 0.15]
    python examples/document_library.py ask LIBRARY "Who founded the observatory of Tarn?"

`build` compresses every text file of a folder (by default twenty short chronicles that this script
makes up) to a share of its keys and values and saves these as a file. `ask` picks the document that
shares the rarest words with the question, loads its cache and answers. The model does not process
the document's text again.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import torch

import h2o

PLACES = "Tarn Velmora Oskarby Pellworm Ardley Quillon Brekke Sorrel Tindale Umbra Falkenau".split()
PLACES += "Girvan Hestia Ivrea Jarrow Kestrel Lomond Mirefield Norrland Orlova".split()
FOUNDERS = ("Clara Whitlock", "Anders Holm", "Beatrix Fenn", "Otto Marsh", "Lucia Ferrant")
KINDS = ("observatory", "paper mill", "botanical garden", "music school")
CHRONICLE = """\
The {kind} of {place} stands on a hill above the town of {place}. It was founded by {founder} in the
year {year}. At first it employed {people} people, most of whom came from the valley below. A fire
destroyed the roof in {fire}, and the town paid for a new one made of copper. For a long time nobody
used the northern wing, where the archives are kept today. Visitors climb {steps} steps to the
entrance. The cafe beside the gate is known for its plum cake. Every spring the people of {place}
hold a fair on the lawn, with music until late in the evening. A small railway brings guests up the
hill on Sundays. From the terrace one sees the river, the old bridge and the mountains in the south.
"""


def chronicles() -> dict[str, str]:
    """Twenty documents, each with facts of its own."""
    return {
        place.lower(): CHRONICLE.format(
            place=place, kind=KINDS[i % 4], founder=FOUNDERS[i % 5], year=1802 + 7 * i,
            people=24 + 5 * i, fire=1931 + 3 * i, steps=112 + 9 * i,
        )
        for i, place in enumerate(PLACES)
    }  # fmt: skip


def read(folder: Path) -> dict[str, str]:
    return {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.txt"))}


def around(tokenizer: Any) -> tuple[str, str]:
    """The text that the chat template puts before a document, and that after the question."""
    if tokenizer.chat_template is None:
        return "", "\n"
    turn = [{"role": "user", "content": "DOCUMENT"}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    before, _, after = text.partition("DOCUMENT")
    return before, after


def encode(tokenizer: Any, text: str) -> torch.Tensor:
    """Token ids [1, n] without special tokens at the ends."""
    return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids


def build(model: Any, tokenizer: Any, library: Path, texts: dict[str, str], budget: float) -> None:
    """Save a cache of each document, and an index of their words and token ids."""
    library.mkdir(parents=True, exist_ok=True)
    before, _ = around(tokenizer)
    index, full = {}, 0
    start = time.perf_counter()
    for name, text in texts.items():
        ids = encode(tokenizer, before + text)
        cache = h2o.compress_document(model, ids, budget=budget, min_tokens=0)
        cache.save(library / f"{name}.safetensors", model)
        full += cache.report().total.bytes_full
        index[name] = {"words": sorted(words(text)), "ids": ids[0].tolist()}
    (library / "index.json").write_text(json.dumps(index), "utf-8")
    held = sum((library / f"{name}.safetensors").stat().st_size for name in index)
    print(
        f"{len(texts)} documents in {time.perf_counter() - start:.1f} s: {held / 1e6:.1f} MB of "
        f"files, where full caches would take {full / 1e6:.1f} MB"
    )


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def pick(index: dict[str, Any], question: str) -> str:
    """The document that shares most with a question. A word counts more if fewer documents have
    it."""

    def rarity(word: str) -> float:
        return math.log((1 + len(index)) / sum(word in other["words"] for other in index.values()))

    asked = words(question)
    return max(index, key=lambda name: sum(map(rarity, asked.intersection(index[name]["words"]))))


def ask(model: Any, tokenizer: Any, library: Path, question: str, tokens: int) -> None:
    """Answer from the saved cache of one document, and print size and times."""
    index = json.loads((library / "index.json").read_text("utf-8"))
    name = pick(index, question)
    file = library / f"{name}.safetensors"
    _, after = around(tokenizer)
    turn = encode(tokenizer, f"\nAnswer briefly. {question}{after}")
    ids = torch.cat([torch.tensor([index[name]["ids"]]), turn], dim=1).to(model.device)
    start = time.perf_counter()
    cache = h2o.H2OCache.load(file, model)
    loaded = time.perf_counter()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=tokens,
        do_sample=False, pad_token_id=tokenizer.pad_token_id or 0,
    )  # fmt: skip
    answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    print(
        f"{name}: {file.stat().st_size / 1e3:.0f} kB loaded in {loaded - start:.3f} s, answered in "
        f"{time.perf_counter() - loaded:.2f} s: {' '.join(answer.split())}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="compress and save documents")
    building.add_argument("library", type=Path)
    building.add_argument("--documents", type=Path, help="a folder of .txt files")
    building.add_argument(
        "--budget", type=float, default=0.15, help="share of a full cache's bytes (%(default)s)"
    )
    asking = commands.add_parser("ask", help="answer questions from the files")
    asking.add_argument("library", type=Path)
    asking.add_argument("questions", nargs="+")
    asking.add_argument("--tokens", type=int, default=24, help="new tokens of an answer, at most")
    options = parser.parse_args()
    model, tokenizer = h2o.load_model(options.model)
    if options.command == "build":
        texts = chronicles() if options.documents is None else read(options.documents)
        build(model, tokenizer, options.library, texts, options.budget)
    else:
        for question in options.questions:
            ask(model, tokenizer, options.library, question, options.tokens)


if __name__ == "__main__":
    main()
