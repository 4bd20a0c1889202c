"""Evaluate evicting caches with RULER, MATH-500 (kvpress' leaderboard), GSM8K and HumanEval.

    python -m benchmarks.leaderboard ruler --data ruler_4096.jsonl --model Qwen/Qwen3-8B \\
        --device cuda --dtype bfloat16 --rows 8
    python -m benchmarks.leaderboard math --data math500.jsonl --model Qwen/Qwen3-8B \\
        --device cuda --dtype bfloat16 --rows 32
    python -m benchmarks.leaderboard gsm8k --data gsm8k.jsonl --dtype bfloat16 --rows 8
    python -m benchmarks.leaderboard humaneval --data humaneval.jsonl --run-code

In RULER the model processes the context, and the cache is cut to its budget before the question
comes. Question and answer then have to fit into the same budget. A removed share of 0.75 is a
budget of 0.25, of the keys, or of the bytes for settings that end in "-bytes". In MATH-500 the
problem is the prompt, and the cache has 512, 1024 or 2048 slots for the problem and the whole
answer, in GSM8K and HumanEval 64 to 192. Decoding is greedy.

Each answer is written to the output file, as a line, as soon as it is complete. The same command
resumes an interrupted run, and prints the table. Without --data, `ruler` lets lm-eval generate the
items of the six tasks that need no download, for the model's tokenizer.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import os
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lm_eval.tasks import TaskManager
from lm_eval.tasks.hendrycks_math.utils import is_equiv, last_boxed_only_string, remove_boxed
from tqdm import tqdm

from benchmarks.written_code import passes
from h2o import models
from h2o.cli.cache_options import add_dtype
from h2o.compat import with_cache
from h2o.errors import UnsupportedError, UserError
from h2o.evaluation.model_fit import check_fit
from h2o.evaluation.protocols import pad_rows, read_documents
from h2o.evaluation.questions import question_start
from h2o.evaluation.setting import Setting, parse_all
from h2o.evaluation.text_table import table
from h2o.hf.batching.generate_all import generate_all
from h2o.hf.batching.request import Request
from h2o.result_file import fingerprint, provenance
from h2o.utils.progress import print_line

GENERATED = (
    "niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe",
)  # fmt: skip
"""Tasks of RULER that lm-eval generates without a download"""
COMPARED = {
    "ruler": "full,authors,robust,echo,echo-bytes",
    "math": "full,authors,robust,echo",
    "gsm8k": "full,authors,robust,local",
    "humaneval": "full,authors,robust,local",
}
"""Settings by benchmark. Only RULER has "-bytes" settings, since others count slots in keys."""
REMOVED = "0.25,0.5,0.75,0.875"
SLOTS = {"math": "512,1024,2048", "gsm8k": "64,96,128,192", "humaneval": "64,96,128,192"}
"""Keys per head by benchmark whose answers are long. The others cut the cache before a question."""
MARK = "<the context ends here>"
WANTED = {
    "math": "\nReason step by step, and put the final answer within \\boxed{}.",
    "gsm8k": "\nReason step by step, and end with the answer as a number.",
    "humaneval": "Complete this function. Answer with the whole function.\n",
}

Prompt = tuple[list[int], list[int]]
"""Tokens of the context, after which the cache is cut, and tokens after it."""


@dataclasses.dataclass(frozen=True)
class Item:
    """A question and its correct answers."""

    task: str
    context: str
    """Text before the cut"""
    question: str
    """Text after the cut"""
    prefix: str
    """The first words of the answer, which are given to the model"""
    answers: tuple[str, ...]
    tokens: int
    """Most tokens of an answer"""

    def score(self, text: str) -> float:
        """Score of a text, 0 to 1. In RULER it is the share of the answers that the text contains,
        and in its "qa" tasks whether it contains one. In MATH it is whether the solution has the
        correct result in a box. In GSM8K it is whether the last number is correct, and in HumanEval
        whether the function passes its tests."""
        if self.task == "math":
            boxed = last_boxed_only_string(text)
            return float(boxed is not None and is_equiv(unboxed(boxed), self.answers[0]))
        if self.task == "gsm8k":
            numbers = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
            return float(bool(numbers) and float(numbers[-1]) == float(self.answers[0]))
        if self.task == "humaneval":
            return float(passes(text, *self.answers))
        found = [answer.lower() in text.lower() for answer in self.answers]
        return float(any(found)) if self.task.startswith("qa") else statistics.fmean(found)


def unboxed(boxed: str) -> str | None:
    """The content of a LaTeX box, or None if the box is not closed."""
    with contextlib.suppress(AssertionError):
        return remove_boxed(boxed)
    return None


def rows_of(path: Path, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON Lines file.

    Raises:
        UserError: a line lacks one of the fields in `wanted`.
    """
    for number, line in enumerate(path.read_text("utf-8").split("\n"), start=1):
        if line.strip():
            row = json.loads(line)
            if missing := [name for name in wanted if name not in row]:
                raise UserError(
                    f"{path}, line {number} has no {missing[0]!r}: a line must be an object with "
                    + ", ".join(wanted)
                )
            yield row


