"""Summaries through a real cache: files of articles, ROUGE, interruption."""

from __future__ import annotations

import json

import pytest

from h2o import H2OCache, cli, models
from h2o.borrowed import with_cache
from h2o.errors import UserError
from h2o.evaluation import summarize
from tests.evaluation.conftest import build, exit_code

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
    records = [
        {"id": f"a{i}", "article": article, "summary": article.split(" was ")[0]}
        for i, article in enumerate(ARTICLES)
    ]
    return write(tmp_path / "articles.jsonl", records)


def run(folder, file, tmp_path, *arguments):
    where = ["--model", str(folder), "-o", str(tmp_path / "out")]
    return cli.main(["eval", "--summarize", str(file), *where, *map(str, arguments)])


def cells(tmp_path):
    return json.loads((tmp_path / "out" / "summaries.json").read_text())["cells"]


# ---- Reading -----------------------------------------------------------------------------------


def test_forms_of_rows(tmp_path):
    prompt = "###\nArticle: It rained.\n\nSummarize the above article in 1 sentence.\n"
    records = [
        {"article": prompt, "summary_gt": "Rain.", "stop": ["###", "!"], "max_tokens": 64},
        {"article": "It snowed.", "summary": "Snow."},
        {"id": "x7", "article": "It hailed.", "highlights": "Hail.\nMuch."},
    ]
    rows = summarize.read_rows(write(tmp_path / "rows.jsonl", records))
    assert [row.name for row in rows] == ["1", "2", "x7"]
    assert rows[0].prompt == prompt
    assert rows[0].stop == ("###", "!")
    assert rows[1].prompt == prompt.replace("It rained.", "It snowed.")
    assert "It hailed.\n\nSummarize the above article in 3 sentences." in rows[2].prompt
    assert [row.reference for row in rows] == ["Rain.", "Snow.", "Hail.\nMuch."]
    assert len(summarize.read_rows(tmp_path / "rows.jsonl", limit=2)) == 2


GOOD = '{"article": "It rained.", "summary": "Rain."}\n'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no rows"),
        (GOOD + '{"article": "It', "line 2: no JSON"),
        (GOOD + "[1]", "line 2: expected an object"),
        (GOOD + "\n" + '{"article": "It snowed."}', "line 3: no summary_gt, summary or highlights"),
        (GOOD + '{"summary": "Snow."}', "line 2: article is missing"),
        (GOOD + '{"article": "", "summary": "Snow."}', "line 2: article is missing, empty"),
        (GOOD + '{"article": "It snowed.", "summary": 4}', "line 2: summary is missing, empty"),
        (GOOD + '{"article": "a", "summary": "b", "stop": "x"}', "line 2: stop is a list"),
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
        summarize.read_rows(path)
    assert "rows.jsonl" in str(error.value)


# ---- Writing and judging -----------------------------------------------------------------------


def test_compare(folder, file, tmp_path, capsys):
    settings = "full,h2o:500+0,h2o:0.1+0.1,local:8"
    assert run(folder, file, tmp_path, "--compare", settings, "--max-new-tokens", 20) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert [name in rows for name in settings.split(",")] == [True] * 4
    by_facts = {(c["facts"]["setting"], c["facts"]["row"]): c for c in cells(tmp_path)}
    assert len(by_facts) == 12
    for (setting, row), cell in by_facts.items():
        assert {
            "model", "versions", "seeds", "protocol", "ratio_of", "file", "max_new_tokens",
            "decoding", "dtype",
        } <= set(cell["facts"])  # fmt: skip
        result = cell["result"]
        assert 0 < result["new_tokens"] <= 20
        assert all(0 <= result[name] <= 1 for name in summarize.ROUGE)
        same = by_facts["full", row]["result"]["summary"]
        if setting == "h2o:500+0":
            assert result["summary"] == same
    texts = [
        [by_facts[s, f"a{i}"]["result"]["summary"] for i in range(3)] for s in ("full", "local:8")
    ]
    assert texts[0] != texts[1]
    assert (tmp_path / "out" / "summaries.png").stat().st_size > 0
    arguments = ["--compare", settings, "--max-new-tokens", 20, "--json"]
    assert run(folder, file, tmp_path, *arguments) == 0
    printed = json.loads(capsys.readouterr().out)["cells"]
    assert sorted(printed, key=json.dumps) == sorted(cells(tmp_path), key=json.dumps)


def test_rouge_judges_what_was_written(folder, file, tmp_path, monkeypatch):
    """Known F-measures: of 4 words in the reference and 2 in the summary, 2 are common."""
    monkeypatch.setattr(
        summarize, "summarize",
        lambda *args: iter([(0, {
            "summary": "the Bridges", "prompt_tokens": 9, "new_tokens": 2, "kept": 4, "seconds": 1,
        })]),
    )  # fmt: skip
    records = [{"article": "It.", "summary": "the bridge over river"}]
    assert run(folder, write(file, records), tmp_path) == 0
    (cell,) = cells(tmp_path)
    assert cell["result"]["rouge1"] == pytest.approx(2 / 3)  # precision 1, recall 1/2; stemmed
    assert cell["result"]["rouge2"] == pytest.approx(0.5)  # 1 of 1 and 1 of 3 pairs
    assert cell["result"]["rougeL"] == pytest.approx(2 / 3)


def by_row(tmp_path):
    return {cell["facts"]["row"]: cell["result"] for cell in cells(tmp_path)}


