"""Requests whose budget is distributed over all layers, with one page for all layers: each must get
the answers it would get alone. tests/vllm compares the same, in vLLM, with an `H2OCache`."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from h2o import H2OConfig, ops
from h2o.config.layer_plan import LayerPlan
from h2o.quantization import set_smoothing
from h2o.vllm.page_budget import PageBudget
from h2o.vllm.page_store import PageStore, page_bytes
from h2o.vllm.paged_request import PagedRequest
from h2o.vllm.paged_rows import Batch, PagedLayer, PartialPrompts
from h2o.vllm.prompt_scoring import CrossLayerBudget
from h2o.vllm.worker_prompts import WorkerPrompts
from tests.torch.test_paged_rows import (
    LAYERS,
    LONGEST,
    PAGES,
    SCALE,
    D,
    G,
    Talk,
    apart,
    feed,
    talk,
    talks,
    traffic,
)

CONFIGS = {
    "floats": H2OConfig(
        heavy=9, recent=3, sinks=2, score_by="mean-echo", value_weighted=True, head_shares="echo"
    ),
    "bytes": H2OConfig(
        heavy=12, recent=4, score_by="mean-echo", head_shares="echo", kv_dtype="int8-int4"
    ),
    "four bits": H2OConfig(
        heavy=12, recent=4, score_by="mean-echo", head_shares="echo", kv_dtype="int4"
    ),
    "fractions": H2OConfig(
        heavy=0.3, recent=0.1, sinks=1, min_tokens=8, score_by="mean-echo", head_shares="echo"
    ),
}


def echo(layer, query, key, value, received):
    """Stand-in for echo scores. They order keys differently from attention, and are uneven across
    heads and layers."""
    uneven = key.abs().amax(-1) * query[:, ::2].abs().amax(-1)
    return received, uneven ** torch.arange(1, G + 1).view(1, G, 1)


class Model:
    """Layers in sequence, each with different tokens. The answer is the sum of theirs."""

    def __init__(self, config: H2OConfig, echo=echo) -> None:
        self.budget = PageBudget(config, LAYERS, LONGEST)
        page = self.budget.empty_pages(torch.empty(1, G, 1, D))
        memory = apart(0, PAGES, page_bytes(page), dtype=torch.int8).fill_(7)
        self.store, cross_layer = PageStore(memory, page, LAYERS), CrossLayerBudget(self.budget)
        known = self.store, self.budget
        more = SCALE, 0.0, WorkerPrompts()
        self.layers = [
            PagedLayer(*known, i, *more, functools.partial(echo, i), cross_layer)
            for i in range(LAYERS)
        ]

    def forward(self, query, key, value, batch: Batch, out) -> None:
        out.zero_()
        for i, layer in enumerate(self.layers):
            answer = torch.full_like(out, torch.nan)
            layer.forward(*tokens_of(i, query, key, value), batch, answer)
            out += answer


def tokens_of(layer: int, query, key, value):
    return query * (1 + layer), (key * 0.8**layer).roll(layer, -1), value.roll(layer, -1)


def kept(model: Model, page: int) -> list[list[list[int]]]:
    """Positions held in a page, by layer and head."""
    number = torch.tensor([page], dtype=torch.int32)
    heads = []
    for layer in range(LAYERS):
        slots = model.store.rows(number, layer)
        starts, positions = slots.starts[page].tolist(), slots.positions[page]
        parts = [positions[a:b] for a, b in itertools.pairwise(starts)]
        heads.append([sorted(part[part >= 0].tolist()) for part in parts])
    return heads


def alone(config: H2OConfig, each: Talk) -> tuple[torch.Tensor, list[list[list[int]]]]:
    """The answers to the request alone, from the operations, with separate slots for each head."""
    budget, sinks = PageBudget(config, LAYERS, LONGEST), config.sinks
    layers, claims = [], []
    for i in range(LAYERS):
        query, keys, values = tokens_of(i, *map(torch.from_numpy, each.text))
        prompt = [x[:, :, : each.prompt] for x in (query, keys, values)]
        out, scores = ops.attend(*prompt, scale=SCALE, policy=config.policy)
        scores, claim = echo(i, *prompt, scores)
        ((heavy, recent),) = budget.by_head(i, keys, PagedRequest(each.prompt))
        for start, stop in each.pinned:
            scores[..., start:stop] = torch.inf
        if config.policy.value_weighted:
            claim = claim * values[:, :, : each.prompt].norm(dim=-1)
        claims.append(claim[0, :, sinks : each.prompt - recent])
        layers.append((query, keys, values, out, scores))
    least = max(0, LayerPlan.of(config, 0, LAYERS).floor - sinks - recent)
    least = min(heavy, max(least, sum(b - a for a, b in each.pinned)))
    for (_, _, values, _, scores), claim in zip(layers, claims, strict=True):
        ranks = scores.clone()
        if config.policy.value_weighted:
            ranks = ranks * values[:, :, : each.prompt].norm(dim=-1)
        ranks = ranks / torch.arange(each.prompt, 0, -1)
        own = ranks[0, :, sinks : each.prompt - recent].topk(min(least, claim.shape[1])).indices
        claim.scatter_(1, own, -1.0)
    pool, best = LAYERS * G * (heavy - least), torch.cat(claims)
    free = int((best >= 0).sum())
    won = best.flatten().topk(min(pool, free)).indices // max(1, best.shape[1])
    won = won.bincount(minlength=len(best)) + max(0, pool - free) // len(best)
    answer, held = torch.zeros(0), []
    for layer, (query, keys, values, out, scores) in enumerate(layers):
        sizes = (least + won[layer * G : (layer + 1) * G]).tolist()
        slots = ops.new_slots(
            keys, [sinks + n + recent + 1 for n in sizes], recent=recent,
            value_weighted=config.policy.value_weighted, kv_dtype=config.kv_dtype, offsets=True,
        )  # fmt: skip
        slots.budget[0, :, 0] = torch.tensor(sizes)
        q, k, v = (x[:, :, : each.prompt] for x in (query, keys, values))
        set_smoothing(slots.smoothing, slots.seen_tokens, q, k, None)
        ops.evict(k, v, scores, slots, policy=config.policy)
        parts = [out[0]]
        for i in range(each.prompt, each.seen):
            q, k, v = (x[:, :, i : i + 1] for x in (query, keys, values))
            parts.append(ops.step(q, k, v, slots, scale=SCALE, policy=config.policy)[0])
        answer = torch.cat(parts) if layer == 0 else answer + torch.cat(parts)
        heads = slots.positions[0].split(slots.starts.diff().tolist())
        held.append([sorted(head[head >= 0].tolist()) for head in heads])
    return answer, held


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("room", [1000, 16])
def test_each_request_as_if_it_were_alone(name, room):
    """Prompts come whole, or in chunks together with those of others, and pages are used again."""
    model, served = Model(CONFIGS[name]), talks() + talks()
    assert (traffic(model, served, seed=3, room=room, held=kept) > 10) == (room < 1000)
    for each in served:
        wanted, held = alone(CONFIGS[name], each)
        assert each.kept == held
        if room == 1000:
            assert torch.equal(torch.cat(each.answer), wanted)
        else:  # the sums of a chunked prompt round differently
            torch.testing.assert_close(torch.cat(each.answer), wanted, rtol=2e-3, atol=2e-3)
    sizes = {len(head) for each in served for layer in each.kept for head in layer}
    assert len(sizes) > 10
    evicted = model.store.eviction()
    seen = sum(each.tokens for each in served) * LAYERS * G
    assert evicted.keys == seen - sum(
        len(head) for each in served for layer in each.kept for head in layer
    )


def test_pinned_keys_stay_in_every_head():
    model, served = Model(CONFIGS["floats"]), talks()
    for each in served[::2]:
        each.pinned = [span for span in ((3, 6), (8, 9)) if span[1] <= each.prompt]
    traffic(model, served, seed=3, room=16, held=kept)
    for each in served:
        wanted, held = alone(CONFIGS["floats"], each)
        assert each.kept == held
        torch.testing.assert_close(torch.cat(each.answer), wanted, rtol=2e-3, atol=2e-3)
        for span in each.pinned:
            assert all(set(range(*span)) <= set(head) for layer in held for head in layer)


def test_a_pass_that_broke_off_leaves_nothing():
    """A pass that fails must leave nothing in a page that another request takes."""
    config = CONFIGS["floats"]
    model, other, begun = Model(config), talk(3, 33, 50), PartialPrompts(2)
    working, other.page = model.layers[1].forward, 4

    def broken(*args):
        raise RuntimeError("no memory")

    model.layers[1].forward = broken
    left = talk(1, 40, 70)
    left.page = 4
    with pytest.raises(RuntimeError, match="no memory"):
        feed(model, begun, [(left, 40)])
    model.layers[1].forward = working
    for tokens in [33, *[1] * 17]:
        feed(model, begun, [(other, tokens)])
    wanted, held = alone(config, other)
    assert kept(model, 4) == held
    assert torch.equal(torch.cat(other.answer), wanted)


def test_a_page_has_room_for_any_division():
    """One head of one layer may get all pooled slots, so its part of the page must have room."""

    def greedy(layer, query, key, value, received):
        wins = torch.tensor([1.0 if layer == 1 and g == 1 else 0.0 for g in range(G)])
        return received, wins[:, None].expand_as(received)

    model, each, begun = Model(CONFIGS["floats"], greedy), talk(5, 80, 90), PartialPrompts(2)
    each.page = 3
    for tokens in [80, *[1] * 10]:
        feed(model, begun, [(each, tokens)])
    sizes = [[len(head) for head in layer] for layer in kept(model, 3)]
    assert sizes == [[5, 5], [5, 5 + LAYERS * G * 9], [5, 5]]
