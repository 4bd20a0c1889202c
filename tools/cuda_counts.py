"""Count the work of the kernels for GPUs, without a GPU, and model their time: `make cuda-counts`.

    python tools/cuda_counts.py                 print all sizes and devices, one JSON object a line
    python tools/cuda_counts.py --check         compare small sizes with tools/cuda_counts.json
    python tools/cuda_counts.py --write         update that file
    python tools/cuda_counts.py --table BEFORE  write benchmarks/cuda_counts.csv from objects on
                                                standard input and earlier ones in a file

The operations run with the project's own launch plans on the PTX of CUDA's compiler (tools/ptx), on
the cases of `cuda_cases.py`. A case has one key/value head. Since the other heads and rows of a
batch do the same, only the model takes them into account. The fields of an object:

    kernel, arch, device, batch
    dtype             dtype of the stored keys
    queries           dtype of the queries
    head_dim, heads   head dimension, and query heads per key/value head
    policy, tokens    policy, and tokens of the prompt or keys held
    chunk             tokens of a chunk, which see the keys held
    unit              the unit of the following counts: a 64 x 64 tile of logits for forward and
                      sums, else a moved row, a slot of a step, or a token
    issued            issue slots of a warp per unit
    kinds             `issued` by kind of instruction
    wavefronts        passes of shared memory per unit
    sectors_per_byte  sectors of 32 bytes of global memory per byte used, 1/32 at best
    round_trips       successive round trips of a block to memory per unit
    block_trips       round trips of the slowest block
    blocks_per_sm, waves
    model_us, bound   modeled time, and the resource that bounds it
    floor_us          the part of that time that no schedule can save: bytes and matrix products

A kernel that an operation launches repeatedly is counted as one launch with the sum of the round
trips.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import cuda_cases as cases
import cuda_model as model

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "build" / "kernels"
PACKAGE = ROOT / "build" / "ptx" / "lib"
COMMITTED = Path(__file__).with_suffix(".json")

KV_HEADS = 8
"""Key/value heads of the layer whose time is modeled."""
BATCHES = 1, 8, 16
SIZES = [1024, 4096, 8192], [820, 4096], [1024, 4096]
SMALL, CHECKED = ([256], [256], [256]), "compute_80"
GROWTH = 1.1
COUNTS = "issued", "wavefronts", "sectors_per_byte", "round_trips", "block_trips"
TABLE = ROOT / "benchmarks" / "cuda_counts.csv"
COMPARED = "issued", "wavefronts", "block_trips", "model_us"
COLUMNS = (
    "device", "kernel", "dtype", "queries", "head_dim", "heads", "policy", "tokens", "chunk",
    "batch", "unit", "issued", "wavefronts", "sectors_per_byte", "round_trips", "block_trips",
    "blocks_per_sm", "waves", "model_us", "bound", "floor_us", *(f"{x}_before" for x in COMPARED),
)  # fmt: skip


def counted() -> Iterator[dict[str, Any]]:
    """Counts of the launches since the last call, as the machine wrote them. Launches of the same
    kernel are added up."""
    path = Path(os.environ["H2O_PTX_COUNTS"])
    text = path.read_text() if path.exists() else ""
    path.unlink(missing_ok=True)
    kernels: dict[str, dict[str, Any]] = {}
    for launch in map(json.loads, text.splitlines()):
        if launch["kernel"] not in kernels:
            kernels[launch["kernel"]] = launch
            continue
        known = kernels[launch["kernel"]]
        known["kinds"] = dict(Counter(known["kinds"]) + Counter(launch["kinds"]))
        known["trips"] = [a + b for a, b in zip(known["trips"], launch["trips"], strict=True)]
        for field in ("issued", "wavefronts", "sectors", "fetched", "bytes", "distinct"):
            known[field] += launch[field]
    yield from kernels.values()


def run(listed: list[cases.Case]) -> Iterator[dict[str, Any]]:
    """Run the cases on the program that H2O_PTX names. Yields their launches with facts and units
    of the case."""
    import torch

    for case in listed:
        torch.manual_seed(0)  # counts of a case do not depend on the cases before it
        if "compute_75" in os.environ["H2O_PTX"] and cases.needs_new_products(case):
            continue
        cases.run(case)
        for launch in filter(lambda x: case.launches(x["kernel"]), counted()):
            unit, count, together = cases.units(launch["kernel"], case)
            yield launch | {
                "facts": case.facts(), "unit": unit, "units": count, "together": together
            }  # fmt: skip


def launches(program: Path, sizes: tuple[list[int], ...]) -> list[dict[str, Any]]:
    """`run` in a new process, because a machine loads only one program."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "H2O_PTX": str(program), "H2O_PTX_COUNTS": f"{folder}/counts", "H2O_CPU": "generic",
            "PYTHONPATH": str(PACKAGE),
        }  # fmt: skip
        command = [sys.executable, __file__, "--run", json.dumps(sizes)]
        done = subprocess.run(
            command, env=environment, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
        )
    return [json.loads(line) for line in done.stdout.splitlines()]


