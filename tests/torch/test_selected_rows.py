"""Calls on some rows of larger slots, selected by number, on torch tensors: the reference, the core
and the torch backend. tests/core/test_selected_rows.py tests what is rejected."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from h2o import backends, ops
from tests import inputs
from tests.conversation import check_as_rows_in_sequence
from tests.inputs import POLICIES
from tests.torch import engines

CALLS = [24, *[1] * 12, 7, *[1] * 6]
UNEVEN = np.array([[[9, 5], [2, 1]], [[4, 4], [0, 7]]], np.int32)
STORES = {
    "floats": (POLICIES["everything"], {}),
    "bytes": (POLICIES["h2o"], {"kv_dtype": "int8-int4"}),
    "heads": (POLICIES["everything"], {"budget": UNEVEN, "kv_dtype": "int8"}),
    "shared": (POLICIES["decayed-max"], {"shared": True}),
}


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("engine", [engines.oracle, engines.core, engines.portable])
def test_as_rows_that_follow_one_another(name, engine):
    policy, store = STORES[name]
    N = sum(CALLS)
    text = inputs.drifting(11, B=2, H=4, G=2, N=N, D=32, sink=True)
    rest = np.ones((2, N - 24), bool)
    rest[0, [3, 11]] = False
    mask = np.concatenate([inputs.holes(4, [20, 13], 24), rest], 1)
    check_as_rows_in_sequence(
        engine(), text, policy, CALLS, lambda size: torch.empty(7, size, dtype=torch.uint8),
        torch.tensor([5, 2], dtype=torch.int32), mask=mask, **store,
    )  # fmt: skip


def test_ranks_of_rolled_keys_are_of_the_rows_too():
    """The torch backend keeps ranks outside the slots. It must select their rows by number too."""
    query, key, value = (torch.randn(1, 2, 1, 8) for _ in range(3))
    slots = ops.new_slots(key.expand(3, -1, -1, -1), 6, 3, 2)
    table, ranks = torch.rand(8, 2, 4), torch.full((3, 2, 6), -1, dtype=torch.int32)
    slots = slots._replace(rows=torch.tensor([1], dtype=torch.int32))
    for _ in range(2):
        with backends.by_torch():
            ops.step(query, key, value, slots, rotary=ops.Rotary(table, ranks))
    assert ranks[1, :, :3].tolist() == [[0, 1, -1]] * 2
    assert (ranks[[0, 2]] == -1).all()
    assert slots.seen_tokens.tolist() == [0, 2, 0]


def test_the_torch_backend_takes_what_is_no_row_for_the_nearest():
    """Numbers that are no rows are clamped where nobody can read them, as on a GPU."""
    from h2o.backends.torch_backend import operation

    query, key, value = (torch.randn(2, 2, 1, 8) for _ in range(3))
    slots = ops.new_slots(key[:1].expand(3, -1, -1, -1), 6, 3, 2)
    slots = slots._replace(rows=torch.tensor([-7, 99], dtype=torch.int32))
    out = torch.empty(2, 1, 2, 8)
    operation("step")(query, key, value, None, slots, out, 0.3, 0.0, ops.Policy(), None, None, None)
    assert slots.seen_tokens.tolist() == [1, 0, 1]
