"""`h2o.calibrate`: costs against dense attention and plain autograd, allocation, profiles."""

from __future__ import annotations

import itertools
import json
from importlib import metadata

import numpy as np
import pytest
import torch
import transformers

import h2o
from h2o.calibration import calibrate as module
from h2o.calibration.allocate import allocate, hull_edges
from h2o.calibration.calibrate import _expand_to_layers
from h2o.calibration.head_costs import heavy_and_recent, measure_costs, watch_gradients
from h2o.calibration.refine import measure_worth, move_budgets, surround
from h2o.errors import UserError
from h2o.model_identity import describe, sample
from tests.hf import tiny
from tests.hf.test_simulation import text

WINDOW = 48


def config_of_head(budget):
    heavy, recent = heavy_and_recent(budget)
    return h2o.H2OConfig(heavy=heavy, recent=recent, sinks=4, score_by="mean", value_weighted=True)


def ids_of(tokens=200, seed=0):
    return text(tokens=tokens, seed=seed)


@pytest.fixture(scope="module")
def profile():
    return h2o.calibrate(tiny.model("llama"), ids_of(), window=WINDOW)


# ---- costs ---------------------------------------------------------------------------------------


def test_costs_are_those_of_dense_attention():
    """The cost of a head must be that of the change of its output, computed here with dense
    attention under the same mask."""
    model, ids = tiny.model("llama"), ids_of(60)[0]
    layers = watch_gradients(model, ids, torch.Generator().manual_seed(0), draws=2)
    assert sorted(layers) == [0, 1]
    for layer, (seen, gradients) in layers.items():
        table = measure_costs(seen, gradients, [8, 16, 60])
        assert table.shape == (2, 3)
        assert (table[:, 2] == 0).all(), "nothing evicted"
        assert (table[:, 0] > table[:, 1]).all()
        config = config_of_head(8)
        with h2o.simulated(model, config, trace=True) as simulation:
            model(ids[None], use_cache=False)
        if layer:
            continue  # the keys of later layers differ in the simulated model
        gone = simulation.evicted_at(layer)[0]
        logits = seen.query @ seen.keys.repeat_interleave(2, 0).mT * seen.scale
        row = torch.arange(60)
        causal = row[:, None] >= row
        still = causal & (row[:, None] < gone.repeat_interleave(2, 0)[:, None])
        values = seen.values.repeat_interleave(2, 0)
        full, cut = (
            logits.masked_fill(~mask, -torch.inf).softmax(-1) @ values for mask in (causal, still)
        )
        change = (cut - full).transpose(0, 1)
        by_head = [(change * g).sum(-1).reshape(60, 2, 2).sum(-1) for g in gradients]
        want = torch.stack(by_head).square().sum(1).mean(0) / (2 * 60)
        torch.testing.assert_close(table[:, 0].float(), want, rtol=1e-3, atol=1e-7)


def test_gradients_predict_what_a_change_does():
    """Gradients must agree with a finite difference of the likelihood of the drawn tokens, with one
    output moved."""
    model, ids = tiny.model("llama", "eager").double(), ids_of(20)[0]
    torch.manual_seed(0)
    change = torch.randn(20, 32, dtype=torch.double) * 3e-3
    outputs = model.model.layers[1].self_attn.o_proj

    def said(factor):
        hook = outputs.register_forward_pre_hook(lambda _, given: (given[0] + factor * change,))
        logits = model(ids[None], use_cache=False).logits[0]
        hook.remove()
        return logits.log_softmax(-1)

    total = said(0).exp().cumsum(-1)
    point = torch.rand(20, 1, generator=torch.Generator().manual_seed(3)).double()
    drawn = torch.searchsorted(total, point * total[:, -1:])
    want = (said(0.5) - said(-0.5)).gather(1, drawn).sum()
    layers = watch_gradients(tiny.model("llama"), ids, torch.Generator().manual_seed(3), draws=1)
    _, (gradient,) = layers[1]
    derivative = (gradient.reshape(20, 32).double() * change).sum()
    torch.testing.assert_close(derivative, want, rtol=0.01, atol=1e-5)


