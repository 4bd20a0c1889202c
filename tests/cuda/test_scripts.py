"""The commands of docs/how_to/use_a_gpu.md, run on the stand-in of tests/cuda/standin.

`make test-gpu` runs in a checkout of its own, with programs in .venv/bin that lead to this Python.
The compiler makes no kernels, and the sanitizer checks nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.device import ROOT
from tests.test_cli import tiny  # noqa: F401

COPIED = (
    "Makefile",
    "setup.py",
    "pyproject.toml",
    "constraints.txt",
    "csrc",
    "h2o",
    "tests",
    "tools",
)
UNLESS_STUBBED = '[ -z "$STUBBED" ] || exit 0\n'
PROGRAMS = {
    ".venv/bin/python": f'{UNLESS_STUBBED}exec {sys.executable} "$@"',
    ".venv/bin/h2o": f'{UNLESS_STUBBED}exec {sys.executable} -m h2o "$@"',
    # Writes the first bytes of a fatbin to the file after the last -o.
    "nvcc": 'for x; do [ "$before" = -o ] && out=$x; before=$x; done\n'
    "{ printf 'P\\355U\\272'; head -c 60 /dev/zero; } > \"$out\"",
}
SANITIZER = """#!/bin/sh
[ "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 ] || exit 2
echo "$*" >> sanitizer.log
[ "$1 $3 $4 $5" = "--tool --report-api-errors no --kernel-name" ] || exit 2
[ "$7 $8 $9" = "--print-limit 20 --error-exitcode" ] || exit 2
[ "$2" != "$FAILING" ] || exit "${10}"
[ "$2$FAILING" != memcheck ] || { shift 10; exec "$@"; }
"""
"""Checks its arguments. The first of its tools runs the program, unless a tool is to fail."""
TESTS = "tests/gpu/test_device.py -k '(current_stream and float16) or check or (waits and llama)'"


@pytest.fixture(scope="module")
def checkout(library, tmp_path_factory) -> Path:
    if not (ROOT / "Makefile").is_file():
        pytest.skip("needs a checkout")
    folder = tmp_path_factory.mktemp("checkout")
    for path in (ROOT / name for name in COPIED):
        if path.is_dir():
            unwanted = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, folder / path.name, ignore=unwanted)
        else:
            shutil.copy2(path, folder)
    (folder / "h2o" / "kernels.fatbin").unlink(missing_ok=True)
    for name, code in PROGRAMS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{code}\n")
        path.chmod(0o755)
    for stamp in ("base", "core", "test"):
        (folder / ".venv" / stamp).touch()
    return folder


def run(checkout: Path, library: str, *command: str, gpu: bool = True, **variables: str):
    """Run a command in the checkout. Both streams are in `stdout`."""
    path = [str(checkout), *filter(None, sys.path)]
    if gpu:
        path.insert(0, str(checkout / "tests" / "cuda" / "standin"))
    there = {
        "PYTHONPATH": os.pathsep.join(path),
        "LD_LIBRARY_PATH": os.path.dirname(library),
        "H2O_CACHE": str(checkout / "cache"),
        "PATH": f"{checkout}:{os.environ['PATH']}",
        "MAKEFLAGS": "",
        "HF_DEACTIVATE_ASYNC_LOAD": "1",  # the stand-in exists in the main thread only
    }
    return subprocess.run(
        command, cwd=checkout, env={**os.environ, **there, **variables},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
    )  # fmt: skip


def make(checkout: Path, library: str, *more: str, **variables):
    return run(checkout, library, "make", "test-gpu", "NVCC=nvcc", *more, **variables)


def sanitizer(checkout: Path) -> Path:
    """Create the stand-in for compute-sanitizer where pip installs it, and delete its log."""
    path = checkout / ".venv/lib/python3.12/site-packages/nvidia/cu13/bin/compute-sanitizer"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SANITIZER)
    path.chmod(0o755)
    (checkout / "sanitizer.log").unlink(missing_ok=True)
    return path


def tools_run(checkout: Path) -> list[str]:
    return [x.split()[1] for x in (checkout / "sanitizer.log").read_text().splitlines()]


RIGHT = "cuda:0  every operation answers as the torch backend does"
SANITIZED = "every operation answers as the core does"
STUBBED = {"STUBBED": "1"}
"""Variables with which only `make`'s part runs: Python and h2o succeed at once."""


@pytest.mark.slow
def test_all_that_a_gpu_is_tested_with(checkout, library):
    sanitizer(checkout)
    done = make(checkout, library, f"GPU_TESTS={TESTS}")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(RIGHT) == 1
    assert done.stdout.count(SANITIZED) == 1
    assert "6 passed" in done.stdout
    assert tools_run(checkout) == ["memcheck", "racecheck", "synccheck", "initcheck"]


def test_what_the_sanitizer_finds_ends_it(checkout, library):
    sanitizer(checkout)
    done = make(checkout, library, FAILING="racecheck", **STUBBED)
    assert done.returncode == 2
    assert tools_run(checkout) == ["memcheck", "racecheck"]


@pytest.mark.parametrize(
    ("wrong", "code", "said"), [("", 0, SANITIZED), ("h2o_cuda_step", 1, "step gets out wrong")]
)
def test_what_the_sanitizer_looks_at(checkout, library, wrong, code, said):
    """The program under the sanitizer runs the kernels, and reports a wrong answer."""
    program = (sys.executable, "-m", "tools.gpu.sanitized")
    done = run(checkout, library, *program, H2O_STANDIN_WRONG=wrong)
    assert (done.returncode, said in done.stdout) == (code, True), done.stdout


def test_without_a_sanitizer_it_is_said(checkout, library):
    sanitizer(checkout).unlink()
    done = make(checkout, library, **STUBBED)
    assert done.returncode == 0, done.stdout
    assert "no compute-sanitizer, so memcheck is skipped" in done.stdout
    assert "pip install nvidia-cuda-sanitizer-api" in done.stdout


def test_kernels_are_made_for_the_devices_of_this_machine(checkout, library):
    """Kernels are built for this machine's devices, once. Kernels of the same sources are kept."""
    command = "make", "gpu-kernels", "NVCC=nvcc"
    (checkout / "h2o" / "kernels.fatbin").unlink(missing_ok=True)
    for printed in ("code=sm_90", ""):
        done = run(checkout, library, *command)
        assert done.returncode == 0, done.stdout
        assert printed in done.stdout
        assert "sm_80" not in done.stdout
    assert "nvcc" not in done.stdout
    (checkout / "h2o" / "kernels.fatbin").unlink()
    done = run(checkout, library, *command, gpu=False)
    assert done.returncode == 2
    assert "torch finds no CUDA device here" in done.stdout


@pytest.mark.slow  # test_serving.py tests the check, the test above what ends `make`
def test_a_wrong_kernel_ends_it_before_the_tests(checkout, library, tmp_path):
    # Wrong kernels are remembered in the cache, so this run has one of its own.
    wrong = {"H2O_STANDIN_WRONG": "h2o_cuda_step", "H2O_CACHE": str(tmp_path)}
    done = make(checkout, library, **wrong)
    assert done.returncode == 2
    assert "cuda:0  step gets out wrong (float32, D = 16)" in done.stdout
    assert "not slow" not in done.stdout


def test_without_a_gpu_it_does_not_begin(checkout, library):
    done = make(checkout, library, gpu=False)
    assert done.returncode == 2
    assert "torch finds no CUDA device here" in done.stdout
    assert "nvcc" not in done.stdout


@pytest.mark.slow
def test_every_command_with_a_model_goes_there(checkout, library, tiny, tmp_path):  # noqa: F811
    """Every command passes --device on to the model. One process runs them, to import torch
    once."""
    (tmp_path / "text").write_text("".join(chr(97 + i * i % 23) for i in range(150)))
    text = ["--text", str(tmp_path / "text")]
    lines = [
        ["generate", "--prompt", "x" * 60, "--max-new-tokens", "3", "--compare"],
        ["analyze", *text, "--output", str(tmp_path / "page.html"), "--compare", "none"],
        ["calibrate", *text, "--window", "60", "--limit", "1",
         "--output", str(tmp_path / "p.json")],
    ]  # fmt: skip
    program = (
        "import json, sys, h2o.models as models; from h2o.cli import main\n"
        "load, devices = models.load_model, []\n"
        "def noting(*names, **how):\n"
        "    devices.append(how['device']); return load(*names, **how)\n"
        "models.load_model = noting\n"
        "codes = [main([*line, '--device', 'cuda', '--model', sys.argv[1]])\n"
        "         for line in json.loads(sys.argv[2])]\n"
        "print(codes, devices)"
    )
    done = run(checkout, library, sys.executable, "-c", program, tiny, json.dumps(lines))
    assert done.stdout.splitlines()[-1] == f"{[0] * 3} {['cuda'] * 3}", done.stdout


def test_a_model_is_timed_there(checkout, library, tiny):  # noqa: F811
    made = run(checkout, library, "make", "--silent", "cuda", "NVCC=nvcc")
    assert made.returncode == 0, made.stdout
    done = run(
        checkout, library, ".venv/bin/h2o", "recommend", "--device", "cuda", "--model", tiny,
        "--length", "300", "--texts", "1", "--budgets", "8", "--compare", "authors", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    result = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert result["machine"]["name"] == "Fake GPU 0"
    assert result["machine"]["device"] == "cuda:0"
    assert result["machine"]["core"]["backends"]["cuda"].startswith("C (Fake GPU 0")
    *_, ours = result["costs"]
    assert ours["setting"] == "authors:8"
    assert ours["bytes_ratio"] < 1
