"""P2, memory: memory of a prompt's attention in addition to its inputs and outputs."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import h2o.ops

from . import inputs
from .options import Options
from .peers import torch_peers
from .timing import Row, Times


def memory(options: Options) -> Iterator[Row]:
    """P2, memory: peak memory of a prefill in addition to inputs and outputs, h2o and eager.

    Each figure comes from a new process, because both sides keep memory for later calls. The
    "times" of these rows are bytes.
    """
    lengths = (64, 128) if options.quick else (1024, 2048, 4096)
    for name, _ in options.wanted("float32", "bfloat16"):
        for n in lengths:
            peak = {way: in_process(way, name, n) for way in ("h2o", "eager")}
            yield Row(
                "P2", "peak bytes of a prefill beyond inputs and outputs / eager",
                f"{name}, n={n}, H=32, G=8, D=128",
                ours=Times("h2o attend", [float(peak["h2o"])]),
                peer=Times("eager + sums", [float(peak["eager"])]),
                facts={"unit": "bytes"},
            )  # fmt: skip


def in_process(way: str, dtype: str, n: int) -> int:
    """Run `measure` in a new process."""
    command = [sys.executable, "-m", __name__, way, dtype, str(n)]
    root = Path(__file__).resolve().parents[1]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=root).stdout
    return json.loads(out)


def measure(way: str, dtype: str, n: int) -> int:
    """Bytes by which one call at full size raises the peak of the resident set."""
    tensors = inputs.text(1, 32, 8, n, 128, getattr(torch, dtype))
    out = tensors[0].new_zeros(1, n, 32, 128)
    scores = torch.zeros(1, 8, n)
    small = [x[:, :, :8].contiguous() for x in tensors]
    if way == "h2o":
        h2o.ops.attend(*small)
        before = reset_peak()
        h2o.ops.attend(*tensors, out=out, scores=scores)
    else:
        torch_peers.eager_with_sums(*small)
        before = reset_peak()
        torch_peers.eager_with_sums(*tensors)
    return status("VmHWM") - before


def reset_peak() -> int:
    """Reset the peak of the resident set to its current size, which is returned (Linux).

    Memory that malloc kept of earlier tensors is released first. Otherwise a call could reuse it
    without raising the peak.
    """
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    with torch.inference_mode():
        print(measure(sys.argv[1], sys.argv[2], int(sys.argv[3])))
