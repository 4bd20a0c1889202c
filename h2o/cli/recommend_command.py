"""The command `h2o recommend`: which budget to use for a model and a text."""

from __future__ import annotations

import argparse
import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h2o.cli import texts
from h2o.cli.cache_options import add_compare, add_model, load_model, parse_count
from h2o.evaluation.setting import parse_all
from h2o.evaluation.text_table import table
from h2o.utils.progress import print_line

if TYPE_CHECKING:
    from h2o.evaluation.recommendation import Cost

COMPARE = "budget"
BUDGETS = ["0.05", "0.1", "0.2", "0.4"]
OUTPUT = Path("h2o-recommend")
DESCRIPTION = """\
Measures what eviction costs your model on your text, for some budgets, and says in one sentence
which to use. The full cache, and every key in few bits, are measured beside them.

  h2o recommend --model Qwen/Qwen2.5-1.5B-Instruct --text notes.txt --dtype bfloat16

It takes --minutes, and a little longer with a large model. Interrupt it at any time: the next run
with the same --output goes on where it stopped.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "facts: sentences hidden among others of their kind, asked about after eviction; only "
        "those count that the full cache finds. rule: whether the first message of a chat is still "
        "obeyed after four others. same token: how often the most likely next token "
        "is the full cache's. KL: divergence from its prediction, in nats. lost: increase of the "
        "loss, in nats per token. --compare budget,random-bytes adds random eviction, which a "
        "budget has to beat; it is simulated, which takes several times as long."
    )
    add = parser.add_argument_group("what to measure").add_argument
    add_model(add)
    add("--text", metavar="FILE", help="a plain text of the kind that the model will read, or - "
        "for standard input (an article that comes with h2o)")  # fmt: skip
    add("--length", type=parse_count, default=1024, metavar="N", help="tokens that are read before "
        "keys are evicted (%(default)s)")  # fmt: skip
    add("--budgets", nargs="+", default=BUDGETS, metavar="B", help="fractions of a full cache's "
        f"bytes, or numbers of tokens ({' '.join(BUDGETS)})")  # fmt: skip
    add_compare(add, COMPARE, "; a setting without a budget is measured with each of --budgets")
    add = parser.add_argument_group("how to measure").add_argument
    add("--texts", type=parse_count, default=8, metavar="N", help="maximum number of pieces of the "
        "text (%(default)s)")  # fmt: skip
    add("--minutes", type=float, default=10.0, metavar="M", help="begin no other piece after this "
        "time (%(default)g)")  # fmt: skip
    add("--output", "-o", type=Path, default=OUTPUT, metavar="FOLDER", help="folder for report.md "
        "and for the results from which an interrupted run continues (%(default)s)")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object and nothing else")


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Add `settings` and `content`, the text. Options that do not go together end in
    `parser.error`."""
    options.settings = parse_all(options.compare or COMPARE, ",".join(options.budgets))
    for one in options.settings:
        if not one.is_cache:
            parser.error(f"argument --compare: {one.why_no_cache}")
    if not options.minutes >= 0:
        parser.error(f"argument --minutes: {options.minutes} is no time")
    options.content = texts.article()
    if options.text is not None:
        options.content = texts.read(parser, "--text", options.text)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code. Raises: UserError (`h2o.errors`)."""
    from h2o import models

    models.need_transformers()
    from h2o.evaluation import recommendation, speed
    from h2o.hf.model_traits.wrappers import input_device
    from h2o.result_file import ResultFile, provenance

    log = partial(print_line, quiet=options.json)
    file = ResultFile(options.output / "results.jsonl")
    caches = [x for x in options.settings if not x.is_random]
    model, tokenizer = load_model(options, caches, log)
    name = models.full_name(options.model)
    study = recommendation.Study(
        model, tokenizer, options.content, options.settings, length=options.length,
        texts=options.texts, file=file, facts=provenance(model, tokenizer, name),
    )  # fmt: skip
    study.run(60 * options.minutes, log)
    costs = study.costs()
    verdict = "No budget was measured, so none is recommended: pass --compare budget."
    if any(one.config.budget is not None for one in options.settings):
        verdict = recommendation.verdict(costs)
    result = {
        "model": name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "length": options.length,
        "texts": len(study.pieces),
        "machine": speed.describe_machine(input_device(model)),
        "versions": study.facts["versions"],
        "costs": [dataclasses.asdict(cost) for cost in costs],
        "verdict": verdict,
    }
    report = format_result(result, costs)
    (options.output / "report.md").write_text(f"```\n{report}\n```\n", "utf-8")
    print(json.dumps(result, indent=2) if options.json else report)
    log(f"written: {options.output / 'report.md'}")
    return 0


def format_result(result: dict[str, Any], costs: list[Cost]) -> str:
    """Format the results as a title, a table and the verdict."""
    machine, rows = result["machine"], []
    for cost in costs:
        timed = ["", "", "", ""]
        if cost.bytes_ratio is not None:
            assert cost.prefill_seconds is not None
            assert cost.token_seconds is not None
            timed = [
                f"{cost.bytes_ratio:.0%}", f"{cost.prefill_seconds:.2f}",
                f"{1e3 * cost.token_seconds:.1f}", f"{cost.token_speedup:.2f}x",
            ]  # fmt: skip
        error = f" ±{cost.lost_error:.3f}" if cost.lost_error else ""
        rows.append(
            [
                cost.setting, f"{cost.found}/{cost.known}",
                "" if cost.followed is None else f"{cost.followed}/{cost.chats}",
                f"{cost.same:.1%}",
                f"{cost.divergence:.4f}", f"{cost.lost:.3f}{error}", *timed,
            ]
        )  # fmt: skip
    header = (
        "cache", "facts", "rule", "same token", "KL", "lost", "bytes", "prefill s", "ms per token",
        "",
    )  # fmt: skip
    place = machine["name"]
    if machine["device"] == "cpu":
        place += f", {machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    texts = result["texts"]
    versions = ", ".join(f"{name} {x}" for name, x in result["versions"].items() if x)
    return "\n".join(
        [
            f"{result['model']}, {result['dtype']}, on {place}",
            f"{texts} text{'s' if texts > 1 else ''} of {result['length']} tokens",
            "",
            table(header, rows),
            "",
            result["verdict"],
            "",
            versions,
        ]
    )
