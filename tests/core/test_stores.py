"""Stores whose heads have slots of their own, and quantised ones, on NumPy arrays."""

from __future__ import annotations

import numpy as np
import pytest

from h2o import ops
from tests import inputs
from tests.conversation import Conversation, numpy_core
from tests.inputs import POLICIES, Policy, Text

CALLS = [24, *[1] * 25, 7, *[1] * 8, 40, *[1] * 3]
BUDGETS = np.array([[[9, 5], [2, 1], [30, 11]], [[4, 4], [12, 0], [0, 7]]], np.int32)


def one_head(text: Text, g: int) -> Text:
    R = text.query.shape[1] // text.keys.shape[1]
    return Text(
        text.query[:, g * R : (g + 1) * R], text.keys[:, g : g + 1], text.values[:, g : g + 1]
    )


def mask_of(N: int) -> np.ndarray:
    return np.concatenate([inputs.holes(4, [20, 13], 24), np.ones((2, N - 24), bool)], 1)


@pytest.mark.parametrize("kv_dtype", [None, "int8", "int8-int4"])
@pytest.mark.parametrize("R", [1, 2, 5])
@pytest.mark.parametrize("D", [32, 160])
def test_each_head_as_that_head_alone(kv_dtype, R, D):
    policy, N = POLICIES["everything"], sum(CALLS)
    text = inputs.drifting(5, B=2, H=3 * R, G=3, N=N, D=D, sink=True)
    shared = {"mask": mask_of(N), "kv_dtype": kv_dtype}
    talk = Conversation(numpy_core, text, policy, budget=BUDGETS, **shared).feed_all(CALLS)
    for g in range(3):
        alone = Conversation(
            numpy_core, one_head(text, g), policy, budget=BUDGETS[:, g], **shared
        ).feed_all(CALLS)
        np.testing.assert_array_equal(talk.answer[:, :, g * R : (g + 1) * R], alone.answer)
        for (positions, scores), (wanted, wanted_scores) in zip(talk.kept, alone.kept, strict=True):
            K = wanted.shape[-1]
            np.testing.assert_array_equal(positions[:, g, :K], wanted[:, 0])
            np.testing.assert_array_equal(scores[:, g, :K], wanted_scores[:, 0])


@pytest.mark.parametrize(("kv_dtype", "error"), [("int8", 0.05), ("int8-int4", 0.5)])
@pytest.mark.parametrize("D", [32, 64, 96])
def test_a_quantised_store_answers_nearly_the_same(kv_dtype, error, D):
    N = sum(CALLS)
    text = inputs.drifting(7, B=2, H=4, G=2, N=N, D=D)
    plain, fewer = (
        Conversation(numpy_core, text, Policy(200, 0), kv_dtype=kind, mask=mask_of(N)).feed_all(
            CALLS
        )
        for kind in (None, kv_dtype)
    )
    apart = np.abs(plain.answer - fewer.answer)
    assert 0 < apart.mean() < error / 5
    assert apart.max() < error * 3
    bytes_of = [c.slots.keys.nbytes + c.slots.values.nbytes for c in (plain, fewer)]
    assert bytes_of[1] < bytes_of[0] * 0.28


@pytest.mark.parametrize("D", [1, 2, 7, 17, 33])
def test_bytes_of_any_head_dimension(D):
    N = sum(CALLS)
    text = inputs.drifting(8, B=1, H=4, G=2, N=N, D=D)
    plain, fewer = (
        Conversation(numpy_core, text, Policy(200, 0), kv_dtype=kind).feed_all(CALLS)
        for kind in (None, "int8")
    )
    assert np.abs(plain.answer - fewer.answer).max() < 0.2


@pytest.mark.parametrize("kv_dtype", ["int8", "int8-int4"])
@pytest.mark.parametrize("prompt", [1, 30])
def test_simulation(kv_dtype, prompt):
    policy, N = POLICIES["value-weighted"], 300
    text = inputs.drifting(9, B=2, H=6, G=3, N=N, D=32, sink=True)
    out, evicted_at, _ = ops.simulate(
        *text, np.full(2, prompt, np.int32), BUDGETS, kv_dtype=kv_dtype, **policy.ranking
    )
    talk = Conversation(numpy_core, text, policy, budget=BUDGETS, kv_dtype=kv_dtype, stepwise=False)
    talk.feed(prompt)
    talk.stepwise = True
    talk.feed_all([1] * (N - prompt))
    np.testing.assert_allclose(out, talk.answer, rtol=2e-5, atol=2e-5)
    for b in range(2):
        for g in range(3):
            held = talk.kept[-1][0][b, g]
            assert (evicted_at[b, g, held[held >= 0]] == N).all()
