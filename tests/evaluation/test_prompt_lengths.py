"""The benchmark of prompts of some lengths, with a tiny model."""

from __future__ import annotations

import json
import sys

import pytest

from tests.evaluation.conftest import build

pytest.importorskip("benchmarks.prompt_lengths", reason="the benchmarks are not here")

from benchmarks import prompt_lengths


@pytest.fixture
def run(tokenizer, tmp_path, monkeypatch, capsys):
    """Runs the command, and returns the cells of the lines that it prints."""
    model = build()
    monkeypatch.setattr(prompt_lengths.models, "load_model", lambda *a, **k: (model, tokenizer))
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Boat {i} came home with {i * i % 89} fish. " for i in range(200)))

    def run(*more: str) -> list[list[str]]:
        fixed = [str(text), "--tokens", "3", "--rounds", "2", "--output-path", str(tmp_path)]
        compared = ["--dtype", "float32", "--compare", "full,echo-bytes:0.2"]
        monkeypatch.setattr(sys, "argv", ["prompt_lengths.py", *fixed, *compared, *more])
        prompt_lengths.main()
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    return run


def test_a_table_of_one_prompt_at_a_time_and_of_many(run, tmp_path, monkeypatch):
    command = "--lengths", "160", "240", "--bytes", "100000"
    cells = run(*command)
    single = [row[:2] for row in cells if row[0] in ("160", "240")]
    names = "full", "echo-bytes:0.2"
    assert single == [[length, name] for length in ("160", "240") for name in names]
    lines = (tmp_path / "prompt_lengths.jsonl").read_text().splitlines()
    results = [json.loads(line)["result"] for line in lines if line]
    assert len(results) == 2 * 2 * 2 + 2
    full, small = (x["bytes_held"] for x in results[:2])
    assert small < full / 2
    many = {row[0]: int(row[1]) for row in cells if row[0] in names}
    assert many == {"full": 100_000 // full, "echo-bytes:0.2": prompt_lengths.MANY}

    def again(*arguments):
        raise AssertionError("a result that is in the file was measured again")

    monkeypatch.setattr(prompt_lengths.speed, "run", again)
    monkeypatch.setattr(prompt_lengths.Bench, "_answer", again)
    assert run(*command) == cells


def test_a_text_that_is_too_short(run):
    with pytest.raises(SystemExit, match=r"the text has .* tokens; .* are needed"):
        run("--lengths", "100000")