def counts(launch: dict[str, Any]) -> dict[str, Any]:
    """Counts of a launch per unit, which do not depend on the device."""
    n, (most, mean) = launch["units"], launch["trips"]
    warps = n * launch["together"]
    blocks = launch["grid"][0] * launch["grid"][1] * launch["grid"][2]
    return {
        "kernel": launch["kernel"],
        **launch["facts"],
        "unit": launch["unit"],
        "issued": round(launch["issued"] / warps, 1),
        "kinds": {kind: round(x / warps, 1) for kind, x in launch["kinds"].items()},
        "wavefronts": round(launch["wavefronts"] / warps, 2),
        "sectors_per_byte": round(launch["sectors"] / max(1, launch["bytes"]), 4),
        "round_trips": round(mean * blocks / n, 3),
        "block_trips": most,
    }


def modeled(program: Path, sizes: tuple[list[int], ...]) -> Iterator[dict[str, Any]]:
    """Yield an output object for each launch, device and batch."""
    all_launches = launches(program, sizes)
    for name, device in model.DEVICES.items():
        if ("75" in program.stem) != (device.architecture == 75):
            continue
        registers = model.registers((KERNELS / device.cubin).read_bytes())
        for launch in all_launches:
            kernel = launch["kernel"]
            blocks = model.blocks_per_sm(
                device, launch["block"], launch["shared"], registers[kernel]
            )
            if blocks == 0:  # too little shared memory: the torch backend runs there
                continue
            for batch in BATCHES:
                copies = batch * KV_HEADS
                grid = launch["grid"][0] * launch["grid"][1] * launch["grid"][2] * copies
                times = model.times(launch, copies, device, blocks)
                bound = max(times, key=times.__getitem__)
                yield counts(launch) | {
                    "arch": f"sm_{device.architecture}",
                    "device": name,
                    "batch": batch,
                    "blocks_per_sm": blocks,
                    "waves": round(grid / (device.multiprocessors * blocks), 2),
                    "model_us": round(times[bound], 2),
                    "bound": bound,
                    "floor_us": round(model.floor(launch, copies, device), 2),
                }


def key_of(counted: dict[str, Any]) -> tuple[Any, ...]:
    """Key of a launch. Counts of the same launch before and after a change have the same key."""
    fields = "dtype", "queries", "head_dim", "heads", "policy", "tokens", "chunk"
    return counted["kernel"], *(counted[x] for x in fields)


def checked(now: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[str]:
    """Messages about counts that have grown by a tenth."""
    known = {key_of(x): x for x in before}
    complaints = []
    for x in now:
        key = key_of(x)
        if key not in known:
            complaints.append(f"{key} is not in {COMMITTED.name}: update it with --write")
            continue
        complaints += [
            f"{key}: {field} {known[key][field]} -> {x[field]}"
            for field in COUNTS
            if x[field] > GROWTH * known[key][field]
        ]
    return complaints


def uncounted(now: list[dict[str, Any]], program: Path) -> list[str]:
    """Messages about kernels of the program that no case has launched."""
    with program.open() as file:
        names = {line.split()[1] for line in file if line.startswith("kernel ")}
    return [f"no case launches {name}" for name in sorted(names - {x["kernel"] for x in now})]


def small() -> list[dict[str, Any]]:
    """The counts of small sizes."""
    measured = [counts(x) for x in launches(KERNELS / f"{CHECKED}.program", SMALL)]
    for x in measured:
        del x["kinds"]
    return measured


def objects(lines: Iterable[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines if line.startswith("{")]


def place_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Key of a row in the table. It finds the earlier row even if the operation has since changed
    its kernel."""
    kernel, *facts = key_of(row)
    operation = kernel.split("_")[2]
    name = operation if operation in ("forward", "sums", "step") else kernel
    return name, *facts, row["device"], row["batch"]


def write_table(rows: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    """Write the table, with the earlier counts of the same launch in columns of their own."""
    known = {place_of(x): x for x in before}
    with TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        for row in rows:
            old = known.get(place_of(row), {})
            table.writerow(row | {f"{x}_before": old.get(x) for x in COMPARED})


def main(arguments: list[str]) -> int:
    match arguments:
        case ["--run", sizes]:
            for launch in run(cases.cases(*json.loads(sizes))):
                print(json.dumps(launch), flush=True)
        case ["--write"]:
            lines = ",\n".join(json.dumps(x) for x in small())
            COMMITTED.write_text(f"[\n{lines}\n]\n")
        case ["--table", before]:
            write_table(objects(sys.stdin), objects(Path(before).read_text().splitlines()))
        case ["--check"]:
            now = small()
            grown = checked(now, json.loads(COMMITTED.read_text()))
            grown += uncounted(now, KERNELS / f"{CHECKED}.program")
            print("\n".join(grown or ["no count has grown by a tenth"]))
            return int(bool(grown))
        case []:
            for arch in ("compute_80", "compute_75"):
                for x in modeled(KERNELS / f"{arch}.program", SIZES):
                    print(json.dumps(x))
        case _:
            sys.exit(__doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