def test_frozen_parameters_and_the_model_stay_as_they_were():
    model = tiny.model("llama", "sdpa").requires_grad_(False)
    a = watch_gradients(model, ids_of(30)[0], torch.Generator().manual_seed(0), draws=1)
    b = watch_gradients(
        tiny.model("llama"), ids_of(30)[0], torch.Generator().manual_seed(0), draws=1
    )
    for layer in a:
        torch.testing.assert_close(a[layer][1], b[layer][1])
    assert model.config._attn_implementation == "sdpa"
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())


# ---- refinement ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_worth_is_the_slope_of_the_divergence(name):
    """The worth of keys must agree with a finite difference of the divergence, with outputs moved
    in the direction in which more keys change them."""
    model, ids = tiny.model(name), ids_of(60)[0]
    kinds = tiny.FAMILIES[name].layers
    layer = max(i for i, kind in enumerate(kinds) if kind == "h2o")
    base = model.model if hasattr(model, "model") else model.transformer
    projection = base.layers[layer].self_attn.o_proj
    served = [i for i, kind in enumerate(kinds) if kind == "h2o"]
    budgets = np.full((3, len(served), 2), 16)
    budgets[1:, -1, 0] = 20, 13  # only one head gets more and fewer keys

    def run(budget, move=0.0):
        """(log-probabilities, input of the layer's output projection)"""
        configs = [config_of_head(x) for x in (budget, 16)]
        heavy, recent = (
            [[getattr(x, field) for x in (configs if i == layer else configs[1:] * 2)]
             for i in range(len(kinds))]
            for field in ("heavy", "recent")
        )  # fmt: skip
        config = h2o.H2OConfig(
            heavy=heavy, recent=recent, sinks=4, score_by="mean", value_weighted=True
        )
        outputs = []

        def hook(_, inputs):
            outputs.append(inputs[0])
            return (inputs[0] + move,)

        handle = projection.register_forward_pre_hook(hook)
        with h2o.simulated(model, config):
            logits = model(ids[None], use_cache=False).logits[0]
        handle.remove()
        return logits.double().log_softmax(-1), outputs[0]

    full = model(ids[None], use_cache=False).logits[0].double().log_softmax(-1)

    def divergence(said):
        return (full.exp() * (full - said)).sum().item() / 60

    measured, total = measure_worth(model, ids, budgets)
    assert total == pytest.approx(divergence(run(16)[0]), rel=1e-3)
    change = run(13)[1] - run(20)[1]
    step = 0.02
    want = (divergence(run(16, step * change)[0]) - divergence(run(16, -step * change)[0])) / step
    assert measured[-1, 0] == pytest.approx(want / 2, rel=0.03, abs=1e-6)
    rest = measured.copy()
    rest[-1, 0] = 0
    assert (rest == 0).all()


def test_steps_move_budgets_to_where_they_do_most():
    budgets = np.array([[10.0, 10, 10, 10]])
    after = move_budgets(budgets, np.full((1, 4), 10), np.array([[4.0, 1, -1, 0]]))
    assert after.tolist() == [[20, 10, 5, 5]]
    shares = np.array([[1.0, 1, 0.1, 3]])
    for mean in (8, 9, 20, 60, 99, 100):
        spread_budgets = module.scale_keys(shares, mean, 100)
        assert spread_budgets.mean() == pytest.approx(mean)
        assert spread_budgets.min() >= 8
        assert spread_budgets.max() <= 100
    assert surround(np.array([[10.0, 90]]), 8, 100).tolist() == [[[10, 90]], [[15, 100]], [[8, 60]]]


# ---- allocation ----------------------------------------------------------------------------------


def test_hull_leaves_out_what_lies_above():
    grid = np.arange(1, 5)
    assert list(hull_edges(grid, np.array([4, 3.9, 1, 0]))) == [(-1.5, 2), (-1, 1)]
    assert list(hull_edges(grid, np.array([1, 5, 1, 2]))) == []


