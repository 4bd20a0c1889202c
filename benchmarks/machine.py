"""The machine under test: its description, and the highest rates that it reaches.

A kernel's time means little without a roofline to compare it with (Williams, Waterman, Patterson,
"Roofline: an insightful visual performance model", CACM 2009). Here the roofline is the rate of
multiply-adds, or the bandwidth of reads, that plain loops reach on the same threads in the same
run. The loops are C (roofline.c), built on first use with the system's compiler. Without a compiler
there are no roofline figures.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

import h2o.ops
from h2o import packages
from h2o.evaluation.speed import processor
from h2o.utils.filesystem import cache_folder, make_once

PACKAGES = ("torch", "transformers", "numpy")
SOURCE = Path(__file__).with_name("roofline.c")


def cache_dir() -> Path:
    """The folder for everything that the benchmarks build."""
    path = cache_folder() / "bench"
    path.mkdir(parents=True, exist_ok=True)
    return path


def describe() -> dict[str, Any]:
    """Description of the machine for the head of every result file."""
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "caches": cache_sizes(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": packages.versions(*PACKAGES),
        "torch_threads": torch.get_num_threads(),
        "h2o": h2o.ops.info(),
    }


def cache_sizes() -> dict[str, str]:
    """Sizes of the first processor's data caches by level, as Linux reports them."""
    sizes = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind, level, size = (
            (index / name).read_text().strip() for name in ("type", "level", "size")
        )
        if kind != "Instruction":
            sizes[f"L{level}"] = size
    return sizes


@cache
def roofline() -> Roofline | None:
    """The loops, built if necessary, or None if there is no C compiler."""
    command = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if command is None:
        return None
    compiler = shlex.split(command)  # it may be "ccache gcc"
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    flags = ["-O3", "-march=native", "-shared", "-fPIC"]
    if "amx_bf16" not in h2o.ops.info()["features"]:
        flags.append("-U__AMX_BF16__")  # the system does not enable it, even if the CPU has it
    key = SOURCE.read_text() + version + processor() + " ".join(flags)
    library = cache_dir() / f"roofline-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    make_once(
        library,
        lambda made: subprocess.run([*compiler, *flags, "-o", made, SOURCE], check=True),
    )
    return Roofline(ctypes.CDLL(str(library)))


class Roofline:
    """The loops of roofline.c as functions that do a known amount of work."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.threads = torch.get_num_threads()
        self.run = _parallel_for()

    def multiply_adds(self, dtype: torch.dtype) -> tuple[Callable[[], None], float]:
        """A function that takes about 10 to 50 ms, and the floating-point operations it does."""
        name = "fma_bf16" if dtype == torch.bfloat16 else "fma_f32"
        turns = ctypes.c_int64(10_000_000)
        flops = ctypes.c_int64.in_dll(self.library, name + "_flops").value
        function = getattr(self.library, name)

        def call() -> None:
            self.run(self.threads, function, ctypes.byref(turns))

        return call, float(flops * turns.value * self.threads)

    def reads(self, tensors: list[torch.Tensor]) -> tuple[Callable[[], None], float]:
        """A function that reads each of these equally large tensors once, and the bytes it
        reads."""
        blocks = (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))
        size = tensors[0].nbytes
        work = _ReadWork(ctypes.cast(blocks, ctypes.c_void_p), len(tensors), size, self.threads)

        def call() -> None:
            self.run(self.threads, self.library.read_blocks, ctypes.byref(work))

        call.keeps = (tensors, blocks)  # type: ignore[attr-defined]
        return call, float(size // self.threads // 256 * 256 * self.threads * len(tensors))


class _ReadWork(ctypes.Structure):
    _fields_ = (
        ("blocks", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    )


def _parallel_for() -> Callable[[int, Any, Any], None]:
    """A function run(threads, function, context). It uses torch's own threads if possible.

    A second pool would compete with torch's threads, which spin for a while after each operator.
    """
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        lend = ctypes.CDLL(str(path)).torch_parallel_for
    except (OSError, AttributeError):
        return _python_threads

    def run(threads: int, function: Any, context: Any) -> None:
        one = ctypes.c_int64(1)
        lend(ctypes.c_int64(0), ctypes.c_int64(threads), one, function, context)

    return run


def _python_threads(threads: int, function: Any, context: Any) -> None:
    def work(t: int) -> None:
        function(ctypes.c_int64(t), ctypes.c_int64(t + 1), context)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
