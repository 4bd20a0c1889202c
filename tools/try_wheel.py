"""Install a wheel in an empty environment without a compiler, and run the core's tests there.

    python tools/try_wheel.py [OPTIONS] WHEEL [PYTHON ...]   (--help lists the options)

PYTHON is the command of an interpreter, by default this one. The interpreter of another machine may
run in an emulator: qemu-aarch64-static -L ROOT ROOT/usr/bin/python3. The pip of this interpreter
chooses what to install, so it must be new enough to know PYTHON (24.1 for free-threaded Python).

WHEEL may also be an sdist. It is built by PYTHON with the compiler that CC names, in a folder with
a space in its name. Wheels for Linux must contain kernels for GPUs that were built from the same
sources as the installed core. The pure wheel, py3-none-any, is installed together with torch and
transformers, or finds them in the site-packages of another environment (--beside). It must pass the
tests that tests/without_core.txt lists. With --pages the examples of README.md and of the first
pages of docs run instead, with the default model as a new user gets it. This needs torch too, and
therefore --beside.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from wheel_contents import kernel_complaints, takes_kernels

ROOT = Path(__file__).resolve().parent.parent
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis")
BINARIES = "Scripts" if os.name == "nt" else "bin"
SYSTEM = ("SYSTEMROOT", "TEMP", "TMP")  # without them no process starts on Windows
FAST = ("-m", "not slow")
PURE_TESTS = (*FAST, "@tests/without_core.txt")
CORE_TESTS = (*FAST, "tests/core")
BRIEF_TESTS = (*FAST, "tests/core/test_golden.py")
PAGES = "test_command or ((test_python or shows_what) and (README or start))"
PAGE_TESTS = ("tests/test_documentation.py", "-k", PAGES)

KERNELS = "from h2o import ops; x = ops.info()['backends']['cuda']; assert 'kernels' not in x, x"
"""Checks that `h2o info` gives the missing driver as the reason, and not the file of kernels."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--numpy", help="NumPy version (default: the newest)")
    parser.add_argument("--beside", type=Path, help="site-packages that the wheel finds too")
    parser.add_argument(
        "--pages", action="store_true", help="run README and the first pages of docs"
    )
    parser.add_argument("--briefly", action="store_true", help="run the golden data only")
    parser.add_argument("python", nargs=argparse.REMAINDER, default=[])
    arguments = parser.parse_args()
    command, *rest = arguments.python or [sys.executable]
    *emulator, interpreter = [shutil.which(command) or command, *rest]
    # As pip --python does: run this environment's pip, which sees no other package of it.
    pip = Path(importlib.util.find_spec("pip").origin).with_name("__pip-runner__.py")
    with tempfile.TemporaryDirectory(prefix="h2o wheel ") as name:
        folder = Path(name)
        kept = {x: y for x, y in os.environ.items() if x.startswith("PIP_") or x in SYSTEM}
        here = {"PATH": str(folder / "env" / BINARIES), "HOME": name, **kept}

        def python(*command: object, environment: dict[str, str] | None = None) -> None:
            words = [*emulator, folder / "env" / BINARIES / "python", *command]
            subprocess.run(list(map(str, words)), check=True, cwd=folder, env=environment or here)

        environment = [*emulator, interpreter, "-m", "venv", "--without-pip", folder / "env"]
        subprocess.run(list(map(str, environment)), check=True)
        if emulator:  # tests that start another interpreter need the emulator too
            started = folder / "env/bin/emulated"
            words = shlex.join([*emulator, str(folder / "env/bin/python")])
            started.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
            started.chmod(0o755)
            (packages,) = folder.glob("env/lib/python*/site-packages")
            setting = f"import sys; sys.executable = {str(started)!r}\n"
            (packages / "emulated.pth").write_text(setting)
        install = [pip, "install", "--quiet", "--no-warn-script-location", "--only-binary", ":all:"]
        numpy = f"numpy=={arguments.numpy}" if arguments.numpy else "numpy"
        wheel = arguments.wheel.resolve()
        pure = wheel.name.endswith("-none-any.whl")
        if arguments.beside:
            (packages,) = folder.glob("env/[Ll]ib/**/site-packages")
            (packages / "beside.pth").write_text(f"{arguments.beside.resolve()}\n")
            python(*install, "--no-deps", wheel)
        elif pure:
            python(*install, f"{wheel}[hf]", numpy, *TEST_TOOLS)
        elif wheel.suffix == ".whl":
            python(*install, wheel, numpy, *TEST_TOOLS)
        else:
            python(*install, numpy, *TEST_TOOLS, "setuptools>=77")
            shutil.unpack_archive(wheel, folder / "source")
            (source,) = (folder / "source").iterdir()
            build = [pip, "install", "--quiet", "--no-build-isolation", "--no-deps", source]
            python(*build, environment={**os.environ, "H2O_WERROR": "1"})
        shutil.copytree(ROOT / "tests", folder / "tests")
        shutil.copy(ROOT / "pyproject.toml", folder)
        python("-m", "h2o", "info")
        if takes_kernels(wheel.name):
            if complaints := list(kernel_complaints(wheel)):
                sys.exit("; ".join(complaints))
            python("-c", KERNELS)
        left_out = ["-k", "not no_memory"] if emulator else []  # qemu does not limit memory
        tests = PURE_TESTS if pure else BRIEF_TESTS if arguments.briefly else CORE_TESTS
        if arguments.pages:
            shutil.copy(ROOT / "README.md", folder)
            shutil.copytree(ROOT / "docs", folder / "docs")
            tests = PAGE_TESTS
        python(*"-m pytest -q -p no:cacheprovider".split(), *left_out, *tests)
    return 0


if __name__ == "__main__":
    sys.exit(main())
