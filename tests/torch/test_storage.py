"""Quantized stores: their bytes, the numbers read from them, and every operation on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch.utils._python_dispatch import TorchDispatchMode

from h2o import ops, quantization
from h2o.kv_dtype import QUANTIZED, stored_bytes
from tests import inputs
from tests.cases import pairs
from tests.conversation import Conversation, assert_same_kept, check_simulation
from tests.inputs import POLICIES
from tests.torch.engines import core, oracle

CALLS = [24, *[1] * 25, 7, *[1] * 8]
BUDGETS = np.array([[[9, 5], [2, 1], [30, 11]], [[4, 4], [12, 0], [3, 7]]])

floats = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=False)


def of_dtype(dtype: torch.dtype) -> np.ndarray:
    """Small budgets for float32. For 16 bits, rounding may choose another of two nearly equal keys,
    so budgets are large enough that nothing is evicted."""
    return BUDGETS if dtype == torch.float32 else np.full_like(BUDGETS, 100)


def stored(x: torch.Tensor, kv_dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [n, bytes] that the core makes from x [n, D], as keys and as values."""
    n = len(x)
    slots = ops.new_slots(x[None, None], n, kv_dtype=kv_dtype)
    ops.evict(x[None, None], x[None, None], torch.zeros(1, 1, n), slots)
    return slots.keys[0, 0], slots.values[0, 0]


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 300.0, 1e7, 1e30])
def test_the_core_stores_what_the_oracle_stores(kv_dtype, dtype, size):
    generator = torch.Generator().manual_seed(int(abs(np.log10(size))))
    x = torch.randn(40, 96, generator=generator) * size
    x[3] = 0.0
    x[4] = size
    x[5, :50] = 0.0
    x = x.to(dtype)
    assert_stored_like_the_oracle(x, kv_dtype)


def assert_stored_like_the_oracle(x: torch.Tensor, kv_dtype: str) -> None:
    for rows, size in zip(stored(x, kv_dtype), stored_bytes(kv_dtype, x.shape[1]), strict=True):
        assert torch.equal(rows, quantization.quantize(x, size))


@pytest.mark.parametrize("kv_dtype", ["int8-int4", "int4"])
@given(arrays(np.float32, (3, 64), elements=floats))
def test_bytes_of_any_floats(kv_dtype, x):
    assert_stored_like_the_oracle(torch.from_numpy(x), kv_dtype)


@pytest.mark.parametrize(("size", "intervals"), [(66, 254), (34, 16), (40, 15)])
def test_what_is_read_back_is_near(size, intervals):
    """The error is half an interval at most. The ends of the range are bounds of intervals for keys
    of four bits, and in the middle of one for all others."""
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)) * 5 + 2
    back = quantization.dequantize(quantization.quantize(x, size), 64)
    groups = x.view(200, -1, 32 if size == 40 else 64)
    width = groups.amax(-1) - groups.amin(-1) if size == 40 else 2 * groups.abs().amax(-1)
    error = (x - back).view(groups.shape).abs().amax(-1)
    assert (error <= width / intervals * 0.5 * 1.002).all()


def test_what_is_not_finite_is_read_as_nan():
    x = torch.randn(4, 64)
    x[1, 5], x[2, 40] = torch.inf, torch.nan
    for size in (66, 34, 40):
        rows = quantization.quantize(x, size)
        back = quantization.dequantize(rows, 64)
        assert back[[0, 3]].isfinite().all()
        assert back[1, :32].isnan().all()
        assert back[2, 32:].isnan().all()
    assert_stored_like_the_oracle(x, "int8-int4")
    assert_stored_like_the_oracle(x, "int4")


def rows_held(slots: ops.Slots) -> list[np.ndarray]:
    """Bytes of the keys and of the values that are held, by batch row, head and position."""
    positions = slots.positions.numpy()
    head = np.arange(3).repeat(np.diff(slots.starts.numpy()))
    orders = [np.lexsort((row, head)) for row in positions]
    orders = [order[row[order] >= 0] for order, row in zip(orders, positions, strict=True)]
    both = slots.keys.numpy(), slots.values.numpy()
    return [x[b, order] for x in both for b, order in enumerate(orders)]


