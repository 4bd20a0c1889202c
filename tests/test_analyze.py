"""`h2o analyze`: its output files, and its page in a real browser."""

import base64
import contextlib
import io
import json
import re
import sys

import numpy as np
import pytest

from h2o import cli
from h2o.packages import install_command
from tests import browser
from tests.test_cli import DEADLINE, tiny  # noqa: F401

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

TEXT = "".join(chr(97 + i * i % 7) for i in range(150)) + "\n</script><b>Grüße & 北京</b> $data\n"


@pytest.fixture(scope="module")
def written(tiny, tmp_path_factory):  # noqa: F811
    """(path of the page, what the command printed to stderr)"""
    folder = tmp_path_factory.mktemp("analysis")
    (folder / "text.txt").write_text(TEXT, "utf-8")
    page = folder / "out" / "page.html"
    arguments = ["analyze", "--model", tiny, "--text", str(folder / "text.txt"), "--output",
                 str(page), "--heavy", "12", "--recent", "0.1", "--min-tokens", "0",
                 "--removal-tokens", "100",
                 "--compare", "robust:0.2,local:0.2"]  # fmt: skip
    error = io.StringIO()
    with contextlib.redirect_stderr(error):
        assert cli.main(arguments) == 0
    return page, error.getvalue()


@pytest.fixture(scope="module")
def content(written):
    """The data embedded in the page for its script."""
    text = written[0].read_text("utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_what_is_measured_is_said(written):
    _, error = written
    assert "cache robust:0.2" in error
    assert "cache local:0.2" in error
    assert "removing keys from the first 100 tokens" in error
    assert "written" in error


def test_page_answers_the_questions(written):
    text = written[0].read_text("utf-8")
    row = r'<tr><th scope="row">(.*?)</th><td>.*?</td><td>\s*(.*?)\s*</td></tr>'
    answers = dict(re.findall(row, text[: text.index("Paper: Zhang")], re.DOTALL))
    assert len(answers) == 6
    assert all(re.search(r"\d\.\d", answer) for answer in answers.values())
    (removal,) = (answer for question, answer in answers.items() if "hurt" in question)
    losses = r" [\d.]+ \(5%\), [\d.]+ \(10%\), [\d.]+ \(20%\); "
    assert re.fullmatch(rf"heavy{losses}random{losses}recent{losses}nothing [\d.]+", removal)


def test_page_is_one_file_that_asks_for_nothing(written):
    text = written[0].read_text("utf-8")
    assert "default-src 'none'" in text
    assert not re.search(r'(?:src|href)="(?!data:|#)', text)
    assert "http:" not in text
    assert "https:" not in text
    assert text.count("<script") == 2
    assert "{{" not in text
    assert "{%" not in text
    assert not list(written[0].parent.glob(".*"))
    assert len(re.findall(r'<img alt="[^"]{20,}"', text)) == 10


def test_page_has_the_text_and_the_numbers(written, content, tiny):  # noqa: F811
    assert "".join(content["tokens"]) == TEXT
    import h2o
    from h2o import models

    model, tokenizer = models.load_model(tiny)
    inputs = tokenizer(TEXT, return_tensors="pt")
    a = h2o.analyze(model, **inputs, heavy=12, recent=0.1, min_tokens=0)
    n = len(a)
    scores = np.frombuffer(base64.b64decode(content["scores"]), "<f2").reshape(2, 4, n)
    left = np.frombuffer(base64.b64decode(content["evicted_at"]), "<u2").reshape(2, 2, n)
    for index, layer in enumerate(a.layers):
        np.testing.assert_allclose(scores[index], a.scores(layer, "query"), rtol=2e-3, atol=1e-4)
        assert np.array_equal(left[index], a.evicted_at(layer))


def test_mistakes(tiny, tmp_path, capsys, monkeypatch):  # noqa: F811
    def error(*arguments, code):
        if code == 2:
            with pytest.raises(SystemExit, match="2"):
                cli.main(["analyze", *arguments])
        else:
            assert cli.main(["analyze", *arguments]) == code
        return capsys.readouterr().err.splitlines()[-1]

    assert "cannot read nowhere.txt" in error("--text", "nowhere.txt", code=2)
    assert "--tokens: must be at least 1" in error("--tokens", "0", code=2)
    assert "--removal-tokens" in error("--removal-tokens", "2", code=2)
    short = tmp_path / "short"
    short.write_text("ab")
    page = str(tmp_path / "page.html")
    assert "at least 3" in error("--model", tiny, "--text", str(short), "--output", page, code=1)
    for wrong, said in (
        (("--compare", "mask-global:0.1+0.1"), "is not a cache"),
        (("--compare", "nonsense"), "unknown"),
        (("--heavy", "1.5"), "heavy"),
        (("--heavy", "0", "--recent", "9"), "--heavy: must be above 0"),
        (("--budget", "0.1", "--heavy", "4"), "not both"),
        (("--output", str(tmp_path)), "is a folder"),
    ):
        assert said in error("--output", page, *wrong, code=2)
    # A path below a file cannot be created. The error appears before the model is loaded.
    wrong = error("--model", "nowhere", "--output", str(short / "page.html"), code=1)
    assert "name another output folder" in wrong
    for package in ("jinja2", "matplotlib"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, package, None)
            said = error("--model", tiny, code=1)
            assert f"this needs {package}: {install_command('analysis')}" in said


def test_a_text_that_is_too_long(tiny, tmp_path, capsys, monkeypatch):  # noqa: F811
    """A text above the limit is rejected before anything is measured."""
    (tmp_path / "text").write_text("x" * 300)
    arguments = ["analyze", "--model", tiny, "--text", str(tmp_path / "text"), "--output",
                 str(tmp_path / "page.html")]  # fmt: skip
    monkeypatch.setattr("h2o.analysis.page.LONGEST", 299)
    monkeypatch.setattr("h2o.analysis.analyze.analyze", lambda *_: pytest.fail("measured"))
    assert cli.main(arguments) == 1
    assert "at most 299 tokens, not 300: pass --tokens 299" in capsys.readouterr().err


def test_a_text_without_repetitions(tiny, tmp_path):  # noqa: F811
    """No kind of token occurs more often than another, so the correlation is undefined, not nan."""
    (tmp_path / "text").write_text("".join(map(chr, range(48, 98))))
    page = tmp_path / "page.html"
    assert cli.main(["analyze", "--model", tiny, "--text", str(tmp_path / "text"), "--output",
                     str(page), "--compare", "local:0.2"]) == 0  # fmt: skip
    text = page.read_text("utf-8")
    assert "total attention with count none, attention per occurrence none" in text
    assert "nan" not in re.sub(r"data:[^\"]*|<script.*?</script>|<style.*?</style>", "", text,
                               flags=re.DOTALL)  # fmt: skip


def test_parts_of_characters_say_of_which(content):
    from h2o.utils.draw import labels

    assert labels(["a", "北", "", "", "", "b", " "]) == {
        2: "北 (2 of 4)", 3: "北 (3 of 4)", 4: "北 (4 of 4)",
    }  # fmt: skip
    assert labels([""]) == {}
    start = content["tokens"].index("北")
    assert content["labels"][str(start + 1)] == "北 (2 of 3)"
    assert all(text or str(j) in content["labels"] for j, text in enumerate(content["tokens"]))


def test_axes_of_layers_have_whole_numbers():
    from matplotlib.figure import Figure

    from h2o.analysis.figures import use_whole_numbers

    for last in (1, 2, 5, 29):
        axes = Figure().add_subplot()
        axes.plot(range(last + 1), range(last + 1))
        use_whole_numbers(axes.xaxis)
        ticks = axes.get_xticks()
        assert all(tick == int(tick) for tick in ticks)
        assert 2 <= len(ticks) <= 12


@pytest.mark.slow
@pytest.mark.skipif(browser.find() is None, reason="no Chromium here")
@pytest.mark.timeout(DEADLINE)
def test_in_a_browser(written, content, tmp_path):
    """The page works by keyboard alone, without network, at the widths of a desktop and a phone."""
    n = len(content["tokens"])
    with browser.browser(tmp_path) as page:
        for width, phone in ((1280, False), (390, True), (320, True)):
            page.open(written[0], width, 844, phone)
            assert page.run("document.documentElement.scrollWidth") == width
            assert page.run("[...document.images].every(x => x.naturalWidth > 300)")
        page.open(written[0])
        assert page.run("document.getElementById('words').textContent") == TEXT
        focus = "document.activeElement.id || document.activeElement.className"

        def tab_to(wanted):
            for _ in range(20):
                page.press("Tab")
                if page.run(focus) == wanted:
                    return
            raise AssertionError(f"{wanted} cannot be reached by Tab")

        def status():
            return page.run("document.getElementById('status').textContent")

        def shades():
            return page.run("[...document.querySelectorAll('#words span')].map(x => "
                            "x.style.background + x.className).join()")  # fmt: skip

        page.press("Tab")
        assert page.run(focus) == "skip"
        seen = {shades()}
        for control, key, says in (
            ("layer", "ArrowDown", "Layer 1, all heads"),
            ("head", "ArrowDown", "Layer 1, key/value head 0"),
            ("at", "Home", "token 0 sees 1 of 1 keys"),
            ("at", "ArrowRight", "token 1 sees 2 of 2 keys"),
            ("token", "ArrowUp", "Token 1, "),
        ):
            if page.run(focus) != control:
                tab_to(control)
            page.press(key)
            assert says in status()
            assert shades() not in seen
            seen.add(shades())
        place = "document.querySelectorAll('#words span')[40]"
        page.run(f"{place}.click()")
        assert "Token 40, " in status()
        assert page.run("document.getElementById('token').value") == "40"
        page.run("at.value = at.max; at.dispatchEvent(new Event('input'))")
        left = np.frombuffer(base64.b64decode(content["evicted_at"]), "<u2").reshape(2, 2, n)
        held = int((left[1, 0] > n - 1).sum())
        assert f"token {n - 1} sees {held} of {n} keys" in status()
        assert page.run("document.querySelectorAll('#words .gone').length") == n - held
        scores = np.frombuffer(base64.b64decode(content["scores"]), "<f2").reshape(2, 4, n)
        best = scores[1, :2].astype(float).sum(0).argmax()
        assert page.run("document.querySelector('#best tbody td').textContent") == str(best)
        assert page.problems == []
