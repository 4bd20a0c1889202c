"""Compile the kernels for NVIDIA GPUs with CUDA's packages on PyPI, and pack them into one file.

    python tools/compile_kernels.py compile sm_80 build/kernels/sm_80.cubin
    python tools/compile_kernels.py compile compute_80 build/kernels/compute_80.ptx
    python tools/compile_kernels.py pack h2o/kernels.fatbin build/kernels/sm_80.cubin ...

The Python that runs this must have CUDA's compiler library (nvidia-cuda-nvrtc-cu12) and the library
that writes fatbins (nvidia-nvfatbin-cu12). No C compiler, nvcc or GPU is needed. Drivers from 525
on accept the code of CUDA 12's compiler. The fatbin does not use CUDA's own compression, which
drivers before 550 cannot read. Instead the whole file is compressed, to a tenth of its size, and
h2o expands it (`h2o.backends.cuda`).
"""

from __future__ import annotations

import ctypes
import lzma
import site
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "csrc" / "cuda" / "kernels.cu"
OPTIONS = ("-std=c++20", "-default-device", f"-I{ROOT / 'csrc'}", f"-I{SOURCE.parent}")
HEADERS = {
    "math.h": "#define INFINITY __int_as_float(0x7f800000)\n",
    "stdbool.h": "",
    "stddef.h": "typedef unsigned long size_t;\n",
    "stdint.h": """
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t, uintptr_t;
#define INT32_MAX 0x7fffffff
#define UINT32_MAX 0xffffffffu
""",
    "string.h": "",
}
"""The C library's headers as far as the sources use them, since the compiler comes without any."""


class Library:
    """A CUDA library from PyPI whose functions begin with a prefix. If a call fails, the program
    exits with the library's message."""

    def __init__(self, package: str, name: str, prefix: str) -> None:
        places = [Path(x) / "nvidia" / package / "lib" / name for x in site.getsitepackages()]
        path = next((x for x in places if x.exists()), None)
        if path is None:
            sys.exit(f"no {name} in {', '.join(str(x.parent) for x in places)}: see `make cuda`")
        self.library, self.prefix = ctypes.CDLL(str(path)), prefix

    def call(self, function: str, *arguments: Any, explain: Callable[[], str] = str) -> None:
        code = getattr(self.library, self.prefix + function)(*arguments)
        if code != 0:
            text = getattr(self.library, self.prefix + "GetErrorString")
            text.restype = ctypes.c_char_p
            sys.exit(f"{explain()}\n{self.prefix}{function}: {text(code).decode()}")

    def bytes(self, what: str, handle: ctypes.c_void_p) -> bytes:
        """The result of <prefix>Get<what>, whose size is that of <prefix>Get<what>Size. "" gets the
        fatbin itself, whose size function is <prefix>Size."""
        size = ctypes.c_size_t()
        self.call(f"Get{what}Size" if what else "Size", handle, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(f"Get{what}", handle, buffer)
        return buffer.raw


def strings(texts: list[str]) -> Any:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))


def compiled(architecture: str) -> bytes:
    """Compile the kernels: a cubin for sm_80 and the like, PTX for compute_80 and the like."""
    nvrtc = Library("cuda_nvrtc", "libnvrtc.so.12", "nvrtc")
    program = ctypes.c_void_p()
    names = list(HEADERS)
    nvrtc.call(
        "CreateProgram", ctypes.byref(program), SOURCE.read_bytes(), SOURCE.name.encode(),
        len(names), strings([HEADERS[name] for name in names]), strings(names),
    )  # fmt: skip
    options = [f"-arch={architecture}", *OPTIONS]
    nvrtc.call(
        "CompileProgram", program, len(options), strings(options),
        explain=lambda: nvrtc.bytes("ProgramLog", program).rstrip(b"\0").decode(),
    )  # fmt: skip
    return nvrtc.bytes("CUBIN" if architecture.startswith("sm_") else "PTX", program)


def packed(files: list[Path]) -> bytes:
    """Pack cubins and PTX files, which are named after their architectures, into one fatbin."""
    fatbin = Library("nvfatbin", "libnvfatbin.so.12", "nvFatbin")
    handle, options = ctypes.c_void_p(), ["-64", "-cuda", "-host=linux", "-compress=false"]
    fatbin.call("Create", ctypes.byref(handle), strings(options), len(options))
    for file in files:
        code, architecture = file.read_bytes(), file.stem.split("_")[1].encode()
        size, name = ctypes.c_size_t(len(code)), file.stem.encode()
        if file.suffix == ".cubin":
            fatbin.call("AddCubin", handle, code, size, architecture, name)
        else:
            fatbin.call("AddPTX", handle, code, size, architecture, name, b"")
    return fatbin.bytes("", handle)


def main(arguments: list[str]) -> int:
    match arguments:
        case ["compile", architecture, out]:
            Path(out).write_bytes(compiled(architecture))
        case ["pack", out, *files] if files:
            Path(out).write_bytes(lzma.compress(packed([Path(file) for file in files])))
        case _:
            sys.exit(__doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
