"""The fake driver, in the place of the one that h2o opens; no GPU is needed, nor used."""

import shutil
import subprocess
from pathlib import Path

import pytest

from h2o import _core, backends, cuda
from tests.cuda.device import DeviceTensor, Driver

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "build/cuda/libcuda.so.1"
IMAGE = b"\x50\xed\x55\xba" + bytes(60)  # what the fake takes for compiled kernels


@pytest.fixture(scope="session")
def library() -> str:
    """The path of the fake driver, which is built if need be."""
    if not (ROOT / "Makefile").is_file() or not all(map(shutil.which, ("make", "g++"))):
        pytest.skip("needs the sources, make and g++")
    subprocess.run(["make", "--silent", LIBRARY], cwd=ROOT, check=True)
    return str(ROOT / LIBRARY)


@pytest.fixture(scope="session")
def loaded(library) -> Driver:
    """Once it is loaded, who opens libcuda.so.1 gets it."""
    driver = Driver(library)
    _core.cuda_load(IMAGE, 0)
    return driver


@pytest.fixture
def driver(loaded):
    loaded.library.fake_forgive()
    yield loaded
    loaded.library.fake_forgive()


@pytest.fixture
def built(tmp_path, monkeypatch):
    """As if the build had kernels, and no process had used them yet."""
    path = tmp_path / "kernels.fatbin"
    path.write_bytes(IMAGE)
    monkeypatch.setattr(cuda, "FATBIN", path)
    monkeypatch.setattr(cuda, "_serving", {})
    monkeypatch.setattr(cuda, "_obstacles", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


@pytest.fixture
def kernels(driver, monkeypatch):
    """The operations as `h2o.cuda` makes them, for tensors of the fake's devices; what no kernel
    serves raises NotImplementedError."""
    import torch

    def workspace(tensor, size):
        raw = torch.zeros(size, dtype=torch.uint8)
        return DeviceTensor(driver, raw, tensor.device) if size else None

    def unserved(*arguments):
        raise NotImplementedError

    monkeypatch.setattr(cuda, "_stream", lambda tensor: 1)
    monkeypatch.setattr(cuda, "_workspace", workspace)
    from types import SimpleNamespace

    return cuda._kernels(SimpleNamespace(**dict.fromkeys(backends.OPERATIONS, unserved)))