@pytest.mark.parametrize(
    ("kv_dtype", "D", "dtype"), pairs(QUANTIZED, [32, 64, 96], [torch.float32, torch.bfloat16])
)
def test_the_core_answers_as_the_oracle(kv_dtype, D, dtype):
    """A prompt, steps and chunks, with budgets of heads and padded rows, must give the reference's
    answers."""
    policy = POLICIES["everything"]
    text = inputs.drifting(5, B=2, H=6, G=3, N=sum(CALLS), D=D, sink=True)
    text = inputs.Text(*(core(dtype).exact(x) for x in text))
    mask = np.concatenate([inputs.left([24, 17], 24), np.ones((2, sum(CALLS) - 24), bool)], 1)
    engines = oracle(torch.float32), core(dtype)
    budgets = of_dtype(dtype)
    talks = [
        Conversation(e, text, policy, mask=mask, budget=budgets, kv_dtype=kv_dtype).feed_all(CALLS)
        for e in engines
    ]
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    np.testing.assert_allclose(talks[1].answer, talks[0].answer, rtol=tolerance, atol=tolerance)
    if dtype == torch.float32:
        assert_same_kept(talks[1], talks[0], rtol=1e-5, atol=1e-5)
        for got, wanted in zip(*(rows_held(talk.slots) for talk in talks), strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_odd_head_dimensions(kv_dtype):
    text = inputs.drifting(6, B=1, H=2, G=1, N=40, D=21)
    if kv_dtype != "int8":
        with pytest.raises(ValueError, match="multiple of 32, not 21"):
            Conversation(core(), text, POLICIES["h2o"], kv_dtype=kv_dtype)
        return
    talks = [
        Conversation(e, text, POLICIES["h2o"], kv_dtype=kv_dtype).feed_all([20, *[1] * 12, 8])
        for e in (oracle(), core())
    ]
    np.testing.assert_allclose(talks[1].answer, talks[0].answer, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("kv_dtype", "prompt", "engine"),
    pairs(QUANTIZED, [1, 24], [oracle(), core(), core(torch.bfloat16)]),
)
def test_simulation_is_the_cache(kv_dtype, prompt, engine):
    text = inputs.drifting(7, B=2, H=6, G=3, N=sum(CALLS), D=32, sink=True)
    mask = np.ones((2, sum(CALLS)), bool)
    if prompt > 1:
        mask[1, :5] = False
    dtype = engine.tensor(text.keys).dtype
    exact = dtype == torch.float32
    check_simulation(
        engine, text, POLICIES["everything"], mask[:, :prompt].sum(1).tolist(),
        budget=of_dtype(dtype), mask=mask, kv_dtype=kv_dtype,
        tolerance=2e-5 if exact else 3e-2, compares_evictions=exact,
    )  # fmt: skip


def test_values_that_are_not_finite_show_where_they_are_seen():
    text = inputs.drifting(8, B=1, H=2, G=1, N=30, D=32)
    text.values[0, 0, 20, 3] = np.nan
    talk = Conversation(core(), text, POLICIES["full"], kv_dtype="int8-int4")
    talk.feed_all([10, *[1] * 20])
    assert np.isfinite(talk.answer[:, :20]).all()
    assert np.isnan(talk.answer[:, 20:]).any(-1).all()


def test_bytes_that_are_no_rows():
    x = torch.randn(1, 1, 4, 32)
    slots = ops.new_slots(x, 8, kv_dtype="int8-int4")
    for name, size, wanted in (
        ("keys", 33, r"34 \(int8\) or 18 \(int4\)"),
        ("keys", 20, r"34 \(int8\) or 18 \(int4\)"),
        ("values", 18, r"34 \(int8\) or 20 \(int4\)"),
    ):
        other = slots._replace(**{name: torch.zeros(1, 1, 8, size, dtype=torch.uint8)})
        with pytest.raises(
            ValueError, match=f"slots.{name}: has rows of {size} bytes, wanted {wanted}"
        ):
            ops.step(*(x[:, :, :1],) * 3, other)
    shared = slots._replace(keys=torch.zeros(1, 1, 8, 18, dtype=torch.uint8), values=None)
    with pytest.raises(ValueError, match=r"has rows of 18 bytes, wanted 34 \(int8\) for 32"):
        ops.step(x[:, :, :1], x[:, :, :1], None, shared)
    mixed = slots._replace(values=torch.zeros(1, 1, 8, 32))
    with pytest.raises(TypeError, match="both quantized or neither"):
        ops.attend(x, x, x, mixed)
    with pytest.raises(ValueError, match='expected None, "int8", "int8-int4" or "int4"'):
        ops.new_slots(x, 8, kv_dtype="int3")


class DividesAsCuda(TorchDispatchMode):
    """Divide by a host number as torch on CUDA does: multiply by the number's inverse."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.div.Tensor and getattr(args[1], "ndim", 0) == 0:
            inverse = torch.ones((), dtype=args[0].dtype) / args[1]
            return args[0] * inverse
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("size", "width"), [(66, 127), (40, 15)])
def test_on_cuda_numbers_are_divided_as_the_core_divides_them(size, width):
    """The ranges here give a scale that float16 can represent, or one next to it. Multiplying by an
    inverse would give some of them the next scale."""
    exact = width * torch.arange(1024, 2048) / 1024
    largest = torch.cat([exact, exact.nextafter(torch.tensor(torch.inf))])
    x = torch.linspace(0, 1, 64) * largest[:, None]
    wanted = stored(x, "int8-int4")[size == 40]
    with DividesAsCuda():
        assert not torch.equal(x / width, x / x.new_full((1,), width))
        assert torch.equal(quantization.quantize(x, size), wanted)


@pytest.mark.parametrize("size", [2, 32, 34.5, "34"])
def test_other_sizes(size):
    with pytest.raises(ValueError, match=f"size is {size!r}; expected 34, 18 or 20"):
        quantization.quantize(torch.ones(2, 32), size)
    with pytest.raises(ValueError, match=r"size is 25; expected 42$"):
        quantization.quantize(torch.ones(2, 40), 25)
