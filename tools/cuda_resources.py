"""What each kernel for GPUs takes of a multiprocessor, as compiled; fails if one spills.

    python tools/cuda_resources.py h2o/kernels.fatbin

A markdown table: registers of a thread, bytes of local memory (registers that did not fit, and
arrays that have an address), instructions in KiB. Needs cuobjdump: of the CUDA toolkit, or
`pip install nvidia-cuda-cuobjdump`.
"""

from __future__ import annotations

import re
import shutil
import site
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


class Kernel(NamedTuple):
    architecture: str
    name: str
    registers: int
    local: int
    size: int


def cuobjdump() -> str | None:
    """Its path, or None."""
    places = [Path(x) for x in site.getsitepackages()]
    packaged = (x for place in places for x in place.glob("nvidia/*/bin/cuobjdump"))
    return shutil.which("cuobjdump") or next(map(str, packaged), None)


def kernels(fatbin: str, tool: str) -> list[Kernel]:
    """Every kernel in the file, once for each architecture that it is compiled for."""

    def dump(option: str) -> str:
        command = [tool, option, fatbin]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    found = []
    texts = [x.split("arch = ")[1:] for x in (dump("-res-usage"), dump("-elf"))]
    for usage, elf in zip(*texts, strict=True):
        sizes = {
            name: int(size, 16)
            for size, name in re.findall(r"^ *\w+ +\w+ +(\w+) .*PROGBITS.*\.text\.(\w+)", elf, re.M)
        }
        pattern = r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)"
        for name, registers, stack, local in re.findall(pattern, usage):
            memory = int(stack) + int(local)
            found.append(Kernel(usage.split()[0], name, int(registers), memory, sizes[name]))
    return found


def main(fatbin: str) -> int:
    tool = cuobjdump()
    if tool is None:
        print("needs cuobjdump: pip install nvidia-cuda-cuobjdump", file=sys.stderr)
        return 2
    all_kernels = kernels(fatbin, tool)
    print("| kernel | architecture | registers | local bytes | KiB of code |")
    print("| --- | --- | --- | --- | --- |")
    for k in sorted(all_kernels, key=lambda k: (k.name, int(k.architecture[3:]))):
        print(
            f"| {k.name.removeprefix('h2o_cuda_')} | {k.architecture} | {k.registers} | {k.local} "
            f"| {k.size / 1024:.0f} |"
        )
    return int(any(k.local for k in all_kernels))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
