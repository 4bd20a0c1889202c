"""The reference, the torch backend and the whole-text masks keep what the authors' code kept (its
golden data)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import inputs
from tests.conversation import Conversation, assert_golden
from tests.reference import operations as reference
from tests.reference.published_masks import simulation_mask
from tests.torch.engines import oracle, portable

pytestmark = pytest.mark.usefixtures("on_one_thread")


@pytest.mark.parametrize(
    ("engine", "stepwise"),
    [(oracle(), True), (portable(), True), (portable(), False)],
    ids=["oracle", "torch", "torch by attend and evict"],
)
@pytest.mark.parametrize("name", inputs.CACHE_CASES)
def test_cache_keeps_what_the_authors_cache_keeps(name, engine, stepwise):
    golden = inputs.golden_cache(name)
    policy = inputs.Policy(golden.heavy, golden.recent)
    talk = Conversation(engine, golden.text, policy, stepwise=stepwise)
    assert_golden(talk.feed_all(golden.calls), golden)


@pytest.mark.parametrize("name", [c for c in inputs.CACHE_CASES if "chunks" not in c])
def test_simulation_keeps_what_the_authors_cache_keeps(name):
    golden = inputs.golden_cache(name)
    q, k, v = (torch.from_numpy(x) for x in golden.text)
    prompt, budget = torch.tensor([golden.calls[0]]), torch.tensor([[golden.heavy, golden.recent]])
    out, evicted_at, _ = reference.simulate(q, k, v, prompt, budget)
    np.testing.assert_allclose(out, golden.out, rtol=0, atol=1e-5)
    stop = 0
    for tokens, kept in zip(golden.calls, golden.kept, strict=True):
        stop += tokens
        for head in range(q.shape[1]):
            alive = (evicted_at[0, head, :stop] > stop).nonzero()[:, 0]
            at_the_end = (evicted_at[0, head, :stop] == q.shape[2]).nonzero()[:, 0]
            np.testing.assert_array_equal(
                alive if stop < q.shape[2] else at_the_end[np.isin(at_the_end, kept[0, head])],
                kept[0, head],
            )


@pytest.mark.parametrize("name", [c for c in inputs.CACHE_CASES if "chunks" not in c])
def test_mask_h2o_is_the_authors_cache(name):
    golden = inputs.golden_cache(name)
    q, k, _ = (torch.from_numpy(x) for x in golden.text)
    logits = q @ k.mT / q.shape[-1] ** 0.5
    mask = simulation_mask(logits, golden.heavy, golden.recent, prompt_length=golden.calls[0])
    row = golden.calls[0]
    assert torch.equal(mask[0, 0, :row, :row], torch.ones(row, row, dtype=torch.bool).tril())
    for kept in golden.kept[:-1]:
        for head in range(q.shape[1]):
            seen = mask[0, head, row].nonzero()[:, 0].tolist()
            assert seen == [*kept[0, head].tolist(), row]
        row += 1


@pytest.mark.parametrize("name", inputs.MASK_CASES)
@pytest.mark.parametrize("variant", ["local", "future"])
def test_masks_of_the_authors_evaluation(name, variant):
    golden = inputs.golden_masks(name)
    logits = torch.from_numpy(golden.logits)
    for case, fractions in enumerate(golden.ratios):
        want = torch.from_numpy(getattr(golden, variant)[case])[None]
        for heavy, recent in (fractions, golden.tokens[case]):
            name = {"local": "local", "future": "global"}[variant]
            assert torch.equal(simulation_mask(logits, heavy, recent, name), want)


@pytest.mark.parametrize(
    ("heavy", "recent", "sinks", "prompt_length"),
    [(10, 6, 0, 24), (10, 6, 0, 1), (0, 9, 3, 1), (9, 0, 0, 12), (7, 5, 2, 40), (0.1, 0.05, 1, 6)],
)
def test_mask_h2o_is_the_oracles_cache(heavy, recent, sinks, prompt_length):
    n = 60
    q, k, v = (torch.from_numpy(x) for x in inputs.drifting(71, B=2, H=3, G=3, N=n))
    tokens = [int(x * n) if isinstance(x, float) else x for x in (heavy, recent)]
    _, evicted_at, _ = reference.simulate(
        q, k, v, torch.tensor([prompt_length] * 2), torch.tensor([tokens] * 2), sinks=sinks
    )
    row, key = torch.arange(n)[:, None], torch.arange(n)
    want = (key <= row) & (row < evicted_at[..., None, :])
    logits = q @ k.mT / q.shape[-1] ** 0.5
    mask = simulation_mask(logits, heavy, recent, prompt_length=prompt_length, sinks=sinks)
    assert torch.equal(mask, want)
    assert not mask.all()


def test_mask_flexgen_lets_in_whatever_leaves_the_window():
    """Key 0 gets nearly all attention, and the others share the rest equally."""
    logits = torch.zeros(1, 1, 7, 7)
    logits[..., 0] = 9.0

    def rows(**kwargs) -> list[list[int]]:
        return [row.nonzero()[:, 0].tolist() for row in simulation_mask(logits, **kwargs)[0, 0]]

    start = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert rows(heavy=2, recent=1) == [*start, [0, 1, 3, 4], [0, 1, 4, 5], [0, 1, 5, 6]]
    flexgen = rows(heavy=2, recent=1, variant="flexgen")
    assert flexgen == [*start, [0, 2, 3, 4], [0, 3, 4, 5], [0, 4, 5, 6]]
    # Even the only heavy key gives way. The prompt is cut by scores as usual.
    flexgen = rows(heavy=1, recent=1, variant="flexgen", prompt_length=4)
    assert flexgen == [*start, [0, 3, 4], [3, 4, 5], [4, 5, 6]]


def test_mask_puts_ties_at_the_lower_position_and_nan_last():
    logits = torch.zeros(1, 1, 6, 6)
    mask = simulation_mask(logits, heavy=2, recent=0, prompt_length=5, variant="h2o")
    assert mask[0, 0, 5].tolist() == [True, True, False, False, False, True]
    equal_columns = torch.full((1, 1, 6, 6), -torch.inf)
    equal_columns[..., 0] = 0.0
    mask = simulation_mask(equal_columns, heavy=2, recent=0, variant="global")
    assert mask[0, 0, 5].tolist() == [True, True, False, False, False, True]
    logits[0, 0, 3, 3] = torch.nan  # makes the scores of keys 0 to 3 NaN, not that of key 4
    mask = simulation_mask(logits, heavy=2, recent=0, prompt_length=5)
    assert mask[0, 0, 5].tolist() == [True, False, False, False, True, True]
