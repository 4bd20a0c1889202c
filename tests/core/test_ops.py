"""The core's operations on NumPy arrays: one table of cases, compared with whole-text matrices.

Kept positions must be equal. Each case first asserts that no two ranks nearly tie, so no tolerance
is needed.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from h2o import ops
from tests import inputs
from tests.cases import checkered
from tests.conversation import Conversation, assert_same_kept, check_slots, numpy_core
from tests.core.dense import answers
from tests.inputs import POLICIES, Policy, Scenario

CLEAR = 3e-5
"""Ranks with a larger relative difference than this cannot swap through float32 rounding."""

BASE = Scenario(
    seed=8,
    lengths=[30, 21],
    calls=[32, *[1] * 12, 5, *[1] * 6, 2, 33, *[1] * 6],
    G=2,
    R=2,
    D=16,
    padding="left",
    policy=POLICIES["h2o"],
    softcap=0.0,
)
"""A prompt, steps, a chunk into slots with a hole, steps, and a chunk longer than a block of
rows."""


def case(**changes) -> Scenario:
    return dataclasses.replace(BASE, **changes)


RANKINGS = {f"policy {name}": case(policy=policy) for name, policy in POLICIES.items()}
SHAPES = {
    **{f"head dimension {D}": case(D=D) for D in (1, 3, 20, 64, 80, 96, 128, 256)},
    **{f"group of {R}": case(R=R, G=3) for R in (1, 3, 4, 8, 32)},
    **{f"padding {padding}": case(padding=padding) for padding in ("right", "holes")},
    **{
        f"prompt of {Q}": case(calls=[Q, *[1] * 20], lengths=[Q], policy=Policy(4, 3), G=3)
        for Q in (1, 2, 31, 33, 100)
    },
    "ragged": case(lengths=[1, 0, 17, 64, 33], calls=[64, *[1] * 8, 3, 1, 1], padding="holes"),
    "softcap": case(softcap=2.0),
    "learned sinks": case(learned_sinks=True, R=4),
    "learned sinks, softcap, long": case(
        lengths=[300, 170],
        calls=[300, *[1] * 6, 70, 1],
        policy=Policy(60, 30),
        D=64,
        seed=9,
        learned_sinks=True,
        softcap=4.0,
        R=3,
    ),
    "many heads, long": case(
        lengths=[300, 170],
        calls=[300, *[1] * 12],
        policy=Policy(190, 80),
        G=1,
        D=80,
        seed=9,
        learned_sinks=True,
        softcap=4.0,
        R=37,
    ),
    "everything at once": case(
        lengths=[40, 0, 3],
        calls=[41, *[1] * 9, 4, 1, 1],
        G=3,
        R=3,
        D=20,
        padding="holes",
        policy=POLICIES["everything"],
        softcap=3.0,
    ),
    "long": case(
        lengths=[300, 170], calls=[300, *[1] * 6, 70, 1], policy=Policy(60, 30), D=64, seed=9
    ),
}
TABLE = RANKINGS | SHAPES
REAL = {"float32": (np.float32, 2e-5), "float16": (np.float16, 2e-3)}
"""Dtypes that NumPy has, and the tolerance of outputs for values around 1."""
CASES = [*checkered(RANKINGS, REAL), *itertools.product(SHAPES, REAL)]
"""Rankings use scores, which are float32 for any dtype of the text. So half of the pairs of a
ranking and a dtype are slow tests."""


def rounded(text: inputs.Text, dtype: type) -> inputs.Text:
    return inputs.Text(*(x.astype(dtype) for x in text))


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_table(name, dtype):
    scenario = TABLE[name]
    real, tolerance = REAL[dtype]
    text = rounded(scenario.text(), real)
    how = {
        "mask": scenario.mask(),
        "softcap": scenario.softcap,
        "sink_logits": scenario.sink_logits(),
    }
    want = answers(text, scenario.calls, scenario.policy, **how)
    assert want.gap > CLEAR, "a near tie: choose another seed"
    talk = Conversation(numpy_core, text, scenario.policy, **how)
    talk.feed_all(scenario.calls)
    compare(talk, want, tolerance)


def compare(talk: Conversation, want, tolerance: float) -> None:
    for call, (positions, scores) in enumerate(talk.kept):
        wanted_positions, wanted_scores = want.kept(call)
        np.testing.assert_array_equal(positions, wanted_positions, err_msg=f"call {call}")
        np.testing.assert_allclose(scores, wanted_scores, rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(talk.answer, want.out, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(talk.slots.evicted_score, want.evicted_score, rtol=2e-5, atol=1e-5)


def test_the_heavy_set_of_the_table_moves():
    """If the heavy set did not change, no test above would notice a wrong score."""
    policy, text = POLICIES["h2o"], inputs.drifting(BASE.seed, N=90)
    want = answers(text, [30, *[1] * 60], policy)
    kept = [want.kept(call)[0] for call in range(len(want.held))]
    assert inputs.swaps(kept, policy.k, policy.recent) > 15


@pytest.mark.parametrize("name", [name for name, s in TABLE.items() if len(s.lengths) == 2])
def test_step_is_attend_and_evict(name):
    scenario = TABLE[name]
    calls = [scenario.calls[0], *[1] * 12]
    talks = [
        Conversation(
            numpy_core, scenario.text(), scenario.policy,
            mask=scenario.mask(), softcap=scenario.softcap, stepwise=stepwise,
            sink_logits=scenario.sink_logits(),
        ).feed_all(calls)
        for stepwise in (True, False)
    ]  # fmt: skip
    assert_same_kept(*talks, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(talks[0].answer, talks[1].answer, rtol=1e-5, atol=1e-5)


def test_a_step_of_more_heads_than_a_block_of_a_gpu_has_shared_memory_for():
    random, R, D, held = np.random.default_rng(3), 1100, 4, 140
    keys, values = (random.standard_normal((1, 1, held + 1, D), np.float32) for _ in range(2))
    query = random.standard_normal((1, R, 1, D), np.float32)
    slots = ops.new_slots(keys, held + 1)
    no_scores = np.zeros((1, 1, held), np.float32)
    ops.evict(keys[:, :, :held], values[:, :, :held], no_scores, slots)
    out = ops.step(query, keys[:, :, held:], values[:, :, held:], slots)
    weights = np.exp(query[0, :, 0].astype(float) @ keys[0, 0].T.astype(float) / np.sqrt(D))
    weights /= weights.sum(1, keepdims=True)
    np.testing.assert_allclose(out.reshape(R, D), weights @ values[0, 0], atol=2e-5)
    _, scores = inputs.kept(slots)
    np.testing.assert_allclose(scores[0, 0], weights.sum(0), rtol=1e-5)


def test_budgets_of_rows():
    budget = np.array([[3, 4], [0, 9], [12, 0], [900, 900], [1, 1]], np.int32)
    policy, calls = Policy(sinks=1), [25, *[1] * 15, 4, 1, 1]
    text = inputs.drifting(11, B=5, N=sum(calls))
    want = answers(text, calls, policy, budget=budget)
    assert want.gap > CLEAR
    talk = Conversation(numpy_core, text, policy, budget=budget, capacity=sum(calls) + 1)
    compare(talk.feed_all(calls), want, REAL["float32"][1])


def test_rows_whose_token_is_masked_stay_as_they_are():
    policy, N = POLICIES["h2o"], 40
    text = inputs.drifting(5, B=3, N=N)
    mask = np.ones((3, N), bool)
    mask[1, 24:] = False
    mask[2, 25::2] = False
    talk = Conversation(numpy_core, text, policy, mask=mask).feed_all([24])
    before = [None if x is None else x[1].copy() for x in talk.slots]
    talk.feed_all([1] * (N - 24))
    for old, new in zip(before, talk.slots, strict=True):
        np.testing.assert_array_equal(None if new is None else new[1], old)
    assert not talk.answer[1, 24:].any()
    compare(talk, answers(text, [24, *[1] * (N - 24)], policy, mask=mask), 2e-5)


# ---- Strides ------------------------------------------------------------------------------------


def transposed(x):  # [B, N, heads, D] in memory, as models project them
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


def backwards(x):
    return np.ascontiguousarray(x[..., ::-1, ::-1])[..., ::-1, ::-1]


def gapped(x):
    return np.repeat(np.repeat(x, 2, axis=-1), 3, axis=-2)[..., ::3, ::2]


def fused(x):  # the middle third of a wider projection
    return np.concatenate([x, x, x], axis=-1)[..., x.shape[-1] : 2 * x.shape[-1]]


def expanded(x):  # every batch row has the same memory
    return np.broadcast_to(x[:1], x.shape)


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("layout", [transposed, backwards, gapped, fused, expanded])
def test_strides_do_not_matter(layout, dtype):
    text = rounded(inputs.drifting(3, B=2, N=48, D=20), REAL[dtype][0])
    if layout is expanded:
        text = inputs.Text(*(np.array(expanded(x)) for x in text))
    viewed = inputs.Text(*(layout(x) for x in text))
    for x, y in zip(text, viewed, strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.strides != y.strides
        y.setflags(write=False)
    calls, policy = [30, *[1] * 10, 8], POLICIES["value-weighted"]
    plain = Conversation(numpy_core, text, policy).feed_all(calls)
    as_is = numpy_core._replace(tensor=np.asarray)
    strided = Conversation(as_is, viewed, policy).feed_all(calls)
    np.testing.assert_array_equal(strided.answer, plain.answer)
    for a, b in zip(strided.slots, plain.slots, strict=True):
        np.testing.assert_array_equal(a, b)


def test_outputs_are_written_where_they_are():
    q, k, v = inputs.drifting(3, N=20)
    wide = np.full((2, 20, 9, 16), 7.0, np.float32)
    out, scores = wide[:, :, 2:6], np.full((2, 2, 20), 7.0, np.float32)
    got = ops.attend(q, k, v, out=out, scores=scores)
    assert got[0] is out
    assert got[1] is scores
    want = ops.attend(q, k, v)
    np.testing.assert_array_equal(out, want[0])
    np.testing.assert_array_equal(scores, want[1])
    assert (wide[:, :, :2] == 7).all()
    assert (wide[:, :, 6:] == 7).all()


@pytest.mark.parametrize("kind", [np.bool_, np.uint8])
def test_masks_of_either_dtype(kind):
    text, mask = inputs.drifting(3, N=20), inputs.holes(3, [20, 11], 20)
    want = ops.attend(*text, mask=mask)
    got = ops.attend(*text, mask=(mask * 255).astype(kind))
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])


# ---- Eviction alone -----------------------------------------------------------------------------

NUMBERS = [0.0, -0.0, 1.0, 2.0, 0.5, -1.0, 3.4e38, -np.inf, np.nan, -np.nan, 1e-40, 3e38]
"""Scores. Infinity is missing because it pins a key."""


def chosen(positions: list[int], scores: np.ndarray, policy: Policy) -> list[int]:
    """The ascending positions that stay, by definition of the policy. `scores` has those of all
    positions."""
    n = len(positions)
    if n <= policy.k:
        return positions
    candidates = [j for j in positions[: n - policy.recent] if j >= policy.sinks]

    def order(j: int) -> tuple[bool, float, int]:
        return (True, 0.0, j) if np.isnan(scores[j]) else (False, -float(scores[j]), j)

    leave = sorted(candidates, key=order)[policy.heavy :]
    return [j for j in positions if j not in leave]


CHOICES = [Policy(9, 4), Policy(4, 0, sinks=2), Policy(20, 7, sinks=1), Policy(1, 0), Policy(0, 5)]


def handmade(seed: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores [1, 1, n] with many ties, and keys [1, 1, n, 2] whose elements are their positions."""
    rng = np.random.default_rng(seed)
    few = rng.choice(NUMBERS, size=rng.integers(2, len(NUMBERS)), replace=False)
    scores = rng.choice(few, size=(1, 1, n)).astype(np.float32)
    return scores, np.arange(n, dtype=np.float32)[:, None] + np.zeros((1, 1, n, 2), np.float32)


