"""What GPUs can do, how many blocks fit on a multiprocessor, and a model of a launch's time.

The time is the largest of what resources take by themselves: issue slots, the units of floats, of
logic and of special functions, tensor cores, L1 with shared memory, L2, memory, and the latency of
round trips that follow one another. Nothing is added for the launch itself, nor for what does not
overlap: it is a floor to compare kernels by.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple


class Device(NamedTuple):
    """Of NVIDIA's data sheets and architecture papers, but for `latency` and `l2`."""

    architecture: int
    """10 times the compute capability"""
    multiprocessors: int
    clock: float
    """GHz, the boost clock"""
    tensor: int
    """products of 16 bits, added up in 32, of a multiprocessor in a clock"""
    floats: int
    """operations on 32-bit floats of a multiprocessor in a clock"""
    shared: int
    """KiB of a multiprocessor's shared memory"""
    threads: int
    """most threads of a multiprocessor"""
    blocks: int
    """most blocks of a multiprocessor"""
    memory: float
    """GB/s"""
    l2: int | None
    """bytes a clock of the whole L2; None: no figure that could be cited"""
    latency: int
    """clocks of a load that misses all caches"""

    @property
    def cubin(self) -> str:
        """File of the device's kernels; those for 9.0 have instructions that no others have."""
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
and clock. `l2` of A100 is of NVIDIA's paper on that architecture, and taken for Hopper too.
`floats` is of the CUDA C++ Programming Guide, "Arithmetic Instructions", as SPECIAL and LOGIC.
`latency` is of Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via
Microbenchmarking" (2024), that of 4090 for L4 too; T4 has that of Volta, rounded."""

SPECIAL = 16
"""exponentials of a multiprocessor in a clock, or conversions between integers and floats"""
LOGIC = 64
"""comparisons, selections, shifts and bits of a multiprocessor in a clock; sums of integers can go
to the unit of floats"""
MMA_ON_HOPPER = 0.63
"""of the tensor cores' rate, what mma.sync, which these kernels use, reaches there (Luo et al.)"""
SECTORS = 4
"""of 32 bytes of global memory that pass a multiprocessor's L1, a part of which is shared memory,
in a clock"""
PORT = 64
"""bytes that L2 brings a multiprocessor in a clock at most"""
MMA_PRODUCTS = {75: 16 * 8 * 8, 80: 16 * 8 * 16}
"""of a warp's instruction, by the architecture of the PTX"""
REGISTERS = 65536
"""of a multiprocessor; a warp takes multiples of 256"""


def registers(cubin: bytes) -> dict[str, int]:
    """Registers of a thread of each kernel in a cubin, an ELF file. Its section .nv.info has
    attributes; number 0x2f is a symbol's index and the registers of that kernel."""
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
    """threads and bytes of shared memory of a block, registers of a thread."""
    warps = threads // 32
    fitting = REGISTERS // 4 // (math.ceil(registers * 32 / 256) * 256) * 4 // warps
    system = 1024 if device.architecture >= 80 else 0  # of each block, from compute capability 8.0
    taken = math.ceil((shared + system) / 256) * 256
    by_shared = device.shared * 1024 // taken if taken else device.blocks
    return min(device.blocks, device.threads // threads, fitting, by_shared)


def products(device: Device) -> int:
    """Of a warp's instruction."""
    return MMA_PRODUCTS[75 if device.architecture < 80 else 80]


def times(launch: Mapping[str, Any], copies: int, device: Device, blocks: int) -> dict[str, float]:
    """Microseconds that each resource takes for a counted launch (tools/ptx/machine.cpp), done
    `copies` times over side by side, with so many blocks on a multiprocessor at once."""
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
    """Microseconds that no schedule saves: bytes, and products on all tensor cores."""
    done = launch["kinds"].get("mma", 0) * products(device) * copies
    tensor = done / (device.tensor * device.multiprocessors * device.clock * 1e3)
    return max(tensor, launch["distinct"] * 32 * copies / device.memory / 1e3)
