"""examples/long_answers.py at its smallest size: its texts, its training and its table."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "long_answers.py"
if not SCRIPT.exists():
    pytest.skip("the examples are not here", allow_module_level=True)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("long_answers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["long_answers"] = module  # dataclasses look up annotations there
    spec.loader.exec_module(module)
    module.TOKENS, module.SAVED = 100, 2
    return module


@pytest.mark.parametrize("often", [False, True])
def test_answers_follow_from_prompts(script, often):
    """Following the numbered steps of a prompt must lead to what the answer says."""
    prompt, answer = script.text(script.Size(20), often, random.Random(3))
    starts, last = prompt[1 : 1 + 2 * 16], prompt.pop()
    holds = dict(zip(starts[::2], starts[1::2], strict=True))
    steps, wanted = prompt[1 + 2 * 16 :], []
    for number, giver, receiver in zip(steps[::3], steps[1::3], steps[2::3], strict=True):
        holds[receiver] = holds[giver] if often else holds.pop(giver)
        wanted += [number, giver, holds[receiver], receiver, holds[receiver]]
    assert [last, *answer] == wanted
    asked = script.answered(answer)
    assert len(asked) == 8
    assert set(asked.values()) <= set(starts[1::2])


def test_training_goes_on_where_it_was_interrupted(script, tmp_path):
    once, twice = script.new_model(), script.new_model()
    script.train(once, tmp_path / "once.pt", 3, 4, 0.0)
    script.train(twice, tmp_path / "twice.pt", 3, 2, 0.0)
    again = script.new_model()
    script.train(again, tmp_path / "twice.pt", 3, 4, 0.0)
    for one, other in zip(once.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_table(script, tmp_path, monkeypatch, capsys):
    arguments = ["--steps", "3", "--updates", "1", "--texts", "2", "--budgets", "0.4,1.0"]
    monkeypatch.setattr(sys, "argv", ["long_answers.py", str(tmp_path / "model.pt"), *arguments])
    script.main()
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("policy"))
    rows = [line.split() for line in lines[start + 1 : -2]]
    names = ["authors", "robust", "echo", "random"]
    assert [row[0] for row in rows] == ["full", *names, *names]
    full = rows[0][2:]
    assert all(row[2:] == full for row in rows[5:]), "nothing is evicted, and nothing changes"


def test_what_the_table_shows(script):
    results = {
        ("full", 9): [1.0, 1.0],
        ("robust", 3): [0.2, 0.6],
        ("echo", 3): [0.5, 0.4],
        ("random", 3): [0.5, 0.45],
    }
    assert script.against_random(results) == [
        "needed once: better than random by 0.12 or more: none; worse: robust at 3",
        "needed often: better than random by 0.12 or more: robust at 3; worse: none",
    ]
