"""Threads of torch that sleep while they wait: counted, not timed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from h2o.utils.openmp_threads import sleeping

TASKS = Path("/proc/self/task")
CALLS = 300

if not TASKS.is_dir() or torch.get_num_threads() < 2:
    pytest.skip("Linux, and two threads", allow_module_level=True)


def threads() -> set[str]:
    return {task.name for task in TASKS.iterdir()}


def slept() -> int:
    """How often threads of this process have gone to sleep by themselves."""
    texts = [(task / "status").read_text() for task in TASKS.iterdir()]
    return sum(int(text.rpartition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in texts)


def test_between_two_calls_they_sleep():
    """Without it they look for the next call, and sleep where the machine is busy only."""
    x = torch.ones(1 << 18)
    x.sum()
    if "libgomp" not in Path("/proc/self/maps").read_text():
        pytest.skip("another OpenMP than GNU's")
    with sleeping():
        before = slept()
        for _ in range(CALLS):
            x.sum()
        assert slept() - before > CALLS / 2


def test_nothing_is_left(monkeypatch):
    torch.ones(1 << 18).sum()
    before = threads(), torch.get_num_threads()
    with sleeping():
        assert threads() > before[0]
    deadline = time.monotonic() + 60  # a thread is seen a little longer than it is there
    while threads() != before[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (threads(), torch.get_num_threads()) == before
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    with sleeping():
        assert threads() == before[0]
    assert os.environ["OMP_WAIT_POLICY"] == "active"
