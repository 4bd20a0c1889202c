"""Fixtures that replace the CUDA driver with the fake one. No GPU is needed or used."""

import pytest

from h2o.backends import cuda
from tests.cuda import device
from tests.cuda.device import IMAGE, Driver


@pytest.fixture(scope="session")
def library() -> str:
    path = device.build()
    if path is None:
        pytest.skip("needs the sources, make and g++")
    return path


@pytest.fixture(scope="session")
def loaded(library) -> Driver:
    return device.load(library)


@pytest.fixture
def driver(loaded):
    loaded.library.fake_forgive()
    yield loaded
    loaded.library.fake_forgive()


@pytest.fixture
def built(tmp_path, monkeypatch):
    """A build with kernels, in a process that has not used them yet."""
    path = tmp_path / "kernels.fatbin"
    path.write_bytes(IMAGE)
    monkeypatch.setattr(cuda, "FATBIN", path)
    monkeypatch.setattr(cuda, "_backends", {})
    monkeypatch.setattr(cuda, "_reasons", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("H2O_CACHE", raising=False)
    return path


@pytest.fixture
def kernels(driver, monkeypatch):
    return device.operations(driver, monkeypatch.setattr)
