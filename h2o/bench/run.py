"""`h2o bench`, in a checkout also `python -m benchmarks`: runs tables and writes the results."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from h2o import backends
from h2o.errors import UserError
from h2o.filesystem import make_writable

from . import (
    engines,
    gpu,
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
from .options import Options, tables
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
    "openvino": engines.openvino,
    "compiled": engines.compiled,
    "batch": engines.batch,
    "kvpress": whole_model.kvpress,
}
"""The tables of options.TABLES."""

GPU_FUNCTIONS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "prefill": gpu.prefill,
    "decode": gpu.decode,
    "long": gpu.long,
    "graph": gpu.graph,
    "flexgen": gpu.flexgen,
    "kvpress": whole_model.kvpress,
}
"""The tables of options.GPU_TABLES."""


def main(told: argparse.Namespace, options: Options) -> int:
    """Runs the tables asked for; returns the exit status. `options` are what `check` made."""
    if options.device == "cuda":
        refuse_without_kernels()
    make_writable(told.output)
    if told.threads:
        torch.set_num_threads(told.threads)
    result = run(
        told.tables or list(tables(options.device)), options, told.output / f"{told.name}.json"
    )
    try:
        report.plot(result, told.output / f"{told.name}.png")
    except ImportError:
        print("no plot: pip install matplotlib", file=sys.stderr)
    print(report.markdown(result))
    print(f"written: {told.output / told.name}.json", file=sys.stderr)
    return 0


def refuse_without_kernels() -> None:
    """Errors: UserError where a GPU is missing, or served by the torch backend unasked."""
    if not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no CUDA device here")
    backends.serving(torch.empty(0, device="cuda"))
    served = backends.info()["backends"]["cuda"]
    if not backends.forced and not served.startswith("C ("):
        raise UserError(
            f"--device cuda: h2o's kernels do not serve here: {served}. To time the torch backend "
            "set H2O_BACKEND=torch"
        )


def run(names: Sequence[str], options: Options, path: Path) -> dict:
    """The result of these tables, which is written to `path` after each of them."""
    result: dict = {
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "quick": options.quick,
        "rounds": options.rounds,
        "machine": machine.describe() | {"device": options.where().describe()},
        "rows": [],
        "missing": {},
        "load": {},
    }
    functions = FUNCTIONS if options.device == "cpu" else GPU_FUNCTIONS
    on = "" if options.device == "cpu" else f" --device {options.device}"
    for name in names:
        before = os.getloadavg()[0]
        try:
            with torch.inference_mode():
                for row in functions[name](options):
                    row.command = f"python -m benchmarks {name}{on}"
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
