"""Answer the prompts of a file on all machines of a Ray cluster, with an evicting cache on each.

    pip install '.[hf]' 'ray[data]'     # in the folder of h2o's sources, on each machine
    ray start --head                    # on one machine
    ray start --address=HEAD:6379       # on each of the others
    python examples/many_machines.py prompts.jsonl answers.jsonl --machines 2

Each line of the first file is an object with `id` and `prompt`, each line of the second an object
with `id` and `text`. Ray Data distributes the prompts, and repeats the work of a lost machine on
another one. This process writes each answer as soon as it arrives. When the script is started
again, it answers the prompts that have no answer yet.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import ray

import h2o
from h2o import models

SHARE = 8
"""Prompts that are sent to a process together. Losing it loses at most the work on these."""


class Answers:
    """A model in one process of a machine. Answers batches of prompts."""

    def __init__(self, model: str | None, rows: int, tokens: int) -> None:
        self.model, self.tokenizer = models.load_model(model)
        self.limits = {"rows": rows, "max_new_tokens": tokens}

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        results = h2o.generate_all(
            self.model, map(str, batch["prompt"]), heavy=128, recent=128,
            tokenizer=self.tokenizer, **self.limits,
        )  # fmt: skip
        return {"index": batch["index"], "text": [result.text for result in results]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", help="default: the embedded SmolLM2-135M")
    parser.add_argument("--machines", type=int, default=2, help="number of processes with a model")
    parser.add_argument("--cpus", type=int, default=1, help="CPUs per process")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs per process")
    parser.add_argument("--rows", type=int, default=16, help="batch rows per process")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt, at most")
    options = parser.parse_args()

    prompts = [json.loads(line) for line in lines_of(options.prompts.read_text("utf-8"))]
    options.answers.touch()
    done = {json.loads(line)["id"] for line in whole_lines(options.answers)}
    missing = [prompt for prompt in prompts if prompt["id"] not in done]
    if not missing:
        return
    ray.init(address="auto")
    items = [{"index": i, "prompt": prompt["prompt"]} for i, prompt in enumerate(missing)]
    data = ray.data.from_items(items, override_num_blocks=-(-len(items) // SHARE))
    answers = data.map_batches(
        Answers,
        fn_constructor_args=(options.model, options.rows, options.tokens),
        batch_size=SHARE,
        concurrency=options.machines,
        num_cpus=options.cpus,
        num_gpus=options.gpus,
    )
    with options.answers.open("a", encoding="utf-8") as file:
        for answer in answers.iter_rows():
            line = {"id": missing[answer["index"]]["id"], "text": answer["text"]}
            file.write(json.dumps(line) + "\n")
            file.flush()


def whole_lines(file: Path) -> list[str]:
    """The complete lines of a file. A last line that a killed run left unfinished is removed from
    the file."""
    text = file.read_text("utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole, "utf-8")
    return lines_of(whole)


def lines_of(text: str) -> list[str]:
    """The lines of a text. splitlines would also split at characters that JSON may contain, such as
    U+2028."""
    return [line for line in text.split("\n") if line.strip()]


if __name__ == "__main__":
    main()
