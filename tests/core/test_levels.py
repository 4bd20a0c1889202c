"""The tables of operations, run at every instruction set level of this machine."""

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


TABLES = [
    *("core/test_ops.py", "core/test_any_scenario.py", "core/test_golden.py"),
    *("torch/test_cache_relative.py", "torch/test_any_scenario.py", "torch/test_dtypes.py"),
    *("torch/test_step_bytes.py", "torch/test_heavy_tails.py"),
]


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
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
