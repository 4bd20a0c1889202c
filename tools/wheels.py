"""Builds the sdist and, from it, a wheel for each platform, and looks at what came out.

    python tools/wheels.py [--out dist] [--kernels h2o/kernels.fatbin] [PLATFORM ...]

zig's C compiler, a wheel on PyPI, brings the headers and libraries of every platform, so all
wheels can be built on Linux. The limited API makes one wheel serve all versions of Python.
"any" is the pure wheel, without the core, for what has no other (setup.py, H2O_PURE=1). Linux's
get the kernels for GPUs (`make cuda`); the sdist has their sources.
Each wheel is judged by auditwheel, or what it links (nothing that the platform lacks), abi3audit
(uses nothing that Python 3.10 lacks), its size and its kernels (wheel_contents.py). Needs ziglang,
auditwheel, abi3audit, build, setuptools and numpy (pip must not fetch the last two, it would take
those of the target); Python itself must not be free-threaded. tools/try_wheel.py tests the result.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ziglang
from wheel_contents import KERNELS, core_of, kernel_complaints, size_complaints, takes_kernels

ROOT = Path(__file__).resolve().parent.parent
ZIG = Path(ziglang.__file__).parent / "zig"


class Platform(NamedTuple):
    """What a wheel is for."""

    target: str
    """what zig calls it"""
    host: str
    """what Python there says of itself"""
    header: str = ""
    """its pyconfig.h, as far as the limited API goes; "": that of this machine, which on Linux is
    the same for all processors"""
    sizes: tuple[tuple[str, int], ...] = ()
    """what in NumPy's configuration is another than on Linux: NPY_SIZEOF_..."""


WIDTHS = """\
#define SIZEOF_SHORT 2
#define SIZEOF_INT 4
#define SIZEOF_LONG_LONG 8
#define SIZEOF_FLOAT 4
#define SIZEOF_DOUBLE 8
#define SIZEOF_SIZE_T 8
#define SIZEOF_VOID_P 8
#define SIZEOF_UINTPTR_T 8
#define SIZEOF_TIME_T 8
#define SIZEOF_PID_T 4
#define HAVE_STDARG_PROTOTYPES 1
"""
MACOS = (
    WIDTHS
    + """\
#define SIZEOF_LONG 8
#define SIZEOF_WCHAR_T 4
#define HAVE_UNISTD_H 1
#define HAVE_SYS_TYPES_H 1
#define HAVE_SSIZE_T 1
"""
)
WINDOWS = (
    WIDTHS
    + """\
#define SIZEOF_LONG 4
#define SIZEOF_WCHAR_T 2
#define MS_WINDOWS 1
#define MS_WIN32 1
#define MS_WIN64 1
#define Py_ENABLE_SHARED 1
#define HAVE_DECLSPEC_DLL 1
#define HAVE_PY_SSIZE_T 1
#include <stdint.h>
typedef int64_t Py_ssize_t;
"""
)
ARM = (("LONGDOUBLE", 8), ("COMPLEX_LONGDOUBLE", 16))
NARROW = (*ARM, ("LONG", 4), ("WCHAR_T", 2), ("OFF_T", 4))
# glibc 2.28 is torch's lower limit too. No musllinux: torch has none, no musl Python is at hand to
# run it, and auditwheel refuses it: zig's x86_64-linux-musl links libc.so, not Alpine's
# libc.musl-x86_64.so.1.
PLATFORMS: dict[str, Platform | None] = {
    "manylinux_2_28_x86_64": Platform("x86_64-linux-gnu.2.28", "manylinux_2_28_x86_64"),
    "manylinux_2_28_aarch64": Platform("aarch64-linux-gnu.2.28", "manylinux_2_28_aarch64"),
    "macosx_11_0_arm64": Platform("aarch64-macos.11.0", "macosx-11.0-arm64", MACOS, ARM),
    "macosx_11_0_x86_64": Platform("x86_64-macos.11.0", "macosx-11.0-x86_64", MACOS),
    "win_amd64": Platform("x86_64-windows-gnu", "win-amd64", WINDOWS, NARROW),
    "any": None,
}
LINKED = {  # beside what auditwheel knows
    "macosx": re.compile(r"/usr/lib/libSystem\.B\.dylib"),
    "win": re.compile(r"(python3|kernel32|ntdll|api-ms-win-crt-[\w-]+)\.dll", re.IGNORECASE),
}


