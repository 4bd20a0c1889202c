"""`h2o.analyze` against the attention matrices of the same model with eager attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import h2o
from h2o.analysis import measures
from h2o.compat import with_cache
from h2o.utils.draw import pieces
from tests.hf import tiny
from tests.hf.test_simulation import text

N = 90  # more than one block of rows


def matrices(name: str, ids: torch.Tensor) -> dict[int, np.ndarray]:
    """Attention probabilities [H, n, n] of the layers with full attention."""
    model = tiny.model(name, "eager")
    out = model(ids, use_cache=False, output_attentions=True)
    kinds = tiny.FAMILIES[name].layers
    return {i: p[0].numpy() for i, p in enumerate(out.attentions) if kinds[i] == "h2o"}


@pytest.fixture(scope="module", params=["llama", "opt", "gpt_neox", "gemma2", "qwen2-mixed"])
def both(request):
    """(analysis, attention matrices)"""
    ids = text(tokens=N)
    model = tiny.model(request.param, "eager")
    analysis = h2o.analyze(model, ids, heavy=6, recent=6)
    assert model.config._attn_implementation == "eager"
    return analysis, matrices(request.param, ids)


def test_scores_are_column_sums(both):
    a, dense = both
    assert a.layers == sorted(dense)
    for layer, p in dense.items():
        query = p.sum(1)
        kv = query.reshape(a.groups, -1, N).sum(1)
        np.testing.assert_allclose(a.scores(layer, "query"), query, rtol=2e-3, atol=2e-4)
        np.testing.assert_allclose(a.scores(layer), kv, rtol=2e-3, atol=4e-4)
        np.testing.assert_allclose(a.scores(layer, "layer"), kv.sum(0), rtol=2e-3, atol=1e-3)
        np.testing.assert_allclose(a.scores(layer, "layer").sum(), N * a.heads, rtol=1e-5)
        early = p[:, :31, :31].sum(1)
        np.testing.assert_allclose(a.scores(layer, "query", at=30), early, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("threshold", [0.01, 0.2])
def test_sparsity(both, threshold):
    a, dense = both
    for row, p in zip(a.sparsity(threshold), dense.values(), strict=True):
        small = np.tril(p < threshold * p.max(-1, keepdims=True))
        want = small.sum((-1, -2)) / (N * (N + 1) / 2)
        assert 0.05 < want.mean() < 0.999
        np.testing.assert_allclose(row, want, atol=3 / N**2)  # some entries equal the threshold


def test_overlap(both):
    a, dense = both

    def sets(scores, k):
        return [set(np.argsort(-row, kind="stable")[:k]) for row in scores]

    def share(x, y):
        return len(x & y) / len(x | y)

    by_layer = [sets(p.sum((0, 1))[None], 6)[0] for p in dense.values()]
    want = [[share(x, y) for y in by_layer] for x in by_layer]
    np.testing.assert_allclose(a.overlap("layer"), want)
    halves, heads = a.overlap("half"), a.overlap("head", "query")
    half = N // 2
    for index, p in enumerate(dense.values()):
        heaviest = sets(p.sum(1), 6)
        np.testing.assert_allclose(
            heads[index], [[share(x, y) for y in heaviest] for x in heaviest]
        )
        grouped = p.reshape(a.groups, -1, N, N).sum(1)
        early, late = grouped[:, :half, :half].sum(1), grouped[:, half:, :half].sum(1)
        want = [share(x, y) for x, y in zip(sets(early, 6), sets(late, 6), strict=True)]
        np.testing.assert_allclose(halves[index], want)
    assert 0 < halves.mean() < 1


def test_retained_mass_of_each_token(both):
    """The retained mass must be 1 with all keys held. Otherwise it must be the dense attention to
    the keys that are left."""
    a, dense = both
    for layer in dense:
        mass = a.retained_mass(layer, per_token=True)
        assert mass.shape == (a.heads, N)
        assert mass[:, :12] == pytest.approx(1, abs=1e-5)
        np.testing.assert_allclose(a.retained_mass(layer), mass.mean(-1), rtol=1e-6)
        assert a.retained_mass(layer, heavy=N, recent=0) == pytest.approx(1, abs=1e-5)
    first = a.layers[0]  # no layer before it evicts, so its attention is the dense one
    seen = np.arange(N)[:, None] < a.evicted_at(first)[:, None]
    seen = seen.repeat(a.heads // a.groups, axis=0)
    want = (dense[first] * seen).sum(-1)
    if first == 0:
        np.testing.assert_allclose(a.retained_mass(0, per_token=True), want, atol=1e-4)
        assert want.mean() < 0.99


def test_tokens_are_those_of_a_cache():
    model, ids = tiny.model("llama", "h2o"), text(tokens=N)
    a = h2o.analyze(model, ids, heavy=6, recent=6)
    cache = h2o.H2OCache(model.config, heavy=6, recent=6)
    at = 59
    for i in range(at):
        model(ids[:, i : i + 1], **with_cache(cache))
    for layer in a.layers:
        kept, _ = cache.kept(layer)
        for head in range(a.groups):
            tokens = a.tokens(Digits(), layer, head, at=at)
            assert sorted(x.position for x in tokens) == list(range(at + 1))
            held = sorted(x.position for x in tokens if x.held)
            assert held == [*kept[0, head].tolist(), at]
            scores = a.scores(layer, at=at)[head]
            assert [x.score for x in tokens] == sorted(scores.tolist(), reverse=True)
            assert all(x.score == scores[x.position] for x in tokens)
            assert all(x.text == f"{ids[0, x.position]}," for x in tokens)
            assert a.tokens(Digits(), layer, 2 * head, per="query", at=at)[0].held in (0, 1)
        held = {x.position: x.held for x in a.tokens(Digits(), layer, at=at)}
        assert held[at] == 1
        count = [(kept[0] == j).any(1).float().mean().item() for j in range(at)]
        assert [held[j] for j in range(at)] == count


class Digits:
    """A tokenizer that decodes each id to its number."""

    def decode(self, ids, **kwargs):
        return "".join(f"{i}," for i in ids)


class Sliced:
    """A tokenizer whose tokens are three bytes each, and may begin or end within a character."""

    def __init__(self, text):
        raw = text.encode()
        self.parts = [raw[i : i + 3] for i in range(0, len(raw), 3)]

    def decode(self, ids, **kwargs):
        return b"".join(self.parts[i] for i in ids).decode(errors="replace")


def test_pieces_join_to_the_text():
    words = "Grüße aus 北京 und 😀😀 zurück"
    cut = Sliced(words)
    texts = pieces(cut, range(len(cut.parts)))
    assert len(texts) == len(cut.parts)
    assert "".join(texts) == words
    assert pieces(Sliced("abc"), [0]) == ["abc"]


def test_pieces_keep_the_blanks_of_sentencepiece():
    class Piece:
        words = ("\u2581Hello", "\u2581wor", "ld")

        def convert_ids_to_tokens(self, ids):
            return [self.words[i] for i in ids]

        def decode(self, ids, **kwargs):
            return "".join(self.words[i] for i in ids).replace("\u2581", " ").lstrip()

    assert pieces(Piece(), [0, 1, 2]) == [" Hello", " wor", "ld"]


def test_removal_of_nothing_and_of_everything():
    model, ids = tiny.model("llama", "sdpa"), text(tokens=200)
    a = h2o.analyze(model, ids, heavy=0.1, recent=0.1, min_tokens=0)
    table = a.removal((0.0, 0.2))
    logits = model(ids).logits
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    assert table["full"][0.0] == pytest.approx(loss.exp().item(), rel=1e-4)
    for kind in ("heavy", "random", "recent"):
        assert table[kind][0.0] == pytest.approx(table["full"][0.0], rel=1e-4)
        assert table[kind][0.2] != pytest.approx(table["full"][0.0], rel=1e-3)
    assert a.removal((0.2,), seed=1)["random"][0.2] != table["random"][0.2]
    assert a.removal((0.2,), limit=150)["full"][0.0] != table["full"][0.0]
    assert len(a.removals) == 12
    assert a.removal(share for share in (0.0, 0.2)) == table


def test_a_short_text_loses_keys_too():
    """With one block of rows, none of which loses a key, removal would seem to cost nothing."""
    model, ids = tiny.model("llama", "sdpa"), text(tokens=40)
    a = h2o.analyze(model, ids, heavy=4, recent=4)
    table = a.removal((0.5,))
    for kind in ("heavy", "random", "recent"):
        assert table[kind][0.5] != pytest.approx(table["full"][0.0], rel=1e-3)
    for limit, error in ((-1, ValueError), (0, ValueError), (1, ValueError), (2.5, TypeError)):
        with pytest.raises(error, match="expected an integer of at least 2"):
            a.removal(limit=limit)


def test_attention_that_is_not_finite():
    """Otherwise the tables show NaN, and heavy hitters that are none."""
    model = tiny.model("llama", "sdpa")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="attention of layer 1 is not finite"):
        h2o.analyze(model, text(tokens=40), heavy=4, recent=4)


@pytest.mark.parametrize("kind", ["heavy", "random", "recent"])
def test_removed_keys_are_those_that_were_named(kind):
    """Exactly the keys that the definition names must be removed. The expected output is computed
    row by row from the definition."""
    from h2o.analysis.collect import Attention
    from h2o.analysis.removal import attend_without

    generator = torch.Generator().manual_seed(3)
    H, G, n, D, share, rows = 4, 2, 150, 8, 0.3, 9
    q, k, v = (2 * torch.randn(x, n, D, generator=generator) for x in (H, G, G))
    chance = torch.rand(G, n, generator=generator)
    out = attend_without(Attention(q, k, v, 0.3, 0.0), kind, share, chance)
    keys, values = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    logits = (0.3 * q @ keys.mT).masked_fill(future, -torch.inf)
    p = logits.softmax(-1)
    for i in range(n):
        first = i // rows * rows
        lost = int(share * first)
        for h in range(H):
            g = h // 2
            if kind == "recent":
                gone = torch.arange(i - lost, i)
            else:
                rank = p[2 * g : 2 * g + 2, :first, :first].sum((0, 1))
                rank = rank if kind == "heavy" else chance[g, :first]
                gone = rank.topk(lost).indices
            row = logits[h, i].clone()
            row[gone] = -torch.inf
            torch.testing.assert_close(out[i, h], row.softmax(-1) @ values[h], atol=1e-5, rtol=0)


def test_pads_are_left_out():
    model, ids = tiny.model("llama", "sdpa"), text(tokens=40)
    alone = h2o.analyze(model, ids, heavy=4, recent=4)
    padded = torch.nn.functional.pad(ids, (5, 3))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (5, 3))
    a = h2o.analyze(model, input_ids=padded, attention_mask=mask, heavy=4, recent=4)
    assert np.array_equal(a.ids, alone.ids)
    assert np.array_equal(a.scores(1), alone.scores(1))


def test_half_precision():
    a = h2o.analyze(tiny.model("llama", "sdpa").bfloat16(), text(tokens=40), heavy=4, recent=4)
    assert a.scores(0).dtype == np.float32
    assert a.scores(0).sum() == pytest.approx(40 * a.heads, rel=1e-4)


def test_attention_that_looks_both_ways_is_refused():
    model = tiny.model("llama", "sdpa")
    model.model.layers[0].self_attn.is_causal = False
    with pytest.raises(h2o.UnsupportedError, match="bidirectional"):
        h2o.analyze(model, text(tokens=20), heavy=4, recent=4)


def test_what_does_not_fit_is_refused():
    model, ids = tiny.model("llama", "sdpa"), text(tokens=20)
    with pytest.raises(TypeError, match="return_tensors"):
        h2o.analyze(model, "a text")
    with pytest.raises(ValueError, match="one text at a time"):
        h2o.analyze(model, ids.repeat(2, 1))
    with pytest.raises(ValueError, match="at least 3"):
        h2o.analyze(model, ids[:, :2])
    with pytest.raises(ValueError, match=r"expected a mask \[1, 20\], as input_ids"):
        h2o.analyze(model, ids, attention_mask=torch.ones(1, 19))
    with pytest.raises(TypeError, match="unknown parameter 'havy'"):
        h2o.analyze(model, ids, havy=3)
    with pytest.raises(ValueError, match="20, but the text has 20 tokens, so nothing would be evi"):
        h2o.analyze(model, ids, heavy=4, recent=4, prompt_length=20)
    with pytest.raises(ValueError, match="nothing for h2o to analyze"):
        h2o.analyze(tiny.model("mistral-window", "sdpa"), ids)
    with pytest.raises(TypeError, match="LlamaConfig, which has no weights: write model, token"):
        h2o.analyze(model.config, ids)
    with pytest.raises(TypeError, match="LlamaModel has none: load the model with h2o"):
        h2o.analyze(model.model, ids)
    model.train()
    with pytest.raises(RuntimeError, match="eval"):
        h2o.analyze(model, ids)
    a = h2o.analyze(model.eval(), ids, heavy=0, recent=4)
    with pytest.raises(ValueError, match="no heavy hitters"):
        a.overlap()
    for wrong in (
        lambda: a.scores(2),
        lambda: a.scores(0.0),
        lambda: a.scores(True),
        lambda: a.scores(np.arange(2)),
        lambda: a.scores(0, "head"),
        lambda: a.scores(0, at=20),
        lambda: a.scores(0, at=1.5),
        lambda: a.tokens(Digits(), 0, 2),
        lambda: a.tokens(Digits(), 0, 0.5),
        lambda: a.tokens(Digits(), 0, 4, per="query"),
        lambda: a.overlap("word"),
        lambda: a.overlap("head", "layer"),
        lambda: a.overlap("layer", "heads"),
        lambda: a.sparsity(0),
        lambda: a.sparsity("1%"),
        lambda: a.removal([1.5]),
        lambda: a.removal(["1%"]),
        lambda: a.removal(seed="1"),
        lambda: a.table("words"),
    ):
        with pytest.raises(
            (TypeError, ValueError), match=r"layer|per|at|head|by|threshold|share|table|seed"
        ):
            wrong()
    with pytest.raises(ValueError, match="layer 7 was not analyzed"):
        a.scores(7)
    with pytest.raises(TypeError, match=r"shares is 0.2; expected a list of numbers"):
        a.removal(0.2)


def test_tables():
    a = h2o.analyze(tiny.model("llama", "sdpa"), text(tokens=60), heavy=4, recent=4)
    layers, heads = a.table(), a.table("head")
    assert {len(column) for column in layers.values()} == {2}
    assert {len(column) for column in heads.values()} == {8}
    assert heads["layer"].tolist() == [0] * 4 + [1] * 4
    assert heads["head"].tolist() == [0, 1, 2, 3] * 2
    for name in ("sparsity", "half_overlap", "retained_mass"):
        np.testing.assert_allclose(heads[name].reshape(2, 4).mean(1), layers[name])
    np.testing.assert_allclose(heads["half_overlap"].reshape(2, 2, 2)[..., 0], a.overlap("half"))


def test_power_law():
    ranks = np.arange(1, 1001)
    law = measures.power_law(np.stack([5 * ranks**-0.7, np.exp(-0.01 * ranks)]))
    np.testing.assert_allclose(law.slope[0], -0.7, rtol=1e-6)
    np.testing.assert_allclose([law.r2[0], law.exponential_r2[1]], 1)
    assert law.exponential_r2[0] < 0.9 > law.r2[1]
    assert measures.power_law(np.array([3.0, 0.0, 0.0, 1.0])).slope < 0


def test_carriers():
    scores = np.array([[1.0, 5.0, 3.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    shares = measures.carriers(scores, (0.5, 0.8, 0.81, 1.0))
    assert {share: list(count) for share, count in shares.items()} == {
        0.5: [1, 2], 0.8: [2, 4], 0.81: [3, 4], 1.0: [4, 4],
    }  # fmt: skip


def test_counts():
    ids = np.array([7, 3, 7, 7, 9, 3])
    counts, sums = measures.per_type(ids, np.array([1.0, 2, 3, 4, 5, 6])[None])
    assert counts.tolist() == [2, 3, 1]
    assert sums.tolist() == [[8, 8, 5]]


def test_rank_correlation():
    x = np.array([1.0, 2, 2, 3, 9])
    assert measures.spearman(x, x**3) == pytest.approx(1)
    assert measures.spearman(x, -x) == pytest.approx(-1)
    # The ranks are 1, 2.5, 2.5, 4, 5 and 2, 1, 3, 5, 4.
    a = np.array([1, 2.5, 2.5, 4, 5])
    b = np.array([2, 1, 3, 5, 4])
    assert measures.spearman(x, b) == pytest.approx(np.corrcoef(a, b)[0, 1])
    assert np.isnan(measures.spearman(x, np.ones(5)))


def test_top_and_jaccard():
    chosen = measures.top(np.array([[1.0, 3, 3, 2], [0, 0, 0, 0]]), 2)
    assert chosen.tolist() == [[False, True, True, False], [True, True, False, False]]
    assert measures.jaccard(chosen).tolist() == [[1, 1 / 3], [1 / 3, 1]]
