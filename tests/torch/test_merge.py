"""Keys that leave and are merged into others: the formula by hand, and every operation over it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from h2o import ops, reference
from tests import inputs
from tests.cases import pairs
from tests.conversation import Conversation, numpy_core
from tests.inputs import Policy
from tests.torch.engines import ROUNDING, core, oracle, portable

CALLS = [24, *[1] * 25, 7, *[1] * 8]
BUDGETS = np.array([[[9, 5], [2, 1], [30, 11]], [[4, 4], [12, 0], [3, 7]]])
POLICIES = {
    "h2o": Policy(10, 6, merge=0.85),
    "sinks": Policy(8, 5, sinks=3, merge=0.7),
    "local": Policy(0, 12, merge=0.8),
    "heavy-only": Policy(12, 0, merge=0.5),
    "decayed": Policy(10, 6, decay=0.9, merge=0.8),
    "max": Policy(10, 6, sinks=1, rank_by="max", decay=0.98, merge=0.8),
    "everything": Policy(
        11, 3, sinks=1, rank_by="mean", decay=0.95, value_weighted=True, merge=0.8
    ),
}  # fmt: skip

STORED = [None, "int8", "int8-int4"]

every_module = pytest.mark.parametrize(
    "module", [reference, ops, portable().module], ids=["oracle", "core", "torch"]
)


def merged(slots: ops.Slots) -> int:
    """Keys that live on in others."""
    return round(float(np.expm1(np.asarray(slots.bias)).sum()))


@every_module
def test_the_formula(module):
    """Three keys, room for two: the second is like the third, and goes into it."""
    keys = torch.tensor([[0.0, 2.0], [3.0, 0.3], [1.0, 0.0]])[None, None]
    values = torch.tensor([[1.0, 1.0], [2.0, 0.0], [0.0, 4.0]])[None, None]
    scores = torch.tensor([[[1.5, 0.4, 0.6]]])
    slots = ops.new_slots(keys, 3, heavy=2, value_weighted=True, merge=True)
    module.evict(keys, values, scores, slots, merge=0.9, value_weighted=True)
    a, b = 0.6 / 1, 0.4 / 2  # scores per query that has seen the key
    a, b = a / (a + b), b / (a + b)
    order = slots.positions[0, 0].argsort()[1:]  # without the empty slot
    third = order[1]
    assert slots.positions[0, 0][order].tolist() == [0, 2]
    torch.testing.assert_close(slots.keys[0, 0, third], torch.tensor([a + 3 * b, 0.3 * b]))
    torch.testing.assert_close(slots.values[0, 0, third], torch.tensor([2 * b, 4 * a]))
    torch.testing.assert_close(slots.norms[0, 0, third], torch.tensor(math.hypot(2 * b, 4 * a)))
    torch.testing.assert_close(slots.bias[0, 0, third], torch.tensor(math.log(2.0)))
    torch.testing.assert_close(slots.scores[0, 0, third], torch.tensor(0.6 + 0.4 * 1 / 2))
    assert slots.lost.item() == 0.0
    query = torch.tensor([[[[0.3, -0.2]]]])
    out, _ = module.attend(query, keys[:, :, :1], values[:, :, :1], slots, scale=1.0)
    logits = torch.stack([query[0, 0, 0] @ x for x in (keys[0, 0, 0], slots.keys[0, 0, third])])
    weights = torch.tensor([*logits.exp(), logits[0].exp()]) * torch.tensor([1.0, 2.0, 1.0])
    seen = torch.stack([values[0, 0, 0], slots.values[0, 0, third], values[0, 0, 0]])
    torch.testing.assert_close(out[0, 0, 0], weights @ seen / weights.sum())


@every_module
def test_the_formula_of_the_largest(module):
    """The scores weigh, whatever has seen them, and the larger is the score of both."""
    keys = torch.tensor([[0.0, 2.0], [3.0, 0.3], [1.0, 0.0]])[None, None]
    values = torch.tensor([[1.0, 1.0], [2.0, 0.0], [0.0, 4.0]])[None, None]
    for second, third in ((0.4, 0.6), (0.7, 0.8)):
        scores = torch.tensor([[[0.9, second, third]]])
        slots = ops.new_slots(keys, 3, heavy=2, merge=True)
        module.evict(keys, values, scores, slots, merge=0.9, decay=0.5, rank_by="max")
        slot = slots.positions[0, 0].argsort()[2]
        a, b = third / (second + third), second / (second + third)
        torch.testing.assert_close(slots.keys[0, 0, slot], torch.tensor([a + 3 * b, 0.3 * b]))
        torch.testing.assert_close(slots.values[0, 0, slot], torch.tensor([2 * b, 4 * a]))
        assert slots.scores[0, 0, slot] == torch.tensor(third)


@every_module
def test_who_cannot_be_merged_is_dropped(module):
    """No key is merged into a sink, nor into a key of norm 0, or one that is not a number."""
    keys = torch.tensor([[2.0, 0.0], [0.0, 0.0], [torch.nan, 1.0], [1.0, 0.0], [0.0, 1.0]])
    keys = keys[None, None]
    values, scores = torch.ones_like(keys), torch.tensor([[[1.0, 1.0, 1.0, 0.25, 1.0]]])
    slots = ops.new_slots(keys, 5, heavy=3, merge=True)
    module.evict(keys, values, scores, slots, sinks=1, merge=0.5)
    assert slots.lost.item() == 0.25
    assert merged(slots) == 0


@every_module
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["leaves", "receives"])
def test_scores_that_are_no_numbers_weigh_nothing(module, bad):
    """A key whose weight is unknown is neither merged nor merged into."""
    keys = torch.tensor([[1.0, 0.2], [1.0, 0.0], [0.0, 1.0]])[None, None]
    slots = ops.new_slots(keys, 3, heavy=2, merge=True)
    scores = torch.tensor([[[0.25, 1.0, 2.0]]])
    scores[0, 0, 0 if math.isnan(bad) else 1] = bad
    module.evict(keys, keys.clone(), scores, slots, merge=0.5)
    assert merged(slots) == 0
    order = slots.positions[0, 0].argsort()[1:]
    assert torch.equal(slots.keys[0, 0, order], keys[0, 0, 1:])
    torch.testing.assert_close(slots.lost.item(), scores[0, 0, 0].item(), equal_nan=True)


@every_module
@pytest.mark.parametrize("n", [4, 37])
@pytest.mark.parametrize("D", [2, 19, 64])
def test_equal_cosines_take_the_lower_position(module, D, n):
    """Wherever they lie. Row 1 has its keys the other way round."""
    torch.manual_seed(D)
    row = torch.rand(D).expand(1, 1, n, D)
    keys = torch.cat([row, -row])
    scores = torch.arange(2 * n).view(2, 1, n) % 7 + 2.0
    scores[:, :, 2] = 0.1
    slots = ops.new_slots(keys, n, heavy=n - 1, merge=True)
    module.evict(keys, keys.clone(), scores, slots, merge=0.5)
    of = [
        dict(zip(*x, strict=True))
        for x in zip(slots.positions[:, 0].tolist(), slots.bias[:, 0].tolist(), strict=True)
    ]
    for biases in of:
        assert biases.pop(0) == pytest.approx(math.log(2))
        assert set(biases.values()) == {0.0}


@pytest.mark.parametrize(
    ("name", "budgets", "kv_dtype"), pairs(POLICIES, ["even", "heads"], STORED)
)
def test_the_core_answers_as_the_oracle(name, budgets, kv_dtype):
    """Through a prompt, steps and chunks, in padded rows; the slots have the same content."""
    N, D = sum(CALLS), 32
    budget = BUDGETS if budgets == "heads" else None
    text = inputs.drifting(5, B=2, H=6, G=3, N=N, D=D, sink=True)
    mask = np.concatenate([inputs.left([24, 17], 24), np.ones((2, N - 24), bool)], 1)
    talks = [
        Conversation(e, text, POLICIES[name], mask=mask, budget=budget, kv_dtype=kv_dtype)
        .feed_all(CALLS)
        for e in (oracle(), core())
    ]  # fmt: skip
    np.testing.assert_allclose(talks[1].answer, talks[0].answer, rtol=3e-5, atol=3e-5)
    for (positions, scores), (wanted, wanted_scores) in zip(
        talks[1].kept, talks[0].kept, strict=True
    ):
        np.testing.assert_array_equal(positions, wanted)
        np.testing.assert_allclose(scores, wanted_scores, rtol=2e-5, atol=2e-5)
    assert merged(talks[0].slots) == merged(talks[1].slots) > 10
    np.testing.assert_allclose(talks[1].slots.lost, talks[0].slots.lost, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves(dtype):
    """One cut, since rounding to 16 bits may choose others among near equals later."""
    text = inputs.drifting(8, B=1, H=4, G=2, N=61, D=48)
    text = inputs.Text(*(core(dtype).exact(x) for x in text))
    policy = POLICIES["sinks"]
    talks = [Conversation(e, text, policy).feed_all([60, 1]) for e in (oracle(), core(dtype))]
    np.testing.assert_allclose(talks[1].answer, talks[0].answer, rtol=2e-2, atol=2e-2)
    assert merged(talks[0].slots) == merged(talks[1].slots) > 10


@every_module
@pytest.mark.parametrize("n", [1, 3, 40])
def test_a_scale_of_nothing(module, n):
    """Every key has the same logit, so a slot weighs as many keys as it stands for."""
    keys, seen = torch.ones(1, 1, 64, 2), torch.arange(3.0)[:2].expand(1, 1, 64, 2)
    slots = ops.new_slots(keys, 2, heavy=0, recent=1, merge=True)
    module.evict(keys, seen, torch.ones(1, 1, 64), slots, merge=0.5)
    assert merged(slots) == 63
    new = torch.ones(1, 1, n, 2)
    out, _ = module.attend(new, new, 3 * new, slots, scale=0.0)
    want = (64 * torch.tensor([0.0, 1.0]) + 3 * n) / (64 + n)
    torch.testing.assert_close(out[0, -1, 0], want)
    if n == 1:
        out = module.step(new, new, 3 * new, slots, scale=0.0, merge=0.5)
        torch.testing.assert_close(out[0, 0, 0], want)


def test_softcap():
    text = inputs.drifting(9, B=1, H=4, G=2, N=48, D=16)
    talks = [
        Conversation(e, text, POLICIES["h2o"], softcap=3.0).feed_all([24, *[1] * 12, 12])
        for e in (oracle(), core())
    ]
    np.testing.assert_allclose(talks[1].answer, talks[0].answer, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("D", [7, 64, 100])
def test_a_large_store(D):
    """Slots of several chunks, which lanes share."""
    N, policy = 2300, Policy(1200, 800, sinks=4, merge=0.9)
    text = inputs.drifting(3, B=1, H=2, G=1, N=N, D=D, turn=0.01)
    tensors = [torch.from_numpy(x) for x in text]
    slots = [ops.new_slots(tensors[1], 2005, 1200, 800, merge=True) for _ in range(2)]
    prompt = [x[:, :, :-8] for x in tensors]
    _, scores = ops.attend(*prompt)
    ops.evict(*prompt[1:], scores, slots[0], **policy.ranking)
    for old, new in zip(slots[0], slots[1], strict=True):
        if old is not None:
            new.copy_(old)
    assert merged(slots[0]) > 20
    for i in range(N - 8, N):
        q, k, v = (x[:, :, i : i + 1] for x in tensors)
        outs = [f.step(q, k, v, s, **policy.ranking) for f, s in zip((ops, reference), slots)]  # noqa: B905
        torch.testing.assert_close(*outs, rtol=3e-5, atol=3e-5)
    kept = [reference.kept(s)[0] for s in slots]
    assert torch.equal(*kept)
    assert merged(slots[0]) == merged(slots[1])


@pytest.mark.parametrize("engine", [core(), core(torch.bfloat16)], ids=["core0", "core1"])
@pytest.mark.parametrize("prompt", [1, 24])
@pytest.mark.parametrize("kv_dtype", STORED)
@pytest.mark.parametrize("name", ["h2o", "everything"])
def test_simulation_is_the_cache(name, kv_dtype, prompt, engine):
    """Merged keys come into the products of a window after these were made."""
    simulation_is_the_cache(name, kv_dtype, prompt, engine)


@pytest.mark.parametrize(
    ("name", "kv_dtype", "prompt"), pairs(["h2o", "everything"], STORED, [1, 24])
)
def test_the_simulation_of_the_oracle_is_its_cache(name, kv_dtype, prompt):
    simulation_is_the_cache(name, kv_dtype, prompt, oracle())


def simulation_is_the_cache(name, kv_dtype, prompt, engine):
    policy, N = POLICIES[name], sum(CALLS)
    text = inputs.drifting(7, B=2, H=6, G=3, N=N, D=32, sink=True)
    mask = np.ones((2, N), bool)
    if prompt > 1:
        mask[1, :5] = False
    tensors = [engine.tensor(x) for x in text]
    out, evicted_at, scores = engine.module.simulate(
        *tensors, engine.tensor(mask[:, :prompt].sum(1).astype(np.int32)),
        engine.tensor(BUDGETS.astype(np.int32)), mask=engine.tensor(mask), kv_dtype=kv_dtype,
        **policy.ranking,
    )  # fmt: skip
    talk = Conversation(engine, text, policy, mask=mask, budget=BUDGETS, kv_dtype=kv_dtype)
    talk.stepwise = False  # a prompt of one token is no decode step
    talk.feed(prompt)
    talk.stepwise = True
    talk.feed_all([1] * (N - prompt))
    # The oracle's simulation takes the steps of a cache; the core's makes products of windows.
    rtol, atol = (1e-6, 4e-6) if engine.name == "oracle" else (ROUNDING[tensors[0].dtype],) * 2
    np.testing.assert_allclose(out.double().numpy(), talk.answer, rtol=rtol, atol=atol)
    positions, held_scores = talk.kept[-1]
    for b, g in np.ndindex(2, 3):
        columns = np.flatnonzero(mask[b])
        held = positions[b, g][positions[b, g] >= 0]
        never = set(np.flatnonzero(evicted_at[b, g].numpy() == N))  # or by the last token
        assert set(columns[held]) <= never
        assert len(never) <= len(held) + 1
        np.testing.assert_allclose(
            scores[b, g, columns[held]], held_scores[b, g, : len(held)], rtol=rtol, atol=atol
        )


@every_module
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 400.0])
def test_a_step_compares_keys_of_16_bits_in_float32(module, dtype, size):
    """A norm above 256 squares beyond float16, and bfloat16 cannot tell near cosines apart."""
    angles = torch.tensor([0.3, 0.0, 0.29, 0.32, 1.5])  # the first is evicted
    keys = size * torch.stack([angles.cos(), angles.sin()], -1)
    keys = keys.to(dtype)[None, None]
    unit = torch.nn.functional.normalize(keys[0, 0].double(), dim=-1)
    nearest = 1 + int((unit[1:4] @ unit[0]).argmax())
    slots = ops.new_slots(keys, 5, heavy=4, merge=True)
    scores = torch.tensor([[[0.0, 1.0, 1.0, 1.0]]])
    module.evict(keys[:, :, :4], keys[:, :, :4], scores, slots, merge=0.9)
    query = torch.zeros_like(keys[:, :, :1])
    slots.scores.copy_(torch.where(slots.positions == 0, -1.0, slots.scores))
    module.step(query, keys[:, :, 4:], keys[:, :, 4:], slots, merge=0.9)
    counts = slots.bias[0, 0].exp().round()
    assert slots.positions[0, 0][counts > 1].tolist() == [nearest]


@pytest.mark.parametrize("strange", [0.0, np.inf, np.nan])
@pytest.mark.parametrize(("G", "R"), [(1, 3), (8, 1)], ids=["shared by lanes", "a lane each"])
def test_a_long_text_is_the_cache(G, R, strange):
    """Several windows and blocks of cells; merged values that are no numbers."""
    policy, N, prompt = Policy(150, 30, sinks=2, merge=0.8), 420, 200
    text = inputs.drifting(17, B=1, H=G * R, G=G, N=N, D=40, turn=0.02)
    text.values[0, :, 120, 3] += strange  # merged by the cut or soon after it
    text.values[0, :, 230, 7] += strange
    out, evicted_at, scores = ops.simulate(
        *text, np.array([prompt], np.int32), np.array([[150, 30]], np.int32), softcap=6.0,
        **policy.ranking,
    )  # fmt: skip
    talk = Conversation(numpy_core, text, policy, softcap=6.0).feed_all(
        [prompt, *[1] * (N - prompt)]
    )
    np.testing.assert_allclose(out, talk.answer, rtol=3e-5, atol=3e-5)
    assert np.isfinite(out).all() == (strange == 0.0)
    assert merged(talk.slots) > 20 * G
    positions, held_scores = talk.kept[-1]
    for g in range(G):
        held = positions[0, g][positions[0, g] >= 0]
        assert set(held) <= set(np.flatnonzero(evicted_at[0, g] == N))
        np.testing.assert_allclose(scores[0, g, held], held_scores[0, g, : len(held)], rtol=3e-5)


def test_the_core_simulates_as_the_oracle():
    N = 90
    text = [torch.from_numpy(x) for x in inputs.drifting(11, B=2, H=4, G=2, N=N, D=24)]
    mask = torch.from_numpy(inputs.holes(2, [80, 61], N))
    operands = *text, torch.tensor([20, 1]).int(), torch.tensor([[9, 5], [4, 12]]).int()
    results = [
        module.simulate(*operands, mask=mask, **POLICIES["decayed"].ranking)
        for module in (reference, ops)
    ]
    torch.testing.assert_close(results[1][0], results[0][0], rtol=3e-5, atol=3e-5)
    assert torch.equal(results[1][1], results[0][1])
    torch.testing.assert_close(results[1][2], results[0][2], rtol=3e-5, atol=3e-5)


@every_module
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_a_row_that_is_all_prompt_and_full(module, kv_dtype):
    """It keeps every token, so that no slot is left for the steps of the other row."""
    text = [torch.from_numpy(x) for x in inputs.drifting(13, N=12)]
    prompt, budget = torch.tensor([13, 3]).int(), torch.tensor([[20, 4], [3, 2]]).int()
    out, evicted_at, _ = module.simulate(*text, prompt, budget, merge=0.5, kv_dtype=kv_dtype)
    assert (evicted_at[0] == 12).all()
    assert (evicted_at[1] < 12).any()
    want = reference.simulate(*text, prompt, budget, merge=0.5, kv_dtype=kv_dtype)[0]
    torch.testing.assert_close(out, want, rtol=3e-5, atol=3e-5)


def test_what_does_not_go_together_is_refused():
    keys = torch.randn(1, 2, 4, 8)
    scores, plain = torch.rand(1, 2, 4), ops.new_slots(keys, 5)
    with pytest.raises(ValueError, match=r"slots\.bias: is None, but merge is given"):
        ops.evict(keys, keys, scores, plain, merge=0.85)
    slots = ops.new_slots(keys, 5, merge=True)
    with pytest.raises(ValueError, match=r"slots\.bias: is given, but merge is None"):
        ops.evict(keys, keys, scores, slots)
    for merge in (1.0, -0.5, math.nan):
        with pytest.raises(ValueError, match=r"merge: is .*, wanted a cosine between 0 and 1"):
            ops.evict(keys, keys, scores, slots, merge=merge)
    one = keys[:, :, :1]
    table = ops.Rotary(torch.zeros(9, 2, 4), torch.full((1, 2, 5), -1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"rotary\.table: is given, but keys that are merged"):
        ops.step(one, one, one, slots, merge=0.85, rotary=table)
