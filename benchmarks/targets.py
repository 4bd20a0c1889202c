"""The devices that benchmarks run on, and how time is measured there."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import machine
from .timing import Clock, Contender


class Cpu(Clock):
    """The CPU, on which work is done when its call returns.

    Attributes:
        type: torch's name of the device.
        tables: which rows of the tables run here, "cpu" or "cuda".
        compute: name of the rate of `compute_peak` in a row.
    """

    type = "cpu"
    tables = "cpu"
    compute = "FMA"

    def captured(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Capture the work as one CUDA graph, so that the host's time is not included."""
        return run

    def peak_bytes(self, run: Callable[[], Any]) -> float:
        """Peak of the device's bytes that a call takes in addition to earlier ones. 0: unknown."""
        run()
        return 0.0

    def facts(self, run: Callable[[], Any]) -> dict[str, Any]:
        """Figures of a call other than its time, by name."""
        return {}

    def describe(self) -> dict[str, Any]:
        """Description of the device for the head of a result file."""
        return {"type": self.type}

    def compute_peak(self, dtype: torch.dtype, small: bool) -> Contender | None:
        """The roofline of a computation, a plain loop of multiply-adds. None without a compiler."""
        loops = machine.roofline()
        if loops is None:
            return None
        run, flops = loops.multiply_adds(dtype)
        return Contender("FMA", run, work=flops)


class DryRun(Cpu):
    """The CPU in place of a GPU. Runs the GPU's tables in tiny shapes, to see that they work."""

    tables = "cuda"
    compute = "matmul"

    def facts(self, run: Callable[[], Any]) -> dict[str, Any]:
        kernels = {f"seconds of {name}": s for name, s in self.kernels(run).items()}
        return kernels | {"bytes beyond inputs and outputs": self.peak_bytes(run)}

    def kernels(self, run: Callable[[], Any]) -> dict[str, float]:
        """Seconds of each of h2o's kernels in one call."""
        run()
        return {}

    def compute_peak(self, dtype: torch.dtype, small: bool) -> Contender | None:
        """The roofline of a computation: a matrix product by torch."""
        n = 64 if small else 8192
        x = torch.randn(n, n, device=self.type).to(dtype)
        y = torch.empty_like(x)
        return Contender("matmul", lambda: torch.mm(x, x, out=y), work=2.0 * n**3)

    def copy_peak(self, small: bool) -> Contender:
        """The roofline of moving bytes: a copy by torch, which reads and writes them."""
        x = torch.zeros((1 << (16 if small else 28)), dtype=torch.uint8, device=self.type)
        y = torch.empty_like(x)
        return Contender("copy", lambda: y.copy_(x), work=2.0 * x.nbytes)


class Cuda(DryRun):
    """torch's current CUDA device."""

    type = "cuda"

    def seconds(self, run: Callable[[], Any], calls: int) -> tuple[float, Any]:
        """Seconds between two events of the current stream."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            answer = run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, answer

    def captured(self, run: Callable[[], Any]) -> Callable[[], Any]:
        run()  # initializes libraries
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def peak_bytes(self, run: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return float(torch.cuda.max_memory_allocated() - before)

    def kernels(self, run: Callable[[], Any]) -> dict[str, float]:
        """The median of five calls by torch's profiler."""
        samples: dict[str, list[float]] = {}
        for _ in range(5):
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profile:
                run()
                torch.cuda.synchronize()
            for event in profile.key_averages():
                if event.key.startswith("h2o_cuda"):
                    samples.setdefault(event.key, []).append(event.self_device_time_total / 1e6)
        return {name: statistics.median(seconds) for name, seconds in samples.items()}

    def describe(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        module = Path("/proc/driver/nvidia/version")
        return {
            "type": self.type,
            "name": properties.name,
            "compute capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "bytes": properties.total_memory,
            "driver": module.read_text().splitlines()[0] if module.is_file() else None,
            "CUDA of torch": torch.version.cuda,
            "cuDNN of torch": torch.backends.cudnn.version(),
        }


DEVICES: dict[str, type[Cpu]] = {"cpu": Cpu, "cuda": Cuda, "dry-run": DryRun}
"""Devices by the value of --device"""
