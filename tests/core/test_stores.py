"""Stores with a number of slots per head, and quantized stores, on NumPy arrays."""

from __future__ import annotations

import numpy as np
import pytest

from h2o import ops
from tests import inputs
from tests.conversation import (
    Conversation,
    check_heads_alone,
    check_simulation,
    numpy_core,
)
from tests.inputs import POLICIES, Policy

CALLS = [24, *[1] * 25, 7, *[1] * 8, 40, *[1] * 3]
BUDGETS = np.array([[[9, 5], [2, 1], [30, 11]], [[4, 4], [12, 0], [0, 7]]], np.int32)


def mask_of(N: int) -> np.ndarray:
    return np.concatenate([inputs.holes(4, [20, 13], 24), np.ones((2, N - 24), bool)], 1)


@pytest.mark.parametrize("kv_dtype", [None, "int8", "int8-int4", "int4"])
@pytest.mark.parametrize("R", [1, 2, 5])
@pytest.mark.parametrize("D", [32, 160])
def test_each_head_as_that_head_alone(kv_dtype, R, D):
    policy, N = POLICIES["everything"], sum(CALLS)
    text = inputs.drifting(5, B=2, H=3 * R, G=3, N=N, D=D, sink=True)
    more = {"mask": mask_of(N), "kv_dtype": kv_dtype}
    check_heads_alone(numpy_core, text, policy, CALLS, BUDGETS, **more)


@pytest.mark.parametrize(("kv_dtype", "error"), [("int8", 0.05), ("int8-int4", 0.5), ("int4", 0.5)])
@pytest.mark.parametrize("D", [32, 64, 96])
def test_a_quantized_store_answers_nearly_the_same(kv_dtype, error, D):
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


@pytest.mark.parametrize("kv_dtype", ["int8", "int8-int4", "int4"])
@pytest.mark.parametrize("prompt", [1, 30])
def test_simulation(kv_dtype, prompt):
    text = inputs.drifting(9, B=2, H=6, G=3, N=300, D=32, sink=True)
    more = {"budget": BUDGETS, "kv_dtype": kv_dtype}
    check_simulation(numpy_core, text, POLICIES["value-weighted"], [prompt] * 2, **more)


def unaligned(x: np.ndarray, offset: int, pitch: int) -> np.ndarray:
    """A copy of x [B, G, N, D] that begins `offset` elements after a multiple of 64 bytes, with
    rows `pitch` elements apart."""
    B, G, N, _ = x.shape
    size = x.dtype.itemsize
    memory = np.zeros(offset + B * G * N * pitch + 64 // size, x.dtype)
    memory = memory[-memory.ctypes.data % 64 // size + offset :]
    view = memory[: B * G * N * pitch].reshape(B, G, N, pitch)[..., : x.shape[-1]]
    view[:] = x
    return view


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("D", [1, 9, 40, 128, 250])
@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8])
def test_rows_move_as_they_are_from_and_to_any_address(D, offset, dtype):
    """The prompt is long enough that several blocks move its rows. A chunk follows."""
    N, Q, S, k = 190, 150, 100, 70
    text = inputs.drifting(3, B=2, G=2, N=N, D=D)
    keys, values = (
        unaligned(x.astype(dtype), near, -(-D // 8) * 8 + near)
        for x, near in zip(text[1:], (offset, 0), strict=True)
    )
    slots = ops.new_slots(keys, S, k - 10, 10)
    slots = slots._replace(keys=unaligned(slots.keys, 0, -(-D // 16) * 16))
    slots = slots._replace(values=unaligned(slots.values, offset, D + offset))
    scores = np.random.default_rng(D).random((2, 2, N), np.float32)
    for new in (slice(0, Q), slice(Q, N)):
        ops.evict(keys[:, :, new], values[:, :, new], scores[:, :, new].copy(), slots)
        assert ((slots.positions >= 0).sum(-1) == k).all()
        for b, g in np.ndindex(2, 2):
            held = slots.positions[b, g, :k]
            np.testing.assert_array_equal(slots.keys[b, g, :k], keys[b, g, held])
            np.testing.assert_array_equal(slots.values[b, g, :k], values[b, g, held])
            np.testing.assert_array_equal(slots.scores[b, g, :k], scores[b, g, held])


@pytest.mark.parametrize("D", [32, 33, 40, 50, 64, 128])
@pytest.mark.parametrize("kind", ["int8", "int8-int4", "int4"])
def test_quantized_rows_move_as_they_are(D, kind):
    """The key beyond the budget moves into the hole, at addresses of every alignment."""
    if kind != "int8" and D % 32:
        pytest.skip("int4 has groups of 32")
    k = 40
    text = inputs.drifting(4, B=1, G=2, N=k + 2, D=D)
    keys, values = text.keys[:, :, : k + 1], text.values[:, :, : k + 1]
    for hole in range(17):
        slots = ops.new_slots(keys, k + 1, k + 1, 0, kv_dtype=kind)
        ops.evict(keys, values, np.ones((1, 2, k + 1), np.float32), slots)
        before = slots.keys.copy(), slots.values.copy()
        slots.positions[..., hole] = -1
        slots.scores[..., hole] = 0
        slots.next_slot[:] = hole
        slots.budget[:] = [k, 0]
        worst = np.full((1, 2, 1), -1, np.float32)
        ops.evict(text.keys[:, :, -1:], text.values[:, :, -1:], worst, slots)
        for g in range(2):
            np.testing.assert_array_equal(
                slots.positions[0, g], [*range(hole), k, *range(hole + 1, k), -1]
            )
            for now, then in zip((slots.keys, slots.values), before, strict=True):
                np.testing.assert_array_equal(now[0, g, hole], then[0, g, k])
                np.testing.assert_array_equal(now[0, g, :hole], then[0, g, :hole])
                np.testing.assert_array_equal(now[0, g, hole + 1 : k], then[0, g, hole + 1 : k])


@pytest.mark.parametrize("kv_dtype", [None, "int8", "int8-int4", "int4"])
def test_rows_of_a_large_store_are_what_they_are_alone(kv_dtype):
    """There are so many heads that a block of a GPU attends to several parts of each."""
    B, G, R, S, D = 200, 8, 2, 300, 64
    random = np.random.default_rng(7)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, np.float32).astype(np.float16)

    keys, values, scores = normal(B, G, S, D), normal(B, G, S, D), random.random((B, G, S))
    token = normal(B, G * R, 1, D), normal(B, G, 1, D), normal(B, G, 1, D)

    def answer(rows: slice) -> list[np.ndarray]:
        slots = ops.new_slots(keys[rows], S, S // 2, S // 2 - 1, kv_dtype=kv_dtype)
        ops.evict(keys[rows], values[rows], scores[rows].astype(np.float32), slots)
        out = ops.step(*(x[rows] for x in token), slots)
        return [out, slots.scores, slots.positions]

    together = answer(slice(None))
    for rows in (slice(0, 2), slice(B - 1, None)):
        for all_rows, some in zip(together, answer(rows), strict=True):
            np.testing.assert_array_equal(all_rows[rows], some)
