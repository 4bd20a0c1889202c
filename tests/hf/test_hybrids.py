"""Models with convolution or recurrent states: transformers keeps the states, h2o keeps the keys.

test_families.py crosses these models with modes and policies. Here is what their states change.
"""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from h2o import (
    H2OCache,
    UnsupportedError,
    analyze,
    calibrate,
    generate_all,
    patched,
    supports,
)
from h2o.compat import with_cache
from h2o.hf.cache_state import recurrent_states
from h2o.hf.cache_state.layer_snapshot import take_snapshot
from h2o.hf.model_traits.layer_kinds import has_states, kind_of
from tests.hf.test_saved import assert_same
from tests.hf.tiny import (
    LAYOUTS,
    batch,
    failing,
    greedy,
    model,
    needs_compiler,
    prompts,
    slow_if,
)

SMALL = {"heavy": 6, "recent": 6}


def everything(cache):
    """Keys and states of each layer, as {name: tensor}."""
    return [take_snapshot(layer).tensors for layer in cache.layers]


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_chosen_in_states_too(name):
    ours, ids = model(name), torch.cat(prompts(20, 20))
    cache = H2OCache(ours.config, **SMALL)
    ours(ids, **with_cache(cache))
    chosen, swapped, doubled = cache.fork(), cache.fork(), cache.fork()
    chosen.batch_select_indices(torch.tensor([1]))
    swapped.reorder_cache(torch.tensor([1, 0]))
    doubled.batch_repeat_interleave(2)
    for before, one, two, four in zip(
        *map(everything, (cache, chosen, swapped, doubled)), strict=True
    ):
        for key, x in before.items():
            if not key.startswith("slots."):
                assert torch.equal(one[key], x[1:]), key
                assert torch.equal(two[key], x.flip(0)), key
                assert torch.equal(four[key], x.repeat_interleave(2, dim=0)), key


def test_a_dynamic_cache_of_other_layers_is_refused():
    ours, plain = model("qwen3_next"), model("llama")
    full = DynamicCache(config=plain.config)
    plain(*prompts(20), **with_cache(full))
    config = ours.config
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]
    with pytest.raises(ValueError, match="layer 0 of the DynamicCache is a DynamicLayer"):
        H2OCache.from_dynamic_cache(full, config, **SMALL)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_report_tells_states_from_keys(name):
    ours = model(name)
    cache = H2OCache(ours.config, **SMALL)
    greedy(ours, batch(prompts(17, 23)), 4, **with_cache(cache))
    report = cache.report()
    for layer, layer_cache in zip(report.layers, cache.layers, strict=True):
        assert layer.kind == kind_of(layer_cache)
        expected = recurrent_states.bytes_of(layer_cache) if has_states(layer_cache) else 0
        assert layer.bytes_states == expected
        assert (expected > 0) == has_states(layer_cache)
    assert report.total.bytes_states == sum(x.bytes_states for x in report.layers) > 0
    text = str(report)
    assert f"{report.total.bytes_states:,}" in text
    assert "state bytes" in text
    assert "state bytes" in report._repr_html_()
    assert "bytes_states" in report.as_dict()["total"]
    assert report.total.bytes_held < report.total.bytes_full
    index = report.layers.index(next(x for x in report.layers if x.kind == "h2o"))
    assert cache.kept(index)[0].shape[-1] == 12
    for index, layer in enumerate(report.layers):
        if layer.kind in ("states", "none"):
            with pytest.raises(ValueError, match=rf"layer {index} (has states|stores nothing)"):
                cache.kept(index)
    assert len(list(cache)) == len(cache.layers)


@pytest.mark.parametrize("name", ["falcon_h1", "zaya", "qwen3_next", "llama"])
def test_states_that_have_seen_a_refused_prompt_are_not_used(name):
    """The first layer may update its states before its keys are refused. States that have seen a
    refused prompt must not be used."""
    ours, (ids,) = model(name), prompts(20)
    settings = {"heavy": 20, "recent": 4, "pinned": "prompt"}
    cache = H2OCache(ours.config, **settings)
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 2, "do_sample": False}
    with pytest.raises(ValueError, match="pinned"):
        ours(prompts(60)[0], **with_cache(cache))
    if name != "llama":
        with pytest.raises(RuntimeError, match=r"was interrupted.*cache\.reset"):
            ours.generate(ids, **how, **with_cache(cache))
        cache.reset()
    fresh = H2OCache(ours.config, **settings)
    want = ours.generate(ids, **how, **with_cache(fresh))
    assert torch.equal(ours.generate(ids, **how, **with_cache(cache)), want)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(
    "way",
    [
        ("zamba2", "model.layers.3.mamba_decoder"),
        ("zamba2", "model.layers.3.shared_transformer.feed_forward"),
        ("nemotron_h", "model.layers.3.mixer"),
    ],
)
def test_a_pass_that_fails_before_the_last_states(way, tokens, tmp_path):
    """The last layer's keys have seen the tokens, or it has none, but its states have not."""
    name, part = way
    ours, (ids,) = model(name), prompts(20)
    cache = H2OCache(ours.config, **SMALL)
    ours(ids, **with_cache(cache))
    before = cache.fork()
    with failing(ours.get_submodule(part)):
        ours(ids[:, :tokens], **with_cache(cache))
    assert cache.report().broken
    for use in (cache.fork, lambda: ours(ids, **with_cache(cache)), lambda: cache.save(tmp_path)):
        with pytest.raises(RuntimeError, match=r"was interrupted.*cache\.reset"):
            use()
    cache.reset()
    ours(ids, **with_cache(cache))
    assert_same(cache, before)


