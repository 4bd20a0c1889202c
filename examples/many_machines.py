"""Answers the prompts of a file on all machines of a Ray cluster, with an evicting cache on each.

    pip install '.[hf]' 'ray[data]'     # in the folder of h2o's sources, on each machine
    ray start --head                    # on one machine
    ray start --address=HEAD:6379       # on each of the others
    python examples/many_machines.py prompts.jsonl answers.jsonl --machines 2

A line of the first file is an object with `id` and `prompt`, one of the second with `id` and
`text`. Ray Data deals out the prompts, and does what a lost machine was doing again on another one;
the answers are written here, each when it comes. Started again, the script goes on with what is
missing.
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
"""Prompts that are dealt out together: what is lost with a machine, at most."""


class Answers:
    """A model and its rows, kept by one process of a machine."""

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
    parser.add_argument("--machines", type=int, default=2, help="processes with a model")
    parser.add_argument("--cpus", type=int, default=1, help="of a process")
    parser.add_argument("--gpus", type=int, default=0, help="of a process")
    parser.add_argument("--rows", type=int, default=16, help="prompts at a time of a process")
    parser.add_argument("--tokens", type=int, default=64, help="new ones, at most")
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
    """The lines of a file, after a last one that a killed run has not finished is taken off."""
    text = file.read_text("utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole, "utf-8")
    return lines_of(whole)


def lines_of(text: str) -> list[str]:
    """Not splitlines, which divides at what may stand within JSON, such as U+2028."""
    return [line for line in text.split("\n") if line.strip()]


if __name__ == "__main__":
    main()
