"""What tools/wheels.py checks about GPU kernels in wheels, and what is packed where."""

from __future__ import annotations

import lzma
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "tools" / "wheel_contents.py").is_file():
    pytest.skip("needs a checkout", allow_module_level=True)
sys.path.insert(0, str(ROOT / "tools"))
import wheel_contents  # noqa: E402

WORD, OTHER = b"h2o-kernels-0123456789abcdef", b"h2o-kernels-fedcba9876543210"
CODE = wheel_contents.FATBIN_BEGINS + bytes(100)
KERNELS = lzma.compress(CODE) + WORD
LINUX = "h2o_kv-1-cp310-abi3-manylinux_2_28_x86_64.whl"
MACOS = "h2o_kv-1-cp310-abi3-macosx_11_0_arm64.whl"


def made(folder: Path, name: str, kernels: bytes | None, code: bytes = b"core " + WORD) -> Path:
    wheel = folder / name
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("h2o/_core.abi3.so", code)
        archive.writestr("h2o/_core.pyi", "")
        if kernels is not None:
            archive.writestr(wheel_contents.KERNELS, kernels)
    return wheel


@pytest.mark.parametrize(
    ("name", "kernels", "complaint"),
    [
        (LINUX, KERNELS, None),
        (MACOS, None, None),
        ("h2o_kv-1-py3-none-any.whl", None, None),
        (LINUX, None, "holds no h2o/kernels.fatbin"),
        (MACOS, KERNELS, "which only Linux uses"),
        (LINUX, KERNELS[:-1], "does not end with the hash"),
        (LINUX, lzma.compress(CODE) + OTHER, "from other sources than the core"),
        (LINUX, lzma.compress(CODE)[:-20], "truncated"),
        (LINUX, lzma.compress(b"no kernels") + WORD, "no file of kernels"),
        (LINUX, CODE + WORD, "Input format not supported"),  # not compressed, as NVCC writes it
    ],
)
def test_kernels_are_those_of_the_core(tmp_path, name, kernels, complaint):
    complaints = list(wheel_contents.kernel_complaints(made(tmp_path, name, kernels)))
    assert len(complaints) == (complaint is not None)
    assert complaint is None or complaint in complaints[0]


def test_sizes_are_limited_with_kernels_and_without(tmp_path):
    def complaints(kernels: int, code: int) -> list[str]:
        wheel = made(tmp_path, LINUX, bytes(kernels), bytes(code))
        return list(wheel_contents.size_complaints(wheel))

    assert complaints(4_800_000, 1_090_000) == []
    (beside,) = complaints(100, wheel_contents.LARGEST + 1)
    assert "without the kernels, expected at most 1100000" in beside
    (whole,) = complaints(5_500_000, 600_000)
    assert whole.endswith("expected at most 6000000")


def test_the_sdist_has_sources_of_kernels_only(checkout):
    (sdist,) = (checkout / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert "csrc/cuda/kernels.cu" in names
    assert [x for x in names if x.endswith(".fatbin")] == []


def test_a_build_takes_kernels_and_tasks_that_lie_there(checkout):
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", "core"],
        cwd=checkout,
        check=True,
        capture_output=True,
    )
    with_core = {str(x.relative_to(checkout / "core")) for x in (checkout / "core").rglob("*.*")}
    (pure,) = (checkout / "dist").glob("*.whl")
    without = set(zipfile.ZipFile(pure).namelist())
    assert wheel_contents.KERNELS in with_core - without
    tasks = {str(x.relative_to(ROOT)) for x in (ROOT / "h2o" / "evaluation").rglob("*.yaml")}
    assert tasks
    assert tasks <= with_core & without  # lm-eval's tasks are not Python files


def test_the_makefile_and_the_build_know_one_word():
    """The kernels end with the word that `make cuda` writes. It must equal the word that setup.py
    compiles into the core."""
    if shutil.which("make") is None:
        pytest.skip("no make here")
    rule = 'word: ; @printf %s "$(KERNELS_WORD)"'
    said = (
        "import runpy, sys; sys.argv = ['setup.py', '--quiet', '--name']; "
        "print(runpy.run_path('setup.py')['kernels_word'](), end='')"
    )
    commands = (["make", "--silent", f"--eval={rule}", "word"], [sys.executable, "-c", said])
    by_make, by_setup = (
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
        for command in commands
    )
    assert wheel_contents.WORD.fullmatch(by_make)
    assert by_setup.endswith(b"\n" + by_make)