def test_allocation_is_the_best_of_all():
    """For convex costs, greedy steps must find the lowest sum, which a search through all
    allocations gives."""
    generator = np.random.default_rng(0)
    grid = [1, 2, 3, 4, 5]
    slopes = -np.sort(-generator.random((3, 4)), axis=1)  # falling
    table = np.stack([slopes[:, i:].sum(1) for i in range(5)], axis=1)
    for total in range(3, 16):
        budgets = allocate(grid, table, total)
        assert budgets.sum() == pytest.approx(total)
        cost = sum(np.interp(x, grid, row) for x, row in zip(budgets, table, strict=True))
        ways = [w for w in itertools.product(range(5), repeat=3) if sum(w) + 3 == total]
        assert cost == pytest.approx(min(table[range(3), list(way)].sum() for way in ways))


def test_allocation_that_nobody_needs_is_shared_out():
    budgets = allocate([8, 16, 100], np.array([[1.0, 0, 0], [0, 0, 0]]), 80)
    assert budgets.sum() == pytest.approx(80)
    assert budgets[0] > budgets[1] > 8
    assert allocate([8, 100], np.zeros((2, 2)), 500).tolist() == [100, 100]


# ---- h2o.calibrate -------------------------------------------------------------------------------


def test_profile_of_a_tiny_model(profile):
    model = tiny.model("llama")
    assert profile.fractions == module.FRACTIONS
    assert profile.window == WINDOW
    for fraction in (0.01, 0.2, 0.25, 0.5, 1.0):
        shares = np.array(profile.shares_for(fraction))
        assert shares.shape == (2, 2)
        assert (shares > 0).all()
        assert shares.mean() == pytest.approx(1, abs=1e-9)
    assert np.ptp(profile.shares_for(0.3)) > 0.1
    for fraction, shares in zip(profile.fractions, profile.shares, strict=True):
        assert np.max(shares) * max(fraction * WINDOW, 8) <= WINDOW + 0.01, "a text has no more"
    assert profile.texts[0]["windows"] == 4
    assert profile.settings["windows"] == 4
    assert profile.versions["torch"] == metadata.version("torch")
    profile.check(model)
    profile.check(model.config)
    assert "llama, 2 layers of 2" in repr(profile)
    assert profile in {profile}


def test_needier_heads_get_more():
    """A head whose values are zero loses nothing by eviction, so it must get the smallest
    budget."""
    model = tiny.model("llama")
    model.model.layers[1].self_attn.v_proj.weight[8:] = 0
    shares = np.array(h2o.calibrate(model, ids_of(), window=WINDOW).shares_for(0.4))
    assert shares[1, 1] == shares.min()
    assert shares[1, 1] * 0.4 * WINDOW == pytest.approx(8, abs=0.1), "the least that heads get"


def test_sliding_layers_have_ones():
    profile = h2o.calibrate(tiny.model("gemma2"), ids_of(), window=WINDOW)
    shares = np.array(profile.shares_for(0.4))
    assert shares[[0, 2]] == pytest.approx(1, abs=1e-3)
    assert shares[[1, 3]].mean() == pytest.approx(1, abs=1e-3)
    assert (shares[[1, 3]] != 1).all()


def test_several_texts_and_fewer_windows():
    a, b = ids_of(200), ids_of(100, seed=1)[0]
    profile = h2o.calibrate(tiny.model("opt"), {"a": a, "b": b}, window=WINDOW, windows=4)
    assert [(x["name"], x["windows"], x["tokens"]) for x in profile.texts] == [
        ("a", 2, 200),
        ("b", 2, 100),
    ]
    chosen = list(module.iterate_windows(module._texts([a, b]), WINDOW, 5))
    assert [x.text for x in chosen] == ["text 0", "text 1", "text 0", "text 1", "text 0"]
    assert torch.equal(chosen[0].ids, a[0, :WINDOW])
    assert len(list(module.iterate_windows(module._texts([a, b]), WINDOW, None))) == 6


