"""`h2o bench`, in a checkout also `python -m benchmarks`: runs tables and writes the results."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from . import kernels, machine, memory, report, simulation, threads, whole_model
from .measure import FEWEST_ROUNDS, Row
from .options import DTYPES, Options
from .peers import PeerMissing

TABLES: dict[str, Callable[[Options], Iterator[Row]]] = {
    "prefill": kernels.prefill,
    "memory": memory.memory,
    "decode": kernels.decode,
    "evict": kernels.evict,
    "simulate": simulation.simulate,
    "overhead": kernels.overhead,
    "threads": threads.threads,
    "model": whole_model.generate,
    "openvino": whole_model.openvino,
    "kvpress": whole_model.kvpress,
}
"""Name on the command line -> the table; each docstring names its rows."""


def parser() -> argparse.ArgumentParser:
    tables = "\n".join(f"  {name:10} {first_line(table)}" for name, table in TABLES.items())
    made = argparse.ArgumentParser(
        prog="h2o bench",
        description="Times h2o beside its peers, in turn, after checking its results.",
        epilog=f"tables:\n{tables}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("tables", nargs="*", metavar="table", help="all of them by default")
    made.add_argument("--rounds", type=int, default=7, help="repetitions of each contender")
    made.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    made.add_argument("--prompts", nargs="+", type=int, default=list(Options.prompts))
    made.add_argument("--tokens", type=int, default=Options.tokens, help="decoded in each round")
    made.add_argument("--threads", type=int, help="torch's number of threads (default: as it is)")
    made.add_argument("--quick", action="store_true", help="tiny shapes: tries, measures nothing")
    made.add_argument("--output", type=Path, default=Path("benchmarks/results"), metavar="FOLDER")
    made.add_argument("--name", default="latest", help="of the files in FOLDER")
    return made


def first_line(function: Callable) -> str:
    return (function.__doc__ or "").splitlines()[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tables asked for; returns the exit status."""
    told = parser().parse_args(arguments)
    unknown = set(told.tables) - set(TABLES)
    if unknown:
        parser().error(f"no table {sorted(unknown)}: there are {', '.join(TABLES)}")
    if told.rounds < FEWEST_ROUNDS and not told.quick:
        parser().error(f"fewer than {FEWEST_ROUNDS} rounds are no figure")
    if told.threads:
        torch.set_num_threads(told.threads)
    options = Options(told.rounds, tuple(told.dtypes), told.quick, tuple(told.prompts), told.tokens)
    result = run(told.tables or list(TABLES), options, told.output / f"{told.name}.json")
    try:
        report.plot(result, told.output / f"{told.name}.png")
    except ImportError:
        print("no plot: pip install matplotlib", file=sys.stderr)
    print(report.markdown(result))
    print(f"written: {told.output / told.name}.json", file=sys.stderr)
    return 0


def run(names: Sequence[str], options: Options, path: Path) -> dict:
    """The result of these tables, which is written to `path` after each of them."""
    result: dict = {
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "quick": options.quick,
        "rounds": options.rounds,
        "machine": machine.describe(),
        "rows": [],
        "missing": {},
        "load": {},
    }
    for name in names:
        before = os.getloadavg()[0]
        try:
            with torch.inference_mode():
                for row in TABLES[name](options):
                    row.command = f"python -m benchmarks {name}"
                    result["rows"].append(row.to_dict())
                    print(line(result["rows"][-1]), file=sys.stderr, flush=True)
        except PeerMissing as problem:
            result["missing"][name] = str(problem)
            print(f"{name}: left out: {problem}", file=sys.stderr)
        result["load"][name] = {"before": before, "after": os.getloadavg()[0]}
        report.write_json(result, path)
    return result


def line(row: dict) -> str:
    return " | ".join(cell for cell in [*report.cells(row), report.facts(row)] if cell)
