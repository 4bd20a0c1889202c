"""The CUDA devices of the fake driver in tests/cuda/fake, and tensors on them."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from h2o import _core, backends
from h2o.backends import cuda
from h2o.backends.torch_backend.centered import has_offsets, restore_output, without_offsets
from tests.core.producers import Producer
from tests.cuda.carry import carry, mapped

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "build/cuda/libcuda.so.1"
IMAGE = b"\x50\xed\x55\xba" + bytes(60) + _core.KERNELS.encode()
"""An image that the fake driver accepts as compiled kernels, with the build id that the core
expects."""
CUDA = 2  # device type in DLPack
KINDS = {torch.bfloat16: 4, torch.bool: 6, torch.uint8: 1, torch.int32: 0, torch.int64: 0}


class Driver:
    """The fake driver's functions. A CUDA error raises RuntimeError."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self.call("cuInit", 0)

    def call(self, entry: str, *arguments: Any) -> None:
        code = getattr(self.library, entry)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(code, ctypes.byref(text))
            words = (text.value or b"unknown").decode()
            raise RuntimeError(f"CUDA error: {words} ({entry}: {code})")  # worded as torch does

    def calls(self, entry: str) -> int:
        return self.library.fake_calls(entry.encode())

    def fault(self, entry: str, code: int, nth: int = 1) -> None:
        self.library.fake_fault(entry.encode(), nth, code)

    def widest(self) -> dict[str, int]:
        """For each kernel the largest number of blocks along x it has run with, 0 if it has not
        run."""
        return {name: self.library.fake_widest(name.encode()) for name in self._names("kernel")}

    def taken(self) -> dict[str, int]:
        """For each counted branch of the kernels (TAKEN) how often it was taken."""
        return {name: self.library.fake_taken(name.encode()) for name in self._names("branch")}

    def _names(self, what: str) -> list[str]:
        name, names = getattr(self.library, f"fake_{what}"), []
        name.restype = ctypes.c_char_p
        while one := name(len(names)):
            names.append(one)
        return [one.decode() for one in names]

    def flip(self, kernel: str) -> None:
        self.library.fake_flip(kernel.encode())

    def current(self) -> int | None:
        context = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(context))
        return context.value

    @contextlib.contextmanager
    def context(self, device: int) -> Iterator[None]:
        """Make the device's primary context current."""
        primary = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(primary), device)
        self.call("cuCtxPushCurrent_v2", primary)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(primary))

    def wait(self, device: int = 0) -> None:
        with self.context(device):
            self.call("cuCtxSynchronize")

    def stream(self, device: int = 0) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        with self.context(device):
            self.call("cuStreamCreate", ctypes.byref(stream), 0)
        return stream


def build() -> str | None:
    """Build the fake driver if necessary, and return its path. None if it cannot be built."""
    if not (ROOT / "Makefile").is_file() or not all(map(shutil.which, ("make", "g++"))):
        return None
    subprocess.run(["make", "--silent", LIBRARY], cwd=ROOT, check=True)
    return str(ROOT / LIBRARY)


def load(path: str) -> Driver:
    """Load the fake driver before the core opens libcuda.so.1, so that the core gets the fake."""
    driver = Driver(path)
    _core.load("cuda", IMAGE, 0)
    return driver


class DeviceTensor(Producer):
    """A copy of a torch tensor in a device's memory, with `__dlpack__` only."""

    def __init__(self, driver: Driver, x: torch.Tensor, device: int = 0, **fields: Any) -> None:
        x = x.detach().contiguous()
        self.driver, self.device, self.like = driver, device, x
        self.address, raw = ctypes.c_void_p(), self._raw(x)
        with driver.context(device):
            driver.call("cuMemAlloc_v2", ctypes.byref(self.address), ctypes.c_size_t(raw.nbytes))
            driver.call(
                "cuMemcpyHtoD_v2", self.address, raw.ctypes.data_as(ctypes.c_void_p),
                ctypes.c_size_t(raw.nbytes),
            )  # fmt: skip
        layout = np.empty(x.shape, f"V{x.element_size()}")
        kind = KINDS.get(x.dtype, 2)
        super().__init__(
            layout.view(f"u{x.element_size()}"), data=self.address, device_type=CUDA,
            device_id=device, code=kind, **fields,
        )  # fmt: skip

    @staticmethod
    def _raw(x: torch.Tensor) -> np.ndarray:
        return x.reshape(-1).view(torch.uint8).numpy()

    def read(self) -> torch.Tensor:
        """Wait for all queued work, and return a copy on the CPU."""
        copy = torch.empty_like(self.like)
        raw = self._raw(copy)
        with self.driver.context(self.device):
            self.driver.call(
                "cuMemcpyDtoH_v2", raw.ctypes.data_as(ctypes.c_void_p), self.address,
                ctypes.c_size_t(raw.nbytes),
            )  # fmt: skip
        return copy

    def release(self) -> None:
        self.driver.call("cuMemFree_v2", self.address)


def to_device(driver: Driver, arguments: Any, device: int = 0) -> list[Any]:
    """Arguments of a call, with their torch tensors copied to a device."""
    return mapped(arguments, lambda x: DeviceTensor(driver, x, device))


def carried(driver: Driver, operations: SimpleNamespace, device: int = 0) -> SimpleNamespace:
    """Operations on CPU tensors, computed on one of the fake driver's devices. Calls that no kernel
    supports go to the torch backend, and (operation, head dimension) is added to `unserved`."""

    def back(tensor: DeviceTensor) -> torch.Tensor:
        copy = tensor.read()
        tensor.release()
        return copy

    served = carry(operations, lambda x: DeviceTensor(driver, x, device), back)
    unserved: list[tuple[str, int]] = []

    def either(name: str) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            given = arguments
            if has_offsets(name, arguments):  # which torch removes, here on the CPU
                _core.call(name, "check", *arguments)
                given = without_offsets(name, arguments)
            try:
                if given is None:
                    raise NotImplementedError
                getattr(served, name)(*given)
                if given is not arguments:
                    restore_output(name, given)
            except NotImplementedError:
                unserved.append((name, arguments[0].shape[-1]))
                getattr(backends._torch_backend(), name)(*arguments)

        return run

    return SimpleNamespace(**{name: either(name) for name in vars(served)}, unserved=unserved)


def operations(driver: Driver, replace: Callable[[Any, str, Any], None]) -> SimpleNamespace:
    """The operations for the fake driver's devices, made by `h2o.backends.cuda`. A call that no
    kernel supports raises NotImplementedError. `replace` patches that module's uses of torch."""

    of_thread = threading.local()

    def workspace(tensor: DeviceTensor, size: int) -> DeviceTensor | None:
        earlier = vars(of_thread).setdefault("workspaces", [])
        while earlier and driver.library.fake_waiting() == 0:  # the work that used them is done
            earlier.pop().release()
        if size == 0:
            return None
        earlier.append(DeviceTensor(driver, torch.zeros(size, dtype=torch.uint8), tensor.device))
        return earlier[-1]

    def unserved(*arguments: Any) -> None:
        raise NotImplementedError

    replace(cuda, "_stream", lambda tensor: 1)
    replace(cuda, "_workspace", workspace)
    return cuda._kernels(SimpleNamespace(**dict.fromkeys(backends.OPERATIONS, unserved)))
