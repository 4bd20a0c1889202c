"""The C core on NumPy arrays keeps what the authors' code kept (golden data)."""

from __future__ import annotations

import numpy as np
import pytest

from h2o import ops
from tests import inputs
from tests.conversation import Conversation, assert_golden, numpy_core


@pytest.mark.parametrize("stepwise", [True, False], ids=["step", "attend-evict"])
@pytest.mark.parametrize("name", inputs.CACHE_CASES)
def test_cache_keeps_what_the_authors_cache_keeps(name, stepwise):
    golden = inputs.golden_cache(name)
    policy = inputs.Policy(golden.heavy, golden.recent)
    talk = Conversation(numpy_core, golden.text, policy, stepwise=stepwise)
    talk.feed_all(golden.calls)
    assert_golden(talk, golden)
    mass = talk.slots.scores[talk.slots.positions >= 0].sum() + talk.slots.evicted_score.sum()
    np.testing.assert_allclose(mass, golden.out.shape[1] * golden.out.shape[2], rtol=1e-5)


@pytest.mark.parametrize("name", [case for case in inputs.CACHE_CASES if "chunks" not in case])
def test_simulation_keeps_what_the_authors_cache_keeps(name):
    golden = inputs.golden_cache(name)
    prompt = np.array([golden.calls[0]], np.int32)
    budget = np.array([[golden.heavy, golden.recent]], np.int32)
    out, evicted_at, scores = ops.simulate(*golden.text, prompt, budget)
    np.testing.assert_allclose(out, golden.out, rtol=0, atol=1e-5)
    stop, N = 0, golden.out.shape[1]
    for tokens, kept in zip(golden.calls, golden.kept, strict=True):
        stop += tokens
        if stop < N:  # row `stop` is the first that cannot see what this call evicted
            for head, alive in enumerate(evicted_at[0, :, :stop] > stop):
                np.testing.assert_array_equal(np.flatnonzero(alive), kept[0, head])
    last = np.take_along_axis(scores, golden.kept[-1], -1)
    np.testing.assert_allclose(last, golden.scores[-1], rtol=0, atol=5e-5)
