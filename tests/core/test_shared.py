"""Slots without values, where the keys serve as values, on NumPy arrays."""

from __future__ import annotations

import numpy as np
import pytest

from h2o import ops
from tests import inputs
from tests.cases import pairs
from tests.conversation import Conversation, assert_same_kept, numpy_core
from tests.core.calls import make
from tests.inputs import POLICIES

CALLS = [24, *[1] * 25, 7, *[1] * 8, 40, *[1] * 3]
FEW_POLICIES = ("h2o", "decayed-max", "everything")
FEWER_POLICIES = ("decayed-max", "everything")


def texts(R: int, D: int, dtype: type = np.float32) -> inputs.Text:
    """A text whose values are its keys."""
    text = inputs.drifting(11, B=2, H=2 * R, G=2, N=sum(CALLS), D=D, sink=True)
    return inputs.Text(*(x.astype(dtype) for x in (text.query, text.keys, text.keys.copy())))


def mask() -> np.ndarray:
    rest = np.ones((2, sum(CALLS) - 24), bool)
    return np.concatenate([inputs.holes(4, [20, 13], 24), rest], 1)


SHAPES = [
    (1, 5, {}),
    (4, 24, {}),
    (8, 256, {}),
    (16, 576, {}),
    (37, 72, {}),
    (16, 576, {"kv_dtype": "int8"}),
    (3, 32, {"stepwise": False}),
    (2, 40, {"kv_dtype": "int8"}),
    (2, 24, {"budget": np.array([[[9, 5], [2, 1]], [[4, 4], [0, 7]]], np.int32)}),
]
CASES = [
    pytest.param(name, R, D, more, marks=[] if few or small else [pytest.mark.slow])
    for name in POLICIES
    for R, D, more in SHAPES
    for small, large in [(R < 5 and D > 5, R > 5)]
    for few in [name in (FEWER_POLICIES if large else FEW_POLICIES)]
]
"""A policy depends on scores only, not on the shape of rows. So all policies run with a few shapes,
and a few policies with all shapes."""


@pytest.mark.parametrize(("name", "R", "D", "more"), CASES)
def test_as_with_values_that_are_the_keys(name, R, D, more):
    text = texts(R, D)
    twice, once = (
        Conversation(numpy_core, text, POLICIES[name], mask=mask(), shared=shared, **more).feed_all(
            CALLS
        )
        for shared in (False, True)
    )
    assert once.slots.values is None
    np.testing.assert_array_equal(once.answer, twice.answer)
    assert_same_kept(once, twice)
    for field in ("keys", "evicted_score", "norms"):
        np.testing.assert_array_equal(getattr(once.slots, field), getattr(twice.slots, field))


HEADS = {24: 2, 256: 8, 576: 16}


@pytest.mark.parametrize(
    ("D", "kv_dtype", "dtype"), pairs(HEADS, [None, "int8"], [np.float32, np.float16])
)
def test_a_simulated_text(D, kv_dtype, dtype):
    R = HEADS[D]
    query, keys, _ = texts(R, D, dtype)
    prompt, budget = np.array([5, 30], np.int32), np.array([[6, 5]] * 2, np.int32)
    more = {"mask": mask(), "kv_dtype": kv_dtype, "sinks": 1, "value_weighted": True}
    twice = ops.simulate(query, keys, keys.copy(), prompt, budget, **more)
    once = ops.simulate(query, keys, None, prompt, budget, **more)
    for got, wanted in zip(once, twice, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_attention_without_slots():
    query, keys, _ = texts(2, 24)
    for got, wanted in zip(
        ops.attend(query, keys, None), ops.attend(query, keys, keys.copy()), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)


def without_values(name: str) -> tuple:
    """A valid call of an operation on slots without values."""
    call = make(name)
    call = call.put("value" if name == "step" else "values", None)
    return call if name == "simulate" else call.put("slots.values", None)


@pytest.mark.parametrize("name", ["attend", "evict", "step", "simulate"])
def test_either_both_have_values_or_none(name, refused):
    call = without_values(name)
    call.run()
    if name != "simulate":
        tensor = "value" if name == "step" else "values"
        call_without = make(name)
        refused(
            call.put(tensor, call_without.get(tensor)), TypeError, "^slots.values: is None, wanted"
        )
        refused(
            call.put("slots.values", call_without.get("slots.values")),
            TypeError,
            f"^{tensor}: is None",
        )


def test_no_stored_values_without_values(refused):
    """`ops.simulate` creates stored keys and values together. A direct call of the core could pass
    only one."""
    from h2o import _core

    query, keys, _ = texts(2, 24)
    slots = ops.new_slots(keys, keys.shape[2], kv_dtype="int8")
    B = len(query)
    out, evicted_at, scores = ops.simulate(
        query, keys, None, np.ones(B, np.int32), np.ones((B, 2), np.int32)
    )
    policy = ops.Policy()
    with pytest.raises(ValueError, match="values: is None, but stored_values is given"):
        _core.call(
            "simulate", "run", query, keys, None, None, np.ones(B, np.int32),
            np.ones((B, 2), np.int32), out, evicted_at, scores, 0.3, 0.0, policy,
            slots.keys, slots.values, None, None, None,
        )  # fmt: skip
