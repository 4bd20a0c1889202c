"""Consequences of the definition of H2O, tested on the reference and on the core."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from torch.nn.functional import scaled_dot_product_attention

from h2o import backends, ops
from h2o.config import UNLIMITED
from tests import inputs, strategies
from tests.cases import pairs
from tests.conversation import Conversation, assert_same_kept, check_simulation
from tests.core.dense import answers
from tests.inputs import POLICIES, Policy, Text
from tests.torch.engines import ROUNDING, assert_same, core, oracle

CLEAR = 3e-5
"""Ranks with a larger relative difference than this cannot swap through float32 rounding."""

ENGINES = {"oracle": oracle(), "core": core()}


@pytest.fixture(params=ENGINES)
def engine(request):
    return ENGINES[request.param]


ANY_DTYPE = [*ENGINES, "core float16", "core bfloat16"]


@pytest.fixture(params=ANY_DTYPE)
def engine_of_any_dtype(request):
    """Engines for tests that must hold to the last bit, and therefore in every dtype."""
    half = {"core float16": core(torch.float16), "core bfloat16": core(torch.bfloat16)}
    return {**ENGINES, **half}[request.param]


# ---- The oracle itself, and the core against it ------------------------------------------------


@given(strategies.scenarios())
def test_oracle_agrees_with_whole_text_matrices(scenario):
    text, mask, policy = scenario.text(), scenario.mask(), scenario.policy
    how = {"mask": mask, "softcap": scenario.softcap, "sink_logits": scenario.sink_logits()}
    want = answers(text, scenario.calls, policy, **how)
    assume(want.gap > CLEAR)
    talk = Conversation(oracle(), text, policy, **how)
    talk.feed_all(scenario.calls)
    for call, (positions, scores) in enumerate(talk.kept):
        np.testing.assert_array_equal(positions, want.kept(call)[0])
        np.testing.assert_allclose(scores, want.kept(call)[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(talk.answer, want.out, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(talk.slots.evicted_score, want.evicted_score, rtol=1e-5, atol=1e-6)


def test_engines_continue_from_each_others_slots():
    """The reference stores keys in order of position, the core leaves holes. Both states are
    valid."""
    policy, calls = POLICIES["everything"], [24, *[1] * 40]
    text = inputs.drifting(23, N=64)
    alone = Conversation(oracle(), text, policy).feed_all(calls)
    mixed = Conversation(oracle(), text, policy)
    for i, columns in enumerate(calls):
        mixed.do = ENGINES["oracle" if i // 3 % 2 else "core"].module
        mixed.feed(columns)
    assert_same_kept(mixed, alone, 1e-5, 1e-5)


# ---- Consequences ------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["none", "holes"])
@pytest.mark.parametrize(
    "policy",
    [Policy(60, 0), Policy(0, 60), Policy(30, 30), Policy(20, 35, sinks=5), Policy(0, 0, sinks=60)],
    ids=str,
)
def test_a_budget_for_everything_is_dense_attention(engine, policy, padding):
    calls = [30, *[1] * 10, 12, *[1] * 8]
    N = sum(calls)
    text = inputs.drifting(31, B=2, H=4, G=2, N=N)
    mask = np.ones((2, N), bool)
    if padding == "holes":
        mask[:, :30] = inputs.holes(31, [30, 11], 30)
    talk = Conversation(engine, text, policy, mask=mask).feed_all(calls)
    for b, row in enumerate(mask):
        everything = list(range(row.sum()))
        assert [x[x >= 0].tolist() for x in talk.kept[-1][0][b]] == [everything] * 2
        q, k, v = (torch.from_numpy(x[b : b + 1, :, row]).double() for x in text)
        dense = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        np.testing.assert_allclose(
            talk.answer[b, row], dense[0].transpose(0, 1), rtol=1e-5, atol=1e-5
        )
    assert not talk.slots.evicted_score.any()
    full = Conversation(engine, text, Policy(UNLIMITED, 0), mask=mask, capacity=N)
    assert_same_kept(talk, full.feed_all(calls))
    np.testing.assert_array_equal(talk.answer, full.answer)


UNITS = [name for name, p in POLICIES.items() if p.decay == 1.0 and p.score_by != "max"]


@pytest.mark.parametrize("name", UNITS)
def test_every_query_gives_each_of_its_heads_one_unit_of_attention(engine, name):
    policy, calls = POLICIES[name], [24, *[1] * 15, 7, 1, 1]
    text = inputs.drifting(37, B=3, H=6, G=2, N=sum(calls))
    mask = np.concatenate(
        [inputs.left([24, 5, 0], 24), np.ones((3, sum(calls) - 24), bool)], axis=1
    )
    talk = Conversation(engine, text, policy, mask=mask)
    stop = 0
    for columns in calls:
        talk.feed(columns)
        stop += columns
        given_out = talk.kept[-1][1].sum(-1, dtype=float) + np.asarray(talk.slots.evicted_score)
        queries = mask[:, :stop].sum(1, keepdims=True)
        np.testing.assert_allclose(given_out, 3 * queries.repeat(2, 1), rtol=1e-5)


@pytest.mark.parametrize(
    ("engine_of_any_dtype", "padding", "name"),
    pairs(ANY_DTYPE, ["left", "right", "holes"], ["h2o", "heavy-only", "everything"]),
    indirect=["engine_of_any_dtype"],
)
def test_a_row_in_a_batch_is_the_row_alone(engine_of_any_dtype, padding, name):
    """A row is equal to the last bit for any neighbors and any padding."""
    policy, rest = POLICIES[name], [*[1] * 12, 6, 1, 1]
    lengths, Q = [40, 1, 23, 0, 33], 41
    N = Q + sum(rest)
    padder = {
        "left": lambda: inputs.left(lengths, Q),
        "right": lambda: inputs.right(lengths, Q),
        "holes": lambda: inputs.holes(5, lengths, Q),
    }[padding]
    mask = np.concatenate([padder(), np.ones((5, N - Q), bool)], axis=1)
    text = inputs.drifting(41, B=5, N=N)
    batch = Conversation(engine_of_any_dtype, inputs.pad(text, mask), policy, mask=mask).feed_all(
        [Q, *rest]
    )
    for b, length in enumerate(lengths):
        row = Text(*(x[b : b + 1] for x in text))
        alone = Conversation(engine_of_any_dtype, row, policy)
        alone.feed_all([length, *rest] if length else rest)
        first = 0 if length else 1
        for (positions, scores), (wanted_positions, wanted_scores) in zip(
            batch.kept[first:], alone.kept, strict=True
        ):
            held = wanted_positions.shape[-1]
            np.testing.assert_array_equal(positions[b, :, :held], wanted_positions[0])
            assert_same(scores[b, :, :held], wanted_scores[0])
            assert (positions[b, :, held:] == -1).all()
        assert_same(batch.answer[b, mask[b]], alone.answer[0], ROUNDING[batch.keys.dtype])
        assert not batch.answer[b, ~mask[b]].any()
        assert_same(batch.slots.evicted_score[b], alone.slots.evicted_score[0])


@pytest.mark.parametrize(
    ("engine", "calls", "decay"),
    pairs(ENGINES, [[30, 10], [1] * 40, [7, 33], [39, 1], [2, 1, 31, 6]], [1.0, 0.9, 0.0]),
    indirect=["engine"],
)
def test_chunks_are_one_prompt_while_nothing_is_evicted(engine, calls, decay):
    policy = Policy(30, 10, score_by="mean", decay=decay)
    text = inputs.drifting(43, B=2, N=60)
    mask = np.concatenate([inputs.holes(43, [40, 17], 40), np.ones((2, 20), bool)], axis=1)
    once, chunks = (
        Conversation(engine, text, policy, mask=mask).feed_all(c) for c in ([40], calls)
    )
    np.testing.assert_allclose(chunks.answer, once.answer, rtol=1e-5, atol=1e-5)
    once.kept, chunks.kept = once.kept[-1:], chunks.kept[-1:]
    for talk in (once, chunks):
        talk.feed_all([1] * 20)
    assert_same_kept(chunks, once, 2e-5, 2e-5)


@pytest.mark.parametrize("name", ["h2o", "everything"])
def test_permuted_rows_are_permuted_state(engine_of_any_dtype, name):
    """Beam search reorders and repeats rows between steps. The rows' scores must move too."""
    policy, order = POLICIES[name], [2, 0, 0, 1]
    text = inputs.drifting(47, B=4, N=60)
    moved = Conversation(engine_of_any_dtype, text, policy).feed_all([24, *[1] * 10])
    stayed = Conversation(engine_of_any_dtype, text, policy).feed_all([24, *[1] * 10])
    for tensor in moved.slots:
        if tensor is not None:
            tensor.copy_(tensor[order])
    moved.query, moved.keys, moved.values = (
        x[order] for x in (stayed.query, stayed.keys, stayed.values)
    )
    for talk in (moved, stayed):
        talk.feed_all([1] * 15 + [5, 1])
    for (positions, scores), (wanted_positions, wanted_scores) in zip(
        moved.kept[11:], stayed.kept[11:], strict=True
    ):
        np.testing.assert_array_equal(positions, wanted_positions[order])
        np.testing.assert_array_equal(scores, wanted_scores[order])
    np.testing.assert_array_equal(moved.answer[:, 34:], stayed.answer[order][:, 34:])


