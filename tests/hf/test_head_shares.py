"""Heads that share a budget: `head_shares`, amounts per head, and the memory they take."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from h2o import H2OCache, H2OConfig
from h2o.compat import with_cache
from h2o.config.head_budgets import LEAST, allocate_tokens
from h2o.config.layer_plan import LayerPlan
from h2o.hf.cache import cache_plan
from tests import inputs
from tests.hf.drive import feed, forward, new_cache
from tests.hf.modes import uneven
from tests.hf.tiny import batch, greedy, model, prompts, shared

TABLE = [[0.5, 1.5], [2.5, 0.4]]

numbers = st.floats(0.01, 100.0)


@given(
    st.integers(1, 300),
    st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=5),
    st.integers(1, 20),
)
def test_parts_of_a_budget(k, rows, least):
    shares = tuple(map(tuple, rows))
    parts = np.array(allocate_tokens(k, shares, least))
    assert parts.shape == (len(rows), 3)
    assert parts.sum() == k * parts.size
    assert parts.min() >= min(least, k)
    flat, given_out = np.array(rows).ravel(), parts.ravel()
    order = flat.argsort(kind="stable")
    assert (np.diff(given_out[order]) >= -1).all()  # a larger share gets no less, up to rounding


def test_parts_go_with_the_shares():
    assert allocate_tokens(100, ((1.0, 3.0),), LEAST) == ((50, 150),)
    assert allocate_tokens(100, ((0.5, 1.5),), LEAST) == ((50, 150),)
    assert allocate_tokens(10, ((1.0, 99.0), (50.0, 50.0)), LEAST) == ((8, 16), (8, 8))
    assert allocate_tokens(5, ((1.0, 99.0),), LEAST) == ((5, 5),)


@pytest.mark.parametrize(
    ("shares", "error", "message"),
    [
        (0.5, TypeError, "numbers \\[layers, key/value heads\\]"),
        ([0.5, 1.0], TypeError, "numbers \\[layers, key/value heads\\]"),
        ("heads.json", TypeError, r"is 'heads.json'; expected .*h2o.Profile.load\(path\)"),
        ([[1.0], [1.0, 2.0]], ValueError, "same number of heads"),
        ([[]], ValueError, "same number of heads"),
        ([[1.0, 0.0]], ValueError, r"shares\[0\]\[1\] is 0.0; expected a positive number"),
        ([[1.0, float("nan")]], ValueError, "positive number"),
        ([[1.0, True]], TypeError, r"shares\[0\]\[1\] is True; expected a positive number"),
        (np.ones((2, 2), bool), TypeError, "is True; expected a positive number"),
        ([[1.0, "2"]], TypeError, "is '2'; expected a positive number"),
    ],
)
def test_what_is_no_table_of_shares(shares, error, message):
    with pytest.raises(error, match=message):
        H2OConfig(heavy=8, recent=8, head_shares=shares)


def test_heads_with_amounts_of_their_own_share_nothing():
    shares = [[1.0, 2.0], [3.0, 4.0]]
    config = H2OConfig(heavy=[8, 9], recent=4, head_shares=shares)
    assert LayerPlan.of(config, 1, 2).tokens(100) == (9, 4)
    for heavy, recent in (([[8, 4], [4, 8]], 4), (8, [4, [2, 6]])):
        with pytest.raises(ValueError, match="give one of the two"):
            H2OConfig(heavy=heavy, recent=recent, head_shares=shares)
    computed = H2OConfig(heavy=lambda layer, layers: [8, 4], recent=4, head_shares=shares)
    with pytest.raises(ValueError, match="give one of the two"):
        LayerPlan.of(computed, 0, 2)


def test_arrays_are_shares_too():
    tables = [TABLE, np.array(TABLE), torch.tensor(TABLE), np.array(TABLE, np.float32)]
    for shares in tables:
        config = H2OConfig(heavy=12, recent=4, head_shares=shares)
        wanted = H2OConfig(heavy=12, recent=4, head_shares=TABLE)
        plan, other = LayerPlan.of(config, 1, 2), LayerPlan.of(wanted, 1, 2)
        assert plan.head_tokens(100) == other.head_tokens(100)
    assert hash(H2OConfig(head_shares=np.array(TABLE))) == hash(H2OConfig(head_shares=TABLE))


def test_a_head_keeps_the_ratio_of_heavy_to_recent():
    config = H2OConfig(heavy=30, recent=10, sinks=4, head_shares=[[0.5, 1.5]])
    plan = LayerPlan.of(config, 0, 1)
    assert plan.head_tokens(500) == [(14, 4), (47, 15)]
    assert plan.tokens(500) == (30, 10)


def test_shares_for_another_model():
    ours = model("llama")
    with pytest.raises(ValueError, match="shares has 3 rows, but the model has 2 layers"):
        H2OCache(ours.config, H2OConfig(heavy=8, recent=8, head_shares=[[1.0, 1.0]] * 3))
    cache = H2OCache(ours.config, H2OConfig(heavy=8, recent=8, head_shares=[[1.0, 1.5, 0.5]] * 2))
    with pytest.raises(ValueError, match=r"has 2 key/value heads.*numbers for 3 heads"):
        ours(torch.arange(9)[None] + 3, **with_cache(cache))


def test_amounts_for_each_head():
    text = inputs.drifting(3, B=2, H=4, G=2, N=40)
    of_prompt = {"min_tokens": 0, "ratio_of": "prompt", "prompt_length": 20}
    cache = new_cache(heavy=[[3, 9]], recent=[[2, 0.5]], **of_prompt)
    feed(cache, text, [20, *[1] * 20])
    report = cache.layers[0].report()
    assert report.budget_by_head == [[5, 19]] * 2
    assert report.kept_by_head == [[5, 19]] * 2
    assert report.kept == [12, 12]
    positions, scores = cache.kept(0)
    assert positions.shape == scores.shape == (2, 2, 19)
    assert (positions[:, 0, 5:] == -1).all()
    assert (positions[:, 1] >= 0).all()
    keys, values = cache.layers[0].kept_rows()
    for b in range(2):
        for g in range(2):
            held = positions[b, g][positions[b, g] >= 0]
            torch.testing.assert_close(
                keys[b, g, : len(held)], torch.from_numpy(text.keys)[b, g, held]
            )
            assert (values[b, g, len(held) :] == 0).all()


def test_memory_falls_with_the_shares():
    ours, ids = model("llama"), prompts(300)[0]
    held = {}
    for name, shares in {"even": None, "uneven": uneven(ours)}.items():
        cache = H2OCache(ours.config, H2OConfig(heavy=24, recent=8, head_shares=shares))
        ours(ids, **with_cache(cache))
        held[name] = cache.report().total.bytes_held
        sizes = [layer.slots.keys.numel() for layer in cache.layers]
        assert held[name] == 2 * sum(sizes) * 4
    assert held["uneven"] == held["even"]  # the same total, split differently


def test_slots_grow_with_the_text():
    """A budget larger than the prompt must not be allocated at once, but grow with the text for
    each head."""
    text = inputs.drifting(4, B=1, H=4, G=2, N=200)
    cache = new_cache(heavy=60, recent=20, head_shares=[[0.2, 1.8]])
    sizes = []
    for start, stop in [(0, 10), *((i, i + 1) for i in range(10, 200))]:
        forward(cache, text.cut(start, stop))
        sizes.append(cache.layers[0].slots.starts.diff().tolist())
    assert sizes[0] == [11, 11]
    assert sizes[-1] == [17, 145]
    for one, two in itertools.pairwise(sizes):
        assert one[0] <= two[0]
        assert one[1] <= two[1]
    at_once = new_cache(heavy=60, recent=20, head_shares=[[0.2, 1.8]])
    feed(at_once, text, [10, *[1] * 190])
    assert torch.equal(cache.kept(0)[0], at_once.kept(0)[0])


def test_rows_of_their_own_and_batch_operations():
    """Selecting and repeating rows must not mix up heads, or rows whose budgets are fractions of
    their own prompts."""
    ours = model("llama")
    rows = prompts(40, 64, 23)
    config = H2OConfig(heavy=0.3, recent=0.2, min_tokens=0, head_shares=uneven(ours))
    cache = H2OCache(ours.config, config)
    greedy(ours, batch(rows), 6, **with_cache(cache))
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    for b, row in enumerate([2, 2, 0, 0]):
        alone = H2OCache(ours.config, config)
        greedy(ours, {"input_ids": rows[row]}, 6, **with_cache(alone))
        for layer in range(2):
            one = [x[x >= 0].tolist() for x in cache.kept(layer)[0][b]]
            assert one == [x[x >= 0].tolist() for x in alone.kept(layer)[0][0]]


def test_from_a_dynamic_cache():
    ours = model("llama")
    ids = prompts(50)[0]
    config = H2OConfig(heavy=12, recent=6, head_shares=uneven(ours))
    full = DynamicCache(config=ours.config)
    ours(ids[:, :40], **with_cache(full))
    cache = H2OCache.from_dynamic_cache(full, ours.config, config)
    ours(ids[:, 40:], **with_cache(cache))
    kept = cache.report().layers[0].kept_by_head
    assert kept == cache.report().layers[0].budget_by_head
    assert kept[0][0] != kept[0][1]


def test_a_copy_of_the_config_keeps_its_shares():
    config = H2OConfig(heavy=12, recent=6, head_shares=TABLE)
    assert dataclasses.replace(config, sinks=2).head_shares == config.head_shares
    assert "head_shares=" in repr(config)


def test_one_budget_is_foreseen_where_a_config_tells_of_equal_heads():
    config = copy.deepcopy(shared("llama").config)
    assert cache_plan._alike(config, [0, 1])
    if hasattr(config, "is_heterogeneous"):  # newer versions of transformers
        config.per_layer_config = {1: {"num_key_value_heads": 1}}
        assert not cache_plan._alike(config, [0, 1])
        assert cache_plan._alike(config, [0])
        config.per_layer_config = None
    config.num_kv_heads = [1, 2]
    cache = H2OCache(config, heavy=8, recent=4, score_by="mean-echo", head_shares="echo")
    assert not cache.guard.makes_pool().alike
