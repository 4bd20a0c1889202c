"""Threads of torch that sleep while they wait, for measurements that take minutes.

A thread of libgomp, torch's OpenMP on Linux, looks for its next piece of work for milliseconds
before it sleeps. On a machine with nothing else to do that spares microseconds; on a busy one it
takes the processor from those that are waited for, and a measurement takes several times as long.
The variables that say how long (`h2o.cli.SPIN_COUNT`) are read when torch is imported, which in a
user's process it has been. But where libgomp has more threads than there are processors, it lets
them sleep almost at once.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

__all__ = ["sleeping"]

MOST = 4
"""Teams of threads, where torch has few threads on many processors."""


@contextlib.contextmanager
def sleeping() -> Iterator[None]:
    """Within the block there are more threads than processors: teams that do nothing, as each
    thread has that calls torch. They end with it, and nothing of torch's settings changes.

    Nothing is done where OMP_WAIT_POLICY says how threads are to wait.
    """
    import torch

    team, done = torch.get_num_threads(), threading.Event()
    holders: list[threading.Thread] = []
    number = 0
    if team > 1 and "OMP_WAIT_POLICY" not in os.environ:
        number = min(MOST, max(1, (processors() - 1) // (team - 1)))
    try:
        for _ in range(number):
            holders.append(_holder(done))
        yield
    finally:
        done.set()
        for holder in holders:
            holder.join()


def processors() -> int:
    """That this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _holder(done: threading.Event) -> threading.Thread:
    """A thread that has made its team of torch's threads, and keeps it until `done`."""
    import torch

    made = threading.Event()

    def hold() -> None:
        try:
            torch.ones(1 << 17, dtype=torch.float32, device="cpu").sum()  # more than one's part
        finally:
            made.set()
        done.wait()

    holder = threading.Thread(target=hold, name="h2o-sleeping", daemon=True)
    holder.start()
    made.wait()
    return holder
