"""Calls on some rows of larger slots, selected by number, on NumPy arrays."""

from __future__ import annotations

import numpy as np
import pytest

from h2o import ops
from tests import inputs
from tests.conversation import Pages, check_as_rows_in_sequence, numpy_core
from tests.core import calls
from tests.core.calls import make
from tests.inputs import POLICIES

CALLS = [24, *[1] * 25, 7, *[1] * 8, 40, *[1] * 3]
ROWS = np.array([5, 2], np.int32)
Z = 7
UNEVEN = np.array([[[9, 5], [2, 1]], [[4, 4], [0, 7]]], np.int32)
STORES = {
    "floats": {},
    "bytes": {"kv_dtype": "int8-int4"},
    "heads": {"budget": UNEVEN, "kv_dtype": "int8"},
    "shared": {"shared": True},
    "long way": {"stepwise": False},
}


def text() -> inputs.Text:
    return inputs.drifting(11, B=2, H=6, G=2, N=sum(CALLS), D=32, sink=True)


def mask() -> np.ndarray:
    rest = np.ones((2, sum(CALLS) - 24), bool)
    rest[0, [3, 11, 30]] = False
    return np.concatenate([inputs.holes(4, [20, 13], 24), rest], 1)


def pages(slots: ops.Slots, rows: np.ndarray = ROWS) -> Pages:
    return Pages(np.empty((Z, Pages.bytes_of(slots)), np.uint8), rows)


CASES = [(POLICIES[x], y) for x in ("h2o", "everything", "decayed-max") for y in STORES]


@pytest.mark.parametrize(("policy", "store"), CASES)
def test_as_rows_that_follow_one_another(policy, store):
    check_as_rows_in_sequence(
        numpy_core, text(), policy, CALLS, lambda size: np.empty((Z, size), np.uint8), ROWS,
        mask=mask(), **STORES[store],
    )  # fmt: skip


def test_ranks_of_rolled_keys_are_of_the_rows_too():
    """rotary.ranks [Z, G, S] has a row for each row of the slots, not for each row of the batch."""
    plain, numbered = make("step rolled"), make("step rolled")
    placed = pages(plain.arguments["slots"])
    slots = placed(numbered.arguments["slots"])
    ranks = np.full((Z, *plain.get("rotary.ranks").shape[1:]), 77, np.int32)
    ranks[ROWS] = numbered.get("rotary.ranks")
    numbered = numbered.put("slots", slots).put("rotary.ranks", ranks)
    np.testing.assert_array_equal(numbered.run(), plain.run())
    np.testing.assert_array_equal(ranks[ROWS], plain.get("rotary.ranks"))
    assert (np.delete(ranks, ROWS, 0) == 77).all()


# ---- What is refused ---------------------------------------------------------------------------


def call_of(name: str) -> calls.Call:
    """A valid call on rows 5 and 2 of 7."""
    call = make(name)
    slots = call.arguments["slots"]
    call = call.put("slots", pages(slots)(slots))
    return call


@pytest.mark.parametrize("name", ["attend", "evict", "step"])
def test_numbers_that_are_no_rows(name, refused):
    call = call_of(name)
    call_of(name).run()
    for wrong, text in (
        ([0, Z], rf"slots.rows\[1\]: is {Z}, wanted 0..{Z - 1}"),
        ([-1, 0], rf"slots.rows\[0\]: is -1, wanted 0..{Z - 1}"),
        ([2**31 - 1, -(2**31)], r"slots.rows\[0\]: is 2147483647"),
        ([3, 3], r"slots.rows\[1\]: is 3 like an earlier entry, wanted distinct rows"),
        ([1, 2, 3], r"slots.rows: has shape \[3\], wanted \[B\] with B = 2"),
        ([[1, 2]], r"slots.rows: has shape \[1, 2\], wanted \[B\]"),
    ):
        refused(call.put("slots.rows", np.array(wrong, np.int32)), ValueError, text)
    refused(call.put("slots.rows", np.array([1, 2])), TypeError, "slots.rows: has dtype int64")
    refused(call.put("slots.rows", np.array([1.0, 2.0])), TypeError, "slots.rows: has dtype float")


@pytest.mark.parametrize("name", ["attend", "evict", "step"])
def test_without_numbers_there_is_a_row_for_each(name, refused):
    call = call_of(name)
    refused(call.put("slots.rows", None), ValueError, r"slots.keys: has shape \[7, .* with B = 2")
    slots = call.arguments["slots"]
    refused(call.put("slots.scores", slots.scores[1:]), ValueError, r"scores: .* with Z = 7")


def test_numbers_at_any_stride():
    plain, numbered = call_of("step"), call_of("step")
    numbered = numbered.put("slots.rows", np.array([2, 9, 5], np.int32)[::-2])
    np.testing.assert_array_equal(numbered.run(), plain.run())


def test_errors_name_the_row_of_the_slots(refused):
    call = call_of("step")
    call.get("slots.next_slot")[5, 1] = 99
    refused(call, ValueError, r"slots.next_slot\[5, 1\]: is 99")
    call = call_of("step")
    call.get("slots.seen_tokens")[2] = -3
    refused(call, ValueError, r"slots.seen_tokens\[2\]: is -3")


# ---- Fields that lie side by side --------------------------------------------------------------


def fields_apart(distance: int, step: int = 64, second_step: int = 64) -> calls.Call:
    """A call of evict whose scores [2, 2, 6] and positions, in rows of 48 bytes, begin `distance`
    bytes apart. The rows of the scores are `step` bytes apart, those of the positions
    `second_step`."""
    call = make("evict")
    memory = np.zeros(4096, np.uint8)
    slots = call.arguments["slots"]
    placed = {"scores": (1024, step), "positions": (1024 + distance, second_step)}
    for name, (begin, between) in placed.items():
        old = getattr(slots, name)
        flat = memory[begin:].view(old.dtype)
        new = np.lib.stride_tricks.as_strided(flat, old.shape, (between, 24, 4))
        if step >= 128:
            new[...] = old
        call = call.put(f"slots.{name}", new)
    return call


@pytest.mark.parametrize("distance", [48, -48, 56, 200, -200])
def test_rows_side_by_side_are_apart(distance):
    plain = make("evict")
    plain.run()
    call = fields_apart(distance, 128, 128)
    call.run()
    for name in ("scores", "positions"):
        np.testing.assert_array_equal(call.get(f"slots.{name}"), plain.get(f"slots.{name}"))


@pytest.mark.parametrize(
    ("distance", "steps"),
    [(0, (64, 64)), (44, (64, 64)), (-44, (64, 64)), (64, (64, 64)), (48, (64, 128))],
)
def test_rows_that_share_bytes_are_refused(distance, steps, refused):
    call = fields_apart(distance, *steps)
    refused(call, ValueError, "slots.(scores|positions): is written and shares memory with")