@pytest.mark.parametrize("name", ["h2o", "everything", "local"])
def test_simulation_is_the_cache(engine, name):
    """Outputs, scores and the time of each eviction must be those of the cache, token by token."""
    text = inputs.drifting(53, B=2, N=60)
    check_simulation(engine, text, POLICIES[name], [20, 35], tolerance=1e-5)


def test_a_prompt_that_is_the_whole_text_is_cut(engine):
    """Keys evicted at a prompt's end are gone for the padding after it, however long other rows
    are."""
    text = inputs.drifting(57, B=3, H=2, G=2, N=40)
    tensors = [engine.tensor(x) for x in text]
    mask = torch.from_numpy(inputs.right([25, 40, 8], 40))
    budget = torch.tensor([[6, 4], [20, 20], [6, 4]], dtype=torch.int32)
    numbers = torch.tensor([40, 12, 40], dtype=torch.int32), budget
    _, evicted_at, _ = engine.module.simulate(*tensors, *numbers, mask=mask)
    assert ((evicted_at[0, :, :25] == 25).sum(1) == 15).all()
    assert (evicted_at[1:][mask[1:, None].expand(2, 2, 40)] == 40).all()
    assert not evicted_at[0, :, 25:].any()


# ---- Threads -----------------------------------------------------------------------------------


@pytest.mark.skipif(backends.forced == "torch", reason="torch cuts products by its threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "policy"),
    [
        ((2, 4, 4, 150), POLICIES["everything"]),
        ((1, 4, 1, 1400), Policy(700, 500)),  # one unit of work, long enough to be split
        ((3, 4, 2, 1400), Policy(300, 900, value_weighted=True)),
    ],
    ids=["small", "one head", "long"],
)
def test_results_do_not_depend_on_threads(shape, policy, dtype):
    """Prompts, chunks, steps and simulation must be equal to the bit for any number of threads."""
    B, H, G, N = shape
    text = inputs.drifting(59, B, H, G, N, D=64)
    prompt = torch.full((B,), N // 2, dtype=torch.int32)
    budget = torch.tensor([[policy.heavy, policy.recent]] * B, dtype=torch.int32)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert ops.info()["threads"] == count
            talk = Conversation(core(dtype), text, policy).feed_all([N - 40, *[1] * 10, 30])
            simulated = ops.simulate(
                talk.query, talk.keys, talk.values, prompt, budget, **policy.ranking
            )
            results.append([torch.from_numpy(talk.answer), *talk.slots, *simulated])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert one is two is None or torch.equal(one, two)
