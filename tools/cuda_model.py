"""Data of GPUs, the number of blocks that fit on a multiprocessor, and a model of a launch's time.

The modeled time is the largest of the times that each resource takes by itself: issue slots, the
units for floats, logic and special functions, tensor cores, L1 with shared memory, L2, memory, and
the latency of successive round trips. The model adds nothing for the launch itself or for work that
does not overlap. It is a lower bound for comparing kernels.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple


class Device(NamedTuple):
    """Data of a GPU. Except `latency` and `l2` they are from NVIDIA's data sheets and papers."""

    architecture: int
    """10 times the compute capability"""
    multiprocessors: int
    clock: float
    """GHz, the boost clock"""
    tensor: int
    """16-bit products with 32-bit sums, per multiprocessor and clock"""
    floats: int
    """operations on 32-bit floats, per multiprocessor and clock"""
    shared: int
    """KiB of shared memory per multiprocessor"""
    threads: int
    """most threads on a multiprocessor"""
    blocks: int
    """most blocks on a multiprocessor"""
    memory: float
    """memory bandwidth in GB/s"""
    l2: int | None
    """bytes per clock of the whole L2; None: no figure to cite"""
    latency: int
    """clocks of a load that misses all caches"""

    @property
    def cubin(self) -> str:
        """File name of the device's kernels. Those for 9.0 use instructions that only 9.0 has."""
        return f"sm_{self.architecture}{'a' if self.architecture == 90 else ''}.cubin"


DEVICES = {
    "T4": Device(75, 40, 1.59, 512, 64, 64, 1024, 16, 320, None, 400),
    "A100": Device(80, 108, 1.41, 1024, 64, 164, 2048, 32, 2039, 5120, 466),
    "L4": Device(89, 58, 2.04, 512, 128, 100, 1536, 24, 300, None, 542),
    "4090": Device(89, 128, 2.52, 256, 128, 100, 1536, 24, 1008, None, 542),
    "H100": Device(90, 132, 1.83, 2048, 128, 228, 2048, 32, 3350, 5120, 479),
    "H200": Device(90, 132, 1.83, 2048, 128, 228, 2048, 32, 4800, 5120, 479),
}
"""`tensor` is the data sheet's rate of dense float16 with float32 sums, divided by multiprocessors
and clock. `l2` of the A100 is from NVIDIA's paper on that architecture, and is used for Hopper too.
`floats` is from the CUDA C++ Programming Guide, "Arithmetic Instructions", as are SPECIAL and
LOGIC. `latency` is from Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture
via Microbenchmarking" (2024). The L4 has that of the 4090, the T4 that of Volta, rounded."""

SPECIAL = 16
"""exponentials, or conversions between integers and floats, per multiprocessor and clock"""
LOGIC = 64
"""comparisons, selections, shifts and bit operations per multiprocessor and clock (the unit for
floats can add integers)"""
MMA_ON_HOPPER = 0.63
"""share of the tensor cores' rate that mma.sync reaches on Hopper (Luo et al.)"""
SECTORS = 4
"""sectors of 32 bytes of global memory that pass a multiprocessor's L1 per clock; shared memory is
part of this L1"""
PORT = 64
"""most bytes per clock from L2 to a multiprocessor"""
MMA_PRODUCTS = {75: 16 * 8 * 8, 80: 16 * 8 * 16}
"""products of one instruction of a warp, by the architecture of the PTX"""
REGISTERS = 65536
"""registers of a multiprocessor; a warp gets multiples of 256"""


def registers(cubin: bytes) -> dict[str, int]:
    """Registers per thread of each kernel in a cubin, which is an ELF file. Its section .nv.info
    has attributes; attribute 0x2f holds a symbol's index and the registers of that kernel."""
    begin, size, count, names = struct.unpack_from("<Q10xHHH", cubin, 40)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, begin + i * size) for i in range(count)]

    def text(at: int) -> str:
        return cubin[at : cubin.index(b"\0", at)].decode()

    named = {text(sections[names][4] + section[0]): section for section in sections}
    info, symbols = named[".nv.info"], named[".symtab"]
    strings = sections[symbols[6]][4]
    by_name, at = {}, info[4]
    while at < info[4] + info[5]:
        form, attribute, length = struct.unpack_from("<BBH", cubin, at)
        if (form, attribute) == (4, 0x2F):
            symbol, registers = struct.unpack_from("<II", cubin, at + 4)
            (name,) = struct.unpack_from("<I", cubin, symbols[4] + 24 * symbol)
            by_name[text(strings + name)] = registers
        at += 4 + (length if form == 4 else 0)  # other forms hold their value in `length`
    return by_name


def blocks_per_sm(device: Device, threads: int, shared: int, registers: int) -> int:
    """Number of blocks that fit on a multiprocessor.

    Args:
        threads, shared: threads and bytes of shared memory of a block.
        registers: registers of a thread.
    """
    warps = threads // 32
    fitting = REGISTERS // 4 // (math.ceil(registers * 32 / 256) * 256) * 4 // warps
    system = 1024 if device.architecture >= 80 else 0  # reserved by the system in each block
    taken = math.ceil((shared + system) / 256) * 256
    by_shared = device.shared * 1024 // taken if taken else device.blocks
    return min(device.blocks, device.threads // threads, fitting, by_shared)


def products(device: Device) -> int:
    """Products of one matrix instruction of a warp."""
    return MMA_PRODUCTS[75 if device.architecture < 80 else 80]


def times(launch: Mapping[str, Any], copies: int, device: Device, blocks: int) -> dict[str, float]:
    """Microseconds that each resource takes for `copies` parallel copies of a counted launch
    (tools/ptx/machine.cpp), with `blocks` blocks on a multiprocessor at once."""
    grid = math.prod(launch["grid"])
    share = math.ceil(grid * copies / device.multiprocessors) / grid  # of the busiest one
    rounds = math.ceil(grid * copies / (device.multiprocessors * blocks))
    kinds = Counter(launch["kinds"])
    fetched = launch["fetched"] * 32
    clocks = {
        "issue": launch["issued"] / 4 * share,
        "float": kinds["float"] * 32 / device.floats * share,
        "logic": kinds["logic"] * 32 / LOGIC * share,
        "special": (kinds["ex2"] + kinds["convert"]) * 32 / SPECIAL * share,
        "tensor": kinds["mma"] * products(device) / device.tensor * share,
        "L1": (launch["wavefronts"] + launch["sectors"] / SECTORS) * share,
        "L2": fetched * max(share / PORT, copies / device.l2 if device.l2 else 0),
        "latency": (launch["trips"][0] + (rounds - 1) * launch["trips"][1]) * device.latency,
    }
    if device.architecture == 90:
        clocks["tensor"] /= MMA_ON_HOPPER
    microseconds = {name: x / device.clock / 1e3 for name, x in clocks.items()}
    return microseconds | {"memory": launch["distinct"] * 32 * copies / device.memory / 1e3}


def floor(launch: Mapping[str, Any], copies: int, device: Device) -> float:
    """Microseconds that no schedule can save: memory traffic, or products on all tensor cores."""
    done = launch["kinds"].get("mma", 0) * products(device) * copies
    tensor = done / (device.tensor * device.multiprocessors * device.clock * 1e3)
    return max(tensor, launch["distinct"] * 32 * copies / device.memory / 1e3)
