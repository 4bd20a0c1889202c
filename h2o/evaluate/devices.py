"""What devices can do: of GPUs as data sheets say, of this machine as measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from h2o.kv_dtype import QUANTISED

__all__ = ["DEVICES", "Device", "Kernels", "measured"]


class Kernels(NamedTuple):
    """What h2o's kernels take on a GPU, by a model of their counted instructions: no GPU has run
    them. `tools/kernel_times.py` draws this from benchmarks/cuda_counts.csv: of rows of 128
    elements, prompts in 16 bits, four query heads for one of keys."""

    tile: float
    """ns of 64 x 64 logits of a prompt, with outputs and scores"""
    trips: tuple[float, float]
    """us of a step, however few rows: over no keys, and for each thousand of a head"""
    key: dict[str | None, float]
    """ns of a key that is held, at a step of many rows, by `kv_dtype`"""

    def prompt(self, tokens: int, heads: float, head_dim: int) -> float:
        """Seconds of a layer with so many query heads."""
        return 1e-9 * heads * self.tile * (tokens / 64) ** 2 / 2 * head_dim / 128

    def step(self, held: int, heads: int, head_dim: int, kv_dtype: str | None) -> float:
        """Seconds of a layer whose rows have so many heads of `held` keys together."""
        alone = 1e3 * (self.trips[0] + self.trips[1] * held / 1000)
        return 1e-9 * max(alone, heads * held * self.key[kv_dtype] * head_dim / 128)


class Device(NamedTuple):
    """What a data sheet says, of 16-bit numbers."""

    memory: float | None
    """GB; None: not known"""
    bandwidth: float
    """GB/s"""
    products: float
    """TFLOP/s, dense, summed up in float32"""
    kernels: Kernels | None = None
    """None: not known"""


def _gpu(sheet: tuple[float, float, float], tile: float, trips: tuple[float, float],
         *key: float) -> Device:  # fmt: skip
    return Device(*sheet, Kernels(tile, trips, dict(zip((None, *QUANTISED), key, strict=True))))


DEVICES = {
    "T4": _gpu((16, 320, 65), 48.6, (2.89, 0.461), 1.73, 0.94, 0.784),
    "A100": _gpu((80, 2039, 312), 15.9, (3.8, 0.605), 0.271, 0.148, 0.123),
    "L4": _gpu((24, 300, 121), 26.2, (3.05, 0.487), 1.84, 1.0, 0.836),
    "4090": _gpu((24, 1008, 165), 19.0, (2.47, 0.394), 0.549, 0.299, 0.249),
    "H100": _gpu((80, 3350, 989), 10.1, (3.01, 0.479), 0.165, 0.0898, 0.0749),
    "H200": _gpu((141, 4800, 989), 10.1, (3.01, 0.479), 0.115, 0.0647, 0.0569),
}
"""NVIDIA's data sheets; of A100 the larger one, of H100 and H200 the SXM modules."""


def measured() -> Device:
    """This machine's processors with torch's threads: reading, and bfloat16 products or those of
    float32 if these are faster. Of several runs the fastest, since the rates are to be bounds; few
    where one takes seconds, as in bfloat16 without instructions for it."""
    import torch

    def rate(work: float, run: Callable[[], Any]) -> float:
        times: list[float] = []
        while len(times) < 20 and sum(times) < 1:
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return work / min(times)

    data = torch.ones(2**26, dtype=torch.float32, device="cpu")
    products = []
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.ones(1024, 1024, dtype=dtype, device="cpu")
        products.append(rate(2 * 1024**3, lambda a=a: a @ a))
    return Device(_memory(), rate(data.nbytes, data.sum) / 1e9, max(products) / 1e12)


def _memory() -> float | None:
    """GB of this machine."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    except (AttributeError, ValueError, OSError):
        return None
