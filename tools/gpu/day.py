"""Build, check, test and measure h2o on a machine with a GPU, in one report for the maintainers.

    python tools/gpu/day.py [--device cpu] [--tiny] [--limit SECONDS] [--output FOLDER]

Run it in the root of a checkout (`make gpu-day`), with a Python that has torch and transformers. It
needs no network. Each stage has its own time limit. A stage that fails or takes too long does not
stop the others. Tests and sanitizers run in parallel, but never during a timed stage. `--device cpu
--tiny` tries everything on the stand-in of tests/cuda/standin, where times mean nothing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import datetime
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

LINES = 150
"""Last lines of a stage's output that go into the report"""


class Stage(NamedTuple):
    name: str
    seconds: int
    """time limit"""
    command: tuple[str, ...]


class Outcome(NamedTuple):
    stage: Stage
    text: str
    seconds: float
    output: str
    failed: bool


# ---- The stages ----------------------------------------------------------------------------------

SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
TINY_TESTS = "tests/gpu/test_device.py -k '(current_stream and float16) or (waits and llama)'"


def stages(device: str, tiny: bool, output: Path) -> list[tuple[Stage, ...]]:
    """The stages, the most important first. Stages in the same tuple run in parallel."""
    make = ("make", "--silent", f"GPU_PYTHON={sys.executable}")
    h2o = (sys.executable, "-m", "h2o")
    on_gpu = device == "cuda"
    tests = ["gpu-tests", *([f"GPU_TESTS={TINY_TESTS}"] if tiny else [])]
    if on_gpu and importlib.util.find_spec("xdist"):
        count = min(12, max(2, (os.cpu_count() or 1) - len(SANITIZERS)))
        tests += [f'PYTEST_MARKS=-m "not slow" -n {count}']  # many fit: the device does little

    def tables(*names: str) -> tuple[str, ...]:
        where = ("--device", "cuda" if on_gpu else "dry-run", *(["--quick"] if tiny else []))
        files = ("--output", str(output), "--name", names[0])
        return (sys.executable, "-m", "benchmarks", *names, *where, "--dtypes", "bfloat16", *files)

    one_by_one = [
        Stage("card", 30, ("nvidia-smi",)),
        Stage("core", 300, (*make, "gpu-core")),
        Stage("kernels", 400, (*make, "gpu-kernels")),
        Stage("software", 60, (*h2o, "info")),
        Stage("check", 90, (*h2o, "info", "--check")),
        Stage("prompts and steps", 120, tables("prefill", "decode")),
    ]
    side_by_side = [
        Stage("tests", 300, (*make, *tests)),
        *(Stage(tool, 240, (*make, f"gpu-{tool}")) for tool in SANITIZERS),
    ]
    after = [
        Stage("models", 400, tables("graph", "flexgen")),
        Stage("a long prompt", 200, tables("long")),
    ]
    groups = [*((x,) for x in one_by_one), tuple(side_by_side), *((x,) for x in after)]
    if on_gpu:
        return groups
    only_there = {"card", "kernels", *SANITIZERS}
    return [
        x for x in (tuple(x for x in group if x.name not in only_there) for group in groups) if x
    ]


def environment(device: str, output: Path) -> dict[str, str]:
    """Environment variables of all stages. The check writes its result into the output folder."""
    path = [os.getcwd(), os.environ.get("PYTHONPATH", "")]
    more = {
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "H2O_CACHE": str(output / "cache"),
        "MAKEFLAGS": "",
    }
    if device == "cpu":
        path.insert(0, os.path.join(os.getcwd(), "tests", "cuda", "standin"))
        more["LD_LIBRARY_PATH"] = os.path.join(os.getcwd(), "build", "cuda")
        more["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # the stand-in works in the main thread only
    return {**os.environ, **more, "PYTHONPATH": os.pathsep.join(filter(None, path))}


# ---- Running them --------------------------------------------------------------------------------


@contextlib.contextmanager
def process(command: Sequence[str], variables: Mapping[str, str], log: IO[bytes]) -> Iterator:
    """Start a process in its own group. The whole group is killed at the end."""
    running = subprocess.Popen(
        command, env=dict(variables), stdin=subprocess.DEVNULL, stdout=log,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def run(stage: Stage, left: float, variables: Mapping[str, str], log: Path) -> Outcome:
    """Run a stage within its limit and the time left."""
    start, limit = time.monotonic(), min(stage.seconds, left)
    if limit < 1:
        return Outcome(stage, "left out: no time left", 0, "", True)
    if shutil.which(stage.command[0]) is None:
        return Outcome(stage, f"left out: no {stage.command[0]}", 0, "", False)
    with log.open("wb") as file, process(stage.command, variables, file) as running:
        try:
            code = running.wait(limit)
            text = "done" if code == 0 else f"ended with {code}"
        except subprocess.TimeoutExpired:
            code, text = -1, f"stopped after {limit:.0f} s"
    output = log.read_text("utf-8", "replace")
    return Outcome(stage, text, time.monotonic() - start, output, code != 0)


def run_all(
    chosen: Sequence[Sequence[Stage]], limit: float, variables: Mapping[str, str], output: Path
) -> list[Outcome]:
    end = time.monotonic() + limit

    def run_one(stage: Stage) -> Outcome:
        print(f"== {stage.name}: {' '.join(stage.command)}", flush=True)
        log = output / f"{stage.name.replace(' ', '-')}.log"
        outcome = run(stage, end - time.monotonic(), variables, log)
        print(f"== {stage.name}: {outcome.text}, {outcome.seconds:.0f} s", flush=True)
        return outcome

    outcomes: list[Outcome] = []
    for group in chosen:
        with concurrent.futures.ThreadPoolExecutor(len(group)) as threads:
            outcomes += threads.map(run_one, group)
    return outcomes


# ---- The report ----------------------------------------------------------------------------------


def report(outcomes: Sequence[Outcome]) -> str:
    """The report: the outcome of each stage, and the end of its output."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(" ", "minutes")
    lines = [f"h2o on a GPU, {now}", ""]
    lines += [f"{x.stage.name:20} {x.seconds:6.0f} s  {x.text}" for x in outcomes]
    for outcome in outcomes:
        lines += ["", f"==== {outcome.stage.name}: {' '.join(outcome.stage.command)}"]
        lines += outcome.output.splitlines()[-LINES:]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--limit", type=float, default=3600, help="seconds in total (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("build/gpu-day"))
    options = parser.parse_args()
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    chosen = stages(options.device, options.tiny, output)
    variables = environment(options.device, output)
    outcomes = run_all(chosen, options.limit, variables, output)
    path = output / "report.txt"
    path.write_text(report(outcomes), "utf-8")
    print("\n".join(f"{x.stage.name:20} {x.seconds:6.0f} s  {x.text}" for x in outcomes))
    print(f"Please send {path} to the maintainers: docs/how_to/use_a_gpu.md says where.")
    return int(any(x.failed for x in outcomes))


if __name__ == "__main__":
    sys.exit(main())
