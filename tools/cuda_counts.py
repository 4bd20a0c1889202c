"""Counts what the kernels for GPUs do, without a GPU, and models their time: `make cuda-counts`.

    python tools/cuda_counts.py          all sizes and devices, a JSON object a line
    python tools/cuda_counts.py --check  small sizes against tools/cuda_counts.json
    python tools/cuda_counts.py --write  renews that file
    python tools/cuda_counts.py --table  writes benchmarks/cuda_counts.csv from objects on its input

The operations run with the project's own launch plans on the PTX of CUDA's compiler (tools/ptx),
with one head of keys and values and HEADS heads of queries; the other heads and rows of a batch do
the same, so that only the model knows of them. In an object:

    kernel, arch, device, dtype (of the stored keys), head_dim, batch, tokens (of the prompt, or
    keys held), chunk (its tokens, which see the keys held), issued (issue slots of a warp for a
    `unit`), unit, kinds (the same by kind),
    wavefronts (passes of shared memory for a unit), sectors_per_byte (sectors of 32 bytes of
    global memory for each byte used: 1/32 at best), round_trips (to memory, one after the other,
    of the slowest block), blocks_per_sm, waves, model_us, bound (what the model says it waits for),
    floor_us (of that the part that no schedule saves: its bytes and its products)

`unit`: a 64 x 64 tile of logits for forward and sums, a moved row, a slot of a step, a token. A
kernel that an operation launches again and again is counted as one, its round trips added up.
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

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "build" / "kernels"
PACKAGE = ROOT / "build" / "ptx" / "lib"
COMMITTED = Path(__file__).with_suffix(".json")

HEADS, KV_HEADS, DEPTH = 4, 8, 128
"""Query heads of one of the KV_HEADS heads of keys and values, and the head dimension."""
BATCHES = 1, 16
PROMPTS, HELD = (1024, 4096, 8192), (820, 4096)
SMALL, CHECKED = 256, "compute_80"
KEPT = 0.2
CHUNK = 256
"""Tokens that come together after others: a chunk of a prompt, a turn of a chat."""
GROWTH = 1.1
TABLE = ROOT / "benchmarks" / "cuda_counts.csv"
TABLED = "A100", "L4", "H100"
COLUMNS = (
    "device", "kernel", "dtype", "tokens", "chunk", "batch", "unit", "issued", "wavefronts",
    "sectors_per_byte", "round_trips", "blocks_per_sm", "waves", "model_us", "bound", "floor_us",
)  # fmt: skip


def counted() -> Iterator[dict[str, Any]]:
    """The launches since the last call, as the machine wrote them down; a kernel's as one."""
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
        for field in ("issued", "wavefronts", "sectors", "bytes", "distinct"):
            known[field] += launch[field]
    yield from kernels.values()