def test_what_cannot_be_taken_back_is_refused():
    """Recurrent states are sums over all tokens, so `crop` must raise an error and change
    nothing."""
    (ids,) = prompts(20)
    ours = model("qwen3_next")
    cache = H2OCache(ours.config, **SMALL)
    cache.activate_past_recording()
    ours(ids, **with_cache(cache))
    before = cache.fork()
    with pytest.raises(NotImplementedError, match=r"recurrent states.*fork\(\)"):
        cache.crop(-2)
    assert_same(cache, before)
    cache.crop(-20)
    assert cache.get_seq_length() == 0
    with pytest.raises(ValueError, match="stateful"):  # transformers' own words
        greedy(ours, {"input_ids": ids}, prompt_lookup_num_tokens=3,
               **with_cache(H2OCache(ours.config, **SMALL)))  # fmt: skip


@pytest.mark.parametrize("name", ["lfm2", "lfm3"])
def test_convolutions_go_back(name):
    ours, (ids,) = model(name), prompts(20)
    cache, expected = (H2OCache(ours.config, **SMALL) for _ in range(2))
    cache.activate_past_recording()
    ours(ids, **with_cache(cache))
    cache.crop(-3)
    ours(ids[:, :17], **with_cache(expected))
    got = ours(ids[:, 17:18], **with_cache(cache)).logits
    cache.crop(0)
    torch.testing.assert_close(got, ours(ids[:, 17:18], **with_cache(expected)).logits)
    for here, there in zip(everything(cache), everything(expected), strict=True):
        for key in here:
            if key.startswith("states."):
                torch.testing.assert_close(here[key], there[key])


@pytest.mark.parametrize("name", LAYOUTS)
def test_patched_with_beams(name):
    ours = model(name)
    inputs = batch(prompts(17, 23))
    expected = greedy(ours, inputs, 8, **with_cache(H2OCache(ours.config, **SMALL)), num_beams=3)
    with patched(ours, **SMALL) as patch:
        assert greedy(ours, inputs, 8, num_beams=3).tolist() == expected.tolist()
        assert patch.cache.report().total.bytes_states > 0


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "nemotron_h", "falcon_h1", "zaya"])
def test_rows_are_refilled_with_states(name):
    ours, rows = model(name), prompts(17, 30, 9, 22)
    texts = [row[0].tolist() for row in rows]
    results = list(generate_all(ours, texts, rows=2, max_new_tokens=6, **SMALL))
    for row, result in zip(rows, results, strict=True):
        cache = H2OCache(ours.config, **SMALL)
        alone = greedy(ours, {"input_ids": row}, 6, **with_cache(cache))
        assert result.ids == alone[0].tolist()
        kept = [cache.kept(i)[0] for i, x in enumerate(cache.layers) if kind_of(x) == "h2o"]
        held = sum(int((x >= 0).sum()) for x in kept) / sum(x.shape[1] for x in kept)
        assert result.report["kept"] == round(held)
        assert result.report["bytes"] > cache.report().total.bytes_states > 0


def test_rows_with_windows_are_not_refilled():
    with pytest.raises(UnsupportedError, match=r"generate_all cannot be .* sliding windows"):
        list(generate_all(model("lfm3"), [[5, 6]], rows=1, **SMALL))


@pytest.mark.parametrize("name", ["qwen3_next", "zamba2"])
def test_layers_without_keys_have_no_share(name):
    ours, (ids,) = model(name), prompts(64)
    profile = calibrate(ours, ids, window=32, fractions=(0.4,))
    kinds = supports(ours.config).layers
    shares = profile.shares_for(0.4)
    assert len(shares) == len(kinds)
    for kind, of_heads in zip(kinds, shares, strict=True):
        assert kind == "h2o" or set(of_heads) == {1.0}
    cache = H2OCache(ours.config, heavy=0.2, recent=0.2, min_tokens=0, head_shares=profile)
    greedy(ours, {"input_ids": ids}, 4, **with_cache(cache))
    analysis = analyze(ours, ids[0], min_tokens=0)
    assert analysis.layers == [i for i, kind in enumerate(kinds) if kind == "h2o"]


# States are transformers' own. A graph's work for h2o differs only where a layer has keys as well.
@needs_compiler
@pytest.mark.parametrize(
    "name",
    [
        slow_if(name != "falcon_h1", name)
        for name in ("qwen3_next", "falcon_h1", "lfm2", "bamba", "jamba", "zamba2")
    ],
)
def test_the_decode_step_compiles(name):
    from tests.hf.test_compiled import compiling

    ours, inputs = model(name), batch(prompts(17, 23))
    expected = greedy(ours, inputs, 8, **with_cache(H2OCache(ours.config, **SMALL)))
    cache = H2OCache(ours.config, **SMALL, compileable=True)
    got = greedy(ours, inputs, 8, **with_cache(cache), **compiling())
    assert got.tolist() == expected.tolist()
