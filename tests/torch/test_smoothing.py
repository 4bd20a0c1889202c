"""Smoothing: what four-bit keys are divided by, and queries multiplied by.

Queries that multiply a few elements of a key by much larger numbers than others must not see these
elements rounded as coarsely as the others.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from h2o import ops
from h2o.backends import torch_backend
from h2o.backends.torch_backend import centered
from h2o.quantization import (
    SMOOTHING_TOKENS,
    offsets_of,
    round_to_bytes,
    set_smoothing,
    smoothing_of,
)
from tests import inputs
from tests.cases import pairs
from tests.conversation import Conversation, assert_same_kept, check_simulation
from tests.inputs import POLICIES
from tests.torch.engines import core, oracle, portable

B, H, G, D = 2, 4, 2, 32
CALLS = [40, *[1] * 12, 7, 1, 1]
BUDGETS = {
    "rows": np.array([[9, 6]] * 2),
    "heads": np.array([[[9, 6], [4, 3]]] * 2),
}
ENGINES = {"core": core(), "torch": portable()}
STORED = {"kv_dtype": "int4", "offsets": True}
every_engine = pytest.mark.parametrize("engine", ENGINES)


def uneven(size: float, D: int = D, N: int = sum(CALLS)) -> inputs.Text:
    """A text whose queries are so many times larger in four elements, and keys as much smaller."""
    text = inputs.drifting(3, B=B, H=H, G=G, N=N, D=D)
    of = [1, 7, 18, 30]
    text.query[..., of] *= np.float32(size)
    text.keys[..., of] /= np.float32(size)
    text.keys[..., 5] += np.float32(8)
    return text


def factors(text: inputs.Text, tokens: int = CALLS[0]) -> torch.Tensor:
    query, keys = (torch.from_numpy(x[:, :, :tokens]) for x in (text.query, text.keys))
    return smoothing_of(query, keys, None)


@every_engine
def test_uneven_queries_cost_no_precision(engine):
    """Against answers from slots that are not quantized. Without smoothing the error is larger."""
    errors = []
    for size, smooths in ((1.0, True), (12.0, True), (12.0, False)):
        text = uneven(size)
        more = {"smoothing": factors(text)} if smooths else {}
        exact, stored = (
            Conversation(ENGINES[engine], text, POLICIES["full"], **kind).feed_all(CALLS)
            for kind in ({}, STORED | more)
        )
        errors.append(np.abs(exact.answer - stored.answer).mean())
    assert errors[1] < 1.5 * errors[0]
    assert errors[2] > 1.5 * errors[1]


@pytest.mark.parametrize(
    ("engine", "logits", "budget"),
    pairs(
        [*ENGINES],
        [{}, {"softcap": 6.0}, {"sink_logits": np.linspace(-1, 2, H, dtype="f4")}],
        [*BUDGETS],
    ),
)
@pytest.mark.parametrize("D", [32, 96])
def test_answers_are_the_oracles(engine, logits, budget, D):
    """Prompts, steps and chunks, padded rows, and heads with their own budgets."""
    text = uneven(6.0, D)
    mask = np.ones((B, sum(CALLS)), bool)
    mask[0, :9] = mask[1, 3] = mask[1, 45] = False
    talks = [
        Conversation(
            e, text, POLICIES["everything"], mask=mask, budget=BUDGETS[budget],
            smoothing=factors(text), **STORED, **logits,
        ).feed_all(CALLS)
        for e in (oracle(), ENGINES[engine])
    ]  # fmt: skip
    np.testing.assert_allclose(talks[1].answer, talks[0].answer, rtol=1e-4, atol=1e-4)
    assert_same_kept(talks[1], talks[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(talks[1].slots.smoothing, factors(text))


@every_engine
@pytest.mark.parametrize("prompt", [1, 40])
def test_simulation_is_the_cache(engine, prompt):
    text = uneven(6.0)
    mask = np.ones((B, sum(CALLS)), bool)
    mask[1, :5] = prompt == 1
    check_simulation(
        ENGINES[engine], text, POLICIES["everything"], mask[:, :prompt].sum(1).tolist(),
        budget=BUDGETS["rows"], mask=mask, **STORED, smoothing=factors(text), tolerance=1e-4,
    )  # fmt: skip


def test_factors_minimize_the_error_of_logits():
    """They are the geometric mean of what the errors of keys and of queries ask for."""
    generator = torch.Generator().manual_seed(0)
    spread, asked = (torch.rand(D, generator=generator) * 3 + 0.2 for _ in range(2))
    query = torch.randn(1, 8, SMOOTHING_TOKENS, D, generator=generator) * asked
    keys = torch.randn(1, 1, SMOOTHING_TOKENS, D, generator=generator) * spread + 5
    found = smoothing_of(query, keys, None)[0, 0].float()
    wanted = (spread / asked).sqrt()
    ratio = found / (wanted / wanted.log().mean().exp())
    assert 1.2 > ratio.max() > ratio.min() > 0.8  # of 128 tokens

    def error(smoothing: torch.Tensor | None) -> float:
        held = torch.randn(1, 1, 500, D, generator=torch.Generator().manual_seed(1)) * spread + 5
        offsets, sizes = offsets_of(keys, None), (D // 2 + 2, D // 2 + D // 8)
        rounded, _ = round_to_bytes(held, held, sizes, offsets, smoothing)
        return float((query[:, :1] @ (rounded - held).mT).square().mean())

    best = error(found.half().view(1, 1, D))
    assert best < 0.8 * error(None)
    assert best < error(found.square().half().view(1, 1, D))


def test_factors_depend_on_the_first_real_tokens_of_their_row():
    text = uneven(3.0, N=140)
    query, keys = torch.from_numpy(text.query), torch.from_numpy(text.keys)
    wanted = smoothing_of(query, keys, None)
    assert torch.equal(wanted, smoothing_of(query[:, :, :128], keys[:, :, :128], None))
    assert torch.equal(wanted[1:], smoothing_of(query[1:], keys[1:], None))
    pad = torch.full((B, 1, 5, D), 1e4)
    padded = (torch.cat([pad.expand(-1, x.shape[1], -1, -1), x], 2) for x in (query, keys))
    mask = torch.ones(B, 5 + keys.shape[2], dtype=torch.uint8)
    mask[:, :5] = 0
    assert torch.equal(wanted, smoothing_of(*padded, mask))


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30, torch.nan, torch.inf])
def test_factors_are_usable_numbers(size):
    keys, query = torch.randn(1, 1, 9, D), torch.randn(1, 2, 9, D)
    for x in (keys, query):
        for at in (slice(None), 3):
            odd = [keys.clone(), query.clone()]
            odd[x is query][..., at] *= size
            found = smoothing_of(odd[1], odd[0], None)
            assert found.isfinite().all()
            assert (found > 0).all()
    assert (smoothing_of(query[:, :, :1], keys[:, :, :1], None) == 1).all()  # a decode step


def test_only_empty_rows_with_tokens_are_set():
    text = uneven(3.0)
    query, keys = torch.from_numpy(text.query), torch.from_numpy(text.keys)
    smoothing = torch.ones(B, G, D, dtype=torch.float16)
    mask = torch.ones(B, keys.shape[2], dtype=torch.bool)
    mask[0] = False
    set_smoothing(smoothing, torch.tensor([0, 0]), query, keys, mask)
    assert (smoothing[0] == 1).all()
    assert torch.equal(smoothing[1], smoothing_of(query, keys, None)[1])
    before = smoothing.clone()
    set_smoothing(smoothing, torch.tensor([2, 3]), query, 2 * keys.flip(-1), None)
    assert torch.equal(smoothing, before)
    set_smoothing(None, torch.tensor([0, 0]), query, keys, None)


def test_few_tokens_decide_little():
    """Factors of a few tokens are noise where elements do not differ."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(50, 2, 3, D, generator=generator)
    first, held = (torch.randn(50, 1, n, D, generator=generator) for n in (3, 200))
    offsets, sizes = offsets_of(first, None), (D // 2 + 2, D // 2 + D // 8)
    asked = torch.randn(50, 1, 20, D, generator=generator)

    def error(smoothing: torch.Tensor | None) -> float:
        rounded, _ = round_to_bytes(held, None, sizes, offsets, smoothing)
        return float((asked @ (rounded - held).mT).square().mean())

    assert error(smoothing_of(query, first, None)) < 1.3 * error(
        None
    )  # 1.5 with all of the factors


@pytest.mark.parametrize("engine", ENGINES)
def test_it_is_refused_where_keys_do_not_have_four_bits(engine):
    keys = torch.randn(B, G, 9, D)
    smoothing, do = torch.ones(B, G, D, dtype=torch.float16), ENGINES[engine].module
    for kind, why in (
        ({"kv_dtype": "int8", "offsets": True}, "slots.keys does not have four bits"),
        ({"kv_dtype": "int4"}, "slots.offsets is None"),
        ({}, "slots.offsets is None"),
    ):
        slots = ops.new_slots(keys, 9, **kind)
        assert slots.smoothing is None
        with pytest.raises(ValueError, match=f"slots.smoothing: is given, but {why}"):
            do.evict(keys, keys, torch.zeros(B, G, 9), slots._replace(smoothing=smoothing))


def test_operands_without_offsets():
    """What kernels get that know neither offsets nor smoothing gives the same answers."""
    text = uneven(5.0)
    query, keys, values = map(torch.from_numpy, text)
    slots = ops.new_slots(keys.repeat(2, 1, 1, 1), 80, 80, 0, **STORED)
    slots.smoothing[1:3] = factors(text)[[1, 0]]
    slots = slots._replace(rows=torch.tensor([2, 1], dtype=torch.int32))
    part = slice(0, 40)
    ops.evict(keys[:, :, part], values[:, :, part], torch.zeros(B, G, 40), slots)
    results = []
    for changes in (lambda _, x: x, centered.without_offsets):
        copy = ops.Slots(*(None if x is None else x.clone() for x in slots))
        q, k, v = (x[:, :, 40:41] for x in (query, keys, values))
        out = torch.empty(B, 1, H, D)
        step = (q, k, v, None, copy, out, D**-0.5, 0.0, ops.Policy(), None, None, None)
        torch_backend.operation("step")(*changes("step", step))
        if changes is centered.without_offsets:
            centered.restore_output("step", step)
        results.append([out, copy.scores[1:3], copy.keys[1:3]])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
