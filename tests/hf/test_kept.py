"""Views of a cache and of an analysis for people: text, heat maps, reports and plots."""

from __future__ import annotations

import html.parser
import pickle

import pytest
import torch

import h2o
from h2o import compat
from h2o.analysis.result import Analysis
from h2o.compat import with_cache
from h2o.hf.simulation.simulation import Simulation
from tests.hf import tiny
from tests.hf.test_analysis import Digits


class Balanced(html.parser.HTMLParser):
    """An HTML parser that fails on tags that are not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def held():
    """(cache, inputs, all ids that it has seen) of two rows, the second of which is padded."""
    model = tiny.model("llama")
    inputs = tiny.batch(tiny.prompts(30, 22))
    cache = h2o.H2OCache(model.config, heavy=5, recent=4)
    out = model.generate(**inputs, **with_cache(cache), max_new_tokens=8, do_sample=False)
    return cache, inputs, out


def test_kept_is_a_pair(held):
    cache = held[0]
    positions, scores = cache.kept(1)
    assert positions.shape == scores.shape == (2, 2, 9)
    assert torch.equal(cache.kept(1).positions, positions)


@pytest.mark.parametrize("head", [None, 0, 1])
@pytest.mark.parametrize("row", [0, 1])
def test_tokens(held, row, head):
    cache, inputs, out = held
    tokens = cache.tokens(
        Digits(), out, 1, row=row, head=head, attention_mask=inputs["attention_mask"]
    )
    positions, scores = cache.kept(1)
    heads = [0, 1] if head is None else [head]
    assert [x.position for x in tokens] == sorted({*positions[row, heads].flatten().tolist()})
    real = out[row, 8:] if row else out[row]
    for token in tokens:
        where = positions[row, heads] == token.position
        assert token.text == f"{real[token.position]},"
        assert token.score == pytest.approx(scores[row, heads][where].sum().item())
        assert token.heads == [g for g, x in zip(heads, where, strict=True) if x.any()]


def test_tokens_of_another_text(held):
    """Positions count the text that the cache has seen, so another one would give wrong words."""
    cache, inputs, out = held
    given = {"row": 1, "attention_mask": inputs["attention_mask"]}
    for look in (
        lambda: cache.tokens(Digits(), out, 1, row=1),
        lambda: cache.kept(1).tokens(Digits(), out, row=1),
        lambda: cache.kept(1).highlight(Digits(), out, row=1),
    ):
        with pytest.raises(ValueError, match=r"row 1 are not the text .* attention_mask if rows"):
            look()
    kept = pickle.loads(pickle.dumps(cache.kept(1)))
    with pytest.raises(ValueError, match="row 0 are not the text"):
        kept.tokens(Digits(), out.flip(1))
    assert cache.tokens(Digits(), out[1, 8:], 1, row=1) == cache.tokens(Digits(), out, 1, **given)
    shorter = cache.fork()
    shorter.batch_select_indices([1, 0])
    with pytest.raises(ValueError, match="row 0 are not the text"):
        shorter.tokens(Digits(), out, 1)
    shorter.batch_select_indices([1])
    shorter.evict([(2, 5)], ids=out[:1])
    with pytest.raises(ValueError, match=r"row 0 .* without the spans that evict\(\) removed"):
        shorter.tokens(Digits(), out[:1], 1)
    left = h2o.without_spans(out[0], [(2, 5)])
    assert [x.text for x in shorter.tokens(Digits(), left, 1)] == [
        f"{left[0, x.position]}," for x in shorter.tokens(Digits(), left, 1)
    ]


def test_a_layer_has_one_name():
    """A layer's number must have the same name in all methods of h2o's own."""
    for call in (
        *(h2o.H2OCache.kept, h2o.H2OCache.tokens, h2o.H2OCache.evicted_at),
        *(Simulation.evicted_at, Simulation.scores, Simulation.retained_mass),
        *(Analysis.evicted_at, Analysis.scores, Analysis.retained_mass, Analysis.tokens),
    ):
        assert compat.accepts(call, "layer"), call


def test_highlight_has_the_whole_text(held):
    cache, inputs, out = held
    shown = cache.kept(1).highlight(
        Digits(), out, row=1, head=0, attention_mask=inputs["attention_mask"]
    )
    parsed = Balanced(shown._repr_html_())
    assert parsed.text == "".join(f"{i}," for i in out[1, 8:])
    assert shown.count("line-through") == out.shape[1] - 8 - 9
    assert shown.count("background:rgb") >= 5


def test_what_does_not_fit_is_refused(held):
    cache, inputs, out = held
    for ids in (inputs["input_ids"], out[:, :-2]):  # the cache has not seen the last of `out`
        with pytest.raises(ValueError, match="everything it has seen"):
            cache.tokens(Digits(), ids, 1)
    with pytest.raises(ValueError, match="more than the 30"):
        cache.tokens(Digits(), inputs["input_ids"], 1, attention_mask=torch.ones(2, 31))
    for wrong in ({"row": 2}, {"head": 2}):
        with pytest.raises(IndexError):
            cache.tokens(Digits(), inputs["input_ids"], 1, **wrong)


def test_heat_map(held):
    parsed = Balanced(held[0].kept(0)._repr_html_())
    assert parsed.tags.count("svg") == 4
    assert parsed.tags.count("rect") == 4 * 9
    model = tiny.model("llama")
    cache = h2o.H2OCache(model.config, heavy=300, recent=4)
    assert "no keys" in cache.kept(0)._repr_html_()
    model(tiny.prompts(450)[0], **with_cache(cache))
    parsed = Balanced(cache.kept(0)._repr_html_())
    assert 2 * 100 < parsed.tags.count("rect") <= 2 * 200
    assert "304 of 450 keys held" in cache.kept(0)._repr_html_()


def test_report_in_a_notebook(held):
    cache = held[0]
    parsed = Balanced(cache.report()._repr_html_())
    assert parsed.tags.count("tr") == 4
    for cell in str(cache.report()).splitlines()[2].split():
        assert cell in parsed.text
    empty = h2o.H2OCache(tiny.model("llama").config)
    assert "empty" in Balanced(empty.report()._repr_html_()).text
    gemma = h2o.H2OCache(tiny.model("gemma2").config, heavy=3, recent=3)
    assert "sliding" in Balanced(gemma.report()._repr_html_()).text


def test_plots_take_and_return_axes(held, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(pyplot, "show", lambda *_: pytest.fail("show() was called"))
    cache = held[0]
    for plot in (cache.report().plot, cache.kept(1).plot):
        ax = figure.Figure().add_subplot()
        assert plot(ax) is ax
        assert ax.get_title()
        new_ax = plot()
        assert new_ax.figure is not ax.figure
        pyplot.close(new_ax.figure)
    assert len(ax.figure.axes) == 2  # the colors have a scale
    shown = ax.images[0].get_array()
    positions, scores = cache.kept(1)
    assert shown.shape == (2, int(positions[0].max()) + 1)
    assert shown[1, positions[0, 1, 3]] == scores[0, 1, 3]
    assert shown.count() == 18


def test_bright_is_much_attention_in_every_heat_map(held):
    figure = pytest.importorskip("matplotlib.figure")
    a = h2o.analyze(tiny.model("llama", "sdpa"), tiny.prompts(20)[0], heavy=4, recent=4)
    maps = []
    for plot in (held[0].kept(1).plot, lambda ax: a.plot("scores", ax)):
        colors = plot(figure.Figure().add_subplot()).images[0].cmap
        assert sum(colors(0.0)[:3]) < sum(colors(0.5)[:3]) < sum(colors(1.0)[:3])
        maps.append(colors.name)
    assert maps[0] == maps[1]


@pytest.mark.parametrize("name", ["sparsity", "power_law", "carriers", "overlap", "halves",
                                  "frequency", "removal", "retained_mass", "retained_over_time",
                                  "scores"])  # fmt: skip
def test_figures_of_an_analysis(name, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(pyplot, "show", lambda *_: pytest.fail("show() was called"))
    a = h2o.analyze(tiny.model("llama", "sdpa"), tiny.prompts(40)[0], heavy=4, recent=4)
    ax = figure.Figure().add_subplot()
    assert a.plot(name, ax) is ax
    assert ax.get_title()
    assert ax.get_xlabel()
    assert ax.has_data()
    if name == "scores":
        by_query = a.plot(name, layer=1, per="query")
        assert by_query.images[0].get_array().shape == (4, 40)
        pyplot.close(by_query.figure)


def test_figures_that_do_not_exist_are_refused():
    a = h2o.analyze(tiny.model("llama", "sdpa"), tiny.prompts(20)[0], heavy=4, recent=4)
    for wrong in ("colors", ["scores"]):
        with pytest.raises(ValueError, match='expected "sparsity"'):
            a.plot(wrong)


def test_highlight_of_an_analysis():
    ids = tiny.prompts(40)[0]
    a = h2o.analyze(tiny.model("llama", "sdpa"), ids, heavy=4, recent=4)
    shown = a.highlight(Digits(), 1, 0, at=30)
    assert Balanced(shown).text == "".join(f"{i}," for i in ids[0, :31])
    assert shown.count("evicted") == 31 - 9
