"""Where benchmarks run, and whose clock takes the time there."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .measure import Clock, Contender


class Host(Clock):
    """The CPU, where work is done when its call returns. Also what a rehearsal runs on."""

    type = "cpu"

    def captured(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """The same work as one CUDA graph, in which the host's time no longer shows."""
        return run

    def peak(self, run: Callable[[], Any]) -> float:
        """Bytes of the device that a call takes at once, beyond those taken already; 0: unknown."""
        run()
        return 0.0

    def kernels(self, run: Callable[[], Any]) -> dict[str, float]:
        """Seconds of each of h2o's kernels in one call."""
        run()
        return {}

    def describe(self) -> dict[str, Any]:
        return {"type": self.type}

    def copies(self, small: bool) -> Contender:
        """Reads and writes of memory by torch, as a bound of what moves bytes."""
        x = torch.zeros((1 << (16 if small else 28)), dtype=torch.uint8, device=self.type)
        y = torch.empty_like(x)
        return Contender("copy", lambda: y.copy_(x), work=2.0 * x.nbytes)

    def products(self, dtype: torch.dtype, small: bool) -> Contender:
        """Matrix products by torch, as a bound of what computes."""
        n = 64 if small else 8192
        x = torch.randn(n, n, device=self.type).to(dtype)
        y = torch.empty_like(x)
        return Contender("matmul", lambda: torch.mm(x, x, out=y), work=2.0 * n**3)


class Cuda(Host):
    """torch's current CUDA device."""

    type = "cuda"

    def seconds(self, run: Callable[[], Any], calls: int) -> tuple[float, Any]:
        """Between two events of the current stream."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            told = run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, told

    def captured(self, run: Callable[[], Any]) -> Callable[[], Any]:
        run()  # libraries make themselves ready in it
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def peak(self, run: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return float(torch.cuda.max_memory_allocated() - before)

    def kernels(self, run: Callable[[], Any]) -> dict[str, float]:
        """By torch's profiler, the median of five calls."""
        found: dict[str, list[float]] = {}
        for _ in range(5):
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profile:
                run()
                torch.cuda.synchronize()
            for event in profile.key_averages():
                if event.key.startswith("h2o_cuda"):
                    found.setdefault(event.key, []).append(event.self_device_time_total / 1e6)
        return {name: statistics.median(seconds) for name, seconds in found.items()}

    def describe(self) -> dict[str, Any]:
        facts = torch.cuda.get_device_properties(torch.cuda.current_device())
        module = Path("/proc/driver/nvidia/version")
        return {
            "type": self.type,
            "name": facts.name,
            "compute capability": f"{facts.major}.{facts.minor}",
            "multiprocessors": facts.multi_processor_count,
            "bytes": facts.total_memory,
            "driver": module.read_text().splitlines()[0] if module.is_file() else None,
            "CUDA of torch": torch.version.cuda,
            "cuDNN of torch": torch.backends.cudnn.version(),
        }


DEVICES = {"cpu": Host, "cuda": Cuda, "rehearsal": Host}
"""--device -> where that is."""
