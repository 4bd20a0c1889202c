"""The torch backend on the CPU gives the same tokens and keeps the same keys as the core.

This is a subset. `make test-torch-backend` runs all of tests/hf with the torch backend.
"""

from __future__ import annotations

import pytest
import torch

import h2o
from h2o import H2OCache, backends
from h2o.compat import with_cache
from tests.hf.modes import MODES, POLICIES, TOKENS, policy
from tests.hf.tiny import batch, greedy, model, prompts

if backends.forced:
    pytest.skip("all tests are of it now", allow_module_level=True)

ROWS = batch(prompts(5, 17, 23, 30))


def both(run):
    """Results of `run` with the torch backend and with the core."""
    with backends.by_torch():
        ours = run()
    return ours, run()


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode):
    ours = model("llama")

    def run():
        return MODES[mode](ours, ROWS, lambda: H2OCache(ours.config, POLICIES["h2o"])).tolist()

    tokens, wanted = both(run)
    assert tokens == wanted


@pytest.mark.parametrize("chosen", POLICIES)
@pytest.mark.parametrize("name", ["gpt_neox", "gemma2"])
def test_policies(name, chosen):
    ours = model(name)
    config = policy(chosen, ours)

    def run():
        cache = H2OCache(ours.config, config)
        tokens = greedy(ours, ROWS, TOKENS, **with_cache(cache)).tolist()
        layers = [i for i, layer in enumerate(cache.layers) if not layer.is_sliding]
        return tokens, [cache.kept(i)[0].tolist() for i in layers]

    (tokens, positions), (wanted, wanted_positions) = both(run)
    assert tokens == wanted
    assert positions == wanted_positions


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_cache_relative(kv_dtype):
    ours = model("llama", "sdpa")

    def run():
        more = {"sinks": 1, "kv_dtype": kv_dtype, "positions": "cache_relative"}
        with h2o.patched(ours, heavy=6, recent=6, **more):
            return greedy(ours, ROWS, 2 * TOKENS).tolist()

    tokens, wanted = both(run)
    assert tokens == wanted


def test_simulated():
    ours = model("llama", "sdpa")

    def run():
        with (
            h2o.simulated(ours, heavy=0.2, recent=0.2, min_tokens=0, trace=True) as trace,
        ):
            return ours(**ROWS, use_cache=False).logits, trace.evicted_at(1)

    (logits, evicted_at), (wanted, wanted_at) = both(run)
    assert torch.equal(evicted_at, wanted_at)
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-4)
