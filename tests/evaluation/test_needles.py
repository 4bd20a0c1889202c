"""Facts hidden in a text: their places, what counts as found, and which caches find them."""

from __future__ import annotations

import random

import pytest
import torch

from h2o import cli
from h2o.compat import with_cache
from h2o.errors import UserError
from h2o.evaluation import facts, needles
from h2o.evaluation.generation import new_cache
from h2o.evaluation.lm import H2OLM
from h2o.evaluation.needles import Needles
from h2o.evaluation.setting import parse
from tests.evaluation.conftest import build, exit_code, measured, table_of

pytestmark = [
    pytest.mark.usefixtures("lm_eval_apart"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # from lm-eval's files
]

TEXT = "".join(f"Boat {i} came home at {i % 12} with {i * i % 89} fish. " for i in range(40))
LENGTHS = (60, 110)


def run(folder, tmp_path, *arguments):
    file = tmp_path / "boats.txt"
    file.write_text(TEXT)
    where = ["--model", str(folder), "-o", str(tmp_path / "out")]
    return cli.main(["eval", "--needle", str(file), *where, *map(str, arguments)])


def find_facts(tokenizer, setting, *which):
    lm = H2OLM(build(), tokenizer=tokenizer)
    lm.use(setting, "read")
    return needles.find_facts(lm, *which)


def test_facts_stand_where_they_should(tokenizer):
    rows = Needles.make_rows(TEXT, tokenizer, LENGTHS, 3)
    assert rows == Needles.make_rows(TEXT, tokenizer, LENGTHS, 3)
    assert len(rows) == len(LENGTHS) * len(needles.DEPTHS) * 3
    assert len({row["text"] for row in rows}) == len(rows)
    for row in rows:
        ((question, answer),) = row["asked"]["facts"]
        (depth,) = row["depths"]
        number = answer.strip()
        before, _, after = row["text"].partition("The secret number of ")
        town = after.partition(" ")[0]
        assert after.startswith(f"{town} is {number}.")
        assert len(before) + len(after.partition(".")[2]) == row["length"] + len(" ")
        assert before.rstrip()[-1] == "."
        assert town in question
        assert number not in question
        left, right = before.count(". "), after.count(". ") - 1  # without the fact's own
        assert left - 1 == round(depth * (left + right - 1))


def test_decoys_are_facts_of_the_same_kinds_about_others(tokenizer):
    """Each fact is asked for separately, and its question names the fact that is meant."""
    kinds = ["number", "place", "gate"]
    (row, *_) = Needles.make_rows(TEXT, tokenizer, (110,), 1, kinds, decoys=3)
    assert row["kinds"] == ["number"] * 4 + ["place"] * 4
    asked = row["asked"]["facts"]
    assert len({question for question, _ in asked}) == 8
    assert sorted(row["depths"]) == [i / 7 for i in range(8)]
    for question, answer in asked:
        begins = question.partition("\nAnswer: ")[2]
        assert row["text"].count(f"{begins}{answer}.") == 1


def test_as_many_decoys_as_there_are_questions(tokenizer):
    """More would be drawn for ever."""
    draw = random.Random(0)
    for make in facts.KINDS.values():
        assert len({make(draw).question for _ in range(1000)}) == facts.SUBJECTS
    for kinds, most in (("number", 7), ("number,number,gate", 7), ("number,gate", 15), ("all", 15)):
        (row, *_) = Needles.make_rows(TEXT, tokenizer, (60,), 1, kinds, decoys=most)
        assert len(row["asked"]["facts"]) == 2 * (most + 1)
        with pytest.raises(UserError, match=f"--decoys {most + 1}: must be at most {most} with"):
            Needles.make_rows(TEXT, tokenizer, (60,), 1, kinds, decoys=most + 1)


def test_each_question_is_answered_as_if_it_were_the_only_one(tokenizer):
    (row, *_) = Needles.make_rows(TEXT, tokenizer, (60,), 1, ["gate", "place"], decoys=1)
    document, asked = needles.encode(tokenizer, row["text"], row["asked"]["facts"])
    setting = parse("h2o:0.2+0.2")
    together = find_facts(tokenizer, setting, document, asked)
    assert together == [find_facts(tokenizer, setting, document, [one])[0] for one in asked]


@pytest.mark.parametrize("kind", facts.KINDS)
def test_facts_of_every_kind(tokenizer, kind):
    """The text contains the answer exactly once, and the question does not contain it."""
    rows = Needles.make_rows(TEXT, tokenizer, (60,), 4, [kind])
    assert all(row["kinds"] == [kind] for row in rows)
    asked = [row["asked"]["facts"][0] for row in rows]
    assert len({answer for _, answer in asked}) > len(rows) / 2
    for row, (question, answer) in zip(rows, asked, strict=True):
        assert answer.startswith(" ")
        assert row["text"].count(answer) == 1
        assert answer.strip() not in question
        assert not question.endswith(" ")


def test_a_text_that_is_too_short_or_has_no_sentences(tokenizer):
    with pytest.raises(UserError, match="lower --lengths"):
        Needles.make_rows("A boat.", tokenizer, (60,), 1)
    with pytest.raises(UserError, match="nowhere to hide"):
        Needles.make_rows("boat " * 40, tokenizer, (60,), 1)


@pytest.mark.parametrize("setting", ["full", "h2o:9+6", "random:500"])
def test_found_is_what_greedy_decoding_writes(tokenizer, setting):
    """Answers that the model itself generates token by token count as found, others do not."""
    model, setting = build(), parse(setting)
    (row, *_) = Needles.make_rows(TEXT, tokenizer, (60,), 1, ["gate", "place"], decoys=1)
    document, asked = needles.encode(tokenizer, row["text"], row["asked"]["facts"])
    config = setting.config if setting.variant == "h2o" and not setting.is_random else None
    answers = []
    for question, _ in asked:
        cache = new_cache(model, config, document.shape[1])
        written, ids = [], question
        with torch.no_grad():
            model(document, **with_cache(cache), use_cache=True)
            for _ in range(5):
                logits = model(ids, **with_cache(cache), use_cache=True).logits
                ids = logits[:, -1:].argmax(-1)
                written.append(ids)
        answers.append(torch.cat(written, 1))
    own = [(question, answer) for (question, _), answer in zip(asked, answers, strict=True)]
    assert find_facts(tokenizer, setting, document, own) == [True] * 4
    wrong = [(question, torch.cat([x[:, :-1], (x[:, -1:] + 1) % 250], 1)) for question, x in own]
    assert find_facts(tokenizer, setting, document, [wrong[0], *own[1:]]) == [False] + [True] * 3


def test_compare(folder, tmp_path, capsys, monkeypatch):
    settings = ["full", "h2o:500+0", "robust-bytes:0.2", "reread:500", "reread-bytes:0.2"]
    settings += ["echo:500", "echo-bytes:0.2"]
    arguments = ["--compare", ",".join(settings), "--lengths", "60,110", "--limit", 1]
    arguments += ["--facts", "gate,number"]
    assert run(folder, tmp_path, *arguments) == 0
    out = capsys.readouterr().out
    rows = table_of(out)
    assert [rows[name]["kept"] for name in settings[:2]] == ["100.0%"] * 2
    assert "of full's" not in out  # full finds none
    titles = ["60 tokens", "110 tokens", "depth 0", "depth 0.25", "gate", "number"]
    assert set(titles) < set(rows["full"])
    for name in ("h2o:500+0", "reread:500", "echo:500"):
        assert [rows[name][x] for x in titles] == [rows["full"][x] for x in titles]
    contents = measured(tmp_path / "out")
    assert list(contents) == settings
    for content in contents.values():
        assert content["config"]["h2o"]["requests"] == 2 * 2 * len(needles.DEPTHS)
    monkeypatch.setattr(needles, "find_facts", lambda *_: 1 / 0)  # fails if anything is measured
    assert run(folder, tmp_path, *arguments) == 0
    assert capsys.readouterr().out == out


def test_what_the_full_cache_finds_is_a_column_of_its_own():
    def samples(*found):
        doc = {"depths": [0.5] * 3, "kinds": ["gate"] * 2 + ["place"], "length": 60}
        return [{"found": list(found), "doc": doc}]

    full = samples(True, True, False)
    assert Needles.columns(full, full) == {
        "found": "0.67 ±0.33", "of full's 2": "1.00 ±0.00", "60 tokens": "0.67",
        "depth 0.5": "0.67", "gate": "1.00", "place": "0.00",
    }  # fmt: skip
    cut = Needles.columns(samples(False, True, True), full)
    assert cut["of full's 2"] == "0.50 ±0.50"
    assert [cut["gate"], cut["place"]] == ["0.50", "1.00"]


def test_shares_and_errors():
    assert needles.format_share([True, True, False, True]) == "0.75 ±0.25"
    assert needles.format_share([True]) == "1.00"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--compare", "mask-local:4+4"], 1, "a mask, not a cache"),
        (["--protocol", "simulate"], 2, "supports only read or drop"),
        (["--lengths", "9000"], 1, "lower --lengths"),
        (["--lengths", "310"], 1, "model's 320 positions"),
        (["--lengths", "many"], 1, "--lengths many"),
        (["--lengths", "0"], 1, "--lengths 0"),
        (["--facts", "gates"], 1, "unknown; choose from all, number, place"),
        (["--decoys", "-1"], 1, "--decoys -1: must be an integer of at least 0"),
        (["--decoys", "8"], 1, "Up to 15 fit with --facts number,place"),
        (["--limit", "0.5"], 1, "--limit 0.5: must be a number of texts"),
    ],
)
def test_arguments_that_do_not_fit(folder, tmp_path, capsys, arguments, code, words):
    assert exit_code(run, folder, tmp_path, *arguments) == code
    assert words in capsys.readouterr().err
