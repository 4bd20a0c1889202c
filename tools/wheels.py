"""Build the sdist and, from it, a wheel for each platform, and check them.

    python tools/wheels.py [--out dist] [--kernels h2o/kernels.fatbin] [PLATFORM ...]

zig's C compiler, a wheel on PyPI, includes the headers and libraries of every platform, so all
wheels can be built on Linux. Thanks to the limited API one wheel works with all versions of Python.
"any" is the pure wheel, without the core, for platforms that have no other (setup.py, H2O_PURE=1).
The wheels for Linux get the kernels for GPUs (`make cuda`). The sdist has the sources of these.

Each wheel is checked for what it links (nothing that the platform lacks; for Linux by auditwheel),
for what it uses of Python (nothing that 3.10 lacks; by abi3audit), for its size and for its kernels
(wheel_contents.py). Needs ziglang, auditwheel, abi3audit, build, setuptools and numpy. The last two
must be installed, since pip would download those of the target platform. Python itself must not be
free-threaded. tools/try_wheel.py tests the result.
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
    """The platform of a wheel."""

    target: str
    """zig's name of it"""
    host: str
    """the platform name that Python has there"""
    header: str = ""
    """its pyconfig.h, as far as the limited API needs it; "": that of this machine, since on Linux
    it is the same for all processors"""
    sizes: tuple[tuple[str, int], ...] = ()
    """the NPY_SIZEOF_... of NumPy's configuration that differ from Linux"""


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
# glibc 2.28 is torch's lower limit too. There is no wheel for musllinux: torch has none, and
# auditwheel rejects ours, because zig's x86_64-linux-musl links libc.so and not Alpine's
# libc.musl-x86_64.so.1.
PLATFORMS: dict[str, Platform | None] = {
    "manylinux_2_28_x86_64": Platform("x86_64-linux-gnu.2.28", "manylinux_2_28_x86_64"),
    "manylinux_2_28_aarch64": Platform("aarch64-linux-gnu.2.28", "manylinux_2_28_aarch64"),
    "macosx_11_0_arm64": Platform("aarch64-macos.11.0", "macosx-11.0-arm64", MACOS, ARM),
    "macosx_11_0_x86_64": Platform("x86_64-macos.11.0", "macosx-11.0-x86_64", MACOS),
    "win_amd64": Platform("x86_64-windows-gnu", "win-amd64", WINDOWS, NARROW),
    "any": None,
}
LINKED = {  # libraries allowed on the platforms that auditwheel does not check
    "macosx": re.compile(r"/usr/lib/libSystem\.B\.dylib"),
    "win": re.compile(r"(python3|kernel32|ntdll|api-ms-win-crt-[\w-]+)\.dll", re.IGNORECASE),
}


BY_NAME = "SECTIONS { .text : { *(.text) *(SORT_BY_NAME(.text.*)) } } INSERT BEFORE .plt;"
"""Linker script that sorts functions by name. The same function of all instruction set levels is
then in one place. These copies are similar, and a wheel's compression finds similar code only if it
is close. This saves a fifth of the core. Other linkers cannot sort."""


def write_headers(folder: Path, platform: Platform) -> list[Path]:
    """Write Python's headers and, except for Linux, NumPy's headers with the platform's
    configuration. Returns their folders. (Debian's own pyconfig.h would include the target
    machine's.)"""
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
    """Write the import library of python3.dll. Its names are those of the stable ABI, which
    abi3info lists."""
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
    """Write a command that compiles for the target. distutils needs one without arguments.

    -Os: inner loops are unrolled explicitly. The other unrolling that clang does for speed makes
    the kernels a third larger and hardly faster. C needs no unwind tables, but Windows does.
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
    """Command line of the linker. Python's functions are resolved when the core is loaded; only
    Windows needs an import library for them."""
    if host.startswith("win"):
        return ["-shared", "-s", str(write_import_library(folder))]
    if host.startswith("macosx"):
        return ["-shared", "-s", "-undefined", "dynamic_lookup"]
    order = folder / "by_name.ld"
    order.write_text(BY_NAME)
    return ["-shared", "-s", f"-Wl,-T,{order}"]


def build_environment(folder: Path, platform: Platform | None) -> dict[str, str]:
    """Environment variables for setup.py."""
    if platform is None:
        return {"H2O_PURE": "1"}
    compiler = write_compiler(folder, platform.target)
    linker = [str(compiler), *linker_arguments(folder, platform.host)]
    return {
        "CC": str(compiler),
        "CFLAGS": " ".join(f"-I{path}" for path in write_headers(folder, platform)),
        "LDSHARED": " ".join(linker),
        "_PYTHON_HOST_PLATFORM": platform.host,  # goes into the wheel's name
        "H2O_WERROR": "1",
    }


def build(sdist: Path, platform: str, out: Path, kernels: Path) -> Path:
    """Build the wheel of one platform into `out`."""
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
    """The glibc version in a manylinux tag, infinity for other tags. An audited tag must not have a
    higher version than the wheel's."""
    numbers = re.match(r"manylinux_(\d+)_(\d+)_", platform)
    return tuple(map(int, numbers.groups())) if numbers else (math.inf,)


def linux_complaints(wheel: Path, platform: str) -> Iterator[str]:
    """Yield auditwheel's complaint about a wheel for Linux."""
    command = [sys.executable, "-m", "auditwheel", "show", "--json", wheel]
    shown = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    if version(shown["overall_tag"]) > version(platform):
        yield f"auditwheel calls it {shown['overall_tag']}: {shown['versioned_symbols']}"


def linked_libraries(name: str, binary: bytes) -> list[str]:
    """Libraries that a core for Windows or macOS links, from the binary's own list."""
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
    """Yield what is wrong with the core of a wheel for macOS or Windows: it is missing, or links a
    library that some systems lack."""
    known = LINKED[platform.partition("_")[0]]
    with zipfile.ZipFile(wheel) as archive:
        names = core_of(archive)
        if len(names) != 1:
            yield f"holds {names or 'no core'}, expected exactly one core"
        for name in names[:1]:
            libraries = linked_libraries(name, archive.read(name))
            if unknown := [x for x in libraries if not known.fullmatch(x)]:
                yield f"links {', '.join(unknown)}"


def complaints(wheel: Path, platform: str) -> Iterator[str]:
    """Yield everything that is wrong with a wheel."""
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
    parser.add_argument(
        "--kernels", type=Path, default=ROOT / KERNELS, help="kernels for the wheels for Linux"
    )
    parser.add_argument("platforms", nargs="*", metavar="PLATFORM", help=", ".join(PLATFORMS))
    arguments = parser.parse_args()
    unknown = set(arguments.platforms) - set(PLATFORMS)
    if unknown:
        parser.error(f"unknown platform {', '.join(unknown)}: use {', '.join(PLATFORMS)}")
    platforms = arguments.platforms or list(PLATFORMS)
    if any(map(takes_kernels, platforms)) and not arguments.kernels.is_file():
        parser.error(f"wheels for Linux need {arguments.kernels}: run make cuda")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        parser.error("free-threaded Python has no limited API: use a Python with a GIL")
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
