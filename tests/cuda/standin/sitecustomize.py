"""A torch with a CUDA device, for programs that are started with this folder on PYTHONPATH.

The device's memory is the CPU's: calls that name a CUDA device run on the CPU, and every tensor
claims to be on cuda:0. The operations of h2o run as on a GPU, through `h2o.backends.cuda` and the
driver that LD_LIBRARY_PATH finds, which is that of tests/cuda/fake. This makes it possible to run
the lines of `make test-gpu` and commands with --device cuda without a GPU
(tests/cuda/test_scripts.py). Errors that only a real GPU reports, such as for operations on tensors
of two devices, do not appear.

H2O_STANDIN_WRONG=h2o_cuda_step makes that kernel answer wrongly.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")
SAID = {
    Tensor.device.__get__: DEVICE,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]
}
ANSWERS = {
    "is_available": True,
    "is_initialized": True,
    "device_count": 1,
    "current_device": 0,
    "get_device_name": "Fake GPU 0",
    "is_current_stream_capturing": False,
    "init": None,
    "_sleep": None,
    "reset_peak_memory_stats": None,
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "get_device_properties": SimpleNamespace(
        name="Fake GPU 0", major=9, minor=0, multi_processor_count=1, total_memory=1 << 30
    ),
}
"""Results of functions of torch.cuda."""


READS = {
    Tensor.item, Tensor.tolist, Tensor.nonzero, Tensor.__bool__, Tensor.__int__,
    Tensor.__float__, Tensor.__index__, Tensor.cpu, torch.nonzero,
}  # fmt: skip
"""Functions that wait for a device."""


class OnDevice(TorchFunctionMode):
    may_wait = True

    def set_sync_debug_mode(self, mode: str) -> None:
        self.may_wait = mode == "default"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS and not self.may_wait:
            raise RuntimeError(f"{func.__name__} waits for the device")
        if func in SAID:
            return SAID[func]
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        placed = {name: on_cpu(x) for name, x in (kwargs or {}).items()}
        return captured(functools.partial(func, *map(on_cpu, args), **placed))


def on_cpu(x: Any) -> Any:
    if isinstance(x, torch.device):
        return CPU if x.type == DEVICE.type else x
    return CPU if isinstance(x, str) and x.partition(":")[0] == DEVICE.type else x


class Stream:
    """A stream without work."""


class Event:
    """An event with the CPU's time, taken when all queued work is done."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        torch.cuda.synchronize()
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return (end.seconds - self.seconds) * 1e3


class CUDAGraph:
    """Captured calls and their results. The calls run during capture as well. A replay runs them
    again and writes the new results to the same tensors."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def replay(self) -> None:
        for call, results in self.calls:
            again = call()
            for result, new in zip(tensors(results), tensors(again), strict=True):
                if result.data_ptr() != new.data_ptr():  # the new result may be the same memory
                    result.copy_(new)


def tensors(results: Any) -> list[Tensor]:
    results = results if isinstance(results, tuple | list) else [results]
    return [x for x in results if isinstance(x, Tensor)]


_capturing: list[CUDAGraph] = []


@contextlib.contextmanager
def capture(graph: CUDAGraph) -> Any:
    _capturing.append(graph)
    try:
        yield
    finally:
        _capturing.clear()


def captured(call: Any) -> Any:
    """Result of a call. If a graph is being captured, it will repeat the call. Calls within the
    call are parts of it."""
    graph = _capturing.pop() if _capturing else None
    result = call()
    if graph is not None:
        graph.calls.append((call, result))
        _capturing.append(graph)
    return result


@contextlib.contextmanager
def nothing(*arguments: Any) -> Any:
    yield


def empty_kernels(image: bytes) -> Path:
    """A file that the fake driver accepts as compiled kernels, for builds without kernels."""
    path = Path(tempfile.mkdtemp()) / "kernels.fatbin"
    path.write_bytes(image)
    atexit.register(shutil.rmtree, path.parent)
    return path


def start() -> None:
    from h2o.backends import cuda, kernel_check, prompt_attention
    from tests.cuda import device

    driver = device.Driver("libcuda.so.1")
    if kernel := os.environ.get("H2O_STANDIN_WRONG"):
        driver.flip(kernel)
    kernels = device.carried(driver, device.operations(driver, setattr))
    if not cuda.FATBIN.is_file():
        cuda.FATBIN = empty_kernels(device.IMAGE)

    def make(name: str) -> Any:
        run = getattr(kernels, name)
        return lambda *arguments: captured(functools.partial(run, *arguments))

    cuda._kernels = lambda by_torch: SimpleNamespace(**{x: make(x) for x in vars(by_torch)})
    # Emulating all cases takes long. test_launch.py runs them.
    size = kernel_check.Size(10, 3, 1, 4, 2)
    kernel_check.CASES = (kernel_check.Case(16, torch.float32, size),)
    prompt_attention.TORCH_ATTENTIONS = {}  # tested in test_prompt_attention.py
    for name, answer in ANSWERS.items():
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    torch.cuda.synchronize = lambda *_: driver.wait()
    torch.cuda.stream = torch.cuda.device = nothing
    torch.cuda.Stream, torch.cuda.Event = Stream, Event
    torch.cuda.graph, torch.cuda.CUDAGraph = capture, CUDAGraph
    mode = OnDevice()
    torch.cuda.set_sync_debug_mode = mode.set_sync_debug_mode
    mode.__enter__()


start()
