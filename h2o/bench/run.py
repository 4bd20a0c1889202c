"""`h2o bench`, in a checkout also `python -m benchmarks`: runs tables and writes the results."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from h2o.files import make_writable

from . import (
    kernels,
    layouts,
    machine,
    memory,
    portable,
    report,
    simulation,
    stores,
    threads,
    whole_model,
)
from .measure import Row
from .options import TABLES, Options
from .peers import PeerMissing

FUNCTIONS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "prefill": kernels.prefill,
    "memory": memory.memory,
    "decode": kernels.decode,
    "strides": layouts.strides,
    "lengths": layouts.lengths,
    "evict": kernels.evict,
    "simulate": simulation.simulate,
    "bits": stores.bits,
    "merging": stores.merging,
    "uneven": stores.uneven,
    "overhead": kernels.overhead,
    "portable": portable.portable,
    "threads": threads.threads,
    "model": whole_model.generate,
    "openvino": whole_model.openvino,
    "kvpress": whole_model.kvpress,
}
"""The tables of options.TABLES."""


def main(told: argparse.Namespace, options: Options) -> int:
    """Runs the tables asked for; returns the exit status. `options` are what `check` made."""
    make_writable(told.output)
    if told.threads:
        torch.set_num_threads(told.threads)
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
                for row in FUNCTIONS[name](options):
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
