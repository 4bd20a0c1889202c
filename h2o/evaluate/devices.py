"""What devices can do: of GPUs as data sheets say, of this machine as measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["DEVICES", "Device", "measured"]


class Device(NamedTuple):
    """What a data sheet says, of 16-bit numbers."""

    memory: float | None
    """GB; None: not known"""
    bandwidth: float
    """GB/s"""
    products: float
    """TFLOP/s, dense, summed up in float32"""


DEVICES = {
    "T4": Device(16, 320, 65),
    "A100": Device(80, 2039, 312),
    "L4": Device(24, 300, 121),
    "4090": Device(24, 1008, 165),
    "H100": Device(80, 3350, 989),
    "H200": Device(141, 4800, 989),
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
