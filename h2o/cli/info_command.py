"""The command line `h2o info`: what serves here, for bug reports, and whether that is right."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import sys
from dataclasses import asdict
from typing import Any

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME", help="say whether and how h2o serves this model")
    parser.add_argument(
        "--check", action="store_true", help="run the kernels of every CUDA device against torch"
    )
    parser.add_argument("--json", action="store_true", help="for machines")


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """The exit code: 0 where the answer is a good one. Raises: UserError (`h2o.errors`)."""
    if options.model:
        return print_support(options.model, options.json)
    if options.check:
        return print_check(options.json)
    # The core borrows torch's threads where torch is loaded, as it is when a model runs.
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401
    from h2o import ops, packages

    if not packages.has_core():
        print(packages.without_core(), file=sys.stderr)
    core = ops.info()
    versions = {"h2o": core.pop("version"), "python": platform.python_version()}
    for name in ("numpy", "torch", "transformers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    machine = {"system": platform.platform(), "processors": os.cpu_count()}
    facts = {"core": core, "versions": versions, "machine": machine}
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    rows = [row for section in facts.values() for row in section.items()]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name.replace('_', ' '):<{width}}  {readable(value)}")
    return 0


def print_support(name: str, as_json: bool) -> int:
    """From a hub name's or folder's config alone. The exit code is 0 if h2o serves the model."""
    from h2o import models
    from h2o.hf.support import supports

    support = supports(models.config_of(name))
    print(json.dumps(asdict(support), indent=2) if as_json else support)
    return 0 if support else 1


def print_check(as_json: bool) -> int:
    """What the kernels of CUDA devices get wrong. The exit code is 0 if they get nothing wrong."""
    from h2o import backends
    from h2o.errors import UserError

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


def readable(value: Any) -> str:
    """A value as a reader takes it."""
    if value is None:
        return "not installed"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {readable(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return str(value)
