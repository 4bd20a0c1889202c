"""Facts hidden in a text: where they stand, what counts as found, which caches find them."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from h2o import cli
from h2o.borrowed import with_cache
from h2o.errors import UserError
from h2o.evaluation import facts, needle
from h2o.evaluation.setting import parse
from tests.evaluation.conftest import build, exit_code

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
        (turn,) = row.turns
        number = turn.fact.answer.strip()
        before, _, after = row.document.partition("The secret number of ")
        town = after.partition(" ")[0]
        assert after.startswith(f"{town} is {number}.")
        assert len(before) + len(after.partition(".")[2]) == row.length + len(" ")
        assert before.rstrip()[-1] == "."
        assert town in turn.fact.question
        assert number not in turn.fact.question
        left, right = before.count(". "), after.count(". ") - 1  # but for the fact's own
        assert left - 1 == round(turn.depth * (left + right - 1))


def test_turns_ask_for_facts_of_all_kinds_and_depths(tokenizer):
    kinds = ["number", "place", "gate"]
    rows = needle.trials(TEXT, tokenizer, (110,), 1, kinds, turns=2)
    assert rows[0].document != needle.trials(TEXT, tokenizer, (110,), 1, kinds)[0].document
    for place in range(2):
        turns = [row.turns[place] for row in rows]
        assert {turn.turn for turn in turns} == {place + 1}
        assert {(turn.depth, turn.kind) for turn in turns} == {
            (depth, kind) for depth in needle.DEPTHS for kind in kinds
        }
    for row in rows:
        first, second = sorted(row.turns, key=lambda turn: turn.depth)
        places = [row.document.index(turn.fact.sentence) for turn in (first, second)]
        assert places == sorted(places)
        assert first.kind != second.kind
    with pytest.raises(UserError, match="2 turns ask for facts of as many kinds, and there are 1"):
        needle.trials(TEXT, tokenizer, (60,), 1, turns=2)


def test_decoys_are_facts_of_the_same_kinds_about_others(tokenizer):
    """Each is asked for alone, and its question names the one that is meant."""
    (row, *_) = needle.trials(TEXT, tokenizer, (110,), 1, ["number", "place", "gate"], decoys=3)
    assert row.apart
    assert [turn.kind for turn in row.turns] == ["number"] * 4 + ["place"] * 4
    assert len({turn.fact.question for turn in row.turns}) == 8
    assert sorted(turn.depth for turn in row.turns) == [i / 7 for i in range(8)]
    for turn in row.turns:
        assert row.document.count(turn.fact.sentence) == 1


def test_questions_apart_are_answered_as_if_each_were_the_only_one(tokenizer):
    ours = build("llama")
    (row, *_) = needle.trials(TEXT, tokenizer, (60,), 1, ["gate", "place"], decoys=1)
    ours.config.max_position_embeddings = 2048
    document, asked = needle.encode(tokenizer, ours.config, row)
    setting = parse("h2o:0.2+0.2")
    together = needle.answered(ours, setting, document, asked, apart=True)["found"]
    alone = [needle.answered(ours, setting, document, [one])["found"][0] for one in asked]
    assert together == alone


@pytest.mark.parametrize("kind", facts.KINDS)
def test_facts_of_every_kind(tokenizer, kind):
    """The text says what is asked for, once; the question does not."""
    rows = needle.trials(TEXT, tokenizer, (60,), 4, [kind])
    assert {row.turns[0].kind for row in rows} == {kind}
    hidden = [row.turns[0].fact for row in rows]
    assert len({fact.answer for fact in hidden}) > len(rows) / 2
    for row, fact in zip(rows, hidden, strict=True):
        assert fact.answer.startswith(" ")
        assert row.document.count(fact.answer) == 1
        assert fact.answer.strip() not in fact.question
        assert not fact.question.endswith(" ")


def test_kinds_and_turns_stand_side_by_side(folder, tmp_path, capsys):
    """Another number of turns is measured anew."""
    folder = shutil.copytree(folder, tmp_path / "longer")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 500}))
    chosen = ["--facts", "gate,place", "--lengths", 60, "--limit", 1, "--compare", "full"]
    for turns, columns in ((1, ["gate", "place"]), (2, ["place", "turn", "1", "turn", "2"])):
        assert run(folder, tmp_path, *chosen, "--turns", turns) == 0
        out = capsys.readouterr().out
        assert f"{10 * turns} facts" in out
        titles = out.split("setting")[1].splitlines()[0].split()
        assert titles[-1 - len(columns) :] == [*columns, "time"]
    cells = json.loads((tmp_path / "out" / "needle.json").read_text())["cells"]
    assert [len(cell["facts"]["turns"]) for cell in cells] == [1] * 10 + [2] * 10


def test_a_text_that_is_too_short_or_has_no_sentences(tokenizer):
    with pytest.raises(UserError, match="lower --lengths"):
        needle.trials("A boat.", tokenizer, (60,), 1)
    with pytest.raises(UserError, match="nowhere to hide"):
        needle.trials("boat " * 40, tokenizer, (60,), 1)


@pytest.mark.parametrize("setting", ["full", "h2o:9+6"])
def test_found_is_what_greedy_decoding_writes(tokenizer, setting):
    """The model's own answers, generated token by token in one conversation, count as found;
    others do not, and change nothing of what the next turn finds."""
    model, setting = build(), parse(setting)
    model.config.max_position_embeddings = 500
    (row, *_) = needle.trials(TEXT, tokenizer, (60,), 1, ["gate", "place"], turns=2)
    document, asked = needle.encode(tokenizer, model.config, row)
    config = None if setting.variant == "full" else setting.config
    cache = needle.new_cache(model, config, document.shape[1])
    answers, unread = [], document[:, :0]
    with torch.no_grad():
        model(document, **with_cache(cache), use_cache=True)
        for question, _ in asked:
            ids, written = torch.cat([unread, question], 1), []
            for _ in range(5):
                logits = model(ids, **with_cache(cache), use_cache=True).logits
                ids = logits[:, -1:].argmax(-1)
                written.append(ids.item())
            answers.append(torch.tensor([written]))
            unread = ids

    def found(first, second):
        turns = [(asked[0][0], first), (asked[1][0], second)]
        return needle.answered(model, setting, document, turns)["found"]

    assert found(*answers) == [True, True]
    for place in (0, 4):
        other = answers[1].clone()
        other[0, place] = (other[0, place] + 1) % 256
        assert found(answers[0], other) == [True, False]
    other = answers[0].clone()
    other[0, 0] = (other[0, 0] + 1) % 256
    assert not found(other, answers[1])[0]


def test_random_keys_are_a_setting(folder, tmp_path, capsys):
    arguments = ["--compare", "full,random:0.5,random-bytes", "--budgets", 0.5]
    assert run(folder, tmp_path, *arguments, "--lengths", 60, "--limit", 1) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    assert float(rows["random:0.5"][1].rstrip("%")) < 60
    assert float(rows["random-bytes:0.5"][2].rstrip("%")) <= 50


def test_compare(folder, tmp_path, capsys, monkeypatch):
    settings = ["full", "h2o:500+0", "robust-bytes:0.2", "reread:500", "reread-bytes:0.2"]
    settings += ["echo:500", "echo-bytes:0.2"]
    arguments = ["--compare", ",".join(settings), "--lengths", "60,110", "--limit", 1]
    assert run(folder, tmp_path, *arguments) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert [rows[name][1] for name in settings[:2]] == ["100.0%"] * 2
    assert "of full's" not in out  # which finds none
    assert rows["full"][3:-2] == rows["h2o:500+0"][3:-2] == rows["reread:500"][3:-2]
    assert rows["echo:500"][3:-2] == rows["full"][3:-2]
    cells = json.loads((tmp_path / "out" / "needle.json").read_text())["cells"]
    assert len(cells) == len(settings) * 2 * len(needle.DEPTHS)
    for cell in cells:
        assert {"model", "versions", "length", "turns", "setting"} <= set(cell["facts"])
    monkeypatch.setattr(needle, "answered", lambda *_: 1 / 0)  # nothing is measured again
    assert run(folder, tmp_path, *arguments) == 0
    capsys.readouterr()
    assert run(folder, tmp_path, *arguments, "--json") == 0
    assert json.loads(capsys.readouterr().out)["cells"] == cells


def test_what_the_full_cache_finds_is_a_column_of_its_own():
    def rows(*found):
        same = {"length": 60, "depth": 0.5, "kind": "gate", "kept": 1, "seen": 2, "seconds": 1}
        return [same | {"found": x, "turn": turn} for turn, x in enumerate(found, start=1)]

    results = {"full": rows(True, True, False), "h2o:9+6": rows(False, True, True)}
    lines = needle.as_table(results, {"full": 100.0, "h2o:9+6": 50.0}).splitlines()
    assert "of full's 2" in lines[0]
    assert lines[-2].split()[3:7] == ["0.67", "±0.33", "1.00", "±0.00"]
    assert lines[-1].split()[3:7] == ["0.67", "±0.33", "0.50", "±0.50"]
    assert lines[-1].split()[-5:-2] == ["0.00", "1.00", "1.00"]  # turn by turn


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
        (["--turns", "0"], 2, "--turns 0: at least 1"),
        (["--turns", "2"], 1, "name more with --facts"),
    ],
)
def test_arguments_that_do_not_fit(folder, tmp_path, capsys, arguments, code, words):
    assert exit_code(run, folder, tmp_path, *arguments) == code
    assert words in capsys.readouterr().err
