"""Heads with their own budgets and numbers of slots: each behaves as if it were alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from h2o import backends, ops
from h2o.slots import EMPTY, PER_SLOT
from tests import inputs
from tests.cases import checkered, pairs
from tests.conversation import (
    Conversation,
    assert_same_kept,
    check_heads_alone,
    check_simulation,
)
from tests.inputs import POLICIES, Text
from tests.torch.engines import ROUNDING, assert_same, core, oracle, portable

ENGINES = {"oracle": oracle(), "core": core(), "core bfloat16": core(torch.bfloat16)}
CALLS = [24, *[1] * 25, 7, *[1] * 8]
BUDGETS = np.array([[[9, 5], [2, 1], [30, 11]], [[4, 4], [12, 0], [0, 7]]])
"""[B, G, 2]: rows differ too, so some heads have slots that one of the rows cannot fill"""


@pytest.fixture(params=ENGINES)
def engine(request):
    return ENGINES[request.param]


def all_heads(seed: int = 5, N: int = sum(CALLS)) -> Text:
    return inputs.drifting(seed, B=2, H=6, G=3, N=N, sink=True)


@pytest.mark.parametrize(
    ("engine", "name"),
    checkered(ENGINES, [name for name in POLICIES if name != "full"]),
    indirect=["engine"],
)
def test_each_head_as_that_head_alone(engine, name):
    policy, text = POLICIES[name], all_heads()
    mask = np.concatenate([inputs.left([24, 17], 24), np.ones((2, sum(CALLS) - 24), bool)], 1)
    budgets = BUDGETS.clip(max=[[[policy.heavy * 9, policy.recent * 9]]])
    budgets[..., 0] += budgets.sum(-1) + policy.sinks == 0
    rounding = ROUNDING[engine.tensor(text.keys).dtype] if backends.forced else 0.0
    check_heads_alone(engine, text, policy, CALLS, budgets, mask=mask, tolerance=rounding)


def test_equal_budgets_in_a_store_of_one_axis(engine):
    """A store with `starts` must hold and answer the same as one without."""
    policy, text = POLICIES["sinks"], all_heads()
    same = np.broadcast_to([policy.heavy, policy.recent], (2, 3, 2)).copy()
    uneven = Conversation(engine, text, policy, budget=same).feed_all(CALLS)
    even = Conversation(engine, text, policy).feed_all(CALLS)
    assert_same(uneven.answer, even.answer, ROUNDING[even.keys.dtype])
    np.testing.assert_array_equal(inputs.heads(uneven.slots, "positions", -1), even.slots.positions)


@pytest.mark.parametrize(
    ("engine", "name", "prompt"),
    pairs(ENGINES, ["h2o", "everything"], [1, 24]),
    indirect=["engine"],
)
def test_simulation_with_budgets_of_heads(engine, name, prompt):
    exact = engine.tensor(np.zeros(1, np.float32)).dtype == torch.float32
    more = {"tolerance": 1e-5 if exact else 2e-2, "compares_evictions": exact}
    check_simulation(engine, all_heads(), POLICIES[name], [prompt] * 2, budget=BUDGETS, **more)


def test_memory_goes_with_the_budgets():
    keys = torch.zeros(2, 3, 1, 16)
    slots = ops.new_slots(keys, [11, 4, 40])
    assert slots.keys.shape == (2, 55, 16)
    assert slots.scores.shape == (2, 55)
    assert slots.starts.tolist() == [0, 11, 15, 55]
    assert slots.budget.shape == (2, 3, 2)


def test_slots_of_other_strides_and_with_gaps():
    """Memory between two heads' slots belongs to no head, and must not change."""
    policy, text = POLICIES["value-weighted"], all_heads()
    budget = BUDGETS[0][None].repeat(2, axis=0)
    plain = Conversation(ENGINES["core"], text, policy, budget=budget)
    gaps = Conversation(ENGINES["core"], text, policy, budget=budget)
    sizes = np.diff(plain.slots.starts.tolist())
    starts = np.array([3, 3 + sizes[0], 3 + sizes[:2].sum(), 3 + sizes.sum()], np.int32)
    rooms = torch.full((2, 2, int(starts[-1]) + 5, 24), 7.0)
    wide = ops.new_slots(torch.zeros(2, 3, 1, 16), int(starts[-1]) + 5, value_weighted=True)
    gaps.slots = gaps.slots._replace(
        keys=rooms[0, :, :, :16],
        values=rooms[1, :, :, 5:21],
        scores=wide.scores[:, 0].contiguous(),
        positions=wide.positions[:, 0].contiguous(),
        norms=wide.norms[:, 0].contiguous(),
        starts=torch.from_numpy(starts),
    )
    for talk in (plain, gaps):
        talk.feed_all(CALLS)
    assert_same(plain.answer, gaps.answer)
    beside = [rooms[0, :, :, 16:], rooms[1, :, :, :5], rooms[1, :, :, 21:]]
    untouched = [rooms[:, :, :3], rooms[:, :, starts[-1] :], *beside]
    assert all((part == 7.0).all() for part in untouched)


