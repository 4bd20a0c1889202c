"""Threads of torch that sleep while they wait, for measurements that take minutes.

A thread of libgomp, torch's OpenMP on Linux, looks for its next piece of work for milliseconds
before it sleeps. On a busy machine this takes the processor from the threads that are waited for.
With sleeping threads a forward pass of 768 tokens took 6.3 s instead of 17.4 s on two cores at a
load of 11 (2026-11-26). The variables that say how long a thread looks (`h2o.cli.SPIN_COUNT`) are
read when torch is imported, which is too late here. But where libgomp has more threads than there
are processors, it lets them sleep almost at once.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

MOST = 4
"""Largest number of teams, which counts where torch has few threads on many processors."""


@contextlib.contextmanager
def sleeping() -> Iterator[None]:
    """Keep more threads than processors within the block, as teams of torch's that do nothing.

    The teams end with the block, and torch's settings do not change. Does nothing where
    OMP_WAIT_POLICY is set.
    """
    import torch

    team, done = torch.get_num_threads(), threading.Event()

    def hold(made: threading.Event) -> None:
        try:
            torch.ones(1 << 17, dtype=torch.float32, device="cpu").sum()  # makes a team
        finally:
            made.set()
        done.wait()

    holders = []
    if team > 1 and "OMP_WAIT_POLICY" not in os.environ:
        able = getattr(os, "sched_getaffinity", None)
        processors = len(able(0)) if able else os.cpu_count() or 1
        for _ in range(min(MOST, max(1, (processors - 1) // (team - 1)))):
            made = threading.Event()
            holders.append(threading.Thread(target=hold, args=(made,), daemon=True))
            holders[-1].start()
            made.wait()
    try:
        yield
    finally:
        done.set()
        for holder in holders:
            holder.join()