def test_an_interrupted_run_goes_on(tmp_path):
    model, file = tiny.model("llama"), tmp_path / "unfinished.json"
    seen = []

    def stop(done, total):
        seen.append((done, total))
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        h2o.calibrate(model, ids_of(), window=WINDOW, resume=file, progress=stop)
    assert seen == [(0, 28), (1, 28), (2, 28)], "4 windows, two steps over them at 3 budgets"
    rest = []
    resumed = h2o.calibrate(
        model, ids_of(), window=WINDOW, resume=file, progress=lambda *x: rest.append(x)
    )
    assert (rest[0], rest[-1]) == ((2, 28), (28, 28))
    assert resumed.shares == h2o.calibrate(model, ids_of(), window=WINDOW).shares
    again = []
    h2o.calibrate(
        model, ids_of(), window=WINDOW, seed=1, resume=file, progress=lambda *x: again.append(x)
    )
    assert again[0] == (0, 28), "of another seed"
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UserError, match="not a file of results"):
        h2o.calibrate(model, ids_of(), window=WINDOW, resume=tmp_path / "other.json")


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (TypeError, "expected token ids", {"input_ids": "a text"}),
        (TypeError, "everything that a tok", {"input_ids": {"input_ids": 0, "attention_mask": 0}}),
        (ValueError, "there is no text", {"input_ids": []}),
        (ValueError, "fewer than a window of 48", {"input_ids": torch.ones(20, dtype=torch.long)}),
        (ValueError, r"\[2, 9\]", {"input_ids": torch.ones(2, 9, dtype=torch.long)}),
        (ValueError, "fractions", {"fractions": [0.0]}),
        (TypeError, "fractions is True; expected a number", {"fractions": [True]}),
        (
            ValueError,
            "fractions is nan; expected",
            {"fractions": [0.2, float("nan"), 0.4]},
        ),
        (TypeError, "fractions is 0.2; expected a list of numbers", {"fractions": 0.2}),
        (TypeError, "fractions is '0.2'; expected a list", {"fractions": "0.2"}),
        (ValueError, "draws", {"draws": 0}),
        (TypeError, "draws is True; expected an integer of at least 1", {"draws": True}),
        (ValueError, "seed is 9223372036854775808; expected", {"seed": 2**63}),
        (ValueError, "windows", {"windows": 0}),
        (TypeError, "windows", {"windows": 1.5}),
        (TypeError, "windows is True; expected an integer of at least 1", {"windows": True}),
        (ValueError, "refine", {"refine": float("nan")}),
        (TypeError, "refine is True; expected", {"refine": True}),
        (ValueError, "window is 16; expected an integer of at least 17", {"window": 16}),
    ],
)
def test_refusals(error, match, arguments):
    with pytest.raises(error, match=match):
        h2o.calibrate(tiny.model("llama"), **{"input_ids": ids_of(), "window": WINDOW, **arguments})


def test_models_that_cannot_be_calibrated():
    with pytest.raises(ValueError, match="sliding"):
        h2o.calibrate(tiny.model("mistral-window"), ids_of(), window=WINDOW)
    with pytest.raises(RuntimeError, match="eval"):
        h2o.calibrate(tiny.model("llama").train(), ids_of(), window=WINDOW)
    with pytest.raises(TypeError, match="LlamaConfig, which has no weights: write model, token"):
        h2o.calibrate(tiny.model("llama").config, ids_of(), window=WINDOW)
    with pytest.raises(TypeError, match="LlamaModel has none: load the model with h2o"):
        h2o.calibrate(tiny.model("llama").model, ids_of(), window=WINDOW)
    overflowing = tiny.model("llama")
    overflowing.model.layers[1].mlp.down_proj.weight[0, 0] = torch.inf
    for refine in (0.2, 0):
        with pytest.raises(ValueError, match="costs of a window of text are not finite"):
            h2o.calibrate(overflowing, ids_of(), window=WINDOW, refine=refine)


# ---- profiles ------------------------------------------------------------------------------------


