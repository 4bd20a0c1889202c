"""The scripts in examples run, and what they print has the shape that the documentation quotes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ten_questions():
    out = run("ten_questions.py", "--tokens", "2")
    for name in ("full, read again", "full, copied", "h2o, forked"):
        assert re.search(rf"^{name} .* s .* MB +\d+ of 10$", out, re.MULTILINE)
    held = [float(x) for x in re.findall(r"([\d.]+) MB +\d", out)]
    assert held[2] < 0.21 * held[1]


def test_prompt_lookup():
    out = run("prompt_lookup.py", "--tokens", "40")
    assert "the same text for 40 of 40 tokens" in out.splitlines()[2]
    greedy, lookup = (int(x) for x in re.findall(r"(\d+) passes", out)[:2])
    assert lookup < greedy == 40
