"""What `h2o plan` knows of h2o's kernels for GPUs, from benchmarks/cuda_counts.csv.

    python tools/kernel_times.py     the lines of DEVICES in h2o/evaluate/devices.py

Times of launches on a full device are spread over their tiles, or the keys that a step holds; what
a step takes however few rows there are is its round trips (`cuda_model.py`), a line through those
over few and many keys. A test compares what is there.
"""

from __future__ import annotations

import csv
from typing import Any

import cuda_cases as cases
import cuda_counts as counts
import cuda_model as model

from h2o.evaluate.devices import DEVICES, Kernels

HELD = "820", "4096"
PROMPT = 1024


def drawn() -> dict[str, Kernels]:
    """By the names of devices."""
    with counts.TABLE.open() as file:
        rows = [x for x in csv.DictReader(file) if x["chunk"] == "0" and is_plain(x)]
    return {name: kernels_of(name, [x for x in rows if x["device"] == name]) for name in DEVICES}


def is_plain(row: dict[str, Any]) -> bool:
    """What the figures are of: queries in float16, four heads that share one of keys."""
    wanted = {"queries": "float16", "head_dim": "128", "heads": "4", "policy": "sum"}
    return all(row[field] == value for field, value in wanted.items())


def kernels_of(device: str, rows: list[dict[str, Any]]) -> Kernels:
    batch = str(counts.BATCHES[-1])
    heads = int(batch) * counts.KV_HEADS

    def launches(kernel: str, tokens: str, batch: str = batch) -> list[dict[str, Any]]:
        named = [x for x in rows if x["kernel"].startswith(f"h2o_cuda_{kernel}")]
        return [x for x in named if (x["tokens"], x["batch"]) == (tokens, batch)]

    def microseconds(found: list[dict[str, Any]]) -> float:
        return sum(float(x["model_us"]) for x in found if x["dtype"] == "float16")

    prompt = launches("forward", str(PROMPT)) + launches("sums", str(PROMPT))
    tile = microseconds(prompt) * 1e3 / (heads * 4 * cases.tiles(PROMPT, 0))
    trip = model.DEVICES[device].latency / model.DEVICES[device].clock / 1e3
    few, many = (float(launches("step", x, "1")[0]["block_trips"]) * trip for x in HELD)
    slope = (many - few) / (int(HELD[1]) - int(HELD[0])) * 1000
    steps = {x["dtype"]: x for x in launches("step", HELD[1])}
    key = {
        stored: float(steps[stored or "float16"]["model_us"]) * 1e3 / (heads * int(HELD[1]))
        for stored in (None, *cases.STORES)
    }
    return Kernels(
        short(tile),
        (short(few - slope * int(HELD[0]) / 1000), short(slope)),
        {stored: short(x) for stored, x in key.items()},
    )


def short(x: float) -> float:
    return float(f"{x:.3g}")


if __name__ == "__main__":
    for name, (tile, trips, key) in drawn().items():
        values = ", ".join(map(str, (tile, trips, *key.values())))
        print(f'    "{name}": _gpu({DEVICES[name][:3]}, {values}),')
