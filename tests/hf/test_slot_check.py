"""Slots that no eviction leaves are found in the pass that leaves them."""

from __future__ import annotations

import pytest
import torch

from h2o import H2OCache
from h2o.compat import with_cache
from h2o.hf.layers import slot_check
from h2o.hf.layers.slot_check import check_slots
from tests.hf.tiny import batch, prompts, shared

SETTINGS = {"heavy": 5, "recent": 4, "sinks": 1, "value_weighted": True}


def filled(**settings):
    """A layer with two rows of 20 and 14 tokens, after a prompt and two decode steps."""
    ours = shared("llama")
    cache = H2OCache(ours.config, **SETTINGS | settings, pinned=[(2, 4)])
    inputs = batch(prompts(18, 12))
    mask = inputs["attention_mask"]
    ours(**inputs, position_ids=(mask.cumsum(1) - 1).clamp(min=0), **with_cache(cache))
    for _ in range(2):
        mask = torch.cat([mask, mask[:, :1] * 0 + 1], 1)
        places = mask.sum(1, keepdim=True) - 1
        given = {"attention_mask": mask, "position_ids": places}
        ours(inputs["input_ids"][:, -1:], **given, **with_cache(cache))
    return cache.layers[0]


def at(layer, position):
    """Index of the slot of a position in row 1, head 0."""
    return 1, 0, int((layer.slots.positions[1, 0] == position).nonzero()[0, 0])


def lose(layer):
    layer.slots.positions[at(layer, 13)] = -1


def double(layer):
    layer.slots.positions[at(layer, 12)] = 13


def move_on(layer):
    layer.slots.positions[at(layer, 13)] = 14


def lose_the_sink(layer):
    layer.slots.positions[at(layer, 0)] = 5


def unheld(layer):
    """A position from 4 to 9 that row 1, head 0 has lost."""
    return min({*range(4, 10)} - {*layer.slots.positions[1, 0].tolist()})


def lose_a_recent_one(layer):
    layer.guard.put(layer.guard.state._replace(prompt_columns=0))
    layer.slots.positions[at(layer, 13)] = unheld(layer)


def move_the_gap(layer):
    row, gap = layer.slots.positions[1, 0], layer.slots.next_slot[1, 0]
    row[gap], row[0] = row[0].clone(), -1


def forget_the_gap(layer):
    layer.slots.next_slot[1, 0] = at(layer, 13)[2]


def unpin(layer):
    layer.slots.scores[at(layer, 3)] = 1.0


def lose_a_pinned_one(layer):
    layer.slots.positions[at(layer, 3)] = unheld(layer)


def mistake_a_norm(layer):
    layer.slots.norms[at(layer, 13)] += 1


FAULTS = {
    lose: "a wrong number of keys",
    double: "a position occurs twice",
    move_on: "a position is beyond",
    lose_the_sink: "a sink is missing",
    lose_a_recent_one: "a recent token is missing",
    move_the_gap: "the next slot is not the empty one",
    forget_the_gap: "the next slot is not the empty one",
    unpin: "another score than infinity",
    lose_a_pinned_one: "a pinned token is missing",
    mistake_a_norm: "a norm is not that of its value",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(fault):
    layer = filled()
    check_slots(layer, layer.guard.state)
    fault(layer)
    with pytest.raises(AssertionError, match=FAULTS[fault]):
        check_slots(layer, layer.guard.state)


def test_layers_check_their_slots_in_tests():
    """The variable must be set wherever these tests run, and a pass must check all rows."""
    assert slot_check.CHECKS_SLOTS
    ours = shared("llama")
    cache = H2OCache(ours.config, heavy=5, recent=4)
    (ids,) = prompts(20)
    ours(ids, **with_cache(cache))
    cache.layers[1].slots.positions[0, 0].fill_(3)
    with pytest.raises(AssertionError, match="layer 1"):
        ours(ids[:, :1], **with_cache(cache))
