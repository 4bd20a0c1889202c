"""The published masks, computed in blocks of rows, equal the readable ones, which test_reference.py
compares with the authors'."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from h2o import attention_blocks
from h2o.evaluation import published_masks
from h2o.evaluation.published_masks import MASKS
from h2o.evaluation.setting import VARIANTS
from tests import inputs
from tests.reference.published_masks import simulation_mask


def visibility(evicted_at: Tensor) -> Tensor:
    """Which keys each row sees, [..., n, n], from evicted_at [..., n]."""
    n = evicted_at.shape[-1]
    row, key = torch.arange(n)[:, None], torch.arange(n)
    return (key <= row) & (row < evicted_at[..., None, :])


def through(variant: str, logits: Tensor, heavy: int, recent: int, **kwargs):
    """The variant on logits [H, n, n]: queries are their rows, keys and values are unit vectors."""
    H, n, _ = logits.shape
    unit = torch.eye(n).expand(H, n, n)
    return published_masks.attend(variant, logits, unit, unit, heavy, recent, scale=1.0, **kwargs)


def drifting_logits(seed: int, n: int, H: int = 4) -> Tensor:
    text = inputs.drifting(seed, B=1, H=H, G=H, N=n)
    q, k = torch.from_numpy(text.query[0]), torch.from_numpy(text.keys[0])
    return (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).float()


# Lengths below, at and above a block of rows; budgets from no heavy key to all keys.
@pytest.mark.parametrize("n", [1, 40, attention_blocks.ROWS, 150])
@pytest.mark.parametrize(
    ("heavy", "recent"), [(3, 2), (0, 6), (6, 0), (1, 1), (12, 11), (30, 5), (400, 1)]
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_readable_masks(variant, heavy, recent, n):
    logits = drifting_logits(n + heavy, n)
    out, evicted_at = through(variant, logits, heavy, recent)
    want = simulation_mask(logits[None], heavy, recent, variant)[0]
    assert torch.equal(visibility(evicted_at), want)
    weights = logits.masked_fill(~want, -torch.inf).softmax(-1)
    torch.testing.assert_close(out.transpose(0, 1), weights, atol=1e-6, rtol=0)


@pytest.mark.parametrize("prompt_length", [2, 20, 70, 150])
def test_flexgen_prompt(prompt_length):
    logits = drifting_logits(prompt_length, 120)
    _, evicted_at = through("flexgen", logits, 8, 7, prompt_length=prompt_length)
    want = simulation_mask(logits[None], 8, 7, "flexgen", prompt_length=prompt_length)[0]
    assert torch.equal(visibility(evicted_at), want)


def test_the_variants_differ():
    """If the variants gave equal masks on these inputs, the tests could not tell them apart."""
    logits = drifting_logits(7, 120)
    seen = [visibility(through(variant, logits, 8, 7)[1]) for variant in VARIANTS]
    seen.append(simulation_mask(logits[None], 8, 7, "h2o")[0])
    for i, a in enumerate(seen):
        for b in seen[:i]:
            assert not torch.equal(a, b)


def test_equal_scores_keep_the_lower_position():
    logits = torch.zeros(1, 6, 6)
    _, evicted_at = through("local", logits, 3, 0)
    assert torch.equal(visibility(evicted_at), simulation_mask(logits[None], 3, 0, "local")[0])


def test_groups():
    """The masks "local" and "global" choose for each query head, "flexgen" for each group."""
    text = inputs.drifting(3, B=1, H=6, G=2, N=90)
    q, k, v = (torch.from_numpy(x[0]) for x in text)
    for variant in ("local", "global"):
        out, evicted_at = published_masks.attend(variant, q, k, v, 6, 5)
        repeated = k.repeat_interleave(3, 0), v.repeat_interleave(3, 0)
        alone = published_masks.attend(variant, q, *repeated, 6, 5)
        assert torch.equal(out, alone[0])
        assert torch.equal(evicted_at, alone[1])
    shared = published_masks.attend("flexgen", q, k, v, 6, 5)[1].view(2, 3, -1)
    assert torch.equal(shared, shared[:, :1].expand_as(shared))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    """Keys are chosen from float32 values, so they are those of the rounded inputs in float32."""
    text = inputs.drifting(5, B=1, H=4, G=2, N=80)
    q, k, v = (torch.from_numpy(x[0]).to(dtype) for x in text)
    for variant in VARIANTS:
        out, evicted_at = published_masks.attend(variant, q, k, v, 6, 5)
        want, want_evicted_at = published_masks.attend(
            variant, q.float(), k.float(), v.float(), 6, 5
        )
        assert out.dtype == dtype
        assert torch.equal(evicted_at, want_evicted_at)
        torch.testing.assert_close(out, want.to(dtype), rtol=0, atol=0)


def test_retained_mass():
    logits = drifting_logits(11, 100)
    _, evicted_at = through("local", logits, 6, 5)
    unit = torch.eye(100).expand(4, 100, 100)
    mass = attention_blocks.retained_mass(logits, unit, evicted_at, scale=1.0)
    future = torch.ones(100, 100, dtype=torch.bool).triu(1)
    full = logits.masked_fill(future, -torch.inf).softmax(-1)
    np.testing.assert_allclose(mass, (full * visibility(evicted_at)).sum(-1), rtol=1e-5)
    assert (mass.mean(-1) < 0.99).all()
    everything = torch.full_like(evicted_at, 100)
    np.testing.assert_allclose(
        attention_blocks.retained_mass(logits, unit, everything, scale=1.0), 1.0, rtol=1e-6
    )


def test_retained_mass_under_a_softcap():
    logits = 5 * drifting_logits(11, 100)
    _, evicted_at = through("local", logits, 6, 5)
    unit = torch.eye(100).expand(4, 100, 100)
    capped = 3 * torch.tanh(logits / 3)
    mass = attention_blocks.retained_mass(logits, unit, evicted_at, scale=1.0, softcap=3.0)
    want = attention_blocks.retained_mass(capped, unit, evicted_at, scale=1.0)
    torch.testing.assert_close(mass, want)


def test_settings_name_the_masks_that_there_are():
    assert tuple(MASKS) == VARIANTS
