"""The scripts in examples run, and their output has the form that the documentation quotes."""

from __future__ import annotations

import re

import pytest

from tests.examples import run

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


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
