"""The command line `h2o plan`: how many requests fit on a device, and how fast they can be."""

from __future__ import annotations

import argparse
import json

from h2o.cli.cache_options import (
    add_cache_options,
    add_compare,
    add_dtype,
    add_model,
    settings_from,
)
from h2o.cli.prompts_file import parse_bytes
from h2o.evaluate.devices import DEVICES, measured

__all__ = ["add_arguments", "check", "run"]

COMPARE = "full,robust:0.2,robust-bytes:0.1"
HEADER = (
    "setting", "a request", "requests", "ms a prompt", "ms a step", "tokens/s", "", "bound by",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Bounds by what has to be read and multiplied, from data sheets, and by counts of h2o's "
        "kernels for GPUs: runs reach about half of them. Nothing is loaded but the model's config."
    )
    add = parser.add_argument
    add_model(add)
    add_dtype(add)
    add("--device", choices=["cpu", *DEVICES], default="cpu", help="cpu is this machine, whose "
        "rates are measured (%(default)s)")  # fmt: skip
    add("--bytes", type=parse_bytes, metavar="B", help="for the caches of all requests, such as "
        "40GB; default: what the weights leave of nine tenths of the memory")  # fmt: skip
    add("--requests", type=int, metavar="N", help="at a time; default: as many as fit")
    add("--prompt", type=int, default=2048, metavar="N", help="tokens of a prompt (%(default)s)")
    add("--new", type=int, default=256, metavar="N", help="new tokens (%(default)s)")
    add_compare(add, COMPARE)
    add_cache_options(parser.add_argument_group("or one cache"), min_tokens=0)
    add("--json", action="store_true", help="for machines")


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends with an error message where what is asked for makes no sense; else `settings`."""
    for name in ("requests", "prompt", "new"):
        number = getattr(options, name)
        if number is not None and number < 1:
            parser.error(f"argument --{name}: must be at least 1, not {number}")
    try:
        options.settings = settings_from(options, COMPARE)
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    for one in options.settings:
        if not one.has_cache:
            parser.error(f"argument --compare {one.why_not_dropping}")


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """The exit code. Raises: UserError (`h2o.errors`)."""
    from h2o import models
    from h2o.evaluate.fitting import check_fit
    from h2o.evaluate.plan import model_of, plan
    from h2o.evaluate.presentation import table

    name = options.model or models.DEFAULT_MODEL
    config = models.config_of(name)
    if options.dtype != "auto":
        import torch

        config.get_text_config(decoder=True).dtype = getattr(torch, options.dtype)
    model = model_of(config)
    device = measured() if options.device == "cpu" else DEVICES[options.device]
    plans = []
    check_fit(options.settings)(config)
    for setting in options.settings:
        how = {"memory": options.bytes, "rows": options.requests}
        plans.append(plan(model, device, setting, options.prompt, options.new, **how))
    if options.json:
        print(json.dumps([one._asdict() for one in plans], indent=2))
        return 0
    rows = [
        (
            one.setting,
            f"{one.row_bytes / 1e6:.1f} MB",
            one.rows,
            f"{1e3 * one.prompt_seconds:.3g}",
            f"{1e3 * one.step_seconds:.3g}",
            f"{one.tokens_per_second:,.0f}",
            f"{one.tokens_per_second / plans[0].tokens_per_second:.1f}x",
            one.bound,
        )
        for one in plans
    ]
    print(
        f"{name} ({model.weights / 1e9:.2f} GB) on {options.device}, prompts of {options.prompt} "
        f"tokens and {options.new} new ones; bounds, of which runs reach about half\n"
    )
    print(table(HEADER, rows))
    return 0
