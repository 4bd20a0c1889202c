"""Values smaller than keys (MiMo-V2-Flash), and keys that are repeated after the cache (JetMoe).

The cross with modes and policies is that of test_families.py.
"""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import h2o
from h2o import H2OCache, H2OConfig, Unsupported, analyze, calibrate, patched, supports
from h2o.borrowed import with_cache
from h2o.model_identity import key_size
from tests.hf.test_hybrids import prove_stepwise
from tests.hf.tiny import FAMILIES, batch, greedy, model, prompts

SMALL = {"heavy": 6, "recent": 6}
NAMES = [name for name in ("jetmoe", "mimo_v2_flash") if name in FAMILIES]
every = pytest.mark.parametrize("name", NAMES)


@every
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_the_simulation_is_the_cache(name, kv_dtype):
    ours, (ids,) = model(name), prompts(36)
    prove_stepwise(ours, ids, **SMALL, kv_dtype=kv_dtype, value_weighted=True)


@every
def test_saved_loaded_forked_and_taken_over_it_goes_on_as_before(name, tmp_path):
    ours, (ids, more) = model(name), prompts(20, 4)
    cache = H2OCache(ours.config, **SMALL)
    with torch.no_grad():
        ours(ids, **with_cache(cache))
    cache.save(tmp_path / "cache.safetensors", ours)
    loaded, once = H2OCache.load(tmp_path / "cache.safetensors", ours), cache.fork()
    again = {"input_ids": torch.cat([ids, more], dim=1)}
    expected = greedy(ours, again, 8, **with_cache(cache))
    for other in (loaded, once):
        assert greedy(ours, again, 8, **with_cache(other)).tolist() == expected.tolist()
    full = DynamicCache(config=ours.config)
    with torch.no_grad():
        ours(ids, **with_cache(full))
    taken = H2OCache.from_dynamic_cache(full, ours.config, H2OConfig.full())
    for (keys, values, _), theirs in zip(taken, full.layers, strict=True):
        assert torch.equal(keys, theirs.keys)
        assert torch.equal(values, theirs.values)
    got = greedy(ours, again, 8, **with_cache(taken))
    assert got.tolist() == greedy(ours, again, 8, **with_cache(full)).tolist()


@every
def test_the_budget_holds_and_patched_with_beams_keeps_it(name):
    ours, inputs = model(name), batch(prompts(17, 23))
    cache = H2OCache(ours.config, **SMALL)
    expected = greedy(ours, inputs, 8, **with_cache(cache), num_beams=3)
    with patched(ours, **SMALL):
        assert greedy(ours, inputs, 8, num_beams=3).tolist() == expected.tolist()
    served = [i for i, kind in enumerate(supports(ours.config).layers) if kind == "h2o"]
    assert served
    for layer in served:
        assert (cache.kept(layer)[0] >= 0).sum(-1).unique().tolist() == [12]


@every
def test_read_calibrated_and_analysed(name):
    ours, (ids,) = model(name), prompts(64)
    repeat = torch.tensor([5, 9, 2])
    question = {"input_ids": torch.cat([ids, *prompts(5, seed=3)], 1)}
    unpruned = h2o.read(ours, ids, H2OConfig.full(), repeat=repeat)
    theirs = DynamicCache(config=ours.config)
    wanted = greedy(model(name, "eager"), question, **with_cache(theirs))
    assert torch.equal(greedy(ours, question, **with_cache(unpruned)), wanted)
    profile = calibrate(ours, ids, window=32, fractions=(0.4,))
    kinds = supports(ours.config).layers
    G = ours.config.num_key_value_heads
    assert [len(x) for x, kind in zip(profile.shares_for(0.4), kinds, strict=True)
            if kind == "h2o"] == [G] * kinds.count("h2o")  # fmt: skip
    cache = H2OCache(ours.config, heavy=0.2, recent=0.2, min_tokens=0, shares=profile)
    greedy(ours, {"input_ids": ids}, 4, **with_cache(cache))
    analysis = analyze(ours, ids[0])
    assert analysis.layers == [i for i, kind in enumerate(kinds) if kind == "h2o"]


@every
def test_bytes_are_those_of_a_full_cache(name):
    """Of which values are what the model makes of them; a slot has as much for each as a key."""
    ours, (ids,) = model(name), prompts(200)
    full = DynamicCache(config=ours.config)
    cache = H2OCache(ours.config, heavy=0.3, recent=0.2, min_tokens=0, of="bytes")
    with torch.no_grad():
        ours(ids, **with_cache(full))
        ours(ids, **with_cache(cache))
    D, element, rows = key_size(ours.config)
    for layer, kind in enumerate(supports(ours.config).layers):
        if kind == "h2o":
            report, theirs = cache.report().layers[layer], full.layers[layer]
            assert report.bytes_full == 4 * (theirs.keys.numel() + theirs.values.numel())
            assert rows * D * element * 200 * theirs.keys.shape[1] == report.bytes_full
            used = (report.bytes_held + report.bytes_bookkeeping) / report.bytes_full
            assert 0.4 < used <= 0.5 + 1e-9


@every
def test_what_is_refused(name):
    config = model(name).config
    for more in ({"positions": "rolled"}, {"compileable": True}):
        with pytest.raises(Unsupported):
            H2OCache(config, **SMALL, **more)
    assert supports(config).not_rolled
