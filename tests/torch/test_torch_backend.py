"""The torch backend on the CPU, compared with golden data, the reference and the core.

`make test-torch-backend` runs more: all of tests/torch and tests/hf with H2O_BACKEND=torch.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from h2o import backends, ops
from h2o.backends.torch_backend import attend, slot_view
from tests import inputs, strategies
from tests.conversation import Conversation, assert_same_kept
from tests.core.calls import EVERY_TENSOR, Call
from tests.inputs import POLICIES, Policy
from tests.torch.calls import TABLE, make
from tests.torch.engines import core, one_thread, oracle
from tests.torch.engines import portable as torch_engine

if backends.forced:
    pytest.skip("all tests are of it now", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("on_one_thread")

CALLS = [24, *[1] * 20, 7, *[1] * 6]
N = sum(CALLS)
UNEVEN = np.array([[[9, 5], [2, 1]], [[4, 4], [12, 0]]])


def padded() -> np.ndarray:
    """A mask with left padding of the prompt, and one row that skips a step."""
    mask = np.concatenate([inputs.left([24, 17], 24), np.ones((2, N - 24), bool)], axis=1)
    mask[1, 30] = False
    return mask


def assert_same_history(talk: Conversation, wanted: Conversation) -> None:
    assert_same_kept(talk, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(talk.answer, wanted.answer, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(
        talk.slots.evicted_score, wanted.slots.evicted_score, rtol=1e-5, atol=1e-5
    )


# ---- Which backend serves ----------------------------------------------------------------------


def test_the_core_serves_the_cpu_unless_told_otherwise():
    tensor = torch.zeros(1)
    assert backends.backend_for(tensor) is backends.backend_for(np.zeros(1))
    with backends.by_torch():
        assert backends.backend_for(tensor) is not backends.backend_for(np.zeros(1))
        assert ops.info()["backends"]["cpu"] == "torch"


@pytest.mark.parametrize("name", ["torch", "nonsense"])
def test_the_variable(name):
    code = "import h2o; print(h2o.ops.info()['backends']['cpu'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "H2O_BACKEND": name, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    if name == "torch":
        assert done.stdout == "torch\n"
    else:
        assert 'H2O_BACKEND=nonsense: wanted "torch"' in done.stderr


@pytest.mark.parametrize("name", backends.OPERATIONS)
def test_forced_calls_reach_the_backend(name, monkeypatch):
    backends._torch_backend.cache_clear()
    file = importlib.import_module(f"h2o.backends.torch_backend.{name}")

    @functools.wraps(getattr(file, name))  # its parameters are inspected
    def reached(*arguments):
        raise NotImplementedError("reached")

    monkeypatch.setattr(file, name, reached)
    try:
        with backends.by_torch(), pytest.raises(NotImplementedError, match="reached"):
            make(name).run()
    finally:
        backends._torch_backend.cache_clear()


# ---- The algorithm -----------------------------------------------------------------------------


LAYOUTS = list(
    itertools.product(
        [False, True],
        [None, UNEVEN],
        [
            (None, False),
            ("int8", False),
            ("int8-int4", False),
            ("int4", False),
            (None, True),
            ("int8", True),
        ],
    )
)
"""Padding, budgets of heads, and kv_dtype with whether keys are the values too."""

CROSSED = [
    *((name, *LAYOUTS[i % len(LAYOUTS)]) for i, name in enumerate(POLICIES)),
    *(("everything", *layout) for layout in LAYOUTS),
]


@pytest.mark.parametrize(("name", "pads", "budget", "stored"), CROSSED)
def test_as_the_oracle(name, pads, budget, stored):
    """A prompt, steps and a chunk, in blocks of a few queries, must give the reference's
    history."""
    text = inputs.drifting(21, B=2, H=6, G=2, N=N, D=32, sink=True)
    mask = padded() if pads else None
    kv_dtype, shared = stored
    more = {"mask": mask, "budget": budget, "kv_dtype": kv_dtype, "shared": shared}
    talks = [
        Conversation(engine, text, POLICIES[name], **more).feed_all(CALLS)
        for engine in (torch_engine(), oracle())
    ]
    assert_same_history(*talks)


@given(strategies.scenarios())
def test_any_scenario_is_as_with_the_core(scenario):
    """The backend is compared with the core, which is faster than the reference and tested against
    it."""
    talks = [
        Conversation(
            engine,
            scenario.text(),
            scenario.policy,
            mask=scenario.mask(),
            softcap=scenario.softcap,
            sink_logits=scenario.sink_logits(),
        ).feed_all(scenario.calls)
        for engine in (torch_engine(), core())
    ]
    assert_same_history(*talks)


@pytest.mark.parametrize("size", [1, 700, 5000, 1 << 22])
def test_blocks_of_any_size(size, monkeypatch):
    text = inputs.drifting(22, B=2, H=6, G=2, N=N, D=32, sink=True)
    wanted = Conversation(core(), text, POLICIES["everything"], mask=padded()).feed_all(CALLS)
    monkeypatch.setattr(attend, "BLOCK", size)
    talk = Conversation(torch_engine(), text, POLICIES["everything"], mask=padded())
    assert_same_history(talk.feed_all(CALLS), wanted)


@pytest.mark.parametrize(("name", "pads", "budget", "stored"), CROSSED[::2])
@pytest.mark.parametrize("prompt", [(1, 1), (24, 9), (90, 30)], ids=str)
def test_simulation_as_with_the_core(name, pads, budget, stored, prompt):
    policy = POLICIES[name]
    text = inputs.drifting(21, B=2, H=6, G=2, N=N, D=32, sink=True)
    rows = np.array([[policy.heavy, policy.recent]] * 2) if budget is None else budget
    query, keys, values = map(torch.from_numpy, text)
    kv_dtype, shared = stored
    more = {"kv_dtype": kv_dtype, **policy.ranking}
    if pads:
        sinks = torch.from_numpy(inputs.sink_logits(3, 6))
        more |= {"softcap": 3.0, "mask": torch.from_numpy(padded()), "sink_logits": sinks}
    answers = [
        engine.module.simulate(
            query, keys, None if shared else values, torch.tensor(prompt, dtype=torch.int32),
            torch.tensor(rows, dtype=torch.int32), **more,
        )
        for engine in (torch_engine(), core())
    ]  # fmt: skip
    out, evicted_at, scores = zip(*answers, strict=True)
    assert torch.equal(*evicted_at)
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*out, rtol=2e-5, atol=2e-5)


ranks = arrays(
    np.float32,
    (1, 2, 12),
    elements=st.sampled_from(
        [0.0, -0.0, 1.0, 1.0, 2.0, -3.0, np.nan, np.inf, -np.inf, 1e-45, 3e38]
    ),
)


@given(ranks, strategies.policies(6), st.integers(0, 5))
def test_the_order_of_any_ranks(scores, policy, more):
    """With ties, signed zeros, infinity and NaN, the backend must keep the keys that the core
    keeps."""
    kept = []
    for engine in (torch_engine(), core()):
        x = torch.ones(1, 2, 12, 4)
        slots = ops.new_slots(
            x, 20, policy.heavy, policy.recent, value_weighted=policy.value_weighted
        )
        engine.module.evict(x, x, torch.from_numpy(scores), slots, **policy.ranking)
        for i in range(more):
            zero = torch.zeros(1, 2, 1, 4)
            engine.module.step(zero, zero, (i + 1) * zero, slots, **policy.ranking)
        kept.append(inputs.kept(slots)[0])
    np.testing.assert_array_equal(*kept)


def test_values_that_are_not_finite_show_where_they_are_seen():
    """Values that are not finite must not show in other rows of a block, at padding, or after their
    eviction."""
    text = inputs.drifting(8, B=2, H=4, G=2, N=N, D=32)
    mask = padded()
    for b, g, column, bad in [(0, 0, 5, np.nan), (0, 1, 11, np.inf), (1, 1, 26, np.nan)]:
        text.values[b, g, column, 3] = bad
    for x in text:
        x[1, :, :7] = np.nan  # padding
    talks = [
        Conversation(engine, text, Policy(8, 8), mask=mask).feed_all(CALLS)
        for engine in (torch_engine(), core())
    ]
    answers = [talk.answer for talk in talks]
    assert np.isnan(answers[1]).any()
    assert np.isfinite(answers[1][:, -1]).all(), "nothing of it was evicted"
    np.testing.assert_array_equal(*(np.isfinite(x) for x in answers))
    np.testing.assert_allclose(*(np.where(np.isfinite(x), x, 0) for x in answers), atol=2e-5)
    tensors = [torch.from_numpy(x) for x in text]
    budget = torch.tensor([[8, 8]] * 2, dtype=torch.int32)
    outs = [
        engine.module.simulate(
            *tensors, torch.tensor([20, 9], dtype=torch.int32), budget, mask=torch.from_numpy(mask)
        )[0]
        for engine in (torch_engine(), core())
    ]
    assert torch.equal(*(x.isfinite() for x in outs))


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("size", [None, 8])
def test_simulated_infinities_are_the_oracles(kv_dtype, size, monkeypatch):
    """Infinite values keep their signs while they are held, and two of different signs give NaN."""
    if size is not None:
        monkeypatch.setattr(attend, "BLOCK", size)
    text = inputs.drifting(8, B=2, H=4, G=2, N=N, D=32)
    mask = padded()
    inf = np.inf
    for b, g, column, bad in [
        (0, 0, 5, np.nan), (0, 1, 11, inf), (0, 1, 30, -inf), (1, 0, 20, -inf), (1, 1, 26, inf),
    ]:  # fmt: skip
        text.values[b, g, column, 3] = bad
        text.values[b, g, column + 2, 5] = bad
    for x in text:
        x[1, :, :7] = inf  # padding
    prompt = torch.tensor([20, 9], dtype=torch.int32)
    budget = torch.tensor([[[5, 3], [8, 8]]] * 2, dtype=torch.int32)
    got, want = (
        engine.module.simulate(
            *map(engine.tensor, text), prompt, budget, mask=torch.from_numpy(mask),
            kv_dtype=kv_dtype,
        )[0].numpy()
        for engine in (torch_engine(), oracle())
    )  # fmt: skip
    kinds = np.isnan(want), np.isposinf(want), np.isneginf(want)
    assert all(kind.any() for kind in kinds[: 2 if kv_dtype else 3])
    assert np.isfinite(want[:, -1]).any(), "nothing of it was evicted"
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_values_that_are_not_finite_stay_in_their_heads(kv_dtype):
    """The slots of all heads are on one axis. Values that are not finite, stored or new, must not
    spread to other heads."""
    text = inputs.drifting(8, B=2, H=6, G=3, N=N, D=32)
    budget = np.array([[[9, 5], [2, 7], [9, 3]], [[4, 8], [12, 6], [3, 9]]])
    for b, g, column, bad in [(0, 0, 20, np.inf), (0, 0, 40, -np.inf), (1, 2, 26, np.nan)]:
        text.values[b, g, column, 3] = bad
        text.values[b, g, column + 2, 5] = bad
        text.keys[b, g, column + 1, 4] = np.nan
    talks = [
        Conversation(engine, text, Policy(8, 8), budget=budget, kv_dtype=kv_dtype).feed_all(CALLS)
        for engine in (torch_engine(), oracle())
    ]
    wanted = talks[1].answer.reshape(2, N, 3, 2, 32)
    assert np.isfinite(wanted[0, :, 1:]).all()
    assert np.isfinite(wanted[1, :, :2]).all()
    assert not np.isfinite(wanted[0, :, 0]).all()
    for got, want in zip(talks[0].kept, talks[1].kept, strict=True):
        np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(talks[0].answer, talks[1].answer, rtol=2e-5, atol=2e-5)


def test_memory_is_no_square():
    """The largest tensor of a prompt's attention, measured by torch's profiler, must not grow with
    the square of the prompt."""
    from torch.profiler import ProfilerActivity, profile

    largest = []
    for n in (1024, 4096):
        x = torch.randn(1, 2, n, 8)
        with (
            backends.by_torch(),
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
        ):
            ops.attend(x, x, x)
        largest.append(max(event.self_cpu_memory_usage for event in profiler.events()))
    assert largest[0] <= 4 * 2 * 1024 * 1024
    assert largest[1] <= 4 * attend.BLOCK


@pytest.mark.skipif(not TABLE, reason="an older torch makes more operations of the same calls")
def test_a_step_takes_few_operations():
    """With one row and few keys, operations cost more than their work, so a step must call few."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    counts = []
    for kv_dtype in (None, "int8"):
        tokens = [torch.from_numpy(x) for x in inputs.drifting(4, N=12, D=32).cut(11, 12)]
        slots = ops.new_slots(tokens[1], 12, 4, 4, kv_dtype=kv_dtype)
        with backends.by_torch(), Counter() as counter:
            ops.step(*tokens, slots)
        counts.append(counter.count)
    assert counts[0] <= 71
    assert counts[1] <= 150, "keys and values are quantized at once"


