"""Print the resources of each compiled kernel for GPUs. Fails if a kernel spills much.

    python tools/cuda_resources.py h2o/kernels.fatbin

Prints a Markdown table: registers per thread, bytes of local memory (spilled registers, and arrays
that have an address), and the number of instructions, in total and by kind: tensor core products,
float arithmetic, special functions, loads and stores of shared and of other memory, barriers. These
are instructions in the code, not executions. Needs cuobjdump and nvdisasm, from the CUDA toolkit or
by `pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm`.
"""

from __future__ import annotations

import lzma
import re
import shutil
import site
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple


class Kernel(NamedTuple):
    architecture: str
    name: str
    registers: int
    local: int
    instructions: Counter[str]


#: Bytes of local memory that a kernel may use so that more blocks fit on a multiprocessor. Loops
#: over tiles do not read it, except for eight bytes in decode steps over rows of more than 64
#: bytes, and for some between tiles of keys in prompts on 12.0, which use the most.
LOCAL = 136

#: Kinds of instructions by the first word of their names.
KINDS = {
    "matrix": {"HMMA", "HGMMA"},
    "float": {"FFMA", "FADD", "FMUL", "FFMA2", "FADD2", "FMUL2"},
    "special": {"MUFU"},
    "shared": {"LDS", "STS", "LDSM", "ATOMS"},
    "memory": {"LD", "ST", "LDG", "STG", "ATOM", "ATOMG", "RED"},
    "barriers": {"BAR"},
}


def cuobjdump() -> str | None:
    """Path of cuobjdump, or None."""
    places = [Path(x) for x in site.getsitepackages()]
    packaged = (x for place in places for x in place.glob("nvidia/*/bin/cuobjdump"))
    return shutil.which("cuobjdump") or next(map(str, packaged), None)


def kernels(fatbin: str, tool: str) -> list[Kernel]:
    """List every kernel in the file, once for each architecture."""

    code = re.sub(rb"h2o-kernels-[0-9a-f]{16}\Z", b"", Path(fatbin).read_bytes())
    if code.startswith(b"\xfd7zXZ\0"):
        code = lzma.decompress(code)

    def dump(option: str) -> str:
        with tempfile.NamedTemporaryFile(suffix=".fatbin") as file:  # without the Makefile's hash
            file.write(code)
            file.flush()
            command = [tool, option, file.name]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    listed = []
    texts = [x.split("arch = ")[1:] for x in (dump("-res-usage"), dump("-sass"))]
    for usage, sass in zip(*texts, strict=True):
        codes = dict(re.findall(r"Function : (\w+)(.*?)(?=\tFunction|\Z)", sass, re.S))
        pattern = r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)"
        for name, registers, stack, local in re.findall(pattern, usage):
            words = re.findall(r"/\*[0-9a-f]{4,}\*/ +(?:@!?\w+ +)?([A-Z0-9]+)", codes[name])
            memory = int(stack) + int(local)
            listed.append(Kernel(usage.split()[0], name, int(registers), memory, Counter(words)))
    return listed


def main(fatbin: str) -> int:
    tool = cuobjdump()
    if tool is None:
        print("cuobjdump not found: pip install nvidia-cuda-cuobjdump", file=sys.stderr)
        return 2
    all_kernels = kernels(fatbin, tool)
    heads = ["kernel", "architecture", "registers", "local bytes", "instructions", *KINDS]
    print("|", " | ".join(heads), "|")
    print("| --- " * len(heads) + "|")
    for k in sorted(all_kernels, key=lambda k: (k.name, k.architecture.rjust(8))):
        kinds = (sum(k.instructions[x] for x in words) for words in KINDS.values())
        cells = [k.name.removeprefix("h2o_cuda_"), k.architecture, k.registers, k.local]
        print("|", " | ".join(map(str, [*cells, k.instructions.total(), *kinds])), "|")
    return int(any(k.local > LOCAL for k in all_kernels))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
