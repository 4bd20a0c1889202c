"""Checks of the contents of a wheel: its size and, in wheels for Linux, the kernels for GPUs."""

from __future__ import annotations

import lzma
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["core_of", "kernel_complaints", "size_complaints", "takes_kernels"]

LARGEST = 1_100_000
"""Limit for a wheel without kernels, in bytes. The largest wheel is that for Windows, with 1,020
kB. Its core takes 576 kB, since its linker cannot sort functions by name (BY_NAME of wheels.py)."""
LARGEST_WITH_KERNELS = 6_000_000
KERNELS = "h2o/kernels.fatbin"
WORD = re.compile(rb"h2o-kernels-[0-9a-f]{16}")
"""Hash by which core and kernels name the sources that they were built from, see setup.py"""
FATBIN_BEGINS = b"P\xedU\xba"
"""First bytes of a fatbin, by which drivers recognize it"""


def takes_kernels(name: str) -> bool:
    """Whether the wheel with this name or platform contains kernels. Only wheels for Linux do,
    where the core opens NVIDIA's driver."""
    return "manylinux" in name


def core_of(archive: zipfile.ZipFile) -> list[str]:
    """The names of compiled cores in a wheel."""
    return [x for x in archive.namelist() if re.match(r"h2o/_core\.(?!pyi)", x)]


def size_complaints(wheel: Path) -> Iterator[str]:
    """Yield a complaint if the wheel, or the wheel without the kernels, is too large."""
    size = wheel.stat().st_size
    with zipfile.ZipFile(wheel) as archive:
        kernels = [x.compress_size for x in archive.infolist() if x.filename == KERNELS]
    for bytes_, largest, without in (
        (size, LARGEST_WITH_KERNELS, ""),
        (size - sum(kernels), LARGEST, " without the kernels"),
    ):
        if bytes_ > largest:
            yield f"has {bytes_} bytes{without}, expected at most {largest}"


def kernel_complaints(wheel: Path) -> Iterator[str]:
    """Yield what is wrong with the kernels in a wheel, or with their absence. The file must expand
    to a fatbin and end with the hash that the wheel's core looks for."""
    wanted = takes_kernels(wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        if (KERNELS in archive.namelist()) != wanted:
            yield f"holds no {KERNELS}" if wanted else f"holds {KERNELS}, which only Linux uses"
            return
        if not wanted:
            return
        file = archive.read(KERNELS)
        cores = [archive.read(name) for name in core_of(archive)]
    expander = lzma.LZMADecompressor()
    try:
        code = expander.decompress(file)
    except lzma.LZMAError as error:
        yield f"{KERNELS}: {error}"
        return
    if not expander.eof or not code.startswith(FATBIN_BEGINS):
        yield f"{KERNELS} is truncated, or no file of kernels"
        return
    word = expander.unused_data
    if not WORD.fullmatch(word):
        yield f"{KERNELS} does not end with the hash of its sources"
    elif [WORD.findall(core) for core in cores] != [[word]]:
        yield f"{KERNELS} was built from other sources than the core: run make cuda"
