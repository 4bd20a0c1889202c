"""The transform of keys and values that are stored with offsets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from h2o import ops
from h2o.quantization import from_stored, hadamard, quantize, to_stored
from tests import inputs
from tests.cases import pairs
from tests.conversation import Conversation, assert_same_kept, check_simulation
from tests.inputs import POLICIES
from tests.torch.engines import core, oracle, portable

ENGINES = {"core": core(), "torch": portable()}
every_engine = pytest.mark.parametrize("engine", ENGINES)
STORED = {"kv_dtype": "int8", "offsets": True}
BLOCKS = {1: 1, 6: 2, 20: 4, 24: 8, 80: 16, 96: 32, 112: 16, 64: 64, 128: 128, 256: 256, 576: 64}
"""Elements of a block for each head dimension"""


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def matrix(N: int) -> torch.Tensor:
    """Sylvester's construction."""
    one = torch.ones(1, 1)
    while len(one) < N:
        one = torch.cat([torch.cat([one, one], 1), torch.cat([one, -one], 1)])
    return one / N**0.5


@pytest.mark.parametrize(("D", "N"), BLOCKS.items())
def test_the_transform_is_the_matrix_in_blocks(D, N):
    x = normal(3, 5, D)
    wanted = torch.cat([part @ matrix(N) for part in x.split(N, -1)], -1)
    torch.testing.assert_close(hadamard(x), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=0, atol=1e-5)
    assert hadamard(x.half()).dtype == torch.float32


def test_stored_and_model_rows_are_inverses():
    keys, values, offsets = normal(2, 3, 7, 96), normal(2, 3, 7, 96), normal(2, 3, 96).half()
    assert to_stored(keys, values, None) == (keys, values) == from_stored(keys, values, None)
    back = from_stored(*to_stored(keys, values, offsets), offsets[:, :, None])
    torch.testing.assert_close(back, (keys, values), rtol=0, atol=1e-5)
    assert to_stored(keys, None, offsets)[1] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("D", BLOCKS)
def test_both_backends_store_the_same_bytes(D, dtype):
    """By `evict` and by `step`, in rows that are contiguous and in rows that are not."""
    keys, values = normal(2, 2, 40, D) * 3 + 5, normal(2, 40, 2, D).transpose(1, 2)
    keys, values = keys.to(dtype), values.to(dtype)
    for kv_dtype in ("int8",) if D % 32 else ("int8", "int4"):
        slots = ops.new_slots(keys, 41, 41, 0, kv_dtype=kv_dtype, offsets=True)
        ops.evict(keys[:, :, :39], values[:, :, :39], torch.zeros(2, 2, 39), slots)
        ops.step(keys[:, :, 39:], keys[:, :, 39:], values[:, :, 39:], slots)
        wanted = to_stored(keys, values, slots.offsets)
        for rows, x in zip((slots.keys, slots.values), wanted, strict=True):
            assert torch.equal(rows[:, :, :40], quantize(x, rows.shape[-1]))


def text(D: int, size: float = 20.0) -> inputs.Text:
    """A text whose keys and values have an outlier element in every third token."""
    text = inputs.drifting(3, B=1, H=4, G=2, N=64, D=D)
    text.keys[..., ::3, D // 2] += np.float32(size)
    text.values[..., ::3, D // 3] -= np.float32(size)
    return text


@pytest.mark.parametrize(("engine", "D"), pairs([*ENGINES], [20, 80, 96, 256]))
def test_answers_are_the_oracle_s(engine, D):
    calls = [40, *[1] * 16, 7, 1]
    talks = [
        Conversation(
            e, text(D), POLICIES["everything"], budget=np.array([[20, 12]]), **STORED
        ).feed_all(calls)
        for e in (oracle(), ENGINES[engine])
    ]
    np.testing.assert_allclose(talks[1].answer, talks[0].answer, rtol=1e-4, atol=1e-3)
    assert_same_kept(talks[1], talks[0], rtol=1e-4, atol=1e-3)


@every_engine
def test_simulation_is_the_cache(engine):
    check_simulation(
        ENGINES[engine], text(80), POLICIES["everything"], [40], budget=np.array([[20, 12]]),
        tolerance=1e-3, **STORED,
    )  # fmt: skip


@every_engine
def test_outliers_cost_little(engine):
    """The mean square error of answers from four-bit values of which some have an outlier."""
    errors = []
    for offsets in (False, True):
        exact, stored = (
            Conversation(
                ENGINES[engine], text(64), POLICIES["full"], kv_dtype=kv_dtype, offsets=offsets
            ).feed_all([40, *[1] * 24])
            for kv_dtype in (None, "int8-int4")
        )
        errors.append(((exact.answer - stored.answer)[:, 40:] ** 2).mean())
    assert errors[1] < errors[0] / 2


def test_too_long_rows_are_refused():
    keys = torch.zeros(1, 1, 1, 2048)
    slots = ops.new_slots(keys, 2, **STORED)
    for engine in ENGINES.values():
        with pytest.raises(ValueError, match=r"slots.offsets: is given, but rows have 2048 e"):
            engine.module.step(keys, keys, keys, slots)
