"""What a wheel must hold and may not: its size, and in those of Linux the kernels for GPUs."""

from __future__ import annotations

import lzma
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["core_of", "kernel_complaints", "size_complaints", "takes_kernels"]

LARGEST = 1_100_000
"""Bytes of a wheel, but for the kernels. The largest is the one for Windows, 1,020 kB, where the
core is 576 kB: its linker cannot put functions of one name side by side (BY_NAME of wheels.py)."""
LARGEST_WITH_KERNELS = 6_000_000
KERNELS = "h2o/kernels.fatbin"
WORD = re.compile(rb"h2o-kernels-[0-9a-f]{16}")
"""By which core and kernels say of which sources they are, see setup.py."""
FATBIN_BEGINS = b"P\xedU\xba"
"""What drivers know a file of kernels by."""


def takes_kernels(name: str) -> bool:
    """Whether the wheel of that name or platform holds them: those of Linux, where the core opens
    NVIDIA's driver."""
    return "manylinux" in name


def core_of(archive: zipfile.ZipFile) -> list[str]:
    """The names of compiled cores in a wheel."""
    return [x for x in archive.namelist() if re.match(r"h2o/_core\.(?!pyi)", x)]


def size_complaints(wheel: Path) -> Iterator[str]:
    """What is too large: the wheel, or what it holds beside the kernels."""
    size = wheel.stat().st_size
    with zipfile.ZipFile(wheel) as archive:
        kernels = [x.compress_size for x in archive.infolist() if x.filename == KERNELS]
    for bytes_, largest, without in (
        (size, LARGEST_WITH_KERNELS, ""),
        (size - sum(kernels), LARGEST, " but for the kernels"),
    ):
        if bytes_ > largest:
            yield f"has {bytes_} bytes{without}, wanted at most {largest}"


def kernel_complaints(wheel: Path) -> Iterator[str]:
    """What is wrong with the kernels in a wheel, or with their absence. The file begins as a driver
    wants it, once it is expanded, and ends with the word that the wheel's own core looks for."""
    wanted = takes_kernels(wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        if (KERNELS in archive.namelist()) != wanted:
            yield f"holds no {KERNELS}" if wanted else f"holds {KERNELS}, which nothing there loads"
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
        yield f"{KERNELS} is cut off, or no file of kernels"
        return
    word = expander.unused_data
    if not WORD.fullmatch(word):
        yield f"{KERNELS} does not end with its word"
    elif [WORD.findall(core) for core in cores] != [[word]]:
        yield f"{KERNELS} is of other sources than the core: make cuda"
