"""The command line `h2o bench`: kernels and models timed beside their peers."""

from __future__ import annotations

import argparse

from h2o.bench import options as bench_options

__all__ = ["add_arguments", "check", "run"]

add_arguments = bench_options.add_arguments


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.wanted = bench_options.check(parser, options)


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """The exit code. Raises: UserError (`h2o.errors`)."""
    from h2o.models import need_transformers

    need_transformers()
    from h2o.bench.run import main

    return main(options, options.wanted)
