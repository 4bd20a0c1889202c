"""Command-line options of the benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .targets import DEVICES, Cpu

DTYPES = ("float32", "bfloat16", "float16")

QUICK = {"rounds": 2, "prompts": (40,), "tokens": 2}
"""Defaults of options with --quick"""

FEWEST_ROUNDS = 5
"""Least number of repetitions for a meaningful figure"""


@dataclass(frozen=True)
class Options:
    """Options of a run.

    Attributes:
        rounds: repetitions of each contender.
        dtypes: names among DTYPES. A table leaves out those that it has no row for.
        quick: whether shapes are tiny, to try the code without measuring anything.
        prompts: prompt lengths of the whole-model tables.
        tokens: decoded tokens in each round of the whole-model tables.
        device: "cpu", "cuda" or "dry-run", see `add_arguments`.
    """

    rounds: int = 7
    dtypes: tuple[str, ...] = DTYPES
    quick: bool = False
    prompts: tuple[int, ...] = (512, 2048, 4096, 7500)
    tokens: int = 16
    device: str = "cpu"

    def target(self) -> Cpu:
        """The device, see `targets`."""
        return DEVICES[self.device]()

    def wanted(self, *names: str) -> list[tuple[str, torch.dtype]]:
        """The pairs (name, torch dtype) of those `names` that are among the dtypes of the run."""
        return [(name, getattr(torch, name)) for name in names if name in self.dtypes]


def add_arguments(parser: argparse.ArgumentParser, tables: str) -> None:
    """Add the arguments of `python -m benchmarks`. `tables` describes the tables for --help."""
    add = parser.add_argument
    add("tables", nargs="*", metavar="table", help=f"names of tables (default: all). {tables}")
    add("--device", choices=tuple(DEVICES), default="cpu", help="cuda: another list "
        "of tables, on torch's current CUDA device; dry-run: the tables of cuda, on the CPU in the "
        "shapes of --quick, to see that they run")  # fmt: skip
    add("--rounds", type=int, help=f"repetitions ({Options.rounds})")
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), metavar="DTYPE",
        help="some of %(choices)s")  # fmt: skip
    add("--prompts", nargs="+", type=int, metavar="N", help="prompt lengths of the whole-model "
        f"tables ({' '.join(map(str, Options.prompts))})")  # fmt: skip
    add("--tokens", type=int, help=f"tokens decoded in each round ({Options.tokens})")
    add("--threads", type=int, help="torch's number of threads")
    add("--quick", action="store_true", help="tiny shapes and few rounds, to try everything "
        "without measuring")  # fmt: skip
    add("--output", type=Path, default=Path("benchmarks/results"), metavar="FOLDER",
        help="folder for the results (%(default)s)")  # fmt: skip
    add("--name", help="name of the result files (latest on the CPU, else the device)")


def check(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace,
    names: Callable[[str], list[str]],
) -> Options:  # fmt: skip
    """Convert parsed arguments to options. Exits with an error message for invalid ones.

    names: returns the names of the tables of a device.
    """
    there = names(arguments.device)
    unknown = sorted(set(arguments.tables) - set(there))
    if unknown:
        parser.error(f"no table {unknown[0]!r}: the tables are {', '.join(there)}")
    arguments.quick |= arguments.device == "dry-run"
    arguments.name = arguments.name or ("latest" if arguments.device == "cpu" else arguments.device)
    usual = QUICK if arguments.quick else {name: getattr(Options, name) for name in QUICK}
    for name, value in usual.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.rounds < FEWEST_ROUNDS and not arguments.quick:
        parser.error(
            f"argument --rounds: a meaningful figure needs at least {FEWEST_ROUNDS}, or use --quick"
        )
    threads = 1 if arguments.threads is None else arguments.threads
    counts = {"rounds": arguments.rounds, "tokens": arguments.tokens, "threads": threads}
    for name, number in [*counts.items(), *(("prompts", length) for length in arguments.prompts)]:
        if number < 1:
            parser.error(f"argument --{name}: must be at least 1, not {number}")
    return Options(
        arguments.rounds, tuple(arguments.dtypes), arguments.quick, tuple(arguments.prompts),
        arguments.tokens, arguments.device,
    )  # fmt: skip