BY_NAME = "SECTIONS { .text : { *(.text) *(SORT_BY_NAME(.text.*)) } } INSERT BEFORE .plt;"
"""Functions of one name, of all instruction set levels, come side by side: much of them is alike,
which a wheel's compression finds where it is near: a fifth of the core. Other linkers cannot."""


def write_headers(folder: Path, platform: Platform) -> list[Path]:
    """Folders of Python's and, for other systems than Linux, NumPy's headers with the platform's
    configuration. Debian's pyconfig.h looks for one of the target machine."""
    import numpy

    headers = folder / "include"
    shutil.copytree(sysconfig.get_path("include"), headers)
    config = Path(sysconfig.get_config_h_filename()).read_text("utf-8")
    (headers / "pyconfig.h").write_text(platform.header or config)
    if not platform.header:
        return [headers]
    arrays = folder / "arrays"
    shutil.copytree(numpy.get_include(), arrays)
    numbers = arrays / "numpy" / "_numpyconfig.h"
    text = re.sub(r"#define (NPY_HAVE_ENDIAN_H) 1", r"/* no \1 */", numbers.read_text("utf-8"))
    for name, size in platform.sizes:
        text, replaced = re.subn(rf"(#define NPY_SIZEOF_{name}) \d+", rf"\1 {size}", text)
        assert replaced == 1, f"NumPy has no NPY_SIZEOF_{name}"
    numbers.write_text(text)
    return [headers, arrays]


def write_import_library(folder: Path) -> Path:
    """That of python3.dll: the names of the stable ABI, of which abi3info has the list."""
    from abi3info import DATAS, FUNCTIONS

    def names(symbols: dict[Any, Any]) -> list[str]:
        old = [x for x in symbols.values() if (x.added.major, x.added.minor) <= (3, 10)]
        return [x.symbol.name for x in old]

    data = [f"{name} DATA" for name in names(DATAS)]
    listed, library = folder / "python3.def", folder / "python3.lib"
    listed.write_text("\n".join(["LIBRARY python3.dll", "EXPORTS", *names(FUNCTIONS), *data, ""]))
    command = [ZIG, "dlltool", "-m", "i386:x86-64", "-d", listed, "-l", library]
    subprocess.run(command, check=True)
    return library


def write_compiler(folder: Path, target: str) -> Path:
    """A command that compiles for the target; distutils takes no arguments in its name.

    For size: inner loops are unrolled by name, and what else clang unrolls for speed makes the
    kernels a third larger and hardly faster. C unwinds no stack, but Windows wants to be able to.
    """
    compiler = folder / "cc"
    size = "-Os -ffunction-sections"  # for BY_NAME
    if "windows" not in target:
        size += " -fno-unwind-tables -fno-asynchronous-unwind-tables"
    command = f'exec {shlex.quote(str(ZIG))} cc -target {target} "$@" {size}'
    compiler.write_text(f"#!/bin/sh\n{command}\n")
    compiler.chmod(0o755)
    return compiler


def linker_arguments(folder: Path, host: str) -> list[str]:
    """Python itself is found when the core is loaded; Windows wants to know where."""
    if host.startswith("win"):
        return ["-shared", "-s", str(write_import_library(folder))]
    if host.startswith("macosx"):
        return ["-shared", "-s", "-undefined", "dynamic_lookup"]
    order = folder / "by_name.ld"
    order.write_text(BY_NAME)
    return ["-shared", "-s", f"-Wl,-T,{order}"]


def build_environment(folder: Path, platform: Platform | None) -> dict[str, str]:
    """What setup.py is to know."""
    if platform is None:
        return {"H2O_PURE": "1"}
    compiler = write_compiler(folder, platform.target)
    linker = [str(compiler), *linker_arguments(folder, platform.host)]
    return {
        "CC": str(compiler),
        "CFLAGS": " ".join(f"-I{path}" for path in write_headers(folder, platform)),
        "LDSHARED": " ".join(linker),
        "_PYTHON_HOST_PLATFORM": platform.host,  # what the wheel is named for
        "H2O_WERROR": "1",
    }


