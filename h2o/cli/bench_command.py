"""The command line `h2o bench`: a model on this machine, with the full cache and with h2o's."""

from __future__ import annotations

import argparse
import json
from typing import Any

from h2o.cli.cache_options import (
    add_cache_options,
    add_compare,
    add_model,
    load_model,
    make_settings,
    parse_count,
)

COMPARE = "authors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Times are medians over rounds in which the caches take turns. The project's own tables, "
        "of kernels and models beside other packages, are run from a checkout: "
        "python -m benchmarks."
    )
    add = parser.add_argument_group("what to time").add_argument
    add_model(add)
    add("--prompts", nargs="+", type=parse_count, default=[512, 2048, 4096], metavar="N",
        help="prompt lengths in tokens (512 2048 4096)")  # fmt: skip
    add = parser.add_argument_group("beside the full cache").add_argument
    add("--budgets", nargs="+", default=["0.1", "0.2"], metavar="B", help="what h2o keeps: a "
        "number with a point is a fraction of the prompt, one without counts tokens "
        "(0.1 0.2)")  # fmt: skip
    add_compare(add, COMPARE, "; a name without a budget has each of --budgets")
    add_cache_options(parser.add_argument_group("or beside it one cache"), min_tokens=0)
    add = parser.add_argument_group("how").add_argument
    add(
        "--tokens",
        type=parse_count,
        default=16,
        metavar="N",
        help="decoded in each round (%(default)s)",
    )
    add("--rounds", type=parse_count, default=5, metavar="N", help="(%(default)s)")
    add("--json", action="store_true", help="for machines: one object, nothing else")


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Add the `settings` to time to the options. End by `parser.error` for options that do not fit
    together."""
    from h2o.evaluation import setting

    settings = make_settings(options, COMPARE, ",".join(options.budgets))
    for one in settings:
        if not one.is_cache:
            parser.error(f"argument --compare {one.why_no_cache}")
    full = setting.parse("full")
    options.settings = [full, *(one for one in settings if one.variant != "full")]


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run the command and return its exit code. Raises: UserError (`h2o.errors`)."""
    from h2o import models
    from h2o.evaluation import speed

    models.need_transformers()
    say = (lambda text: None) if options.json else models.say
    model, tokenizer = load_model(options, options.settings, say)
    result = {"model": options.model or models.DEFAULT_MODEL} | speed.measure(
        model, tokenizer, options.settings, options.prompts,
        tokens=options.tokens, rounds=options.rounds, say=say,
    )  # fmt: skip
    print(json.dumps(result, indent=2) if options.json else format_result(result))
    return 0


def format_result(result: dict[str, Any]) -> str:
    """The figures for a reader: each cache's, and how they compare with the full one's."""
    from h2o.evaluation.text_table import table

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
    header = ("cache", "prompt", "prefill s", "", "ms a token", "tokens/s", "", "cache MB", "")
    title = f"{result['model']}, {result['dtype']}, on {name}; medians of {result['rounds']} rounds"
    note = "x: times as fast as the full cache; %: of its bytes"
    return "\n".join([title, "", table(header, rows), "", note])
