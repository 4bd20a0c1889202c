"""A CUDA device that the fake driver of tests/cuda/fake has, and tensors on it."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from h2o.slots import Slots
from tests.core.producers import Producer

CUDA = 2  # DLPack's number
KINDS = {torch.bfloat16: 4, torch.bool: 6, torch.uint8: 1, torch.int32: 0, torch.int64: 0}


class Driver:
    """The fake's functions; what fails raises."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self.call("cuInit", 0)

    def call(self, entry: str, *arguments: Any) -> None:
        code = getattr(self.library, entry)(*arguments)
        if code != 0:
            raise RuntimeError(f"{entry}: {code}")

    def calls(self, entry: str) -> int:
        return self.library.fake_calls(entry.encode())

    def fault(self, entry: str, code: int, nth: int = 1) -> None:
        self.library.fake_fault(entry.encode(), nth, code)

    def flip(self, kernel: str) -> None:
        self.library.fake_flip(kernel.encode())

    def current(self) -> int | None:
        found = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(found))
        return found.value

    @contextlib.contextmanager
    def context(self, device: int) -> Iterator[None]:
        """The device's primary context is the thread's."""
        found = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(found), device)
        self.call("cuCtxPushCurrent_v2", found)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(found))

    def wait(self, device: int = 0) -> None:
        with self.context(device):
            self.call("cuCtxSynchronize")

    def stream(self, device: int = 0) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        with self.context(device):
            self.call("cuStreamCreate", ctypes.byref(made), 0)
        return made


class DeviceTensor(Producer):
    """A copy of a torch tensor in a device's memory, which speaks `__dlpack__` only."""

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
        described = np.empty(x.shape, f"V{x.element_size()}")
        kind = KINDS.get(x.dtype, 2)
        super().__init__(
            described.view(f"u{x.element_size()}"), data=self.address, device_type=CUDA,
            device_id=device, code=kind, **fields,
        )  # fmt: skip

    @staticmethod
    def _raw(x: torch.Tensor) -> np.ndarray:
        return x.reshape(-1).view(torch.uint8).numpy()

    def read(self) -> torch.Tensor:
        """What it holds, after waiting for all that is queued."""
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
    """Arguments of a call with their torch tensors on a device."""
    carried = [
        DeviceTensor(driver, x, device) if isinstance(x, torch.Tensor) else x for x in arguments
    ]
    return [Slots(*to_device(driver, x, device)) if isinstance(x, Slots) else x for x in carried]


def tensors(arguments: Any) -> Iterator[Any]:
    for x in arguments:
        if isinstance(x, Slots):
            yield from tensors(x)
        elif isinstance(x, torch.Tensor | DeviceTensor):
            yield x


def carried(driver: Driver, operations: SimpleNamespace, device: int = 0) -> SimpleNamespace:
    """Operations on tensors of the CPU, by those on tensors of a device."""

    def make(name: str) -> Any:
        def run(*arguments: Any) -> None:
            there = to_device(driver, arguments, device)
            try:
                getattr(operations, name)(*there)
                driver.wait(device)
                for mine, theirs in zip(tensors(arguments), tensors(there), strict=True):
                    mine.copy_(theirs.read())
            finally:
                for tensor in tensors(there):
                    tensor.release()

        return run

    return SimpleNamespace(**{name: make(name) for name in vars(operations)})
