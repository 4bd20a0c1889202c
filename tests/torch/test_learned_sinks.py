"""Learned sinks in every operation: by hand, and if they are not finite."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from h2o import ops
from tests import inputs
from tests.conversation import Conversation, assert_same_kept
from tests.inputs import POLICIES
from tests.reference import operations as reference
from tests.torch.engines import assert_same, core, oracle, portable

pytestmark = pytest.mark.usefixtures("on_one_thread")

CALLS = [24, *[1] * 12, 7, 1, 1]
N, D = sum(CALLS), 32
SINKS = inputs.sink_logits(3, 6)

ENGINES = {"core": core(), "torch": portable()}
every_engine = pytest.mark.parametrize("engine", ENGINES)
every_module = pytest.mark.parametrize(
    "module", [reference, ops, portable().module], ids=["oracle", "core", "torch"]
)


def drifting():
    text = inputs.drifting(5, B=2, H=6, G=3, N=N, D=D, sink=True)
    mask = np.concatenate([inputs.left([24, 17], 24), np.ones((2, N - 24), bool)], 1)
    return text, mask


@every_module
def test_by_hand(module):
    """Two heads and two tokens. The second token's logits are 0 and log 2."""
    keys = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
    values = torch.tensor([3.0, 9.0]).view(1, 1, 2, 1)
    query = torch.tensor([[0.0, math.log(2.0)]] * 2).view(1, 2, 2, 1)
    sinks = torch.tensor([math.log(3.0), -math.inf])
    out, scores = module.attend(query, keys, values, scale=1.0, sink_logits=sinks)
    # Row 0 sees key 0 only: 1 / (1 + 3), and 1 without a sink. Row 1: (1, 2) / 6 and (1, 2) / 3.
    wanted = torch.tensor([[3 / 4, 3.0], [3 / 6 + 9 / 3, 3 / 3 + 9 * 2 / 3]])
    torch.testing.assert_close(out[0, :, :, 0], wanted)
    wanted = torch.tensor([1 / 4 + 1 + 1 / 6 + 1 / 3, 2 / 6 + 2 / 3])
    torch.testing.assert_close(scores[0, 0], wanted)


@every_engine
def test_stored_bytes_with_sinks(engine):
    """test_ops.py and test_torch_backend.py test sinks with keys of every other dtype."""
    text, mask = drifting()
    more = {"mask": mask, "sink_logits": SINKS, "kv_dtype": "int8-int4", "softcap": 6.0}
    talks = [
        Conversation(e, text, POLICIES["everything"], **more).feed_all(CALLS)
        for e in (oracle(), ENGINES[engine])
    ]
    np.testing.assert_allclose(talks[1].answer, talks[0].answer, rtol=3e-5, atol=3e-5)
    assert_same_kept(talks[1], talks[0], rtol=3e-5, atol=3e-5)
    np.testing.assert_allclose(
        talks[1].slots.evicted_score, talks[0].slots.evicted_score, rtol=3e-5, atol=3e-5
    )


@every_engine
def test_infinitely_low_sinks_are_none(engine):
    text, mask = drifting()
    talks = [
        Conversation(
            ENGINES[engine], text, POLICIES["everything"], mask=mask, sink_logits=sinks
        ).feed_all(CALLS)
        for sinks in (None, np.full(6, -np.inf, np.float32))
    ]
    assert_same(talks[1].answer, talks[0].answer)
    for one, other in zip(talks[0].kept, talks[1].kept, strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        assert_same(one[1], other[1])


@pytest.mark.parametrize("sink", [math.inf, 3e38, 1e6])
@pytest.mark.parametrize("engine", [oracle(), core(), portable()], ids=lambda e: e.name)
def test_sinks_may_take_everything(engine, sink):
    text, mask = drifting()
    sinks = np.full(6, sink, np.float32)
    talk = Conversation(engine, text, POLICIES["sinks"], mask=mask, sink_logits=sinks)
    talk.feed_all(CALLS)
    assert not talk.answer.any()
    assert not talk.kept[-1][1].any()


@every_engine
def test_keys_that_nobody_can_see(engine):
    """If all logits are -infinity, the sink gets the whole softmax. Without a sink the result is
    NaN."""
    do, S = ENGINES[engine].module, 400
    query = torch.ones(1, 4, 3, 8)
    keys = torch.full((1, 2, 3, 8), -math.inf)
    values = torch.ones(1, 2, 3, 8)
    sinks = torch.tensor([0.0, -300.0, 300.0, -math.inf])
    more = {"sink_logits": sinks}
    long = torch.full((1, 2, S, 8), -math.inf)
    slots = ops.new_slots(keys, S + 1, S, 0)
    do.evict(long, torch.ones_like(long), torch.ones(1, 2, S), slots)
    slots.scores.zero_()
    prompt, budget = torch.ones(1, dtype=torch.int32), torch.tensor([[1, 1]], dtype=torch.int32)
    outputs = [
        do.attend(query, keys, values, **more)[0],
        do.attend(query, keys, values, slots, **more)[0],
        do.step(query[:, :, :1], keys[:, :, :1], values[:, :, :1], slots, **more),
        do.simulate(query, keys, values, prompt, budget, **more)[0],
    ]
    for out in outputs:
        assert (out[:, :, :3] == 0).all()
        assert out[:, :, 3].isnan().all()
    assert not slots.scores[0, 0].any()


@every_engine
def test_sinks_that_are_no_numbers_spoil_their_own_heads(engine):
    text, mask = drifting()
    sinks = SINKS.copy()
    sinks[2] = np.nan  # a head of the second group
    talk = Conversation(ENGINES[engine], text, POLICIES["h2o"], mask=mask, sink_logits=sinks)
    unspoiled = Conversation(ENGINES[engine], text, POLICIES["h2o"], mask=mask, sink_logits=SINKS)
    for call in CALLS:
        talk.feed(call)
        unspoiled.feed(call)
    assert np.isnan(talk.answer[:, -1, 2]).all()
    for h in (0, 1, 4, 5):
        assert_same(talk.answer[:, :, h], unspoiled.answer[:, :, h])


@every_engine
def test_a_row_gives_its_keys_less_than_one(engine):
    """Sinks take a share of each query's attention, so keys get less in total. Of the 6 heads only
    the fifth has no sink."""
    text, _ = drifting()
    q, k, v = map(ENGINES[engine].tensor, text)
    sinks = torch.from_numpy(SINKS)
    _, scores = ENGINES[engine].module.attend(q, k, v, sink_logits=sinks)
    total = scores.sum(-1)
    assert (total < 2 * N).all()
    assert (total > 0).all()
    _, plain = ENGINES[engine].module.attend(q, k, v)
    torch.testing.assert_close(plain.sum(-1), torch.full((2, 3), 2.0 * N))


@pytest.mark.parametrize("Q", [1, 40, 700])
def test_strided_sinks(Q):
    text = inputs.drifting(5, B=1, H=6, G=3, N=Q, D=16)
    q, k, v = map(torch.from_numpy, text)
    wide = torch.full((6, 4), torch.nan)
    wide[:, 1] = torch.from_numpy(SINKS)
    got = ops.attend(q, k, v, sink_logits=wide[:, 1])
    want = ops.attend(q, k, v, sink_logits=torch.from_numpy(SINKS))
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    same = ops.attend(q, k, v, sink_logits=torch.zeros(1).expand(6))
    assert torch.equal(same[0], ops.attend(q, k, v, sink_logits=torch.zeros(6))[0])