def test_save_and_load(profile, tmp_path):
    path = tmp_path / "profile.json"
    profile.save(path)
    loaded = h2o.Profile.load(path)
    assert loaded == profile, "both must divide a budget alike"
    assert sorted(tmp_path.iterdir()) == [path]
    content = json.loads(path.read_text())
    assert "abc" not in path.read_text(), "no text goes into a profile"
    for change, match in [
        ({"kind": "x"}, "not a profile"),
        ({"layout": 99}, "layout 99"),
        ({"shares": None}, "damaged"),
        ({"model": "llama"}, "damaged"),
        ({"weights": [1.0]}, "damaged"),
        ({"weights": {"lm_head.weight": 5}}, "damaged"),
        ({"weights": {"lm_head.weight": [1.0, None]}}, "damaged"),
        ({"shares": [[[1, -1]]] * 5}, "positive"),
    ]:
        path.write_text(json.dumps(content | change))
        with pytest.raises(ValueError, match=rf"profile\.json: .*{match}"):
            h2o.Profile.load(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"profile\.json"):
        h2o.Profile.load(path)
    path.write_text(json.dumps(content), "utf-8-sig")  # as some editors write it
    assert h2o.Profile.load(path) == profile


def test_shares_of_long_windows_do_not_round_to_nothing(tmp_path):
    """In a window of 200,000 tokens 8 keys are a share of 0.00006."""
    ours = tiny.model("llama")
    shares = np.array([[8 / 140000, 1.0], [1.0, 1.99994]])
    expanded = _expand_to_layers(shares, [0, 1], ours)
    profile = h2o.Profile((0.7,), (expanded,), 200000)
    profile.save(tmp_path / "profile.json")
    loaded = h2o.Profile.load(tmp_path / "profile.json")
    assert loaded.shares[0][0][0] == pytest.approx(shares[0, 0], rel=1e-3)


def test_interpolation():
    a, b = ((1.5, 0.5),), ((1.1, 0.9),)
    profile = h2o.Profile((0.1, 0.4), (a, b), 100)
    assert profile.shares_for(0.01) == profile.shares_for(0.1) == a
    assert profile.shares_for(0.9) == profile.shares_for(0.4) == b
    assert profile.shares_for(0.2) == (pytest.approx((1.3, 0.7)),)
    with pytest.raises(ValueError, match="expected a positive number"):
        profile.shares_for(0)


@pytest.mark.parametrize(
    ("fractions", "shares", "match"),
    [
        ((), (), "at least one"),
        ((0.2, 0.1), (((1,),), ((1,),)), "rise"),
        ((0.5, 1.5), (((1,),), ((1,),)), r"\(0, 1\]"),
        ((0.1, 0.2), (((1,),),), "1 tables for 2"),
        ((0.1,), (((),),), "empty"),
        ((0.1,), (((1, 0),),), "positive"),
    ],
)
def test_profiles_that_are_none(fractions, shares, match):
    with pytest.raises(ValueError, match=match):
        h2o.Profile(fractions, shares, 100)


def test_another_model_is_refused(profile):
    with pytest.raises(ValueError, match="this model's model_type is opt, not llama"):
        profile.check(tiny.model("opt"))
    other = tiny.model("llama")
    for parameter in other.parameters():
        parameter *= 1.05
    profile.check(other.config)
    with pytest.raises(ValueError, match=r"weights of .* differ by 5\.0%"):
        profile.check(other)
    deeper = tiny.model("llama").config
    deeper.num_hidden_layers = 3
    with pytest.raises(ValueError, match="num_hidden_layers is 3, not 2"):
        profile.check(deeper)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_is_known_again_in_another_dtype(profile, dtype):
    profile.check(tiny.model("llama").to(dtype))


def test_description_of_models_that_leave_things_out():
    shape = describe(transformers.GPT2Config(n_embd=32, n_head=4))
    assert (shape["num_key_value_heads"], shape["head_dim"]) == (4, 8)
    assert len(sample(tiny.model("llama"))) > 5