def ruler_items(path: Path) -> Iterator[Item]:
    """Items from kvpress' data set, saved as JSON Lines."""
    wanted = ("task", "context", "question", "answer_prefix", "answer", "max_new_tokens")
    for row in rows_of(path, wanted):
        task, context, question, prefix, answers, tokens = (row[name] for name in wanted)
        yield Item(task, context, question, prefix, tuple(answers), tokens)


def generated_items(tokenizer: str, length: int, tasks: Sequence[str]) -> Iterator[Item]:
    """Items of RULER that lm-eval generates. `tokenizer` is a name or a folder."""
    manager = TaskManager(metadata={"tokenizer": tokenizer, "max_seq_lengths": [length]})
    for name in tasks:
        (task,) = manager.load([name])["tasks"].values()
        tokens = task.config.generation_kwargs["max_gen_toks"]
        for row in task.eval_docs:
            text, answers = row["input"], tuple(row["outputs"])
            begin = question_start(text)
            prefix = row["gen_prefix"]
            yield Item(name, text[:begin], text[begin:], f" {prefix}", answers, tokens)


def math_items(path: Path, tokens: int) -> Iterator[Item]:
    """Items from MATH-500, saved as JSON Lines."""
    for row in rows_of(path, ("problem", "answer")):
        yield Item("math", row["problem"] + WANTED["math"], "", "", (row["answer"],), tokens)


def gsm8k_items(path: Path, tokens: int) -> Iterator[Item]:
    """Items from GSM8K, saved as JSON Lines. A solution ends with "#### " and the answer."""
    for row in rows_of(path, ("question", "answer")):
        answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
        yield Item("gsm8k", row["question"] + WANTED["gsm8k"], "", "", (answer,), tokens)


def code_items(path: Path, tokens: int) -> Iterator[Item]:
    """Items from HumanEval, saved as JSON Lines."""
    for row in rows_of(path, ("prompt", "test", "entry_point")):
        tests = f"{row['test']}\ncheck({row['entry_point']})"
        text = f"{WANTED['humaneval']}```python\n{row['prompt']}```"
        yield Item("humaneval", text, "", "", (row["prompt"], tests), tokens)


LONG_ANSWERS = {"math": math_items, "gsm8k": gsm8k_items, "humaneval": code_items}
"""Functions that read the items of the benchmarks in `SLOTS`"""


def limited(items: Iterable[Item], limit: int | None) -> list[Item]:
    """The first items of each task."""
    by_task: dict[str, list[Item]] = {}
    for item in items:
        by_task.setdefault(item.task, []).append(item)
    return [item for task in by_task.values() for item in task[:limit]]


