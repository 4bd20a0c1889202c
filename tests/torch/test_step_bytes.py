"""A decode step of bfloat16 queries over quantized rows, which may be computed with integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from h2o import ops
from tests import inputs
from tests.conversation import Conversation
from tests.inputs import Policy
from tests.reference import operations as reference
from tests.torch.engines import assert_same, core, oracle

KINDS = ["int8", "int8-int4", "int4"]
OF_BYTES = core(torch.bfloat16)


def slots_of(text: list[torch.Tensor], kv_dtype: str):
    """Slots with all keys except the last token's, with scores 0 and room for the last token."""
    _, keys, values = text
    n = keys.shape[2]
    slots = ops.new_slots(keys, n, n, 0, kv_dtype=kv_dtype)
    zeros = torch.zeros((*keys.shape[:2], n - 1))
    ops.evict(keys[:, :, :-1], values[:, :, :-1], zeros, slots)
    return slots


def last(text: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x[:, :, -1:].contiguous() for x in text]


def drifting(n: int, D: int, R: int, G: int = 2, B: int = 1) -> list[torch.Tensor]:
    text = inputs.drifting(n + D + R, B=B, H=R * G, G=G, N=n, D=D, sink=True)
    return [OF_BYTES.tensor(x) for x in text]


def copied(slots):
    return type(slots)(*(None if x is None else x.clone() for x in slots))


@pytest.mark.parametrize("kv_dtype", KINDS)
def test_what_is_not_finite_is_seen_where_it_was(kv_dtype):
    """A query, a key or a value that is not finite must show where it is used, and nowhere else.
    Numbers too small for the integers must not be wrong either."""
    n, D, R = 100, 64, 3
    for name, place, x in [
        ("query", (0, 1, n - 1, 5), np.nan), ("query", (0, 4, n - 1, 5), np.inf),
        ("key", (0, 1, 40, 7), np.inf), ("value", (0, 0, 60, 40), np.nan),
        ("value", (0, 1, 97, 0), -np.inf), ("query", (0, 2), 1e-38), ("query", (0, 2), 0.0),
        ("value", (0, 1), 0.0), ("value", (0, 1), 1e-9),
    ]:  # fmt: skip
        text = drifting(n, D, R)
        text[("query", "key", "value").index(name)][place] = x
        slots = slots_of(text, kv_dtype)
        truth = copied(slots)
        exact = reference.step(*last(text), truth)
        out = ops.step(*last(text), slots)
        np.testing.assert_allclose(out.double(), exact.double(), rtol=1e-2, atol=4e-3)
        assert torch.equal(slots.scores.isnan(), truth.scores.isnan()), (name, place, x)


@pytest.mark.parametrize("kv_dtype", KINDS)
def test_rows_alone_and_any_threads_give_the_same(kv_dtype):
    text = drifting(1100, 128, 4, B=3)
    token = last(text)
    threads = torch.get_num_threads()
    slots = slots_of(text, kv_dtype)
    together = ops.step(*token, copied(slots))
    try:
        torch.set_num_threads(1)
        assert_same(ops.step(*token, copied(slots)), together)
        for b in range(3):
            row = slots_of([x[b : b + 1] for x in text], kv_dtype)
            assert_same(ops.step(*(x[b : b + 1] for x in token), row), together[b : b + 1])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kv_dtype", KINDS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2))])
def test_the_same_keys_stay(kv_dtype, seed):
    """Through 260 evictions the same keys stay as in the reference and in a simulation."""
    n, prompt, budget = 300, 40, np.array([[16, 8]])
    policy = Policy(16, 8, value_weighted=True)
    text = inputs.drifting(seed, B=2, H=6, G=2, N=n, D=64, sink=True)
    text = inputs.Text(*(OF_BYTES.exact(x) for x in text))
    talks = [
        Conversation(e, text, policy, kv_dtype=kv_dtype).feed_all([prompt, *[1] * (n - prompt)])
        for e in (oracle(torch.float32), OF_BYTES)
    ]
    for (positions, _), (wanted, _) in zip(talks[1].kept, talks[0].kept, strict=True):
        np.testing.assert_array_equal(positions, wanted)
    _, evicted_at, _ = ops.simulate(
        *(OF_BYTES.tensor(x) for x in text), torch.full((2,), prompt, dtype=torch.int32),
        torch.from_numpy(budget.astype(np.int32)).expand(2, 2).contiguous(), kv_dtype=kv_dtype,
        **policy.ranking,
    )  # fmt: skip
    for b, g in np.ndindex(2, 2):
        kept = talks[1].kept[-1][0][b, g]
        assert set(kept[kept >= 0]) <= set(np.flatnonzero(evicted_at[b, g].numpy() >= n))
