"""Builds the sdist and, from it, a wheel for each Linux platform, and looks at what came out.

    python tools/wheels.py [--out dist] [PLATFORM ...]

zig's C compiler, a wheel on PyPI, brings the headers and libraries of every platform, so all
wheels can be built on any of them. The limited API makes one wheel serve all versions of Python.
Each wheel is judged by auditwheel (links nothing that the platform lacks), abi3audit (uses nothing
that Python 3.10 lacks) and its size. Needs ziglang, auditwheel, abi3audit, build, setuptools and
numpy (pip must not fetch the last two, it would take those of the target);
Python itself must not be free-threaded. tools/try_wheel.py tests the result.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import ziglang

ROOT = Path(__file__).resolve().parent.parent
LARGEST = 1_000_000  # bytes, without the kernels for GPUs, if there are any
FATBIN = ROOT / "h2o" / "kernels.fatbin"
# What wheels are named for, and what zig calls it. glibc 2.28 is torch's lower limit too, and the
# first with C11's threads.h. No musllinux: torch has none, no musl Python is at hand to run it, and
# auditwheel refuses it: zig's x86_64-linux-musl links libc.so, not Alpine's libc.musl-x86_64.so.1.
PLATFORMS = {
    "manylinux_2_28_x86_64": "x86_64-linux-gnu.2.28",
    "manylinux_2_28_aarch64": "aarch64-linux-gnu.2.28",
}


def write_headers(folder: Path) -> Path:
    """Python's headers with the one pyconfig.h: Debian's looks for one of the target machine.

    The numbers in it are the same on all platforms above.
    """
    headers = folder / "include"
    shutil.copytree(sysconfig.get_path("include"), headers)
    config = Path(sysconfig.get_config_h_filename()).read_bytes()
    (headers / "pyconfig.h").write_bytes(config)
    return headers


def write_compiler(folder: Path, target: str) -> Path:
    """A command that compiles for the target; distutils takes no arguments in its name.

    For size: inner loops are unrolled by name, and what else clang unrolls for speed makes the
    kernels a third larger and hardly faster.
    """
    compiler = folder / "cc"
    zig = shlex.quote(str(Path(ziglang.__file__).parent / "zig"))
    compiler.write_text(f'#!/bin/sh\nexec {zig} cc -target {target} "$@" -Os\n')
    compiler.chmod(0o755)
    return compiler


def build(sdist: Path, platform: str, out: Path) -> Path:
    """The wheel of one platform, in out."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compiler = write_compiler(folder, PLATFORMS[platform])
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"),
                *("--no-build-isolation", "--wheel-dir", folder / "built", sdist),
            ],
            env={
                **os.environ,
                "CC": str(compiler),
                "CFLAGS": f"-I{write_headers(folder)}",
                "LDSHARED": f"{compiler} -shared -s",
                "_PYTHON_HOST_PLATFORM": platform,  # what the wheel is named for
                "H2O_WERROR": "1",
            },
            check=True,
        )
        (wheel,) = (folder / "built").iterdir()
        return Path(shutil.copy(wheel, out))


def version(platform: str) -> tuple[float, ...]:
    """What of a manylinux tag has to be the same or lower; endless for what is none."""
    numbers = re.match(r"manylinux_(\d+)_(\d+)_", platform)
    return tuple(map(int, numbers.groups())) if numbers else (math.inf,)


def complaints(wheel: Path, platform: str) -> list[str]:
    """What keeps a wheel from being what its name says."""
    found = []
    command = [sys.executable, "-m", "auditwheel", "show", "--json", wheel]
    told = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    if version(told["overall_tag"]) > version(platform):
        found.append(f"auditwheel calls it {told['overall_tag']}: {told['versioned_symbols']}")
    largest = LARGEST + (FATBIN.stat().st_size if FATBIN.is_file() else 0)
    if wheel.stat().st_size > largest:
        found.append(f"has {wheel.stat().st_size} bytes, wanted at most {largest}")
    command = [sys.executable, "-m", "abi3audit", "--strict", wheel]
    audit = subprocess.run(command, capture_output=True, text=True)
    if audit.returncode != 0:
        found.append(f"abi3audit: {audit.stdout}{audit.stderr}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("platforms", nargs="*", metavar="PLATFORM", help=", ".join(PLATFORMS))
    arguments = parser.parse_args()
    unknown = set(arguments.platforms) - set(PLATFORMS)
    if unknown:
        parser.error(f"{', '.join(unknown)}: wanted some of {', '.join(PLATFORMS)}")
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
    for platform in arguments.platforms or PLATFORMS:
        wheel = build(sdist, platform, arguments.out)
        print(f"{wheel.stat().st_size / 1000:5.0f} kB  {wheel.name}", flush=True)
        for complaint in complaints(wheel, platform):
            print(f"          {complaint}")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