@pytest.mark.parametrize("capacity", [600, [600, 800]], ids=["even", "one axis"])
@pytest.mark.parametrize("kv_dtype", ["int8", "int8-int4", "int4"])
def test_a_step_makes_a_store_floats_once(capacity, kv_dtype):
    """Converting keys and values to float32 is most of a step's memory traffic, so it must happen
    once."""
    from torch.utils._python_dispatch import TorchDispatchMode

    tokens = [torch.from_numpy(x) for x in inputs.drifting(4, H=4, G=2, N=12, D=32).cut(11, 12)]
    slots = ops.new_slots(tokens[1], capacity, 4, 4, kv_dtype=kv_dtype)
    number = slots.scores.numel() * 32
    made = set()

    class Watcher(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.numel() == number and out.is_floating_point():
                made.add(out.untyped_storage().data_ptr())
            return out

    with backends.by_torch(), Watcher():
        ops.step(*tokens, slots)
    assert 1 <= len(made) <= 2


@pytest.mark.parametrize("capacity", [600, [600, 800]], ids=["even", "one axis"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_on_the_cpu_widens_a_few_rows_at_a_time(capacity, dtype, monkeypatch):
    """A step must not convert all 16-bit keys and values to float32 at once, but its products are
    those of float32."""
    from torch.utils._python_dispatch import TorchDispatchMode

    text = inputs.drifting(4, H=4, G=2, D=32, N=12).cut(11, 12)
    tokens = [torch.from_numpy(x).to(dtype) for x in text]
    most = []

    class Watcher(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._to_copy.default and args[0].dtype == dtype:
                most.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    answers = []
    for block in (1, 1 << 20):
        monkeypatch.setattr(slot_view, "BLOCK", block)
        slots = ops.new_slots(tokens[1], capacity, 6, 6)
        torch.manual_seed(0)
        for x in (slots.keys, slots.values):
            x.normal_()
        slots.positions[..., :9] = torch.arange(9, dtype=torch.int32)
        slots.next_slot.fill_(9)
        slots.seen_tokens.fill_(9)
        most.clear()
        with backends.by_torch(), Watcher():
            answers.append(ops.step(*tokens, slots))
        number = slots.keys.numel()
        assert (max(most) == number) if block > 1 else (max(most) <= number // 2)
    assert torch.equal(*answers)


def test_few_rows_meet_16_bit_numbers_as_float32(monkeypatch):
    """Few rows must be multiplied in float32, however they are split. Many rows are multiplied in
    16 bits, unless the product must be exact."""
    monkeypatch.setattr(slot_view, "BLOCK", 2 * 40 * 8)
    right = torch.randn(3, 1, 40, 8).bfloat16()
    for rows, exact in ((2, False), (2, True), (slot_view.FEW, True)):
        left = torch.randn(3, 5, rows, 40)
        torch.testing.assert_close(
            slot_view.products(left, right, exact=exact), left @ right.float(), rtol=1e-5, atol=1e-5
        )
    coarse = slot_view.products(left, right)
    assert not torch.allclose(coarse, left @ right.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(coarse, left @ right.float(), rtol=2e-2, atol=2e-1)


# ---- Errors ------------------------------------------------------------------------------------


SPOILT = 6


def spoilt(tensor: torch.Tensor) -> list[object]:
    """SPOILT wrong values for a tensor of a call."""
    other = torch.float64 if tensor.dtype != torch.float64 else torch.int32
    return [tensor[:0], tensor[None], tensor.to(other), torch.cat([tensor, tensor]), None, [1.0]]


@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_refuses_what_the_core_refuses(name, tensor):
    """The backend must reject the tensors that the core rejects, with the same words and before
    anything is written, and accept the others."""
    answers = []
    for context in (backends.by_torch(), one_thread()):
        with context:
            answers.append([answered(make(name), tensor, which) for which in range(SPOILT)])
    assert answers[0] == answers[1]
    assert any(answers[0])


def answered(call: Call, tensor: str, which: int) -> tuple[type[Exception], str] | None:
    """Error of a call with a wrong tensor, or None if the call succeeds."""
    bad = call.put(tensor, spoilt(call.get(tensor))[which])
    before = bad.snapshot()
    try:
        bad.run()
    except (ValueError, TypeError, BufferError) as error:
        assert bad.snapshot() == before
        return type(error), str(error)
    return None


@pytest.mark.parametrize(
    ("name", "tensor", "numbers", "text"),
    [
        ("step", "slots.next_slot", [[2, -1], [3, 3]], r"^slots.next_slot\[0, 1\]: is -1"),
        ("step", "slots.seen_tokens", [7, -3], r"^slots.seen_tokens\[1\]: is -3"),
        ("evict", "slots.budget", [[0, 0], [2, 3]], "sinks \\+ heavy \\+ recent is 0"),
        ("simulate", "prompt", [1, 0], r"^prompt\[1\]: is 0"),
    ],
)
def test_numbers_are_judged_where_they_can_be_read(name, tensor, numbers, text):
    call = make(name)
    call.get(tensor)[...] = torch.tensor(numbers)
    before = call.snapshot()
    with backends.by_torch(), pytest.raises(ValueError, match=text):
        call.run()
    assert call.snapshot() == before
