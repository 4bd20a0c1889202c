"""The tables of operations at every instruction set level that this machine has."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from h2o import ops

ROOT = Path(__file__).parents[2]
LEVELS = ops.info()["levels"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "table", ["core/test_ops.py", "core/test_golden.py", "torch/test_dtypes.py"]
)
@pytest.mark.parametrize("level", LEVELS)
def test_table_at_level(level, table):
    if table.startswith("torch") and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        f"tests/{table}",
    ]
    environment = {**os.environ, "H2O_CPU": level}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


@pytest.mark.parametrize("level", LEVELS)
def test_the_level_that_is_asked_for_runs(level):
    command = [sys.executable, "-c", "from h2o import ops; print(ops.info()['level'])"]
    environment = {**os.environ, "H2O_CPU": level}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.stdout.strip() == level, run.stderr


# One digest of outputs and state. Own threads (torch stays out), as many as H2O_THREADS says.
DIGEST = """
import hashlib, sys
import numpy as np
from h2o import ops
from tests import inputs
from tests.conversation import Conversation, numpy_core
digest = hashlib.sha256()
policy = inputs.POLICIES["everything"]
for B, H, G, N in ((1, 8, 1, 300), (2, 4, 4, 150), (3, 6, 2, 64)):
    text = inputs.drifting(59, B, H, G, N, D=64)
    talk = Conversation(numpy_core, text, policy).feed_all([N - 40, *[1] * 20, 20])
    prompt, budget = np.full(B, N // 2, np.int32), np.full((B, 2), (policy.heavy, policy.recent))
    simulated = ops.simulate(*text, prompt, budget.astype(np.int32), **policy.ranking)
    for x in (talk.answer, *talk.slots, *simulated):
        digest.update(x.tobytes())
assert "torch" not in sys.modules
print(ops.info()["threads"], digest.hexdigest())
"""


def test_results_do_not_depend_on_threads():
    lines = []
    for threads in ("1", "2", "5"):
        environment = {**os.environ, "H2O_THREADS": threads}
        run = subprocess.run(
            [sys.executable, "-c", DIGEST],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        lines.append(run.stdout.split())
    assert [count for count, _ in lines] == ["1", "2", "5"]
    assert len({digest for _, digest in lines}) == 1
