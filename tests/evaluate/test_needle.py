"""Facts hidden in a text: where they stand, what counts as found, which caches find them."""

from __future__ import annotations

import json

import pytest
import torch

from h2o import cli
from h2o.errors import UserError
from h2o.evaluate import facts, needle
from h2o.evaluate.setting import parse
from tests.evaluate.conftest import build, exit_code

TEXT = "".join(f"Boat {i} came home at {i % 12} with {i * i % 89} fish. " for i in range(40))
LENGTHS = (60, 110)


def run(folder, tmp_path, *arguments):
    file = tmp_path / "boats.txt"
    file.write_text(TEXT)
    where = ["--model", str(folder), "-o", str(tmp_path / "out")]
    return cli.main(["eval", "--needle", str(file), *where, *map(str, arguments)])


def test_facts_stand_where_they_should(tokenizer):
    rows = needle.trials(TEXT, tokenizer, LENGTHS, 3)
    assert rows == needle.trials(TEXT, tokenizer, LENGTHS, 3)
    assert len(rows) == len(LENGTHS) * len(needle.DEPTHS) * 3
    assert len({row.document for row in rows}) == len(rows)
    for row in rows:
        number = row.answer.strip()
        before, _, after = row.document.partition("The secret number of ")
        town = after.partition(" ")[0]
        assert after.startswith(f"{town} is {number}.")
        assert len(before) + len(after.partition(".")[2]) == row.length + len(" ")
        assert before.rstrip()[-1] == "."
        assert town in row.question
        assert number not in row.question
        left, right = before.count(". "), after.count(". ") - 1  # but for the fact's own
        assert left - 1 == round(row.depth * (left + right - 1))


@pytest.mark.parametrize("kind", facts.KINDS)
def test_facts_of_every_kind(tokenizer, kind):
    """The text says what is asked for, once; the question does not."""
    rows = needle.trials(TEXT, tokenizer, (60,), 4, [kind])
    assert {row.kind for row in rows} == {kind}
    assert len({row.answer for row in rows}) > len(rows) / 2
    for row in rows:
        assert row.answer.startswith(" ")
        assert row.document.count(row.answer) == 1
        assert row.answer.strip() not in row.question
        assert not row.question.endswith(" ")


def test_kinds_stand_side_by_side(folder, tmp_path, capsys):
    chosen = ["--facts", "gate,place", "--lengths", 60, "--limit", 1, "--compare", "full"]
    assert run(folder, tmp_path, *chosen) == 0
    out = capsys.readouterr().out
    assert "10 facts" in out
    assert out.split("setting")[1].splitlines()[0].split()[-3:] == ["gate", "place", "time"]


def test_a_text_that_is_too_short_or_has_no_sentences(tokenizer):
    with pytest.raises(UserError, match="lower --lengths"):
        needle.trials("A boat.", tokenizer, (60,), 1)
    with pytest.raises(UserError, match="nowhere to hide"):
        needle.trials("boat " * 40, tokenizer, (60,), 1)


@pytest.mark.parametrize("setting", ["full", "h2o:9+6"])
def test_found_is_what_greedy_decoding_writes(tokenizer, setting):
    """The model's own answer, generated token by token, counts as found; another does not."""
    model, setting = build(), parse(setting)
    (row, *_) = needle.trials(TEXT, tokenizer, (60,), 1)
    document, question, _ = needle.encode(tokenizer, model.config, row)
    config = None if setting.variant == "full" else setting.config
    cache = needle.new_cache(model, config, document.shape[1])
    with torch.no_grad():
        model(document, past_key_values=cache, use_cache=True)
        ids, written = question, []
        for _ in range(5):
            logits = model(ids, past_key_values=cache, use_cache=True).logits
            ids = logits[:, -1:].argmax(-1)
            written.append(ids.item())
    answer = torch.tensor([written])
    assert needle.answered(model, setting, document, question, answer)["found"]
    for place in (0, 4):
        other = answer.clone()
        other[0, place] = (other[0, place] + 1) % 256
        assert not needle.answered(model, setting, document, question, other)["found"]


def test_compare(folder, tmp_path, capsys, monkeypatch):
    settings = ["full", "h2o:500+0", "robust-bytes:0.2", "reread:500", "reread-bytes:0.2"]
    settings += ["echo:500", "echo-bytes:0.2"]
    arguments = ["--compare", ",".join(settings), "--lengths", "60,110", "--limit", 1]
    assert run(folder, tmp_path, *arguments) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert [rows[name][1] for name in settings[:2]] == ["100.0%"] * 2
    assert rows["full"][3:-2] == rows["h2o:500+0"][3:-2] == rows["reread:500"][3:-2]
    assert rows["echo:500"][3:-2] == rows["full"][3:-2]
    assert rows["echo-bytes:0.2"][1:3] == rows["reread-bytes:0.2"][1:3]
    cells = json.loads((tmp_path / "out" / "needle.json").read_text())["cells"]
    assert len(cells) == len(settings) * 2 * len(needle.DEPTHS)
    for cell in cells:
        assert {"model", "versions", "length", "depth", "setting"} <= set(cell["facts"])
    monkeypatch.setattr(needle, "answered", lambda *_: 1 / 0)  # nothing is measured again
    assert run(folder, tmp_path, *arguments) == 0
    capsys.readouterr()
    assert run(folder, tmp_path, *arguments, "--json") == 0
    assert json.loads(capsys.readouterr().out)["cells"] == cells


def test_shares_and_errors():
    rows = [{"found": is_found} for is_found in (True, True, False, True)]
    share, error = needle.found_share(rows)
    assert share == 0.75
    assert error == pytest.approx(0.25)
    assert needle.found_share(rows[:1]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--compare", "mask-local:4+4"], 2, "a mask, no cache"),
        (["--protocol", "simulate"], 2, "no such choice but drop"),
        (["--lengths", "9000"], 1, "lower --lengths"),
        (["--lengths", "310"], 1, "model's 320 positions"),
        (["--lengths", "many"], 2, "--lengths many"),
        (["--lengths", "0"], 2, "--lengths 0"),
        (["--facts", "gates"], 2, "there are all, number, place"),
    ],
)
def test_arguments_that_do_not_fit(folder, tmp_path, capsys, arguments, code, words):
    assert exit_code(run, folder, tmp_path, *arguments) == code
    assert words in capsys.readouterr().err
