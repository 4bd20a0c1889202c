"""Models with convolution or recurrent states: these stay transformers', the keys are h2o's.

The cross with modes and policies is that of test_families.py; here is what states change.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, DynamicCache

from h2o import (
    H2OCache,
    H2OConfig,
    UnsupportedError,
    analyze,
    calibrate,
    generate_all,
    patched,
    simulated,
    supports,
)
from h2o.compat import with_cache
from h2o.hf.families.layer_kinds import HYBRIDS, has_states, kind_of
from h2o.hf.store import states
from h2o.hf.store.layer_state import layer_state
from tests.hf.tiny import (
    LATENT_AND_STATES,
    WITH_STATES,
    batch,
    greedy,
    model,
    needs_compiler,
    prompts,
    slow_if,
)

pytestmark = pytest.mark.skipif(not HYBRIDS, reason="states as of transformers 5.21")
SMALL = {"heavy": 6, "recent": 6}
LAYOUTS = ["qwen3_next", "lfm3", "nemotron_h", "falcon_h1", "zamba2"] if HYBRIDS else []
"""States before keys, beside a window, beside nothing, in one layer, of a shared block."""
ALIKE = {
    "qwen3_5": "qwen3_next",
    "qwen3_5, whole": "qwen3_next",
    "olmo_hybrid": "qwen3_next",
    "granitemoehybrid": "bamba",
    "lfm2_moe": "lfm2",
    "lfm2_vl": "lfm2",
    "zamba": "zamba2",
    "kimi_linear": "bailing_hybrid",
}
"""Families whose states, and layers beside them, are those of another."""
every = pytest.mark.parametrize(
    "name", [slow_if(name in ALIKE, name) for name in [*WITH_STATES, *LATENT_AND_STATES]]
)


def stepwise(ours, ids, prompt, cache):
    """Logits of a prompt and then of one token after the other."""
    out = [ours(ids[:, :prompt], **with_cache(cache)).logits]
    for i in range(prompt, ids.shape[1]):
        where = {"position_ids": torch.tensor([[i]])}  # which Bamba does not count by itself
        out.append(ours(ids[:, i : i + 1], **with_cache(cache), **where).logits)
    return torch.cat(out, dim=1)


def prove_stepwise(ours, ids, **settings):
    """The simulation is the cache, of a text [1, N] whose first 20 tokens are the prompt."""
    cache = H2OCache(ours.config, **settings, trace=True)
    with torch.no_grad():
        with simulated(ours, **settings, prompt_length=20, trace=True) as simulation:
            expected = ours(ids, use_cache=False).logits
        full = ours(ids, use_cache=False).logits
        got = stepwise(ours, ids, 20, cache)
    # States of one pass and of single steps are summed in another order.
    assert (got - expected).abs().max() < 1e-3 * (full - expected).abs().max()
    for layer in simulation.layers():
        assert torch.equal(simulation.evicted_at(layer), cache.evicted_at(layer))


def everything(cache):
    """{layer: {name: tensor}} of keys and states."""
    return [layer_state(layer).tensors for layer in cache.layers]


def assert_same(one, other):
    for here, there in zip(everything(one), everything(other), strict=True):
        assert here.keys() == there.keys()
        for name in here:
            assert torch.equal(here[name], there[name]), name


def rows_as_alone(ours, rows):
    """The small cache of a batch, each row of which answered what it answers alone."""
    cache = H2OCache(ours.config, **SMALL)
    tokens = greedy(ours, batch(rows), 12, **with_cache(cache))
    for b, row in enumerate(rows):
        alone = H2OCache(ours.config, **SMALL)
        expected = greedy(ours, {"input_ids": row}, 12, **with_cache(alone))
        assert tokens[b].tolist() == expected[0].tolist()
    return cache


@every
def test_a_budget_for_all_gives_the_full_caches_tokens(name):
    ours, theirs = model(name), model(name, "sdpa")
    inputs = batch(prompts(17, 23))
    expected = greedy(theirs, inputs, 32)
    cache = H2OCache(ours.config, H2OConfig.full())
    assert greedy(ours, inputs, 32, **with_cache(cache)).tolist() == expected.tolist()
    assert len(expected.unique()) > 10


@every
def test_rows_are_rows_alone_and_the_budget_holds(name):
    ours = model(name)
    cache = rows_as_alone(ours, prompts(17, 30))
    for index, kind in enumerate(supports(ours.config).layers):
        if kind == "h2o":
            assert (cache.kept(index)[0] >= 0).sum(-1).unique().tolist() == [12]


@every
def test_the_simulation_is_the_cache(name):
    ours, (ids,) = model(name), prompts(36)
    prove_stepwise(ours, ids, **SMALL)


@every
def test_saved_loaded_and_forked_it_goes_on_as_before(name, tmp_path):
    ours, (ids, more) = model(name), prompts(20, 4)
    cache = H2OCache(ours.config, **SMALL)
    with torch.no_grad():
        ours(ids, **with_cache(cache))
    cache.save(tmp_path / "cache.safetensors", ours)
    loaded = H2OCache.load(tmp_path / "cache.safetensors", ours)
    assert_same(loaded, cache)
    twice, once = cache.fork(2), cache.fork()
    again = {"input_ids": torch.cat([ids, more], dim=1)}
    expected = greedy(ours, again, 8, **with_cache(cache))
    assert_same(loaded, once)  # which the text has not reached
    for other in (loaded, once):
        assert greedy(ours, again, 8, **with_cache(other)).tolist() == expected.tolist()
        assert_same(other, cache)
    again = {"input_ids": again["input_ids"].repeat(2, 1)}
    assert greedy(ours, again, 8, **with_cache(twice)).tolist() == expected.tolist() * 2


@pytest.mark.parametrize("name", LAYOUTS)
def test_reset_takes_another_number_of_rows(name):
    ours = model(name)
    cache = H2OCache(ours.config, **SMALL)
    greedy(ours, batch(prompts(17, 23)), 4, **with_cache(cache))
    cache.reset()
    assert not any(map(len, everything(cache)))
    (row,) = prompts(20, seed=1)
    again = greedy(ours, {"input_ids": row}, 8, **with_cache(cache))
    fresh = H2OCache(ours.config, **SMALL)
    assert again.tolist() == greedy(ours, {"input_ids": row}, 8, **with_cache(fresh)).tolist()
    assert_same(cache, fresh)


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_chosen_in_states_too(name):
    ours, rows = model(name), prompts(20, 20)
    cache = H2OCache(ours.config, **SMALL)
    with torch.no_grad():
        ours(torch.cat(rows), **with_cache(cache))
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


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_dynamic_cache_is_taken_over_with_its_states(name):
    ours, (ids, more) = model(name), prompts(20, 4)
    full = DynamicCache(config=ours.config)
    with torch.no_grad():
        ours(ids, **with_cache(full))
    cache = H2OCache.from_dynamic_cache(full, ours.config, H2OConfig.full())
    again = {"input_ids": torch.cat([ids, more], dim=1)}
    got = greedy(ours, again, 8, **with_cache(cache))
    assert got.tolist() == greedy(ours, again, 8, **with_cache(full)).tolist()
    small = H2OCache.from_dynamic_cache(full, ours.config, **SMALL)
    greedy(ours, {"input_ids": torch.cat([again["input_ids"], got, more], dim=1)}, 2,
           **with_cache(small))  # fmt: skip
    kinds = supports(ours.config).layers
    assert all(
        int((small.kept(i)[0] >= 0).sum(-1).max()) == 12
        for i, kind in enumerate(kinds)
        if kind == "h2o"
    )


def test_a_dynamic_cache_of_other_layers_is_refused():
    ours, plain = model("qwen3_next"), model("llama")
    full = DynamicCache(config=plain.config)
    with torch.no_grad():
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
        expected = states.bytes_of(layer_cache) if has_states(layer_cache) else 0
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
    """The first layer may have states beside its keys, which were there before the keys."""
    ours, (ids,) = model(name), prompts(20)
    cache = H2OCache(ours.config, heavy=0.4, recent=0.2, min_tokens=0)
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 2, "do_sample": False}
    with pytest.raises(ValueError, match="prefill_chunk_size"):
        ours.generate(ids, **how, prefill_chunk_size=8, **with_cache(cache))
    if name != "llama":
        with pytest.raises(RuntimeError, match=r"broke off.*cache\.reset"):
            ours.generate(ids, **how, **with_cache(cache))
        cache.reset()
    fresh = H2OCache(ours.config, heavy=0.4, recent=0.2, min_tokens=0)
    want = ours.generate(ids, **how, **with_cache(fresh))
    assert torch.equal(ours.generate(ids, **how, **with_cache(cache)), want)


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h", "falcon_h1"])
@pytest.mark.parametrize("later", [False, True], ids=["prompt", "later pass"])
def test_a_pass_that_broke_off_amid_states_is_noticed(name, later, monkeypatch):
    """States do not tell how many tokens they have seen."""
    ours, (ids,) = model(name), prompts(20)
    cache = H2OCache(ours.config, **SMALL)
    with torch.no_grad():
        if later:
            ours(ids, **with_cache(cache))
        first = next(i for i, x in enumerate(cache.layers) if has_states(x))
        broken = ours.base_model.layers[first + 1]
        with monkeypatch.context() as patch:
            patch.setattr(broken, "forward", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                ours(ids[:, :1], **with_cache(cache))
        with pytest.raises(RuntimeError, match=r"broke off.*cache\.reset"):
            ours(ids[:, :1], **with_cache(cache))
        with pytest.raises(RuntimeError, match="broke off"):
            cache.fork()
        cache.reset()
        ours(ids, **with_cache(cache))


def test_what_cannot_be_taken_back_is_refused():
    """Recurrent states are sums; those of convolutions are the last inputs, and go back."""
    (ids,) = prompts(20)
    ours = model("qwen3_next")
    cache = H2OCache(ours.config, **SMALL)
    cache.activate_past_recording()
    with torch.no_grad():
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
    with torch.no_grad():
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


@pytest.mark.parametrize("name", ["lfm2"])
def test_prompt_lookup_where_states_go_back(name):
    ours, (ids,) = model(name), prompts(12)
    text = {"input_ids": ids.repeat(1, 3)}
    expected = greedy(model(name, "sdpa"), text)
    cache = H2OCache(ours.config, H2OConfig.full())
    got = greedy(ours, text, prompt_lookup_num_tokens=4, **with_cache(cache))
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "falcon_mamba", "recurrent_gemma"])
def test_a_model_without_full_attention_has_nothing_to_evict(model_type):
    config = AutoConfig.for_model(model_type)
    assert "nothing to evict" in supports(config).reason
    with pytest.raises(UnsupportedError, match="nothing to evict"):
        H2OCache(config, **SMALL)


@pytest.mark.parametrize("model_type", ["inkling_text", "inkling2_text"])
def test_a_bias_by_position_is_refused_with_the_config(model_type):
    assert "bias" in supports(AutoConfig.for_model(model_type)).reason


def test_sparse_attention_is_refused_by_name():
    support = supports(AutoConfig.for_model("qwen4_exp_text"))
    assert support.reason.startswith("layer 3 is indexed_attention, which is sparse attention")


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
    with pytest.raises(
        UnsupportedError, match="full attention or states in all layers, and layer 1"
    ):
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
    analysis = analyze(ours, ids[0])
    assert analysis.layers == [i for i, kind in enumerate(kinds) if kind == "h2o"]


@needs_compiler
@pytest.mark.parametrize(
    "name",
    [
        slow_if(name not in ("qwen3_next", "falcon_h1"), name)
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
