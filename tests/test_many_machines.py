"""examples/many_machines.py on a real Ray cluster of two nodes: `make test-ray`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from ray.cluster_utils import Cluster

pytestmark = pytest.mark.timeout(900)
SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "many_machines.py"
PROMPTS = 48


@pytest.fixture
def cluster() -> Iterator[Any]:
    size = {"num_cpus": 1, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=size)
    cluster.add_node(**size)
    yield cluster
    cluster.shutdown()


@pytest.fixture
def start(cluster, tmp_path):
    prompts = [
        {"id": f"q{i}", "prompt": f"Once upon a time {i} little bears lived in"}
        for i in range(PROMPTS)
    ]
    prompts[0]["prompt"] += "\u2028"  # JSON lines do not end there
    lines = [json.dumps(prompt, ensure_ascii=False) for prompt in prompts]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines), "utf-8")

    with (tmp_path / "log").open("w") as log:

        def start() -> subprocess.Popen[bytes]:
            files = [tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"]
            return subprocess.Popen(
                [sys.executable, SCRIPT, *files, "--tokens", "24"],
                env={**os.environ, "RAY_ADDRESS": cluster.address, "OMP_NUM_THREADS": "1"},
                stdout=log, stderr=log,
            )  # fmt: skip

        yield start


def lines(tmp_path: Path) -> list[str]:
    file = tmp_path / "answers.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def wait_for_answers(run: subprocess.Popen[bytes], tmp_path: Path) -> None:
    while not lines(tmp_path):
        assert run.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.1)


def check_answers(run: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert run.wait(timeout=600) == 0, (tmp_path / "log").read_text()
    answers = [json.loads(line) for line in lines(tmp_path)]
    assert sorted(x["id"] for x in answers) == sorted(f"q{i}" for i in range(PROMPTS))
    assert all(x["text"] for x in answers)


def test_a_lost_machine(cluster, start, tmp_path):
    run = start()
    wait_for_answers(run, tmp_path)
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    check_answers(run, tmp_path)


def test_a_killed_script(start, tmp_path):
    run = start()
    wait_for_answers(run, tmp_path)
    run.send_signal(signal.SIGKILL)
    run.wait()
    with (tmp_path / "answers.jsonl").open("a") as file:
        file.write('{"id": "q1')  # as if the kill had come in the middle of a line
    before = lines(tmp_path)[:-1]
    assert 0 < len(before) < PROMPTS
    check_answers(start(), tmp_path)
    assert lines(tmp_path)[: len(before)] == before