def on_one_axis(slots: ops.Slots, gap: int = 3) -> ops.Slots:
    """Slots with `starts` for each row. Rows have as many slots as their budgets need, at different
    places of an axis that is longer than necessary. Everything else on the axis is garbage."""
    sizes = slots.starts.diff()
    wanted = torch.minimum(slots.budget.sum(-1, dtype=torch.int32) + 9, sizes)
    begin = gap * torch.arange(1, len(wanted) + 1, dtype=torch.int32)[:, None]
    starts = torch.cat([begin, begin + wanted.cumsum(1)], 1).int()
    fields = {}
    for name in PER_SLOT:
        x = getattr(slots, name)
        if x is not None:
            shape = len(x), 2 * x.shape[1] + 4 * gap, *x.shape[2:]
            rubbish = torch.nan if name in ("keys", "values") and x.is_floating_point() else 7
            new = torch.full(shape, rubbish, dtype=x.dtype)
            for row, (first, last) in zip(new, starts[:, [0, -1]].tolist(), strict=True):
                row[first:last] = EMPTY[name]
            fields[name] = new
    return slots._replace(**fields, starts=starts)


@pytest.mark.parametrize("name", ["everything", "decayed-max", "value-weighted"])
@pytest.mark.parametrize("kv_dtype", [None, "int8-int4", "int4"])
@pytest.mark.parametrize("engine", [*ENGINES.values(), portable()], ids=lambda engine: engine.name)
def test_rows_with_places_of_their_own(engine, kv_dtype, name):
    """Starts [Z, G + 1] give each row its own places. The answers must be those with common places,
    and nothing else on the axis may be read or written."""
    policy, text = POLICIES[name], all_heads()
    text = Text(*(np.concatenate([x, x[..., ::-1]], -1) for x in text))  # int4 needs a D of 32
    mask = np.concatenate([inputs.left([24, 17], 24), np.ones((2, sum(CALLS) - 24), bool)], 1)
    settings = {"mask": mask, "budget": BUDGETS, "kv_dtype": kv_dtype}
    plain = Conversation(engine, text, policy, **settings)
    apart = Conversation(engine, text, policy, **settings, place=on_one_axis)
    first, last = apart.slots.starts[:, 0].tolist(), apart.slots.starts[:, -1].tolist()
    before = [x.clone() for x in apart.slots[:4]]
    for talk in (plain, apart):
        talk.feed_all(CALLS)
    rounding = 0.0 if engine.name == "core" and not backends.forced else 1e-5
    np.testing.assert_allclose(apart.answer, plain.answer, rounding, rounding)
    assert_same_kept(apart, plain, rounding, rounding)
    for was, now in zip(before, apart.slots[:4], strict=True):
        for b in range(2):
            for part in (slice(None, first[b]), slice(last[b], None)):
                assert torch.equal(was[b, part].nan_to_num(9), now[b, part].nan_to_num(9))


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([0, 11, 15, 56], r"slots 15..55, wanted at least one within 0..54"),
        ([0, 11, 11, 55], r"starts\[1\]: slots 11..10"),
        ([-1, 11, 15, 55], r"starts\[0\]: slots -1..10"),
        ([0, 16, 15, 55], r"starts\[1\]: slots 16..14"),
        ([0, 2**31 - 1, 15, 55], r"starts\[0\]: slots 0..2147483646"),
        ([0, 11, 55], r"has shape \[3\], wanted \[G \+ 1\] with|wanted \[G \+ 1\]"),
        ([[0, 11, 15, 55]], r"has shape \[1, 4\], wanted \[B, G \+ 1\]"),
        ([[0, 11, 15, 55], [0, 11, 15, 56]], r"starts\[1, 2\]: slots 15..55"),
    ],
)
def test_starts_that_cannot_be(starts, message):
    text = all_heads(N=8)
    tensors = [torch.from_numpy(x) for x in text]
    slots = ops.new_slots(tensors[1], [11, 4, 40])
    slots = slots._replace(starts=torch.tensor(starts, dtype=torch.int32))
    before = [None if x is None else x.clone() for x in slots]
    with pytest.raises(ValueError, match=message):
        ops.attend(*tensors, slots)
    with pytest.raises(ValueError, match=message):
        ops.step(*(x[:, :, :1] for x in tensors), slots)
    with pytest.raises(ValueError, match=message):
        ops.evict(*tensors[1:], torch.zeros(2, 3, 8), slots)
    for was, now in zip(before, slots, strict=True):
        assert was is None or torch.equal(was, now)


def test_shapes_of_an_uneven_store_are_checked():
    tensors = [torch.from_numpy(x) for x in all_heads(N=1)]
    slots = ops.new_slots(tensors[1], [11, 4, 40])
    with pytest.raises(ValueError, match=r"slots.scores: has shape \[2, 54\], wanted \[B, T\]"):
        ops.step(*tensors, slots._replace(scores=slots.scores[:, 1:].contiguous()))
    with pytest.raises(
        ValueError, match=r"slots.keys: has shape \[2, 55, 16\], wanted \[B, G, S, D\]"
    ):
        ops.step(*tensors, slots._replace(starts=None))
    with pytest.raises(
        ValueError, match=r"slots.budget: has shape \[2, 2, 2\], wanted \[B, G, 2\]"
    ):
        ops.step(*tensors, slots._replace(budget=slots.budget[:, :2].contiguous()))
    slots.budget[1, 2] = torch.tensor([3, -1])
    with pytest.raises(ValueError, match=r"slots.budget\[1, 2\]: is \(3, -1\)"):
        ops.step(*tensors, slots)
    with pytest.raises(ValueError, match="one for each of 3 heads"):
        ops.new_slots(tensors[1], [3, 4])