def build(sdist: Path, platform: str, out: Path, kernels: Path) -> Path:
    """The wheel of one platform, in out."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.unpack_archive(sdist, folder / "source")
        (source,) = (folder / "source").iterdir()
        if takes_kernels(platform):
            shutil.copy(kernels, source / KERNELS)
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"),
                *("--no-build-isolation", "--wheel-dir", folder / "built", source),
            ],
            env={**os.environ, **build_environment(folder, PLATFORMS[platform])},
            check=True,
        )
        (wheel,) = (folder / "built").iterdir()
        return Path(shutil.copy(wheel, out))


def version(platform: str) -> tuple[float, ...]:
    """What of a manylinux tag has to be the same or lower; endless for what is none."""
    numbers = re.match(r"manylinux_(\d+)_(\d+)_", platform)
    return tuple(map(int, numbers.groups())) if numbers else (math.inf,)


def linux_complaints(wheel: Path, platform: str) -> Iterator[str]:
    """What auditwheel says against a wheel."""
    command = [sys.executable, "-m", "auditwheel", "show", "--json", wheel]
    shown = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    if version(shown["overall_tag"]) > version(platform):
        yield f"auditwheel calls it {shown['overall_tag']}: {shown['versioned_symbols']}"


def linked_libraries(name: str, binary: bytes) -> list[str]:
    """What a core for Windows or macOS asks its system for, by the binary's own lists."""
    if name.endswith(".pyd"):
        import pefile

        image = pefile.PE(data=binary)
        return [entry.dll.decode() for entry in image.DIRECTORY_ENTRY_IMPORT]
    magic, _, _, _, commands = struct.unpack_from("<5I", binary)
    assert magic == 0xFEEDFACF, f"{name} is no Mach-O file of 64 bits"
    at, libraries = 32, []
    for _ in range(commands):
        kind, size, start = struct.unpack_from("<3I", binary, at)
        if kind == 0xC:  # LC_LOAD_DYLIB
            libraries.append(binary[at + start : at + size].rstrip(b"\0").decode())
        at += size
    return libraries


def foreign_complaints(wheel: Path, platform: str) -> Iterator[str]:
    """The same for other systems: what links something that not each of them has."""
    known = LINKED[platform.partition("_")[0]]
    with zipfile.ZipFile(wheel) as archive:
        names = core_of(archive)
        if len(names) != 1:
            yield f"holds {names or 'no core'}, wanted one core and nothing beside it"
        for name in names[:1]:
            libraries = linked_libraries(name, archive.read(name))
            if unknown := [x for x in libraries if not known.fullmatch(x)]:
                yield f"links {', '.join(unknown)}"


def complaints(wheel: Path, platform: str) -> Iterator[str]:
    """What keeps a wheel from being what its name says."""
    if not wheel.name.endswith(f"-{platform}.whl"):
        yield f"is named {wheel.name}"
    yield from size_complaints(wheel)
    yield from kernel_complaints(wheel)
    if platform == "any":
        return
    linux = platform.startswith("manylinux")
    yield from (linux_complaints if linux else foreign_complaints)(wheel, platform)
    command = [sys.executable, "-m", "abi3audit", "--strict", wheel]
    audit = subprocess.run(command, capture_output=True, text=True)
    if audit.returncode != 0:
        yield f"abi3audit: {audit.stdout}{audit.stderr}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--kernels", type=Path, default=ROOT / KERNELS, help="what Linux's hold")
    parser.add_argument("platforms", nargs="*", metavar="PLATFORM", help=", ".join(PLATFORMS))
    arguments = parser.parse_args()
    unknown = set(arguments.platforms) - set(PLATFORMS)
    if unknown:
        parser.error(f"{', '.join(unknown)}: wanted some of {', '.join(PLATFORMS)}")
    platforms = arguments.platforms or list(PLATFORMS)
    if any(map(takes_kernels, platforms)) and not arguments.kernels.is_file():
        parser.error(f"{arguments.kernels}, which Linux's wheels hold, is not built: make cuda")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        parser.error("needs a Python with a GIL: the limited API has no other")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", name]
        subprocess.run([*command, ROOT], check=True, stdout=subprocess.DEVNULL)
        (built,) = Path(name).iterdir()
        sdist = Path(shutil.copy(built, arguments.out))
    print(f"{sdist.stat().st_size / 1000:5.0f} kB  {sdist.name}")
    failed = False
    for platform in platforms:
        wheel = build(sdist, platform, arguments.out, arguments.kernels)
        print(f"{wheel.stat().st_size / 1000:5.0f} kB  {wheel.name}", flush=True)
        for complaint in complaints(wheel, platform):
            print(f"          {complaint}")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