@pytest.mark.parametrize("chunk", [0, 1, 17])
@pytest.mark.parametrize("policy", CHOICES, ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_ties_and_nan(seed, policy, chunk):
    """Ties and NaN are resolved as defined, whether all keys are a prompt, or some are stored and
    some are a chunk."""
    n = 60
    scores, keys = handmade(seed, n)
    slots = ops.new_slots(keys, n, policy.heavy, policy.recent)
    want: list[int] = []
    for new in (slice(0, n - chunk), slice(n - chunk, n))[: 2 if chunk else 1]:
        ops.evict(keys[:, :, new], -keys[:, :, new], scores[:, :, new], slots, sinks=policy.sinks)
        want = chosen([*want, *range(n)[new]], scores[0, 0], policy)
        check_slots(slots, policy.sinks)
        assert inputs.kept(slots)[0][0, 0].tolist() == want
    filled = slots.positions[0, 0] >= 0
    held = slots.positions[0, 0, filled]
    np.testing.assert_array_equal(slots.scores[0, 0, filled], scores[0, 0, held])
    np.testing.assert_array_equal(slots.keys[0, 0, filled, 0], held)
    np.testing.assert_array_equal(slots.values[0, 0, filled], -slots.keys[0, 0, filled])


def test_more_candidates_than_a_block_of_a_gpu_takes_at_a_time():
    n, policy = 7000, Policy(900, 400, sinks=2)
    scores, keys = handmade(3, n)
    mask = np.random.default_rng(3).random((1, n)) < 0.9
    columns = np.flatnonzero(mask[0])
    slots = ops.new_slots(keys, policy.k + 1, policy.heavy, policy.recent)
    want: list[int] = []
    for new in (slice(0, 4200), slice(4200, n)):
        tokens = range(mask[0, : new.start].sum(), mask[0, : new.stop].sum())
        rows = keys[:, :, new], -keys[:, :, new], scores[:, :, new]
        ops.evict(*rows, slots, mask=mask[:, new], sinks=policy.sinks)
        want = chosen([*want, *tokens], scores[0, 0, columns], policy)
        assert inputs.kept(slots)[0][0, 0].tolist() == want
    held = columns[slots.positions[0, 0, : policy.k]]
    np.testing.assert_array_equal(slots.keys[0, 0, : policy.k, 0], held)
    np.testing.assert_array_equal(slots.scores[0, 0, : policy.k], scores[0, 0, held])


@pytest.mark.parametrize("policy", CHOICES, ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_ties_and_nan_in_a_step(seed, policy):
    """The query is 0, so all keys, including the new one, receive the same attention."""
    k = policy.k
    scores, keys = handmade(seed, k + 1)
    slots = ops.new_slots(keys, k + 1, policy.heavy, policy.recent)
    ops.evict(keys[:, :, :k], keys[:, :, :k], scores[:, :, :k], slots, sinks=policy.sinks)
    last = keys[:, :, k:]
    ops.step(0 * last, last, last, slots, sinks=policy.sinks)
    check_slots(slots, policy.sinks)
    scores[0, 0, k] = 0
    scores += np.float32(1 / (k + 1))
    assert inputs.kept(slots)[0][0, 0].tolist() == chosen([*range(k + 1)], scores[0, 0], policy)


def test_the_capacity_need_not_exceed_what_is_kept():
    q, k, v = inputs.drifting(9, N=50)
    policy = POLICIES["sinks"]
    talk = Conversation(numpy_core, inputs.Text(q, k, v), policy, capacity=policy.k)
    compare(talk.feed_all([40, 10]), answers(inputs.Text(q, k, v), [40, 10], policy), 2e-5)


def test_survivors_stay_in_their_slots():
    """Keys that stay are not moved, except one beyond the last used slot once a chunk has filled
    the holes."""
    talk = Conversation(numpy_core, inputs.drifting(9, N=70), POLICIES["h2o"])
    talk.feed_all([30, *[1] * 9])
    before = talk.slots.positions[..., : POLICIES["h2o"].k].copy()
    talk.feed(5)
    after = talk.slots.positions[..., : POLICIES["h2o"].k]
    for b, g in np.ndindex(2, 2):
        stayed = np.isin(before[b, g], after[b, g]) & (before[b, g] >= 0)
        assert stayed.sum() > 5
        np.testing.assert_array_equal(after[b, g, stayed], before[b, g, stayed])


def test_a_nan_key_is_dropped_first():
    """One NaN in a key makes its scores NaN permanently. The cache must evict that key."""
    text = inputs.drifting(2, B=1, H=1, G=1, N=40)
    policy = Policy(6, 4)
    slots = ops.new_slots(text.keys, policy.k + 1, policy.heavy, policy.recent)
    q, k, v = text.cut(0, 9)
    _, scores = ops.attend(q, k, v, slots)
    scores[0, 0, 3] = np.nan
    ops.evict(k, v, scores, slots)
    ops.step(*text.cut(9, 10), slots)
    assert 3 in slots.positions
    ops.step(*text.cut(10, 11), slots)
    assert 3 not in slots.positions
    assert np.isfinite(slots.scores[slots.positions >= 0]).all()


def test_the_score_of_an_empty_slot_is_nobodys():
    """Slots that others have filled may contain anything where no token is stored."""
    text = inputs.drifting(2, B=1, H=2, G=1, N=20)
    clean, others = (ops.new_slots(text.keys, 8, 4, 3) for _ in range(2))
    others.scores[:] = np.nan
    for i in range(20):
        token = text.cut(i, i + 1)
        np.testing.assert_array_equal(ops.step(*token, others), ops.step(*token, clean))
    held = clean.positions >= 0
    np.testing.assert_array_equal(others.positions, clean.positions)
    np.testing.assert_array_equal(others.scores[held], clean.scores[held])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_how_far_a_value_that_is_not_finite_reaches(bad):
    text = inputs.drifting(7, B=1, H=2, G=1, N=200)
    clean, scores = ops.attend(*text)
    text.values[0, 0, 100] = bad
    out, scores_with = ops.attend(*text)
    np.testing.assert_array_equal(out[0, :69], clean[0, :69])
    assert not np.isfinite(out[0, 100:]).any()
    np.testing.assert_array_equal(scores_with, scores)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_the_scores_of_a_padded_row_are_those_of_the_row_alone(padding):
    """Sums must be added in the same order for any padding, so scores are equal to the last bit."""
    text = inputs.drifting(4, B=2, H=4, G=1, N=700)
    lengths = np.array([700, 150])
    place = np.arange(700) if padding == "right" else np.arange(699, -1, -1)
    mask = place < lengths[:, None]
    out, scores = ops.attend(*text, mask=mask)
    alone = [np.ascontiguousarray(x[1:, :, mask[1]]) for x in text]
    out_alone, scores_alone = ops.attend(*alone)
    np.testing.assert_array_equal(scores[1:, :, mask[1]], scores_alone)
    np.testing.assert_array_equal(out[1:, mask[1]], out_alone)


# ---- Simulation ---------------------------------------------------------------------------------


def rows_alone(text, policy, prompt, budget, mask, softcap):
    """Answers of caches that are each fed one row alone, its prompt in one call."""
    N = text.query.shape[2]
    for b, row in enumerate(mask):
        real = np.flatnonzero(row)
        cut = int(real[min(prompt[b], len(real)) - 1]) + 1 if len(real) else N
        one = slice(b, b + 1)
        yield answers(
            inputs.Text(*(x[one] for x in text)),
            [cut, *[1] * (N - cut)],
            policy,
            mask=mask[one],
            budget=budget[one],
            softcap=softcap,
        )


def compare_simulation(got, mask, alone, tolerance):
    for b, want in enumerate(alone):
        out, evicted_at, scores = (x[b] for x in got)
        np.testing.assert_allclose(out, want.out[0], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(scores, want.last_scores[0], rtol=5e-5, atol=2e-5)
        tokens = np.concatenate([[0], mask[b].cumsum()])  # real columns before each column
        np.testing.assert_array_equal(tokens[evicted_at], tokens[want.evicted_at[0]])
        assert not evicted_at[:, ~mask[b]].any()


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_simulation_table(name, dtype):
    scenario = TABLE[name]
    real, tolerance = REAL[dtype]
    text, policy, softcap = rounded(scenario.text(), real), scenario.policy, scenario.softcap
    mask = scenario.mask()
    mask[:, -3:-1] = False
    budget = np.array([[policy.heavy, policy.recent]] * scenario.B, np.int32)
    prompt = np.array([1, 25, 7, 300, 60][: scenario.B], np.int32)
    alone = list(rows_alone(text, policy, prompt, budget, mask, softcap))
    assert min(want.gap for want in alone) > CLEAR, "a near tie: choose another seed"
    got = ops.simulate(*text, prompt, budget, mask=mask, softcap=softcap, **policy.ranking)
    compare_simulation(got, mask, alone, tolerance)


def test_heads_of_a_simulation_with_room_for_little_and_for_all():
    """Memory must be sized for the head that holds most, even if that head never evicts a key."""
    text = inputs.drifting(3, B=1, H=4, G=2, N=300, D=16)
    prompt, budgets = np.array([4], np.int32), np.array([[[3, 2], [150, 250]]], np.int32)
    out, evicted_at, scores = ops.simulate(*text, prompt, budgets)
    for g in range(2):
        heads = slice(2 * g, 2 * g + 2)
        part = text.query[:, heads], text.keys[:, g : g + 1], text.values[:, g : g + 1]
        alone = ops.simulate(*part, prompt, budgets[:, g])
        np.testing.assert_array_equal(evicted_at[:, g], alone[1][:, 0])
        np.testing.assert_allclose(out[:, :, heads], alone[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(scores[:, g], alone[2][:, 0], rtol=1e-4, atol=1e-5)
    assert (evicted_at[:, 1] == 300).all()
    assert (evicted_at[:, 0] < 300).sum() == 294  # the last eviction follows the last query
