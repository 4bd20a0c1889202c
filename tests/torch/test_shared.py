"""Slots without values, where the keys serve as values: each engine matches the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import inputs
from tests.conversation import Conversation
from tests.inputs import POLICIES
from tests.torch.engines import core, oracle, portable

CALLS = [24, *[1] * 25, 7, *[1] * 8]
UNEVEN = np.array([[[9, 5], [2, 1]], [[4, 4], [3, 7]]], np.int32)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("budget", [None, UNEVEN], ids=["even", "by head"])
@pytest.mark.parametrize("name", ["h2o", "everything"])
@pytest.mark.parametrize("engine", [core, portable], ids=["core", "torch"])
def test_as_the_oracle(engine, name, budget, kv_dtype):
    text = inputs.drifting(11, B=2, H=6, G=2, N=sum(CALLS), D=24, sink=True)
    mask = np.concatenate([inputs.left([20, 13], 24), np.ones((2, sum(CALLS) - 24), bool)], 1)
    more = {"mask": mask, "budget": budget, "kv_dtype": kv_dtype, "shared": True}
    got, wanted = (
        Conversation(x, text, POLICIES[name], **more).feed_all(CALLS) for x in (engine(), oracle())
    )
    assert got.slots.values is None
    np.testing.assert_allclose(got.answer, wanted.answer, rtol=2e-5, atol=2e-5)
    for (positions, scores), (expected, expected_scores) in zip(got.kept, wanted.kept, strict=True):
        np.testing.assert_array_equal(positions, expected)
        np.testing.assert_allclose(scores, expected_scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("engine", [core, portable], ids=["core", "torch"])
def test_a_simulated_text(engine, kv_dtype):
    text = inputs.drifting(12, B=2, H=6, G=1, N=70, D=40, sink=True)
    prompt = torch.tensor([5, 30], dtype=torch.int32)
    budget = torch.tensor([[6, 5]] * 2, dtype=torch.int32)
    got, wanted = (
        x.module.simulate(
            x.tensor(text.query), x.tensor(text.keys), None, prompt, budget, sinks=1,
            kv_dtype=kv_dtype,
        )
        for x in (engine(), oracle())
    )  # fmt: skip
    assert torch.equal(got[1], wanted[1])
    for x, y in ((got[0], wanted[0]), (got[2], wanted[2])):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-5)
