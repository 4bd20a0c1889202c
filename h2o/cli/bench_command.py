"""The command `h2o bench`: times a model on this machine with the full cache and with H2O."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

from h2o.cli.cache_options import (
    add_cache_options,
    add_compare,
    add_model,
    load_model,
    make_settings,
    parse_count,
)
from h2o.evaluation import setting
from h2o.evaluation.text_table import table
from h2o.utils.progress import print_line

COMPARE = "authors"
"""The preset that is timed if no other setting is named."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Times are medians over interleaved rounds: in each round every cache runs once. To "
        "compare h2o with other packages, run the project's benchmarks from a checkout: "
        "python -m benchmarks."
    )
    add = parser.add_argument_group("what to time").add_argument
    add_model(add)
    add("--prompts", nargs="+", type=parse_counts, default=[[512, 2048, 4096]], metavar="N",
        help="prompt lengths in tokens (512 2048 4096)")  # fmt: skip
    add = parser.add_argument_group("settings to compare with the full cache").add_argument
    add("--budgets", nargs="+", default=["0.1", "0.2"], metavar="B", help="how much h2o keeps: a "
        "number with a point is a fraction of the prompt, one without is a number of tokens "
        "(0.1 0.2)")  # fmt: skip
    add_compare(add, COMPARE, "; a setting without a budget is run with each of --budgets")
    add_cache_options(parser.add_argument_group("or a single cache"), min_tokens=0)
    add = parser.add_argument_group("how to measure").add_argument
    add(
        "--tokens",
        type=parse_count,
        default=16,
        metavar="N",
        help="tokens decoded in each round (%(default)s)",
    )
    add("--rounds", type=parse_count, default=5, metavar="N", help="number of rounds (%(default)s)")
    add("--json", action="store_true", help="print one JSON object and nothing else")


def parse_counts(text: str) -> list[int]:
    """Parse numbers that are at least 1, separated by commas."""
    return [parse_count(part) for part in text.split(",")]


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Add the `settings` to time to the options. Options that do not go together end in
    `parser.error`."""
    options.prompts = [count for counts in options.prompts for count in counts]
    settings = make_settings(options, COMPARE, ",".join(options.budgets))
    for one in settings:
        if not one.is_cache:
            parser.error(f"argument --compare {one.why_no_cache}")
    full = setting.parse("full")
    options.settings = [full, *(one for one in settings if one.variant != "full")]


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code. Raises: UserError (`h2o.errors`)."""
    from h2o import models

    models.need_transformers()
    from h2o.evaluation import speed

    log = partial(print_line, quiet=options.json)
    model, tokenizer = load_model(options, options.settings, log)
    result = {"model": models.full_name(options.model)} | speed.measure(
        model, tokenizer, options.settings, options.prompts,
        tokens=options.tokens, rounds=options.rounds, log=log,
    )  # fmt: skip
    print(json.dumps(result, indent=2) if options.json else format_result(result))
    return 0


def format_result(result: dict[str, Any]) -> str:
    """Format the results as a table: each cache's figures, and their ratio to the full cache's."""
    machine = result["machine"]
    name = machine["name"]
    if machine["device"] == "cpu":
        name += f", {machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    rows = []
    for one in result["measurements"]:
        ratios = ["", "", ""]
        if one["setting"] != "full":
            speedups = one["prefill_speedup"], one["token_speedup"]
            ratios = [*(f"{x:.2f}x" for x in speedups), f"{one['bytes_ratio']:.0%}"]
        rows.append(
            (
                one["setting"], one["prompt_tokens"],
                f"{one['prefill_seconds']:.3f}", ratios[0],
                f"{1e3 * one['token_seconds']:.1f}", f"{one['tokens_per_second']:.1f}", ratios[1],
                f"{one['bytes_held'] / 1e6:.1f}", ratios[2],
            )
        )  # fmt: skip
    header = ("cache", "prompt", "prefill s", "", "ms per token", "tokens/s", "", "cache MB", "")
    title = f"{result['model']}, {result['dtype']}, on {name}; medians of {result['rounds']} rounds"
    note = "x: speed relative to the full cache; %: bytes relative to the full cache"
    return "\n".join([title, "", table(header, rows), "", note])
