"""Summaries with a real cache: files of articles, and ROUGE."""

from __future__ import annotations

import json
import shutil

import pytest

from h2o import cli
from h2o.errors import UserError
from h2o.evaluation import summaries
from h2o.utils.filesystem import read_text
from tests.evaluation.conftest import exit_code, measured, table_of

pytestmark = [
    pytest.mark.usefixtures("lm_eval_apart"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # from lm-eval's files
]

ARTICLES = [
    "The bridge over the river was closed on Monday after a crack was found in a pillar.",
    "A cat that was lost for two years walked back into the bakery where it was born.",
    "The last film of the old cinema was shown to an audience of nine people and a dog.",
]


def write(path, records):
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return path


@pytest.fixture
def file(tmp_path):
    records = [{"article": x, "summary": x.split(" was ")[0]} for x in ARTICLES]
    return write(tmp_path / "articles.jsonl", records)


def run(folder, file, tmp_path, *arguments):
    where = ["--model", str(folder), "-o", str(tmp_path / "out")]
    return cli.main(["eval", "--summarize", str(file), *where, *map(str, arguments)])


def read(path):
    return summaries.Summaries.make_rows(read_text(path), str(path))


# ---- Reading -----------------------------------------------------------------------------------


def test_forms_of_rows(tmp_path):
    prompt = "###\nArticle: It rained.\n\nSummarize the above article in 1 sentence.\n"
    records = [
        {"article": prompt, "summary_gt": "Rain.", "max_tokens": 64},
        {"article": "It snowed.", "summary": "Snow."},
        {"id": "x7", "article": "It hailed.", "highlights": "Hail.\nMuch."},
    ]
    rows = read(write(tmp_path / "rows.jsonl", records))
    assert rows[0]["prompt"] == prompt
    assert rows[1]["prompt"] == prompt.replace("It rained.", "It snowed.")
    assert "It hailed.\n\nSummarize the above article in 3 sentences." in rows[2]["prompt"]
    assert [row["reference"] for row in rows] == ["Rain.", "Snow.", "Hail.\nMuch."]


GOOD = '{"article": "It rained.", "summary": "Rain."}\n'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no rows"),
        (GOOD + '{"article": "It', "line 2: not JSON"),
        ("[" * 100_000, "line 1: not JSON"),
        (GOOD + "[1]", "line 2: expected an object"),
        (GOOD + "\n" + '{"article": "It snowed."}', "line 3: no summary_gt, summary or highlights"),
        (GOOD + '{"summary": "Snow."}', "line 2: article is missing"),
        (GOOD + '{"article": "", "summary": "Snow."}', "line 2: article is missing, empty"),
        (GOOD + '{"article": "It snowed.", "summary": 4}', "line 2: summary is missing, empty"),
        (b"\xff\xfe", "cannot read"),
        (None, "cannot read"),
    ],
)
def test_files_that_are_not_right(tmp_path, content, words):
    path = tmp_path / "rows.jsonl"
    if isinstance(content, str):
        path.write_text(content)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=words) as error:
        read(path)
    assert "rows.jsonl" in str(error.value)


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_lines_end_at_line_ends_alone(tmp_path, mark):
    """Characters at which splitlines() splits may occur in a text, or between the parts of a
    row."""
    texts = [f"One{mark}two.", "Three."]
    lines = [json.dumps({"article": x, "summary": x}, ensure_ascii=mark < " ") for x in texts]
    (tmp_path / "rows.jsonl").write_text("\r\n".join([lines[0], "", lines[1]]) + "\n", newline="")
    assert [row["reference"] for row in read(tmp_path / "rows.jsonl")] == texts


# ---- Writing and judging -----------------------------------------------------------------------


def test_compare(folder, file, tmp_path, capsys):
    settings = "full,h2o:500+0,h2o:0.1+0.1,local:8"
    arguments = ["--compare", settings, "--gen_kwargs", "max_gen_toks=20", "--log_samples"]
    assert run(folder, file, tmp_path, *arguments) == 0
    rows = table_of(capsys.readouterr().out)
    assert list(rows) == settings.split(",")
    texts = {}
    for name, content in measured(tmp_path / "out").items():
        assert content["config"]["h2o"]["requests"] == 3
        scores = content["results"]["h2o_summaries"]
        assert all(0 <= scores[f"{x},none"] <= 1 for x in ("rouge1", "rouge2", "rougeL"))
        assert rows[name]["h2o_summaries rouge1"].startswith(f"{scores['rouge1,none']:.3f} ±")
        (samples,) = (tmp_path / "out" / name.replace(":", "_")).rglob("samples_*.jsonl")
        lines = samples.read_text().splitlines()
        texts[name] = [json.loads(line)["resps"][0][0] for line in lines]
    assert texts["h2o:500+0"] == texts["full"]
    assert texts["local:8"] != texts["full"]
    assert all("###" not in text for text in texts["full"])


def test_rouge_judges_what_was_written():
    """The F-measures are known: 2 of 4 words of the reference are the 2 words of the summary."""
    scores = summaries.results({"reference": "the bridge over river"}, ["the Bridges "])
    assert scores["rouge1"] == pytest.approx(2 / 3)  # precision 1, recall 1/2, words stemmed
    assert scores["rouge2"] == pytest.approx(0.5)  # 1 of 1 and 1 of 3 pairs
    assert scores["rougeL"] == pytest.approx(2 / 3)


def test_the_chat_template_is_used(folder, file, tmp_path, capsys, tokenizer):
    chatty = shutil.copytree(folder, tmp_path / "chatty")
    (chatty / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<bot>"
    )
    lengths = []
    for extra in ([], ["--apply_chat_template"]):
        arguments = ["--limit", 1, "--gen_kwargs", "max_gen_toks=2", *extra]
        assert run(chatty, file, tmp_path, *arguments) == 0
        (content,) = measured(tmp_path / "out").values()
        lengths.append(content["config"]["h2o"]["tokens_seen"])
    assert lengths[1] - lengths[0] == len("<user><bot>")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--compare", "mask-local:4+4"], 1, "a mask, not a cache"),
        (["--protocol", "simulate"], 2, "supports only drop"),
        (["--prompt-length", "5"], 1, "requires protocol=simulate"),
        (["--limit", "1.5"], 2, "1.5 is neither a number of rows"),
    ],
)
def test_arguments_that_do_not_fit(folder, file, tmp_path, capsys, arguments, code, words):
    assert exit_code(run, folder, file, tmp_path, *arguments) == code
    assert words in capsys.readouterr().err