def tiles(tokens: int, stored: int) -> int:
    """64 x 64 tiles that hold a visible key, of one head."""
    rows = -(-tokens // 64)
    return rows * (rows + 1) // 2 + rows * -(-stored // 64)


def units(kernel: str, tokens: int, kept: int, chunk: int) -> tuple[str, int]:
    """What a kernel's counts are divided by; warps do the tile of a block together."""
    match kernel.removeprefix("h2o_cuda_").split("_")[0]:
        case "forward" | "sums":
            return "tile", 4 * HEADS * (tiles(chunk, tokens) if chunk else tiles(tokens, 0))
        case "move":
            return "row", 2 * kept
        case "step":
            return "slot", tokens
        case _:
            return "token", chunk or tokens


def run(prompts: list[int], held: list[int]) -> Iterator[dict[str, Any]]:
    """Runs the operations on the program that H2O_PTX names; their launches, with what is known
    of each."""
    import torch

    from h2o import ops

    torch.manual_seed(0)

    def normal(*shape: int, dtype: Any) -> Any:
        return torch.randn(shape).to(dtype)

    def named(dtype: str, tokens: int, kept: int = 0, chunk: int = 0) -> Iterator[dict[str, Any]]:
        facts = {"dtype": dtype, "tokens": tokens, "chunk": chunk}
        for launch in counted():
            unit, count = units(launch["kernel"], tokens, kept, chunk)
            yield launch | facts | {"unit": unit, "units": count}

    for name in ("float16", "bfloat16"):
        if name == "bfloat16" and "compute_75" in os.environ["H2O_PTX"]:
            continue
        dtype = getattr(torch, name)
        for tokens in prompts:
            keys, values = (normal(1, 1, tokens, DEPTH, dtype=dtype) for _ in range(2))
            ops.attend(normal(1, HEADS, tokens, DEPTH, dtype=dtype), keys, values)
            yield from named(name, tokens)
    for name in ("float32", "float16"):
        dtype = getattr(torch, name)
        for tokens in prompts:
            text = (normal(1, n, tokens, DEPTH, dtype=dtype) for n in (HEADS, 1, 1))
            kept = int(tokens * KEPT)
            budget = torch.tensor([[kept - kept // 2, kept // 2]], dtype=torch.int32)
            ops.simulate(*text, torch.ones(1, dtype=torch.int32), budget)
            yield from (x for x in named(name, tokens) if "simulate" in x["kernel"])
    for stored in (None, "int8", "int8-int4"):
        name, dtype = stored or "float16", torch.float16
        for prompt, tokens in [(x, int(x * KEPT)) for x in prompts] + [(x, x) for x in held]:
            kept = min(tokens, prompt - 1)
            keys, values = (normal(1, 1, prompt, DEPTH, dtype=dtype) for _ in range(2))
            heavy, recent = kept - kept // 2, kept // 2
            slots = ops.new_slots(keys, kept + 1, heavy, recent, kv_dtype=stored)
            ops.evict(keys, values, torch.rand(1, 1, prompt) ** 8 * 10, slots)
            evicted = list(named(name, prompt, kept))
            if prompt != tokens:
                yield from evicted
                continue
            new = (normal(1, 1, 1, DEPTH, dtype=dtype) for _ in range(2))
            ops.step(normal(1, HEADS, 1, DEPTH, dtype=dtype), *new, slots)
            yield from named(name, tokens)
            new = (normal(1, 1, CHUNK, DEPTH, dtype=dtype) for _ in range(2))
            ops.attend(normal(1, HEADS, CHUNK, DEPTH, dtype=dtype), *new, slots)
            yield from named(name, tokens, chunk=CHUNK)


def launches(program: Path, prompts: list[int], held: list[int]) -> list[dict[str, Any]]:
    """`run` in a process of its own: a machine reads one program."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "H2O_PTX": str(program), "H2O_PTX_COUNTS": f"{folder}/counts", "H2O_CPU": "generic",
            "PYTHONPATH": str(PACKAGE),
        }  # fmt: skip
        command = [sys.executable, __file__, "--run", json.dumps([prompts, held])]
        done = subprocess.run(
            command, env=environment, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
        )
    return [json.loads(line) for line in done.stdout.splitlines()]


def counts(launch: dict[str, Any]) -> dict[str, Any]:
    """What a launch does for a unit, whatever the device."""
    n = launch["units"]
    return {
        "kernel": launch["kernel"],
        "dtype": launch["dtype"],
        "head_dim": DEPTH,
        "tokens": launch["tokens"],
        "chunk": launch["chunk"],
        "unit": launch["unit"],
        "issued": round(launch["issued"] / n, 1),
        "kinds": {kind: round(x / n, 1) for kind, x in launch["kinds"].items()},
        "wavefronts": round(launch["wavefronts"] / n, 2),
        "sectors_per_byte": round(launch["sectors"] / max(1, launch["bytes"]), 4),
        "round_trips": launch["trips"][0],
    }


def modelled(program: Path, prompts: list[int], held: list[int]) -> Iterator[dict[str, Any]]:
    """An object for each launch, device and batch."""
    import cuda_model as model

    all_launches = launches(program, prompts, held)
    for name, device in model.DEVICES.items():
        if ("75" in program.stem) != (device.architecture == 75):
            continue
        registers = model.registers((KERNELS / f"sm_{device.architecture}.cubin").read_bytes())
        for launch in all_launches:
            kernel = launch["kernel"]
            blocks = model.blocks_per_sm(
                device, launch["block"], launch["shared"], registers[kernel]
            )
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
                    "floor_us": round(max(times["memory"], times["tensor"]), 2),
                }


def checked(now: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[str]:
    """What has grown by a tenth, in words."""
    keys = ["kernel", "dtype", "tokens", "chunk", "arch"]
    known = {tuple(x[k] for k in keys): x for x in before}
    complaints = []
    for x in now:
        key = tuple(x[k] for k in keys)
        for field in ("issued", "wavefronts", "sectors_per_byte", "round_trips"):
            if key not in known:
                complaints.append(f"{key} is not in {COMMITTED.name}: --write")
                break
            if x[field] > GROWTH * known[key][field]:
                complaints.append(f"{key}: {field} {known[key][field]} -> {x[field]}")
    return complaints


def small() -> list[dict[str, Any]]:
    """The counts of small sizes."""
    measured = []
    for launch in launches(KERNELS / f"{CHECKED}.program", [SMALL], [SMALL]):
        x = counts(launch) | {"arch": CHECKED}
        del x["kinds"]
        measured.append(x)
    return measured


def write_table(lines: Iterable[str]) -> None:
    """Of the devices of TABLED, from the objects among these lines."""
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    with TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        table.writerows(row for row in rows if row["device"] in TABLED)


def main(arguments: list[str]) -> int:
    match arguments:
        case ["--run", sizes]:
            for launch in run(*json.loads(sizes)):
                print(json.dumps(launch))
        case ["--write"]:
            lines = ",\n".join(json.dumps(x) for x in small())
            COMMITTED.write_text(f"[\n{lines}\n]\n")
        case ["--table"]:
            write_table(sys.stdin)
        case ["--check"]:
            grown = checked(small(), json.loads(COMMITTED.read_text()))
            print("\n".join(grown or ["no count has grown by a tenth"]))
            return int(bool(grown))
        case []:
            for arch in ("compute_80", "compute_75"):
                for x in modelled(KERNELS / f"{arch}.program", [*PROMPTS], [*HELD]):
                    print(json.dumps(x))
        case _:
            sys.exit(__doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
