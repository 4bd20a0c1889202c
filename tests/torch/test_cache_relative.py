"""Rolled positions: the reference matches the authors' code, and the core matches the reference."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from h2o import backends, ops
from h2o.hf.cache_state import slot_layout
from h2o.hf.layers import cache_relative_variant
from tests import inputs
from tests.conversation import Conversation, assert_golden, assert_same_kept
from tests.inputs import POLICIES
from tests.reference import operations as reference
from tests.torch.engines import core, oracle, portable

pytestmark = pytest.mark.usefixtures("on_one_thread")

ENGINES = [oracle(), core(), portable()]


class Angles:
    """Angles of the first 2 F elements of a row, with the usual base."""

    def __init__(self, F: int, base: float = 10000.0) -> None:
        self.frequencies = base ** (-torch.arange(0, F, dtype=torch.float64) / F)

    def table(self, P: int, device: object = None) -> torch.Tensor:
        angles = torch.arange(P)[:, None] * self.frequencies
        return torch.stack([angles.cos(), angles.sin()], dim=1).float()


def rolling(engine, angles: Angles, most: int = 200):
    """The engine with rolled positions. `attend` gets the table, and `step` gets the ranks too."""
    table = angles.table(most)

    def attend(query, keys, values, slots, **more):
        if engine.name == "oracle":
            return engine.module.attend(query, keys, values, slots, rotary=table, **more)
        with backends.by_torch() if engine.name == "torch" else contextlib.nullcontext():
            sizes = [] if slots is None else slot_layout.sizes(slots)
            return cache_relative_variant.attend(
                query, keys, values, slots, sizes, rotary=angles, **more
            )

    def step(query, key, value, slots, **more):
        rotary = ops.Rotary(table, reference.ranks(slots))
        out = engine.module.step(query, key, value, slots, rotary=rotary, **more)
        assert torch.equal(rotary.ranks, reference.ranks(slots))
        return out

    return engine._replace(
        module=SimpleNamespace(attend=attend, step=step, evict=engine.module.evict)
    )


@pytest.mark.parametrize("stepwise", [True, False], ids=["step", "attend-evict"])
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
@pytest.mark.parametrize("name", inputs.ROLLED_CASES)
def test_as_the_authors_cache(name, engine, stepwise):
    golden = inputs.golden_cache(name)
    D = golden.text.keys.shape[-1]
    engine = rolling(engine, Angles(D // 2))
    policy = inputs.Policy(golden.heavy, golden.recent)
    talk = Conversation(engine, golden.text, policy, stepwise=stepwise).feed_all(golden.calls)
    assert_golden(talk, golden)


TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("D", "F"), [(8, 4), (64, 32), (64, 16), (128, 64), (20, 3), (9, 4), (80, 40), (2, 1), (33, 1)]
)
@pytest.mark.parametrize("R", [1, 3, 6, 33])
def test_a_step_of_the_core_is_the_oracles(dtype, D, F, R):
    """Steps over slots in any order, in one part and in many, with one head that is full."""
    B, G, S = 2, 2, 150
    g = torch.Generator().manual_seed(D * R)

    def normal(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    slots = ops.new_slots(normal(B, G, 1, D), S + 1, heavy=100, recent=30)
    keys, values = normal(B, G, S - 20, D), normal(B, G, S - 20, D)
    ops.evict(keys, values, torch.rand(B, G, S - 20, generator=g), slots)
    order = torch.stack([torch.randperm(S - 20, generator=g) for _ in range(B * G)])
    order = order.reshape(B, G, -1)
    for name in ("keys", "values", "scores", "positions"):
        part = getattr(slots, name)[:, :, : S - 20]
        index = order if part.ndim == 3 else order[..., None].expand_as(part)
        part.copy_(part.clone().gather(2, index))
    twin = ops.Slots(*(None if x is None else x.clone() for x in slots))
    table = Angles(F).table(S)
    ours = ops.Rotary(table, reference.ranks(slots))
    theirs = ops.Rotary(table, reference.ranks(twin))
    for _ in range(3):
        token = normal(B, G * R, 1, D) / D**0.25, normal(B, G, 1, D), normal(B, G, 1, D)
        out = ops.step(*token, slots, rotary=ours)
        expected = reference.step(*token, twin, rotary=theirs)
        torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE[dtype])
        positions, scores = reference.kept(slots)
        wanted, wanted_scores = reference.kept(twin)
        assert torch.equal(positions, wanted)
        torch.testing.assert_close(scores, wanted_scores, rtol=0, atol=1e-3)
        assert torch.equal(ours.ranks, reference.ranks(slots))


def test_nothing_is_left_of_an_earlier_call():
    """Queries of 12 elements fill as many vectors as queries of 16. NaN that such a call leaves in
    scratch memory must not be used."""

    def step(D: int, spoil: float = 1.0) -> torch.Tensor:
        g = torch.Generator().manual_seed(D)
        keys = torch.randn(1, 2, 30, D, generator=g)
        slots = ops.new_slots(keys, 31, heavy=10, recent=20)
        ops.evict(keys, keys, torch.rand(1, 2, 30, generator=g), slots)
        rotary = ops.Rotary(Angles(4).table(31), reference.ranks(slots))
        query = spoil * torch.randn(1, 6, 1, D, generator=g)
        return ops.step(query, keys[:, :, :1], keys[:, :, :1], slots, rotary=rotary)

    before = step(12)
    assert step(16, spoil=torch.nan).isnan().all()
    assert torch.equal(step(12), before)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_within_the_budget_it_is_the_embedding_at_true_positions(engine):
    """Ranks equal positions until something is evicted, whatever the calls."""
    text = inputs.drifting(4, B=2, H=4, G=2, N=40, D=16)
    calls, policy = [20, 1, 1, 7, *[1] * 11], POLICIES["full"]
    talk = Conversation(rolling(engine, Angles(8)), text, policy).feed_all(calls)
    at_position = [inputs.rotate(x) for x in text[:2]]
    plain = Conversation(engine, inputs.Text(*at_position, text.values), policy).feed_all(calls)
    np.testing.assert_allclose(talk.answer, plain.answer, rtol=0, atol=2e-5)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_heads_with_budgets_of_their_own(engine):
    """A head's ranks count its own keys, so each head must be as if it were alone."""
    text = inputs.drifting(5, B=2, H=6, G=3, N=60, sink=True)
    budgets = np.array([[[9, 5], [2, 1], [30, 11]], [[4, 4], [12, 0], [0, 7]]])
    calls, policy = [24, *[1] * 20, 7, *[1] * 9], POLICIES["sinks"]
    engine = rolling(engine, Angles(text.keys.shape[-1] // 2))
    talk = Conversation(engine, text, policy, budget=budgets).feed_all(calls)
    for g in range(3):
        one = inputs.Text(text.query[:, 2 * g : 2 * g + 2], *(x[:, g : g + 1] for x in text[1:]))
        alone = Conversation(engine, one, policy, budget=budgets[:, g]).feed_all(calls)
        np.testing.assert_allclose(
            talk.answer[:, :, 2 * g : 2 * g + 2], alone.answer, rtol=0, atol=1e-5
        )


def test_threads_change_nothing():
    """A head is split into parts, and each part must use the ranks of its own slots."""
    B, G, R, S, D = 1, 2, 3, 1700, 128
    g = torch.Generator().manual_seed(1)
    prompt = torch.randn(2, B, G, S, D, generator=g)
    tokens = torch.randn(5, 2, B, G, 1, D, generator=g)
    queries = torch.randn(5, B, G * R, 1, D, generator=g) / 4
    answers = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        slots = ops.new_slots(prompt[0], S + 1, heavy=S - 100, recent=100)
        ops.evict(*prompt, torch.rand(B, G, S, generator=g.manual_seed(2)), slots)
        rotary = ops.Rotary(Angles(64).table(S + 1), reference.ranks(slots))
        outs = [
            ops.step(query, *token, slots, rotary=rotary)
            for query, token in zip(queries, tokens, strict=True)
        ]
        assert torch.equal(rotary.ranks, reference.ranks(slots))
        answers.append((torch.stack(outs), *slots[:4]))
    for answer in answers[1:]:
        for ours, first in zip(answer, answers[0], strict=True):
            assert torch.equal(ours, first)


@pytest.mark.parametrize(("kv_dtype", "F"), [("int8", 16), ("int4", 16), ("int4", 5)])
@pytest.mark.parametrize("engine", ENGINES[1:], ids=lambda engine: engine.name)
def test_quantized_keys(engine, kv_dtype, F):
    """Quantized keys are rotated as they are read."""
    text = inputs.drifting(8, B=2, H=4, G=2, N=60, D=32)
    calls = [24, *[1] * 20, 7, *[1] * 9]
    talks = [
        Conversation(rolling(each, Angles(F)), text, POLICIES["h2o"], kv_dtype=kv_dtype)
        for each in (oracle(), engine)
    ]
    for talk in talks:
        talk.feed_all(calls)
    assert_same_kept(*talks, atol=1e-3)
    np.testing.assert_allclose(talks[0].answer, talks[1].answer, rtol=0, atol=1e-3)


def test_ranks_of_the_torch_side():
    text = inputs.drifting(5, B=2, H=6, G=3, N=60)
    for budget in (None, np.array([[[9, 5], [2, 1], [30, 11]], [[4, 4], [12, 0], [0, 7]]])):
        talk = Conversation(core(), text, POLICIES["h2o"], budget=budget).feed_all([24, *[1] * 9])
        sizes = slot_layout.sizes(talk.slots)
        assert torch.equal(
            cache_relative_variant.ranks(talk.slots, sizes), reference.ranks(talk.slots)
        )


def test_ranks_that_say_nonsense_read_nothing_they_should_not():
    """Another thread may write to the ranks. A rank out of range must not lead outside the
    table."""
    text = inputs.drifting(5, B=1, H=2, G=1, N=30, D=8)
    talk = Conversation(core(), text, inputs.Policy(6, 6)).feed_all([20, *[1] * 5])
    query, key, value = (torch.from_numpy(x[:, :, -1:].copy()) for x in text)
    for nonsense in (-(2**31), -2, 13, 2**31 - 1):
        ranks = torch.full_like(talk.slots.positions, nonsense)
        out = ops.step(query, key, value, talk.slots, rotary=ops.Rotary(Angles(4).table(13), ranks))
        assert out.isfinite().all()
