"""h2o's numbers in `/metrics`, as files: their writing, reading and removal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from h2o.vllm.metrics import Collector
from tests.launch import launch

pytest.importorskip("prometheus_client", reason="make test-vllm brings it")

NUMBERS = {"h2o:request_bytes": 512, "h2o:evicted_keys": 7, "h2o:share_held": None}


def test_files_that_cannot_be_read_have_no_numbers(tmp_path):
    """Files that are incomplete, foreign, or gone when they are opened must be skipped."""
    text = json.dumps([["tiny", "0", "1"], NUMBERS])
    (tmp_path / "0-1.json").write_text(text)
    (tmp_path / "0-2.json").write_text(text[:20])
    (tmp_path / "0-3.json").write_bytes(b"\xff")
    (tmp_path / "0-4.json").symlink_to(tmp_path / "gone")
    (tmp_path / "0-5.new").write_text(text)
    labels = {"model_name": "tiny", "engine": "0", "rank": "1"}
    found = [sample for metric in Collector(tmp_path).collect() for sample in metric.samples]
    assert [(x.name, x.labels, x.value) for x in found] == [
        ("h2o:request_bytes", labels, 512),
        ("h2o:evicted_keys_total", labels, 7),
    ]
    assert list(Collector(tmp_path / "none").collect()) == []


def test_the_folder_goes_with_the_first_process(tmp_path):
    """The folder must be removed with the first process, not with a fork of it, and stay removed. A
    file of a killed process must not prevent this."""
    program = """
import os, sys, time
from multiprocessing import util
from pathlib import Path
from h2o.vllm import metrics
from h2o.vllm.worker_prompts import WorkerPrompts

def left():
    return sorted(file.name for file in folder.iterdir()) if folder.exists() else None

def meter(rank):
    one = metrics.Meter(("tiny", "0", rank), 1, 1, list, WorkerPrompts())
    one.write()
    return one

metrics.publish()
folder = Path(os.environ[metrics.FOLDER])
assert left() is None
first, second = meter("0"), meter("1")
fork = os.fork()
if not fork:
    sys.exit()
os.waitpid(fork, 0)
(folder / "0-2.json").write_text("")
assert left() == ["0-0.json", "0-1.json", "0-2.json"], left()
metrics.SECONDS = 0.2
second.schedule_write()
util._run_finalizers()  # as at the exit of a process that takes its time
time.sleep(1)
assert left() is None
print(folder)
"""
    out, _ = launch(["-c", program], launcher=[], TMPDIR=str(tmp_path))
    folder = Path(out.strip())
    assert folder.parent == tmp_path
    assert not folder.exists()
