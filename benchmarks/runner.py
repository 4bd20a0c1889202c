"""The command line of `python -m benchmarks`, which runs tables and writes the results."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from h2o import backends, models
from h2o.errors import UserError
from h2o.utils.filesystem import make_writable

from . import catalog, machine, options, reporting
from .peers.environments import PeerMissing


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tables that the arguments name. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Time h2o and its peers side by side."
    )
    options.add_arguments(parser, catalog.described())
    chosen = parser.parse_args(arguments)
    checked = options.check(parser, chosen, lambda device: list(catalog.tables(device)))
    models.quiet_libraries()
    try:
        return run_tables(chosen, checked)
    except UserError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1


def run_tables(chosen: argparse.Namespace, checked: options.Options) -> int:
    """Run tables, given the parsed arguments and the options of `options.check`.

    Raises:
        UserError: the output folder cannot be written, or the device cannot be timed.
    """
    if checked.device == "cuda":
        refuse_without_kernels()
    make_writable(chosen.output)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    names = chosen.tables or list(catalog.tables(checked.device))
    result = run(names, checked, chosen.output / f"{chosen.name}.json")
    try:
        reporting.plot(result, chosen.output / f"{chosen.name}.png")
    except ImportError:
        print("no plot: pip install matplotlib", file=sys.stderr)
    print(reporting.markdown(result))
    print(f"written: {chosen.output / chosen.name}.json", file=sys.stderr)
    return 0


def refuse_without_kernels() -> None:
    """Raise a UserError if there is no GPU, or if h2o's kernels do not run on it and the torch
    backend was not requested."""
    if not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no CUDA device here")
    backends.backend_for(torch.empty(0, device="cuda"))
    served = backends.info()["backends"]["cuda"]
    if not backends.forced and not served.startswith("C ("):
        raise UserError(
            f"--device cuda: h2o's kernels do not run here: {served}. To time the torch backend, "
            "set H2O_BACKEND=torch"
        )


def run(names: Sequence[str], checked: options.Options, path: Path) -> dict[str, Any]:
    """Run tables and return the result, which is also written to `path` after each table."""
    result: dict[str, Any] = {
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "quick": checked.quick,
        "rounds": checked.rounds,
        "machine": machine.describe() | {"device": checked.target().describe()},
        "rows": [],
        "missing": {},
        "load": {},
    }
    tables = catalog.tables(checked.device)
    on = "" if checked.device == "cpu" else f" --device {checked.device}"
    for name in names:
        before = os.getloadavg()[0]
        try:
            with torch.inference_mode():
                for row in tables[name].run(checked):
                    row.command = f"python -m benchmarks {name}{on}"
                    result["rows"].append(row.to_dict())
                    print(line(result["rows"][-1]), file=sys.stderr, flush=True)
        except PeerMissing as problem:
            result["missing"][name] = str(problem)
            print(f"{name}: left out: {problem}", file=sys.stderr)
        result["load"][name] = {"before": before, "after": os.getloadavg()[0]}
        reporting.write_json(result, path)
    return result


def line(row: dict[str, Any]) -> str:
    """The text that is printed for a finished row."""
    return " | ".join(cell for cell in [*reporting.cells(row), reporting.facts(row)] if cell)
