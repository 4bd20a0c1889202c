"""The oracle and the whole-text masks against what the authors' code kept (golden data)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from h2o import reference
from h2o.masks import simulation_mask
from tests import inputs
from tests.conversation import Conversation
from tests.torch.engines import oracle


@pytest.mark.parametrize("name", inputs.CACHE_CASES)
def test_cache_keeps_what_the_authors_cache_keeps(name):
    golden = inputs.golden_cache(name)
    talk = Conversation(oracle(), golden.text, inputs.Policy(golden.heavy, golden.recent))
    talk.feed_all(golden.calls)
    for call, (positions, scores) in enumerate(talk.kept):
        np.testing.assert_array_equal(positions, golden.kept[call])
        np.testing.assert_allclose(scores, golden.scores[call], rtol=0, atol=5e-5)
    np.testing.assert_allclose(talk.answer, golden.out, rtol=0, atol=1e-5)


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
    mask = simulation_mask(logits, golden.heavy, golden.recent, prompt_len=golden.calls[0])
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