def with_stops(file, summaries):
    """The rows, each with a stop text that its summary contains, sooner or later."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for i, record in enumerate(records):
        text = summaries[record["id"]][3 * i % 14 :]
        record["stop"] = [next(x for x in text if x.isascii() and x.isprintable())]
    write(file, records)
    return {record["id"]: record["stop"][0] for record in records}


@pytest.mark.parametrize("setting", ["full", "h2o:6+6"])
def test_stop_texts(folder, file, tmp_path, setting):
    arguments = ["--compare", setting, "--max-new-tokens", 30]
    assert run(folder, file, tmp_path, *arguments) == 0
    whole = {name: result["summary"] for name, result in by_row(tmp_path).items()}
    stops = with_stops(file, whole)
    (tmp_path / "out" / "summaries.json").unlink()
    assert run(folder, file, tmp_path, *arguments) == 0
    cut = by_row(tmp_path)
    assert {name: result["summary"] for name, result in cut.items()} == {
        name: text.partition(stops[name])[0].strip() for name, text in whole.items()
    }
    assert all(result["new_tokens"] < 30 for result in cut.values())


def test_many_articles_at_a_time(folder, file, tmp_path, passes):
    """Are summarised as each alone, in rows that are refilled."""
    records = [
        {"id": f"{i}{j}", "article": article[: 40 + 9 * j], "summary": "It."}
        for i, article in enumerate(ARTICLES)
        for j in range(3)
    ]
    write(file, records)
    arguments = ["--compare", "h2o:6+6", "--max-new-tokens", 30, "--rows"]
    assert run(folder, file, tmp_path, *arguments, 1) == 0
    with_stops(file, {name: result["summary"] for name, result in by_row(tmp_path).items()})
    number, results = {}, {}
    for rows in (1, 3):
        passes.clear()
        (tmp_path / "out" / "summaries.json").unlink()
        assert run(folder, file, tmp_path, *arguments, rows) == 0
        number[rows], results[rows] = len(passes), by_row(tmp_path)
        for result in results[rows].values():
            result.pop("seconds")
    new = [result["new_tokens"] for result in results[1].values()]
    assert len(set(new)) > 4
    assert number[1] == sum(new)
    assert number[3] < 0.6 * number[1]
    assert results[3] == results[1]


def test_what_rows_do_not_serve(file, tmp_path, tokenizer):
    """A model with sliding windows: one article after the other."""
    folder, model = tmp_path / "windows", build("gemma2")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert run(folder, file, tmp_path, "--compare", "h2o:6+6", "--max-new-tokens", 9) == 0
    results = by_row(tmp_path)
    assert len(results) == len(ARTICLES)
    model.set_attn_implementation("h2o")
    for row in summarize.read_rows(file):
        ids = models.encode(tokenizer, row.prompt, False)
        cache = H2OCache(model.config, heavy=6, recent=6)
        new = model.generate(ids, **with_cache(cache), max_new_tokens=9, do_sample=False)
        text = tokenizer.decode(new[0, ids.shape[1] :], skip_special_tokens=True)
        assert results[row.name]["summary"] == text.partition("###")[0].strip()


@pytest.mark.parametrize("stopped", [3, 5])
def test_an_interrupted_run_goes_on(folder, file, tmp_path, monkeypatch, stopped):
    """Whether it went through rows or through generate()."""
    original, calls = summarize.summarize, []

    def work(*args):
        for pair in original(*args):
            calls.append(pair)
            if len(calls) == stopped:
                raise KeyboardInterrupt
            yield pair

    monkeypatch.setattr(summarize, "summarize", work)
    arguments = ["--compare", "full,h2o:6+6", "--max-new-tokens", 5, "--rows", 2]
    assert run(folder, file, tmp_path, *arguments) == 130
    first = cells(tmp_path)
    assert len(first) == stopped - 1
    assert run(folder, file, tmp_path, *arguments) == 0
    assert len(calls) == 7
    assert cells(tmp_path)[: len(first)] == first
    assert len(cells(tmp_path)) == 6


def test_the_chat_template_is_used(folder, file, tmp_path, capsys, tokenizer):
    assert run(folder, file, tmp_path, "--chat") == 1
    assert "no chat template" in capsys.readouterr().err
    chatty = tmp_path / "chatty"
    import shutil

    shutil.copytree(folder, chatty)
    (chatty / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<bot>"
    )
    lengths = []
    for extra in ([], ["--chat"]):
        arguments = ["--limit", 1, "--max-new-tokens", 2, *extra]
        assert run(chatty, file, tmp_path, *arguments) == 0
        lengths.append(cells(tmp_path)[-1]["result"]["prompt_tokens"])
    assert lengths[1] - lengths[0] == len("<user><bot>")


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_lines_end_at_line_ends_alone(tmp_path, mark):
    """What Python's splitlines divides at may stand in a text, or between a row's parts."""
    texts = [f"One{mark}two.", "Three."]
    lines = [json.dumps({"article": x, "summary": x}, ensure_ascii=mark < " ") for x in texts]
    (tmp_path / "rows.jsonl").write_text("\r\n".join([lines[0], "", lines[1]]) + "\n", newline="")
    rows = summarize.read_rows(tmp_path / "rows.jsonl")
    assert [row.reference for row in rows] == texts
    assert [row.name for row in rows] == ["1", "3"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--compare", "mask-local:4+4"], 2, "a mask, no cache"),
        (["--protocol", "simulate"], 2, "no such choice but drop"),
        (["--prompt-length", "5"], 2, "no such choice"),
        (["--max-new-tokens", "300"], 1, "row a0: "),
        (["--rows", "0"], 2, "--rows 0: at least 1"),
        (["--limit", "1.5"], 2, "--limit 1.5"),
    ],
)
def test_arguments_that_do_not_fit(folder, file, tmp_path, capsys, arguments, code, words):
    assert exit_code(run, folder, file, tmp_path, *arguments) == code
    assert words in capsys.readouterr().err
