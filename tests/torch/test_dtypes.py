"""The core in float32, float16 and bfloat16, with the shapes that models have.

The true answer is float64 on exactly the numbers that the kernel was given. Plain torch in the same
dtype has an error too, and the kernel may have twice that error, in outputs and in scores. Kept
positions must be equal in every dtype, because scores are float32.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from h2o import ops
from tests.conversation import Conversation, as_float64
from tests.core.dense import Answers, answers
from tests.inputs import POLICIES, Policy, Scenario, Text
from tests.torch.engines import core

CLEAR = 3e-5
"""Ranks with a larger relative difference than this cannot swap through float32 rounding."""

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

BASE = Scenario(
    seed=3,
    lengths=[40, 23],
    calls=[41, *[1] * 9, 6, 1, 1],
    G=2,
    R=2,
    D=64,
    padding="left",
    policy=Policy(14, 6),
    softcap=0.0,
)
"""A padded prompt, steps, a chunk into slots with holes, and steps."""


def case(**changes) -> Scenario:
    return dataclasses.replace(BASE, **changes)


TABLE = {
    **{f"D{D}, group of 2": case(D=D) for D in (1, 20, 64, 80, 96, 128, 256)},
    **{f"D64, group of {R}": case(R=R) for R in (1, 3, 4, 8)},
    **{
        f"chunk of {Q}, holes": case(
            lengths=[27, 30, 0], calls=[30, *[1] * 7, Q, 1, 1], padding="holes", D=80
        )
        for Q in (2, 31, 33, 100)
    },
    "right": case(padding="right", D=128, R=1),
    "softcap": case(softcap=4.0),
    "decay": case(policy=POLICIES["decay"]),
    "everything": case(policy=POLICIES["everything"], softcap=4.0, D=96, R=3, padding="holes"),
    "learned sinks": case(learned_sinks=True, R=4, D=80, padding="holes"),
    "no prompt": case(lengths=[1, 1], calls=[1] * 40),
}

CROSSED = {
    **{
        f"D{D}, group of {R}, {padding}": case(D=D, R=R, padding=padding)
        for D in (1, 20, 64, 80, 96, 128, 256)
        for R, padding in ((1, "holes"), (3, "left"), (4, "right"), (8, "holes"))
    },
    **{
        f"chunk of {Q}, {padding}": case(
            lengths=[27, 30, 0], calls=[30, *[1] * 7, Q, 1, 1], padding=padding, D=64, R=4
        )
        for Q in (2, 31, 33, 100)
        for padding in ("left", "right")
    },
    "long": case(lengths=[400, 270], calls=[400, *[1] * 5, 150, 1], policy=Policy(90, 40)),
}


def cases(table: dict[str, Scenario], crossed: dict[str, Scenario]) -> list:
    return [
        *(pytest.param(scenario, id=name) for name, scenario in table.items()),
        *(pytest.param(s, id=name, marks=pytest.mark.slow) for name, s in crossed.items()),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scenario", cases(TABLE, CROSSED))
def test_table(scenario, dtype):
    engine = core(dtype)
    drawn = scenario.text()
    text, mask, policy = Text(*map(engine.exact, drawn)), scenario.mask(), scenario.policy
    how = {"mask": mask, "softcap": scenario.softcap, "sink_logits": sinks_of(scenario, engine)}
    want = answers(text, scenario.calls, policy, **how)
    assert want.gap > CLEAR, "a near tie: choose another seed"
    talk = Conversation(engine, text, policy, **how)
    talk.feed_all(scenario.calls)
    for call, (positions, scores) in enumerate(talk.kept):
        np.testing.assert_array_equal(positions, want.kept(call)[0])
        np.testing.assert_allclose(scores, want.kept(call)[1], rtol=3e-5, atol=1e-5)
    np.testing.assert_allclose(talk.slots.evicted_score, want.evicted_score, rtol=3e-5, atol=1e-5)

    plain_out, plain_scores = in_plain_torch(scenario, engine, drawn, want)
    assert_as_good(talk.answer, plain_out, want.out)
    if policy.decay == 1.0:
        kept_scores = want.kept(-1)[1]
        want.scores[-1] = np.where(want.held[-1], plain_scores, 0.0)
        assert_as_good(talk.kept[-1][1], want.kept(-1)[1], kept_scores)


def sinks_of(scenario: Scenario, engine) -> np.ndarray | None:
    sinks = scenario.sink_logits()
    return None if sinks is None else engine.exact(sinks)


def assert_as_good(got: np.ndarray, plain: np.ndarray, want: np.ndarray) -> None:
    """The root mean square error must be at most twice that of plain torch.

    The largest error is a matter of luck: of two equally good results, one often has twice the
    largest error of the other. So three times is allowed there. Scores are rounded at every call,
    so a few float32 roundings of the largest number are always allowed.
    """
    error, usual = np.abs(got - want), np.abs(plain - want)
    ulp = float(np.abs(want).max()) * 2**-23
    assert rms(error) <= max(2 * rms(usual), ulp / 3)
    assert error.max() <= max(3 * usual.max(), 2 * ulp)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt((x * x).mean()))


def in_plain_torch(scenario: Scenario, engine, drawn: Text, want: Answers):
    """Attention as one would write it in this dtype, on the keys that each query sees by the
    reference.

    Scores are float32 and accumulate call by call, as in every cache.
    """
    q, k, v = (engine.tensor(x).nan_to_num(0, 0, 0) for x in drawn)  # padding contains NaN
    visible = torch.from_numpy(want.visible).repeat_interleave(scenario.R, dim=1)
    k, v = (x.repeat_interleave(scenario.R, dim=1) for x in (k, v))
    logits = (q @ k.mT) * scenario.D**-0.5
    if scenario.softcap:
        logits = scenario.softcap * torch.tanh(logits / scenario.softcap)
    logits = logits.masked_fill(~visible, -torch.inf)
    if scenario.learned_sinks:
        sinks = engine.tensor(scenario.sink_logits())[:, None, None]
        logits = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], -1)
    p = logits.softmax(-1)[..., : visible.shape[-1]].masked_fill(~visible, 0.0)
    scores = torch.zeros_like(visible[:, :: scenario.R, 0], dtype=torch.float32)
    for call in p.float().split(scenario.calls, dim=2):
        scores += call.sum(2).unflatten(1, (scenario.G, scenario.R)).sum(2)
    return as_float64((p @ v).transpose(1, 2)), as_float64(scores)


# ---- Many rows over many keys -------------------------------------------------------------------


def test_rows_that_share_keys_larger_than_a_cache():
    """With a matrix unit, groups of several blocks of rows share packed keys of more than 1 MB
    (attend_row_split.inc). Here groups have three blocks, the last group has two, and the last
    block is not full. With as many keys as the store has room for, groups would have two."""
    random = torch.Generator().manual_seed(3)
    R, Q, stored, room, D = 12, 1100, 1003, 12000, 256
    n, dtype = stored + Q, torch.bfloat16
    query, keys, values = (
        torch.randn(1, *size, D, generator=random).to(dtype) for size in ((R, Q), (1, n), (1, n))
    )
    slots = ops.new_slots(keys, room, room)
    held = (x[:, :, :stored].contiguous() for x in (keys, values))
    ops.evict(*held, torch.zeros(1, 1, stored), slots)
    out, scores = ops.attend(query, keys[:, :, stored:], values[:, :, stored:], slots)

    weights = (query[0].float() @ keys[0, 0].float().T).mul_(D**-0.5)
    weights.masked_fill_(torch.ones(Q, n, dtype=torch.bool).triu(stored + 1), -torch.inf)
    weights = weights.softmax(-1)
    want = (weights @ values[0, 0].float()).transpose(0, 1)[None]
    received = torch.cat([slots.scores[0, 0, :stored], scores[0, 0]])
    torch.testing.assert_close(received, weights.sum((0, 1)), rtol=1e-4, atol=1e-4)
    assert_as_good(*map(as_float64, (out, want.to(dtype), want)))


# ---- Simulation ---------------------------------------------------------------------------------


def simulated(prompt: int, **changes) -> Scenario:
    return case(lengths=[prompt], calls=[prompt, *[1] * (150 - prompt)], **changes)


SIMULATED = {
    **{f"D{D}": simulated(20, D=D) for D in (20, 64, 128)},
    "group of 3": simulated(1, R=3),
    "everything": simulated(90, policy=POLICIES["everything"], softcap=4.0, D=96, R=3),
    "tiny budget": simulated(20, policy=Policy(2, 1)),
    "learned sinks": simulated(20, learned_sinks=True, R=4, softcap=4.0),
}

SIMULATED_CROSSED = {
    **{
        f"D{D}, group of {R}, {prompt} before": simulated(prompt, D=D, R=R)
        for D in (1, 64, 80, 96, 256)
        for R in (1, 4, 8)
        for prompt in (1, 90)
    },
    "softcap": simulated(20, softcap=4.0),
    "local": simulated(1, policy=Policy(0, 16, sinks=4)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scenario", cases(SIMULATED, SIMULATED_CROSSED))
def test_simulation_table(scenario, dtype):
    engine, drawn = core(dtype), scenario.text()
    policy = scenario.policy
    text = Text(*map(engine.exact, drawn))
    sinks = sinks_of(scenario, engine)
    want = answers(text, scenario.calls, policy, softcap=scenario.softcap, sink_logits=sinks)
    assert want.gap > CLEAR, "a near tie: choose another seed"
    out, evicted_at, scores = ops.simulate(
        *(engine.tensor(x) for x in text),
        torch.tensor(scenario.lengths, dtype=torch.int32),
        torch.tensor([[policy.heavy, policy.recent]], dtype=torch.int32),
        softcap=scenario.softcap,
        sink_logits=None if sinks is None else torch.from_numpy(sinks),
        **policy.ranking,
    )
    np.testing.assert_array_equal(evicted_at, want.evicted_at)
    np.testing.assert_allclose(scores, want.last_scores, rtol=3e-5, atol=1e-5)
    plain_out, _ = in_plain_torch(scenario, engine, drawn, want)
    assert_as_good(as_float64(out), plain_out, want.out)
