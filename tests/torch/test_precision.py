"""Large logits, small logits under a large cap, and infinite values, in every implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from h2o import ops
from tests.torch.engines import ROUNDING, core, oracle, portable

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ENGINES = (core(), portable())
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

Q, D = 72, 64
HELD = 38
"""Tokens that the slots hold before a chunk or a step."""


def text(dtype, *, seed=0):
    """Query [1, 2, Q, D], keys and values [1, 1, Q, D]. The first element of queries and keys is
    0."""
    generator = torch.Generator().manual_seed(seed)
    query, keys, values = (torch.randn(1, heads, Q, D, generator=generator) for heads in (2, 1, 1))
    query[..., 0] = keys[..., 0] = 0
    return query.to(dtype), keys.to(dtype), values.to(dtype)


def answers(module, tensors, **numbers):
    """Outputs and scores of each operation on a text from which nothing is evicted: `attend` on all
    tokens, `attend` on the last with the others in slots, `step` of one more, and `simulate`."""
    outs, scores = {}, {}
    held, chunk, last = (
        [x[:, :, part] for x in tensors]
        for part in (slice(HELD), slice(HELD, None), slice(HELD, HELD + 1))
    )
    outs["attend"], scores["attend"] = module.attend(*tensors, **numbers)
    for name, new in (("chunk", chunk), ("step", last)):
        slots = ops.new_slots(tensors[1], Q, Q, 0)
        module.evict(*held[1:], module.attend(*held, **numbers)[1], slots)
        if name == "step":
            outs[name] = module.step(*new, slots, **numbers)
        else:
            outs[name], scores["new keys"] = module.attend(*new, slots, **numbers)
        scores[name] = slots.scores.gather(-1, slots.positions.sort(stable=True).indices)
    prompt, budget = (torch.tensor(x, dtype=torch.int32) for x in ([HELD], [[Q, 0]]))
    outs["simulate"], _, scores["simulate"] = module.simulate(*tensors, prompt, budget, **numbers)
    return outs, scores


def compare(engine, got, wanted, rounding):
    for name in wanted:
        np.testing.assert_allclose(
            got[name].float().numpy(), wanted[name].float().numpy(),
            rtol=rounding, atol=rounding, err_msg=f"{engine.name}: {name}",
        )  # fmt: skip


@each_dtype
@pytest.mark.parametrize("softcap", [3.0, 1e4, 2e38])
def test_a_large_cap_costs_no_digits(dtype, softcap):
    tensors = text(dtype)
    numbers = {"softcap": softcap, "scale": 0.2}
    wanted = answers(oracle().module, tensors, **numbers)
    for engine in ENGINES:
        outs, scores = answers(engine.module, tensors, **numbers)
        compare(engine, scores, wanted[1], 2e-5)
        compare(engine, outs, wanted[0], ROUNDING[dtype])


@each_dtype
@pytest.mark.parametrize(("size", "step"), [(128, 1 / 128), (2**13, 2**-10)], ids=["1e4", "1e8"])
def test_scores_of_large_logits(dtype, size, step):
    """Logits size^2 + 0, 1, 2 or 3 (times 8 for the larger size), all exact in float32."""
    query, keys, values = text(dtype)
    query[...], keys[...] = 0, 0
    query[..., 0], query[..., 1] = size, size
    keys[..., 0] = size
    keys[..., 1] = (torch.arange(Q) % 4 * step).to(dtype)
    tensors = query, keys, values
    _, wanted = answers(oracle().module, tensors, scale=1.0)
    for engine in ENGINES:
        _, scores = answers(engine.module, tensors, scale=1.0)
        compare(engine, scores, wanted, 2e-5)


@each_dtype
@pytest.mark.parametrize("size", [1.0, 1024.0], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_logits_that_grow_along_the_text(dtype, size, sign):
    """Logits grow by 4 every 6 tokens for each third query, and hardly for the others. Sums must be
    rescaled again and again, in some rows of a tile and not in others."""
    query, keys, values = text(dtype)
    query[...], keys[..., 1:] = 0, 0
    query[..., 0] = (torch.arange(Q) % 3 == 0) * 2 / size + 0.01 / size
    keys[..., 0] = torch.arange(Q) // 6 * 2 * size
    tensors = query * sign, keys, values
    wanted = answers(oracle().module, tensors, scale=float(sign))
    for engine in ENGINES:
        outs, scores = answers(engine.module, tensors, scale=float(sign))
        compare(engine, scores, wanted[1], 2e-5)
        compare(engine, outs, wanted[0], ROUNDING[dtype])


@each_dtype
@pytest.mark.parametrize("gap", [1, 20, 60, 84, 200])
def test_an_infinite_value_is_infinite_where_it_is_seen(dtype, gap):
    """An infinite value shows with its sign, and in its own channel only, while its weight is a
    float32. With a smaller weight it may be NaN."""
    query, keys, values = text(dtype)
    query[...], keys[...] = 0, 0
    query[..., 0], keys[:, :, 5, 0] = 1, -gap
    values[:, :, 5, 3], values[:, :, 5, 7] = torch.inf, -torch.inf
    others = [d for d in range(D) if d not in (3, 7)]
    for engine in ENGINES:
        outs, scores = answers(engine.module, (query, keys, values), scale=1.0)
        assert all(x.isfinite().all() for x in scores.values())
        for name, out in outs.items():
            before = 5 if name in ("attend", "simulate") else 0
            which = engine.name, name
            assert out[..., others].isfinite().all(), which
            assert out[:, :before].isfinite().all(), which
            assert not out[:, before:, :, [3, 7]].isfinite().any(), which
            if gap < 87:
                assert (out[:, before:, :, 3] == torch.inf).all(), which
                assert (out[:, before:, :, 7] == -torch.inf).all(), which
