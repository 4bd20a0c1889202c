"""A score of infinity pins a key under every policy, and attention never produces one."""

from __future__ import annotations

import pytest
import torch

from h2o import ops
from h2o.policy import Policy
from tests.reference import operations as reference

PINNED = [7, 8, 20]
POLICIES = {
    "sum": Policy(),
    "value-weighted": Policy(sinks=2, value_weighted=True),
    "mean": Policy(sinks=2, score_by="mean", value_weighted=True),
    "decayed mean": Policy(score_by="mean", decay=0.9, value_weighted=True),
    "max": Policy(score_by="max", decay=0.5),
    "steep decay": Policy(sinks=2, decay=1e-10),  # its power for a chunk is 0 in float32
    "steep max": Policy(score_by="max", decay=1e-10),
}


def texts(n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values. The pinned keys get no attention, and their values are 0."""
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, 2, n, 8, generator=generator) for _ in "qkv")
    at = [i for i in PINNED if i < n]
    query[..., 0], key[:, :, at, 0], value[:, :, at] = 4.0, -90.0, 0.0
    return query, key, value


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("heavy", [3, 9])
def test_pinned_keys_stay(name, heavy):
    """Pinned keys stay during a prompt, steps and a chunk, as in the reference."""
    policy, kept = POLICIES[name], []
    for engine in (ops, reference):
        query, key, value = texts(80)
        slots = ops.new_slots(key, 20, value_weighted=policy.value_weighted)
        slots.budget.copy_(torch.tensor([[heavy, 4]]))
        held = []
        for start, stop in [(0, 40), *((i, i + 1) for i in range(40, 72)), (72, 80)]:
            q, k, v = (x[:, :, start:stop] for x in (query, key, value))
            if stop - start == 1:
                engine.step(q, k, v, slots, policy=policy)
            else:
                _, scores = engine.attend(q, k, v, slots, policy=policy)
                if start == 0:
                    scores[:, :, PINNED] = torch.inf
                engine.evict(k, v, scores, slots, policy=policy)
            positions, scores = reference.kept(slots)
            held.append(positions.tolist())
            assert all(set(PINNED) <= set(head) for head in held[-1][0])
            assert (scores == torch.inf).sum(-1).tolist() == [[len(PINNED)] * 2]
        assert slots.evicted_score.isfinite().all()
        kept.append(held)
    assert kept[0] == kept[1]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan, 3e38])
def test_attention_pins_nothing(name, number):
    """No numbers in a model may make attention pin a key."""
    for at in range(3):
        text = texts(40)
        text[at][:, :, 5:9, 1:3] = number
        query, key, value = text
        slots = ops.new_slots(key, 20, value_weighted=POLICIES[name].value_weighted)
        slots.budget.copy_(torch.tensor([[9, 4]]))
        _, scores = ops.attend(query, key, value, slots, policy=POLICIES[name])
        assert not (scores == torch.inf).any()
        ops.evict(key, value, scores, slots, policy=POLICIES[name])
        for i in range(4, 12):
            one = (x[:, :, i : i + 1] for x in text)
            ops.step(*one, slots, policy=POLICIES[name])
        assert not (slots.scores == torch.inf).any()
