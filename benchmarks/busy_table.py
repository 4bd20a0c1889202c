"""The time of a decode step while other processes keep the processors busy.

If a worker loses its processor, the others wait for the task that it holds. torch's SDPA waits only
once, at its end, so its slowdown shows what losing a share of the processors costs by itself.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import torch

import h2o.ops

from . import inputs
from .options import Options
from .peers import torch_peers
from .timing import Contender, Row, race

BUSY = (0, 1, 2, 4)
"""Numbers of other processes that never sleep"""


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    processes = [
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def busy(options: Options) -> Iterator[Row]:
    """A decode step of SmolLM2's heads over 1500 keys during busy processes, against SDPA.

    The facts say how much longer both take than in the first row, without busy processes.
    """
    for name, dtype in options.wanted("float32", "bfloat16"):
        query, keys, values = inputs.text(1, 9, 3, 1700, 64, dtype)
        slots = inputs.filled_slots(
            *(x[:, :, :1600].contiguous() for x in (keys, values, query)), 750, 750
        )
        token = [x[:, :, 1600:1601].contiguous() for x in (query, keys, values)]
        out = query.new_empty(1, 1, 9, 64)
        kept = slots.keys[:, :, :1500], slots.values[:, :, :1500]
        _, sdpa = torch_peers.fastest(torch_peers.sdpa(token[0], *kept, causal=False))

        def step(token=token, slots=slots, out=out) -> None:
            h2o.ops.step(*token, slots, out=out)

        quiet: dict[str, float] = {}
        for count in BUSY:
            with busy_processes(count):
                times = race([Contender("h2o", step), Contender("SDPA", sdpa)], options.rounds)
            slower = {}
            for contender, taken in times.items():
                quiet.setdefault(contender, taken.median)
                slower[f"{contender} slower by"] = taken.median / quiet[contender]
            yield Row(
                "busy", "a decode step beside busy processes, against SDPA",
                f"{name}, 1500 keys, {count} busy processes, {torch.get_num_threads()} threads",
                ours=times["h2o"], peer=times["SDPA"], facts=slower,
            )  # fmt: skip
