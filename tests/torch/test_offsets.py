"""Offsets: what is subtracted from the keys of a row and head before they are quantized.

Keys that lie around a constant far from 0, as a bias makes them in Qwen2, must be stored as well as
keys around 0.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from h2o import ops
from h2o.backends import torch_backend
from h2o.backends.torch_backend import centered
from h2o.quantization import CENTER_TOKENS, offsets_of
from tests import inputs
from tests.cases import pairs
from tests.conversation import Conversation, assert_same_kept, check_simulation
from tests.inputs import POLICIES
from tests.torch.engines import core, oracle, portable

B, H, G, D = 2, 4, 2, 32
BUDGETS = np.array([[9, 6]] * 2)
CALLS = [40, *[1] * 12, 7, 1, 1]
ENGINES = {"core": core(), "torch": portable()}
every_engine = pytest.mark.parametrize("engine", ENGINES)


def biased(size: float, N: int = sum(CALLS)) -> inputs.Text:
    """A text whose keys have a constant of this size in three elements."""
    text = inputs.drifting(3, B=B, H=H, G=G, N=N, D=D)
    text.keys[..., [3, 19, 20]] += np.float32(size)
    return text


def filled(keys: torch.Tensor) -> ops.Slots:
    n = keys.shape[2]
    slots = ops.new_slots(keys, n + 8, n + 8, 0, kv_dtype="int8", offsets=True)
    ops.evict(keys, keys, torch.zeros(keys.shape[:3]), slots)
    return slots


@every_engine
def test_a_constant_in_all_keys_costs_no_precision(engine):
    """Against answers from unquantized slots. Without offsets the error is a hundred times this."""
    errors = []
    for size in (0.0, 100.0):
        exact, stored = (
            Conversation(
                ENGINES[engine], biased(size), POLICIES["full"], kv_dtype=kv_dtype, offsets=True
            ).feed_all(CALLS)
            for kv_dtype in (None, "int8")
        )
        errors.append(np.abs(exact.answer - stored.answer).max())
    assert errors[1] < 2 * errors[0]


@every_engine
@pytest.mark.parametrize("policy", ["h2o", "everything"])
def test_quantized_keys_keep_the_same_set(engine, policy):
    """The kept sets of a cache with a constant in its keys are those without quantization."""
    exact, stored = (
        Conversation(
            ENGINES[engine],
            biased(50.0),
            POLICIES[policy],
            kv_dtype=kv_dtype,
            offsets=True,
            budget=BUDGETS,
        ).feed_all(CALLS)
        for kv_dtype in (None, "int8")
    )
    for one, other in zip(exact.kept, stored.kept, strict=True):
        np.testing.assert_array_equal(one[0], other[0])


@pytest.mark.parametrize(
    ("engine", "logits"),
    pairs([*ENGINES], [{}, {"softcap": 6.0}, {"sink_logits": np.linspace(-1, 2, H, dtype="f4")}]),
)
def test_logits_that_a_constant_would_change(engine, logits):
    """A softcap bends logits, and learned sinks share a softmax with them."""
    stored = {"kv_dtype": "int8-int4", "offsets": True}
    talks = [
        Conversation(e, biased(8.0), POLICIES["everything"], **stored, **logits).feed_all(CALLS)
        for e in (oracle(), ENGINES[engine])
    ]
    np.testing.assert_allclose(talks[1].answer, talks[0].answer, rtol=1e-4, atol=1e-4)
    assert_same_kept(talks[1], talks[0], rtol=1e-4, atol=1e-4)


@every_engine
@pytest.mark.parametrize("prompt", [1, 40])
def test_simulation_is_the_cache(engine, prompt):
    mask = np.ones((B, sum(CALLS)), bool)
    mask[1, :5] = prompt == 1
    check_simulation(
        ENGINES[engine], biased(20.0), POLICIES["everything"], mask[:, :prompt].sum(1).tolist(),
        budget=BUDGETS, mask=mask, kv_dtype="int8-int4", offsets=True, tolerance=1e-4,
    )  # fmt: skip


@every_engine
def test_padded_rows_answer_as_the_oracle(engine):
    mask = np.ones((B, sum(CALLS)), bool)
    mask[0, :9] = mask[1, 3] = mask[1, 20] = False
    more = {"mask": mask, "kv_dtype": "int8-int4", "offsets": True, "budget": BUDGETS}
    talks = [
        Conversation(e, biased(20.0), POLICIES["everything"], **more).feed_all(CALLS)
        for e in (oracle(), ENGINES[engine])
    ]
    np.testing.assert_allclose(talks[1].answer, talks[0].answer, rtol=1e-4, atol=1e-4)
    assert_same_kept(talks[1], talks[0], rtol=1e-4, atol=1e-4)


def test_they_are_set_by_the_first_keys_of_a_row():
    """By real tokens only, whatever the batch; later keys change nothing."""
    keys = torch.randn(B, G, 90, D, generator=torch.Generator().manual_seed(0)) + 3
    mask = torch.ones(B, 90, dtype=torch.bool)
    mask[1, :11] = mask[1, 20] = False
    slots = ops.new_slots(keys, 100, kv_dtype="int8", offsets=True)
    ops.evict(keys, keys, torch.zeros(B, G, 90), slots, mask=mask)
    assert slots.offsets.dtype == torch.float16
    for b in range(B):
        wanted = keys[b, :, mask[b]][:, :CENTER_TOKENS].mean(1)
        torch.testing.assert_close(slots.offsets[b].float(), wanted, rtol=1e-3, atol=1e-3)
    before = slots.offsets.clone()
    ops.evict(keys[:, :, :5] - 40, keys[:, :, :5], torch.zeros(B, G, 5), slots)
    ops.step(keys[:, :, :1].repeat(1, 2, 1, 1), keys[:, :, :1], keys[:, :, :1], slots)
    assert torch.equal(slots.offsets, before)


def test_both_backends_set_the_same_offsets():
    keys = torch.randn(B, G, 50, D, generator=torch.Generator().manual_seed(1)) * 1e3
    keys[0, 0, 3, 5], keys[1, 1, :, 7], keys[0, 1, 2, 2] = torch.nan, 1e6, -torch.inf
    mask = torch.ones(B, 50, dtype=torch.uint8)
    mask[0, 7:] = 0
    slots = ops.new_slots(keys, 50, kv_dtype="int8", offsets=True)
    ops.evict(keys, keys, torch.zeros(B, G, 50), slots, mask=mask)
    assert torch.equal(slots.offsets, offsets_of(keys, mask))
    assert slots.offsets.isfinite().all()
    assert slots.offsets[0, 0, 5] == slots.offsets[1, 1, 7] == slots.offsets[0, 1, 2] == 0


def test_log_sums_are_those_of_the_keys():
    keys = torch.from_numpy(biased(30.0, 60).keys)
    query = torch.from_numpy(biased(0.0, 60).query)
    slots = filled(keys[:, :, :50])
    whole = [query[:, :, 50:], keys[:, :, 50:]]
    plain = ops.new_slots(keys, 50, 50, 0)
    ops.evict(keys[:, :, :50], keys[:, :, :50], torch.zeros(B, G, 50), plain)
    sums = [ops.log_sums(*whole, held) for held in (plain, slots)]
    torch.testing.assert_close(sums[1], sums[0], rtol=0, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operands_without_offsets(dtype):
    """What kernels get that know no offsets gives the same answers."""
    text = [torch.from_numpy(x).to(dtype) for x in biased(20.0)]
    run = {name: torch_backend.operation(name) for name in ("attend", "evict", "step")}
    results = []
    for changes in (lambda _, x: x, centered.without_offsets):
        slots = ops.new_slots(text[1].repeat(2, 1, 1, 1), 80, 80, 0, kv_dtype="int8", offsets=True)
        slots = slots._replace(rows=torch.tensor([2, 1], dtype=torch.int32))
        answers, last = [], 0
        for n in CALLS:
            q, k, v = (x[:, :, last : last + n] for x in text)
            out, scores = torch.empty(B, n, H, D, dtype=dtype), torch.empty(B, G, n)
            rest = (D**-0.5, 0.0, ops.Policy())
            if n == 1:
                calls = {"step": (q, k, v, None, slots, out, *rest, None, None, None)}
            else:
                seen = slots if last else None
                calls = {
                    "attend": (q, k, v, None, seen, out, scores, *rest, None, None, None),
                    "evict": (k, v, scores, None, slots, ops.Policy()),
                }
            for name, operands in calls.items():
                changed = centered.has_offsets(name, operands)
                run[name](*(changes(name, operands) if changed else operands))
                if changed and changes is centered.without_offsets:
                    centered.restore_output(name, operands)
            answers.append(out.float())
            last += n
        results.append([torch.cat(answers, 1), slots.scores[1:3], slots.offsets])
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_kernels_without_offsets_refuse_other_logits():
    keys = torch.from_numpy(biased(1.0, 9).keys)
    slots, one = filled(keys), keys[:, :, :1]
    query, out = one.repeat(1, 2, 1, 1), torch.empty(B, 1, H, D)
    for softcap, sinks in ((5.0, None), (0.0, torch.zeros(H))):
        step = (query, one, one, None, slots, out, 1.0, softcap, ops.Policy(), None, None, sinks)
        assert centered.without_offsets("step", step) is None


def test_offsets_that_belong_to_no_quantized_keys():
    keys = torch.randn(1, 1, 4, D)
    offsets = torch.zeros(1, 1, D, dtype=torch.float16)
    plain = ops.new_slots(keys, 8)._replace(offsets=offsets)
    with pytest.raises(ValueError, match=r"slots.offsets: is given, but slots.keys is not quant"):
        ops.attend(keys, keys, keys, plain)
    shared = ops.new_slots(keys, 8, kv_dtype="int8", shared=True, offsets=True)
    assert shared.offsets is None
    with pytest.raises(ValueError, match=r"offsets: is given, but slots.keys has no values"):
        ops.step(keys[:, :, :1], keys[:, :, :1], None, shared._replace(offsets=offsets))
    short = ops.new_slots(keys, 8, kv_dtype="int8", offsets=True)._replace(offsets=offsets[..., :5])
    with pytest.raises(ValueError, match=r"slots.offsets: has shape \[1, 1, 5\], wanted \[B, G, D"):
        ops.attend(keys, keys, keys, short)
