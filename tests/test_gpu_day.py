"""The stages of `make gpu-day`, and its report. .ci/run runs all of it on the emulated driver."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from tools.gpu import day


def stage(name: str, code: str, seconds: int = 60) -> day.Stage:
    return day.Stage(name, seconds, (sys.executable, "-c", code))


def is_gone(pid: int) -> bool:
    """Whether a process disappears within ten seconds, which init may need to reap it."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_a_stage_that_fails_costs_the_others_nothing(tmp_path):
    chosen = [
        stage("wrong", "print('why'); raise SystemExit(3)"),
        day.Stage("missing", 60, ("no-such-program",)),
        stage("right", "import os; print(os.environ['WORD'])"),
    ]
    outcomes = day.run_all([(x,) for x in chosen], 100, {**os.environ, "WORD": "heard"}, tmp_path)
    assert [x.text for x in outcomes] == ["ended with 3", "left out: no no-such-program", "done"]
    assert [x.failed for x in outcomes] == [True, False, False]
    text = day.report(outcomes)
    for part in ("wrong", "ended with 3", "why", "no no-such-program", "heard"):
        assert part in text


def test_a_stage_ends_at_its_limit_with_all_that_it_started(tmp_path):
    child = tmp_path / "child"
    code = (
        "import os, subprocess, sys, time\n"
        "x = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(child)!r}, 'w').write(str(x.pid)); time.sleep(600)"
    )
    chosen = [(stage("slow", code, 5),), (stage("next", ""),)]
    outcomes = day.run_all(chosen, 100, os.environ, tmp_path)
    assert [x.text for x in outcomes] == ["stopped after 5 s", "done"]
    assert is_gone(int(child.read_text()))


def test_stages_of_a_group_run_side_by_side_and_alone(tmp_path):
    """The first two stages wait for each other, so they must run together. The third must start
    after both."""
    meet = (
        "import pathlib, time\n"
        "here, there = (pathlib.Path({folder!r}, x) for x in {names})\n"
        "here.touch()\n"
        "while not there.exists(): time.sleep(0.05)\n"
        "here.with_suffix('.left').touch()"
    )
    a, b = (meet.format(folder=str(tmp_path), names=names) for names in (("a", "b"), ("b", "a")))
    after = f"import os; assert {{'a.left', 'b.left'}} <= {{*os.listdir({str(tmp_path)!r})}}"
    chosen = [(stage("a", a), stage("b", b)), (stage("after", after),)]
    outcomes = day.run_all(chosen, 100, os.environ, tmp_path)
    assert [(x.stage.name, x.text) for x in outcomes] == [
        ("a", "done"), ("b", "done"), ("after", "done"),
    ]  # fmt: skip


def test_nothing_timed_runs_beside_others(tmp_path):
    (beside,) = [x for x in day.stages("cuda", False, tmp_path) if len(x) > 1]
    assert [x.name for x in beside] == ["tests", *day.SANITIZERS]


def test_what_the_time_is_not_enough_for_is_a_failure(tmp_path):
    (outcome,) = day.run_all([(stage("late", ""),)], 0, os.environ, tmp_path)
    assert (outcome.text, outcome.failed) == ("left out: no time left", True)


def test_every_target_is_one_of_the_makefile(tmp_path):
    if not Path("Makefile").is_file():
        pytest.skip("needs a checkout")
    targets = {
        x for group in day.stages("cuda", True, tmp_path) for one in group for x in one.command[1:]
    }
    targets = {x for x in targets if x.startswith("gpu-")}
    targets.remove("gpu-kernels")  # its recipe runs make, which make -n executes
    assert len(targets) == 6
    done = subprocess.run(["make", "-n", *targets], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_tests_need_pytest_alone(tmp_path):
    """docs/how_to/use_a_gpu.md promises it for a machine without a network: torch, transformers,
    pytest and pytest-timeout are enough to collect every test that runs on a GPU."""
    if not Path("Makefile").is_file() or shutil.which("make") is None:
        pytest.skip("needs a checkout and make")
    missing = ("hypothesis", "_hypothesis", "xdist", "pytest_xdist", "execnet", "peft", "mypy",
               "torchao", "accelerate", "lm_eval", "matplotlib", "gguf", "pandas")  # fmt: skip
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.lower().startswith(missing):
            (tmp_path / path.name).symlink_to(path)
    rule = "list: ; @echo $(GPU_TESTS)"
    listed = subprocess.run(
        ["make", "--silent", f"--eval={rule}", "list"], check=True, capture_output=True, text=True
    )
    done = subprocess.run(  # -S: without this environment's own packages
        [sys.executable, "-S", "-m", "pytest", "-q", "--collect-only", *listed.stdout.split()],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "could not import 'hypothesis'" in done.stdout