def encode(tokenizer: Any, item: Item, thinking: bool) -> Prompt:
    """Tokens of an item, as a turn of a chat if the tokenizer has a template."""
    before, after = item.context, ""
    if has_template := tokenizer.chat_template is not None:
        turn = {"role": "user", "content": item.context + MARK}
        text = tokenizer.apply_chat_template(
            [turn], tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
        before, after = text.split(MARK)
    document = tokenizer(before, add_special_tokens=not has_template)["input_ids"]
    rest = tokenizer(item.question + after + item.prefix, add_special_tokens=False)["input_ids"]
    return (document, rest) if rest else (document[:-1], document[-1:])


def written(
    model: Any, tokenizer: Any, setting: Setting, prompts: Sequence[Prompt], tokens: int,
    rows: int, cut: bool, pins: bool,
) -> Iterator[tuple[int, list[int]]]:  # fmt: skip
    """Answer prompts. Yields (index, new tokens) as soon as an answer is complete.

    Args:
        rows: number of prompts that are answered at a time.
        cut: whether the cache is cut between the two parts of a prompt.
        pins: whether the prompts are pinned.
    """
    how = copy.deepcopy(model.generation_config)
    how.update(max_new_tokens=tokens, do_sample=False, temperature=None, top_p=None, top_k=None)
    if how.pad_token_id is None:
        how.pad_token_id = tokenizer.eos_token_id
    whole = [Request(torch.tensor(a + b), generation_config=how) for a, b in prompts]
    if not cut and setting.variant == "h2o":
        if pins:
            whole = [pinned(request, setting) for request in whole]
        how_many = {"rows": rows, "tokenizer": tokenizer, "as_completed": True}
        with contextlib.suppress(UnsupportedError):  # raised before the first answer
            results = generate_all(model, whole, setting.config, **how_many)
            with contextlib.closing(results):  # or an error's traceback would hold the model's lock
                for result in results:
                    if result.error is not None:
                        raise result.error
                    yield result.index, result.ids
            return
    for start in range(0, len(prompts), rows):
        batch = batch_written(model, tokenizer, setting, prompts[start : start + rows], how)
        yield from enumerate(batch, start)


def pinned(request: Request, setting: Setting) -> Request:
    """A request with a pinned prompt, which has slots besides those of the setting."""
    heavy = setting.config.heavy + len(request.prompt)
    config = dataclasses.replace(setting.config, heavy=heavy)
    return dataclasses.replace(request, config=config, pinned="prompt")


@torch.no_grad()
def batch_written(
    model: Any, tokenizer: Any, setting: Setting, prompts: Sequence[Prompt], how: Any
) -> list[list[int]]:
    """New tokens of a batch. The cache is cut between the two parts of the prompts."""
    first, rest = (pad_rows(part, pad=how.pad_token_id) for part in zip(*prompts, strict=True))
    cache = read_documents(model, setting, *first, tokenizer)
    ids, mask = (torch.cat(x, dim=1).to(model.device) for x in zip(first, rest, strict=True))
    out = model.generate(ids, attention_mask=mask, generation_config=how, **with_cache(cache))
    return [without_pads(row.tolist(), how.pad_token_id) for row in out[:, ids.shape[1] :]]


def without_pads(tokens: list[int], pad: int) -> list[int]:
    """The tokens of a batch row without the padding at its end."""
    while tokens and tokens[-1] == pad:
        tokens = tokens[:-1]
    return tokens


class Records:
    """A JSON Lines file of answers. The key of each is a hash of everything that it depends on."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        *lines, unfinished = path.read_bytes().split(b"\n")
        if unfinished:  # a run was killed while it wrote this line
            os.truncate(path, path.stat().st_size - len(unfinished))
        self.path = path
        self.by_key = {record["key"]: record for record in map(json.loads, lines)}

    def add(self, record: dict[str, Any]) -> None:
        self.by_key[record["key"]] = record
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def measure(
    model: Any, tokenizer: Any, settings: Sequence[Setting], items: Sequence[Item],
    records: Records, facts: dict[str, Any], *, rows: int, thinking: bool, pins: bool,
) -> dict[str, list[dict[str, Any]]]:  # fmt: skip
    """Answer the items that the file lacks. Returns the records of all items by setting."""
    results: dict[str, list[dict[str, Any]]] = {}
    for setting in settings:
        about = facts | setting.describe() | {"thinking": thinking, "pins": pins}
        keys = [fingerprint(about | {"item": dataclasses.asdict(item)}) for item in items]
        missing = [i for i, key in enumerate(keys) if key not in records.by_key]
        with tqdm(total=len(missing), desc=setting.name, disable=not missing) as bar:
            for task in dict.fromkeys(items[i].task for i in missing):
                part = [i for i in missing if items[i].task == task]
                prompts = [encode(tokenizer, items[i], thinking) for i in part]
                tokens, cut = items[part[0]].tokens, task not in SLOTS
                answers = written(model, tokenizer, setting, prompts, tokens, rows, cut, pins)
                for j, ids in answers:
                    item, key = items[part[j]], keys[part[j]]
                    text = tokenizer.decode(ids, skip_special_tokens=True)
                    about_it = {"model": facts["model"], "setting": setting.name, "task": task}
                    score = {"score": item.score(text), "right": item.answers, "text": text}
                    records.add({"key": key, **about_it, **score, "tokens": len(ids)})
                    bar.update()
        results[setting.name] = [records.by_key[key] for key in keys]
    return results


def as_table(results: dict[str, list[dict[str, Any]]]) -> str:
    """A table with a row for each setting, and columns for the mean and each task in percent."""
    tasks = list(dict.fromkeys(row["task"] for rows in results.values() for row in rows))
    lines = []
    for setting, rows in results.items():
        scores = [statistics.fmean(x["score"] for x in rows if x["task"] == task) for task in tasks]
        tokens = statistics.fmean(row["tokens"] for row in rows)
        shown = [f"{100 * score:.1f}" for score in (statistics.fmean(scores), *scores)]
        lines.append([setting, len(rows), *shown, f"{tokens:.0f}"])
    return table(["setting", "items", "mean", *tasks, "tokens written"], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.leaderboard", description=__doc__.splitlines()[0]
    )
    parser.add_argument("benchmark", choices=COMPARED)
    parser.add_argument("--data", type=Path, help="a JSON Lines file; see benchmarks/README.md")
    parser.add_argument("--model", help="default: the embedded SmolLM2-135M")
    add_dtype(parser.add_argument)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compare", help=f"settings of h2o eval ({COMPARED['ruler']})")
    parser.add_argument("--removed", default=REMOVED, help=f"ruler: removed shares ({REMOVED})")
    parser.add_argument(
        "--slots", help=f"not ruler: keys per head (math {SLOTS['math']}; others {SLOTS['gsm8k']})"
    )
    parser.add_argument(
        "--pin-prompts",
        action="store_true",
        help="not ruler: pin the prompts, in slots besides those of --slots",
    )
    parser.add_argument(
        "--length", type=int, default=4096, help="ruler without --data: tokens of an item (4096)"
    )
    parser.add_argument(
        "--tasks", default=",".join(GENERATED), help="ruler without --data: names of tasks"
    )
    parser.add_argument(
        "--tokens", type=int, default=4096, help="not ruler: most tokens of an answer (4096)"
    )
    parser.add_argument(
        "--thinking", action="store_true", help="pass enable_thinking=True to the chat template"
    )
    parser.add_argument(
        "--run-code",
        action="store_true",
        help="humaneval: run the code that the model writes, with the rights that you have",
    )
    parser.add_argument("--limit", type=int, help="items of each task (default: all)")
    parser.add_argument("--rows", type=int, default=1, help="items that are answered at a time (1)")
    parser.add_argument("--output", type=Path, default=Path("leaderboard.jsonl"))
    options = parser.parse_args(arguments)

    if options.benchmark in SLOTS:
        budgets = options.slots or SLOTS[options.benchmark]
    else:
        budgets = ",".join(f"{1 - float(share):.6g}" for share in options.removed.split(","))
    settings = parse_all(options.compare or COMPARED[options.benchmark], budgets)
    for setting in settings:
        if setting.is_mask:
            parser.error(f"{setting.why_no_cache}; it cannot answer")
    if options.benchmark in SLOTS and options.data is None:
        parser.error(f"{options.benchmark} needs --data: see benchmarks/README.md")
    if options.benchmark == "humaneval" and not options.run_code:
        parser.error(
            "humaneval runs the code that the model writes, which may do whatever you may do. Use "
            "a container or a virtual machine, and pass --run-code"
        )
    model, tokenizer = models.load_model(
        options.model, dtype=options.dtype, device=options.device, log=print_line,
        check=partial(check_fit, settings, full_cache=True),
    )  # fmt: skip
    if options.benchmark in SLOTS:
        items = LONG_ANSWERS[options.benchmark](options.data, options.tokens)
    elif options.data:
        items = ruler_items(options.data)
    else:
        name = options.model or str(models.embedded_folder(print_line))
        items = generated_items(name, options.length, options.tasks.split(","))
    facts = provenance(model, tokenizer, options.model or models.DEFAULT_MODEL)
    results = measure(
        model, tokenizer, settings, limited(items, options.limit), Records(options.output), facts,
        rows=options.rows, thinking=options.thinking, pins=options.pin_prompts,
    )  # fmt: skip
    print(f"{facts['model']}, {facts['dtype']}, {options.benchmark}")
    print(as_table(results))
    print(f"written: {options.output}")


if __name__ == "__main__":
    main()
