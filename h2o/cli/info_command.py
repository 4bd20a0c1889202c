"""The command `h2o info`: describes the installation for bug reports, says whether h2o supports a
model, and how many of its requests fit in memory."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
from dataclasses import asdict
from typing import Any

from h2o import backends, models, ops, packages
from h2o.cli.cache_options import (
    add_cache_options,
    add_compare,
    add_dtype,
    make_settings,
    option_name,
    parse_count,
    parse_name,
)
from h2o.errors import UserError
from h2o.evaluation.model_fit import check_fit
from h2o.evaluation.text_table import table

COMPARE = "full,budget:0.2,budget:0.1"
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        type=parse_name,
        metavar="NAME",
        help="say whether and how h2o supports this model; with --memory, default: the embedded "
        "SmolLM2-135M-Instruct",
    )
    add("--check", action="store_true", help="check the kernels on every CUDA device against torch")
    add("--json", action="store_true", help="print JSON")
    group = parser.add_argument_group("number of requests that fit in memory")
    group.add_argument("--memory", type=parse_bytes, metavar="B", help="memory for the caches of "
                       "all requests, such as 40GB")  # fmt: skip
    group.add_argument("--prompt", type=parse_count, default=2048, metavar="N",
                       help="tokens per prompt (%(default)s)")  # fmt: skip
    group.add_argument(
        "--new", type=parse_count, default=256, metavar="N",
        help="new tokens per request (%(default)s)",
    )  # fmt: skip
    add_dtype(group.add_argument)
    add_compare(group.add_argument, COMPARE)
    add_cache_options(parser.add_argument_group("or a single cache"))


def parse_bytes(text: str) -> int:
    """Parse a number of bytes: 64MB is 64,000,000."""
    number = text.strip().upper().rstrip("KMGTB")
    suffix = text.strip().upper()[len(number) :]
    try:
        size = int(float(number) * UNITS[suffix])
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 64MB or 2GB")
    if size < 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is {size} bytes: add a unit, such as 8GB")
    return size


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Add the `settings` whose requests are counted to the options."""
    if options.memory is None:
        counted = ("prompt", "new", "dtype", "compare", "preset", "budget", *options.cache_fields)
        for name in counted:
            if getattr(options, name) != parser.get_default(name):
                option = option_name(name)
                parser.error(f"argument {option}: requires --memory, such as --memory 40GB")
        return
    options.settings = make_settings(options, COMPARE)
    for one in options.settings:
        if one.is_mask:
            parser.error(f"argument --compare {one.why_no_cache}")


def run(options: argparse.Namespace) -> int:
    """Run the command. The exit code is 0 unless the model is not supported or a kernel is wrong.
    Raises: UserError."""
    if options.model or options.memory is not None:
        models.quiet_libraries()
        if options.memory is not None:
            return print_requests(options)
        return print_support(options.model, options.json)
    if options.check:
        return print_check(options.json)
    # If torch is loaded, as it is when a model runs, the core uses torch's threads.
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401
    if not packages.has_core():
        print(packages.without_core(), file=sys.stderr)
    core = ops.info()
    versions = {"h2o": core.pop("version"), "python": platform.python_version()}
    versions |= packages.versions("numpy", "torch", "transformers")
    machine = {"system": platform.platform(), "processors": os.cpu_count()}
    facts = {"core": core, "versions": versions, "machine": machine}
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    rows = [row for section in facts.values() for row in section.items()]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name.replace('_', ' '):<{width}}  {format_value(value)}")
    return 0


def print_support(name: str, as_json: bool) -> int:
    """Print whether and how h2o supports a model, judging by its config. The exit code is 0 if h2o
    supports it."""
    from h2o.hf.support import supports

    support = supports(models.load_config(name))
    print(json.dumps(asdict(support), indent=2) if as_json else support)
    return 0 if support else 1


def print_requests(options: argparse.Namespace) -> int:
    """Print how many requests of a model fit in memory with each setting. The exit code is 0."""
    from h2o.evaluation.cache_bytes import request_bytes, state_bytes

    config = models.load_config(options.model)
    if options.dtype != "auto":
        import torch

        config.get_text_config(decoder=True).dtype = getattr(torch, options.dtype)
    check_fit(options.settings, config)
    end = options.prompt + options.new
    states = state_bytes(config)
    rows = []
    for one in options.settings:
        size = request_bytes(config, one, options.prompt, end) + (states or 0)
        count = options.memory // size
        rows.append({"setting": one.name, "bytes": size, "state_bytes": states, "requests": count})
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    name = models.full_name(options.model)
    print(f"{name}: prompts of {options.prompt} tokens and {options.new} new ones")
    if weights := models.weight_bytes(config):
        print(f"The weights take another {weights / 1e9:.2f} GB, which --memory must not include.")
    if states:
        print(f"{states / 1e6:.2f} MB of a request are states, which no budget changes.")
    if states is None:
        print("A request also takes memory for states, whose size is unknown. It is not counted.")
    print()
    cells = [(x["setting"], f"{x['bytes'] / 1e6:.2f} MB", x["requests"]) for x in rows]
    print(table(("setting", "a request", "requests"), cells))
    return 0


def print_check(as_json: bool) -> int:
    """Print the mistakes of the kernels on CUDA devices. The exit code is 0 if there are none."""
    try:
        mistakes = backends.check()
    except RuntimeError as error:
        raise UserError(str(error)) from error
    if as_json:
        print(json.dumps(mistakes, indent=2))
    else:
        for device, lines in mistakes.items():
            for line in lines or ["every operation answers as the torch backend does"]:
                print(f"{device}  {line}")
    return 1 if any(mistakes.values()) else 0


def format_value(value: Any) -> str:
    """Format a value as text."""
    if value is None:
        return "not installed"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {format_value(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return str(value)
