"""The benchmark of RULER, MATH-500, GSM8K and HumanEval, on two items with a tiny model."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch

from h2o import H2OCache
from h2o.compat import with_cache
from h2o.errors import UserError
from h2o.evaluation.setting import parse
from tests.evaluation.conftest import build

pytest.importorskip("benchmarks.leaderboard", reason="the benchmarks are not here")

from benchmarks import leaderboard

CONTEXT = "The gate of the farm is blue. It was painted in May, when the wells were dry.\n"
RULER = [
    {
        "task": "niah_single_1", "context": CONTEXT, "question": "Which colour has the gate?\n",
        "answer_prefix": "Answer: it is", "answer": ["blue"], "max_new_tokens": 5,
    },
    {
        "task": "niah_single_1", "context": CONTEXT * 2, "question": "When?\n",
        "answer_prefix": "In", "answer": ["May"], "max_new_tokens": 5,
    },
]  # fmt: skip
MATH = [{"problem": "What is 1 + 1?", "answer": "2"}, {"problem": "$2^3$?", "answer": "8"}]
GSM8K = [
    {"question": "A dozen hundreds and 34?", "answer": "12 * 100 = <<1200>>1200.\n#### 1,234"},
    {"question": "2 + 3?", "answer": "#### 5"},
]
CODE = [
    {
        "prompt": "import math\n\n\ndef square(x):\n    return x * x\n\n\n"
        'def area(r: float) -> float:\n    """Area of a circle."""\n',
        "test": "def check(candidate):\n    assert candidate(2) == math.pi * square(2)",
        "entry_point": "area",
    }
]


@pytest.fixture
def run(tokenizer, tmp_path, monkeypatch, capsys):
    """Run the benchmark on rows. Returns (the table's lines, the records)."""
    model = build()
    model.set_attn_implementation("h2o")
    monkeypatch.setattr(leaderboard.models, "load_model", lambda *a, **k: (model, tokenizer))

    def call(benchmark, rows, *arguments):
        data, output = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        where = ["--data", str(data), "--output", str(output)]
        leaderboard.main([benchmark, *where, *arguments])
        lines = capsys.readouterr().out.splitlines()
        return lines[3:-1], [json.loads(line) for line in output.read_text().splitlines()]

    call.model, call.output = model, tmp_path / "out.jsonl"
    return call


def test_a_run_goes_on_where_it_was_interrupted(run, monkeypatch):
    what = ("ruler", RULER, "--compare", "full,robust", "--removed", "0.5,0.75", "--rows", "2")
    lines, records = run(*what)
    assert [line.split()[:2] for line in lines] == [
        ["full", "2"], ["robust:0.5", "2"], ["robust:0.25", "2"],
    ]  # fmt: skip
    assert [record["setting"] for record in records] == ["full"] * 2 + ["robust:0.5"] * 2 + [
        "robust:0.25"
    ] * 2
    whole = run.output.read_text()
    run.output.write_text(whole[:-20])  # the last line is incomplete
    asked = []
    original = leaderboard.written

    def counted(model, tokenizer, setting, prompts, *more):
        asked.append((setting.name, len(prompts)))
        return original(model, tokenizer, setting, prompts, *more)

    monkeypatch.setattr(leaderboard, "written", counted)
    again, _ = run(*what)
    assert again == lines
    assert asked == [("robust:0.25", 1)]
    monkeypatch.setattr(leaderboard, "written", None)
    assert run(*what)[0] == lines


def test_ruler_is_cut_before_the_question(run, tokenizer):
    """A row in a batch must have the text that a cache driven by hand writes."""
    _, records = run("ruler", RULER, "--compare", "robust", "--removed", "0.75", "--rows", "2")
    for row, record in zip(RULER, records, strict=True):
        document = tokenizer(row["context"], return_tensors="pt").input_ids
        rest = tokenizer(row["question"] + row["answer_prefix"], return_tensors="pt").input_ids
        cache = H2OCache(run.model.config, parse("robust:0.25").config)
        tokens = []
        with torch.no_grad():
            run.model(document, **with_cache(cache))
            for _ in range(5):
                rest = run.model(rest, **with_cache(cache)).logits[:, -1:].argmax(-1)
                tokens.append(rest.item())
        assert record["text"] == tokenizer.decode(tokens, skip_special_tokens=True)


def test_math(run, tokenizer):
    """The slots are for the problem and everything that is written."""
    lines, records = run(
        "math", MATH, "--compare", "full,authors", "--slots", "16", "--tokens", "24", "--rows", "2"
    )
    assert [line.split()[:2] for line in lines] == [["full", "2"], ["authors:16", "2"]]
    for row in MATH:
        ids = tokenizer(row["problem"] + leaderboard.WANTED["math"], return_tensors="pt").input_ids
        cache = H2OCache(run.model.config, parse("authors:16").config)
        with torch.no_grad():
            out = run.model.generate(
                ids, max_new_tokens=24, do_sample=False, **with_cache(cache), pad_token_id=257
            )
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert text in [x["text"] for x in records if x["setting"] == "authors:16"]


def test_gsm8k_with_pinned_prompts(run, tokenizer):
    """A pinned prompt has slots besides those of the setting."""
    _, records = run(
        "gsm8k",
        GSM8K,
        "--compare",
        "full,robust",
        "--slots",
        "32",
        "--tokens",
        "24",
        "--pin-prompts",
    )
    assert [record["right"] for record in records] == [["1234"], ["5"]] * 2
    assert [record["setting"] for record in records] == ["full"] * 2 + ["robust:32"] * 2
    for row, record in zip(GSM8K, records[2:], strict=True):
        ids = tokenizer(
            row["question"] + leaderboard.WANTED["gsm8k"], return_tensors="pt"
        ).input_ids
        config = parse("robust:32").config
        config = dataclasses.replace(config, heavy=config.heavy + ids.shape[1])
        cache = H2OCache(run.model.config, config, pinned="prompt")
        with torch.no_grad():
            out = run.model.generate(
                ids, max_new_tokens=24, do_sample=False, **with_cache(cache), pad_token_id=257
            )
        assert record["text"] == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("task", "answers", "text", "score"),
    [
        ("niah_multivalue", ("17", "four"), "It is 17, I think.", 0.5),
        ("qa_1", ("17", "four"), "FOUR of them", 1.0),
        ("math", (r"\frac{1}{2}",), r"No \boxed{2}, but \boxed{\frac12}.", 1.0),
        ("math", (r"\frac{1}{2}",), r"Hence \boxed{2}.", 0.0),
        ("math", ("2",), r"It is 2, or \boxed{2", 0.0),
        ("math", ("2",), r"\fbox{2}", 0.0),
        ("gsm8k", ("1234",), "3 boxes, so 12 * 100 + 34 = 1,234.", 1.0),
        ("gsm8k", ("18",), "The answer is $18.00.", 1.0),
        ("gsm8k", ("18",), "It is 18, not 19.", 0.0),
        ("gsm8k", ("18",), "I do not know.", 0.0),
    ],
)
def test_scores(task, answers, text, score):
    assert leaderboard.Item(task, "", "", "", answers, 1).score(text) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Here:\n```python\ndef area(r):\n    return math.pi * r**2\n```\nIt multiplies.", 1.0),
        ("def area(r):\n    return math.pi * r**2", 1.0),
        ("```python\ndef area(r):\n    return math.pi * r\n    while True", 0.0),  # was cut off
        ("```python\ndef area(r):\n    return 3.14\n```", 0.0),
        ("```python\ndef area(r):\n    while True: pass\n```", 0.0),
        ("I cannot.", 0.0),
    ],
)
def test_code_is_run(text, score, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.written_code.SECONDS", 2)
    data = tmp_path / "code.jsonl"
    data.write_text(json.dumps(CODE[0]))
    (item,) = leaderboard.code_items(data, 8)
    assert item.score(text) == score


def test_code_is_run_only_if_asked(run, capsys):
    with pytest.raises(SystemExit):
        run("humaneval", CODE)
    assert "pass --run-code" in capsys.readouterr().err
    lines, _ = run("humaneval", CODE, "--run-code", "--compare", "full", "--tokens", "4")
    assert lines[0].split()[:3] == ["full", "1", "0.0"]


def test_a_chat_is_cut_at_the_end_of_the_context(tokenizer):
    chat = copy.deepcopy(tokenizer)
    chat.chat_template = "<u>{{ messages[0]['content'] }}</u>{{ enable_thinking }}<a>"
    item = leaderboard.Item("vt", "Much.\n", "Who?", " It is", (), 1)
    first, rest = leaderboard.encode(chat, item, False)
    assert chat.decode(first) == "<u>Much.\n"
    assert chat.decode(rest) == "Who?</u>False<a> It is"


def test_a_row_without_a_field(run):
    with pytest.raises(UserError, match=r"line 2 has no 'answer': .* problem, answer$"):
        run("math", [MATH[0], {"problem": "1?"}])


def test_a_dtype_that_h2o_does_not_compute_in(capsys):
    """A benchmark must refuse it before it loads a model, like the commands."""
    with pytest.raises(SystemExit) as end:
        leaderboard.main(["ruler", "--dtype", "float64"])
    assert end.value.code == 2
    assert "argument --dtype: invalid choice: 'float64'" in capsys.readouterr().err
