"""Layers that share one budget drop keys early that no budget can keep."""

from __future__ import annotations

import functools
import itertools
from contextlib import contextmanager

import pytest
import torch

import h2o
from h2o import H2OCache, UnsupportedError
from h2o.compat import with_cache
from h2o.hf.cache_state.layer_snapshot import take_snapshot
from h2o.hf.prompt.cross_head_budget import ROOM, CrossHeadBudget
from h2o.hf.prompt.echo_scorer import PromptEcho
from tests.hf.test_compress import positions
from tests.hf.test_prompt_echo import read
from tests.hf.tiny import DEVICE, failing, llama, prompts, shared, slow_if

SMALL = {"heavy": 8, "recent": 4, "sinks": 2, "score_by": "mean-echo", "head_shares": "echo"}
POOL = 8 + 4 + 2


@functools.cache
def deep(**more):
    """A model of six layers, in the first of which keys are dropped several times."""
    return llama(6, **more)


def as_if_all_were_held(ours, documents, **parameters):
    """Assert that all tensors of all layers are the same as when nothing is dropped before the last
    layer. Returns the largest numbers of keys held, with dropping and without."""
    caches, most = [], []
    for drops in (True, False):
        with watched(ours, drops) as held:
            caches.append(read(ours, documents, **parameters))
        most.append(max(held))
    for ours_, theirs in zip(*(cache.layers for cache in caches), strict=True):
        got, wanted = take_snapshot(ours_), take_snapshot(theirs)
        assert got.numbers == wanted.numbers
        torch.testing.assert_close(got.tensors, wanted.tensors, rtol=0, atol=0, equal_nan=True)
    return most


@contextmanager
def watched(ours, drops=True):
    """Yield a list that gets the number of keys held before each layer adds its prompt."""
    held, take = [], CrossHeadBudget.take

    def watching(self, *layer_and_prompt):
        self.alike = self.alike and drops
        held.append(self.keys_held)
        return take(self, *layer_and_prompt)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CrossHeadBudget, "take", watching)
        yield held


DROPPING = {
    "plain": {},
    "weighted": {"value_weighted": True},
    "heads that keep but one key": {"heavy": 2, "recent": 0, "sinks": 0},
    "int8": {"kv_dtype": "int8"},
    "a part of the bytes": {"heavy": 0.3, "recent": 0.1, "min_tokens": 0, "budget_unit": "bytes"},
    "layers of different budgets": {"heavy": [2, 12, 3, 9, 1, 5], "recent": [1, 2, 3, 1, 2, 3]},
    "parts": {"heavy": 0.1, "recent": 0.1, "min_tokens": 0},
    "no heavy hitters": {"heavy": 0},
    "no head below": {"heavy": 0.2, "recent": 0.1, "min_tokens": 9, "value_weighted": True},
}


@pytest.mark.parametrize("seed", [slow_if(seed > 1, seed) for seed in (1, 2, 3)])
@pytest.mark.parametrize("name", DROPPING)
def test_dropping_early_changes_nothing(name, seed):
    documents = prompts(60, 25, 44, seed=seed)
    for batched in (documents, documents[:1]):
        held, of = as_if_all_were_held(deep(), batched, **SMALL | DROPPING[name])
        assert held < 0.7 * of


def test_values_in_four_bits():
    held, of = as_if_all_were_held(
        deep(head_dim=32), prompts(200, 60, 130), **SMALL, kv_dtype="int8-int4"
    )
    assert held < of / 2


@pytest.mark.parametrize("name", ["gemma3", "gemma2"])
def test_models_whose_keys_are_held_in_another_way(name):
    held, of = as_if_all_were_held(shared(name), prompts(60), **SMALL)
    assert held < of


@pytest.mark.parametrize("of", [0, 1], ids=["scores", "echo"])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: (x * 8).round() / 8,
        lambda x: x * 0,
        lambda x: x.index_fill(2, torch.tensor([7], device=DEVICE), torch.nan),
        lambda x: x.index_fill(2, torch.tensor([7], device=DEVICE), torch.inf),
    ],
    ids=["ties", "zeros", "NaN", "infinity"],
)
def test_what_is_hard_to_order(change, of, monkeypatch):
    scores = PromptEcho.scores

    def change_one(self, tokens, received):
        made = list(scores(self, tokens, received))
        made[of] = change(made[of])
        return tuple(made)

    monkeypatch.setattr(PromptEcho, "scores", change_one)
    as_if_all_were_held(deep(), prompts(60, 44), **SMALL)


def test_a_bar_that_becomes_nan(monkeypatch):
    """A bar that becomes NaN in a later layer must not drop any more keys."""
    scores = PromptEcho.scores
    calls = itertools.count()

    def change_later_ones(self, tokens, received):
        made, echo = scores(self, tokens, received)
        if next(calls) % 6 >= 3:
            echo[..., 7] = torch.nan
        return made, echo

    monkeypatch.setattr(PromptEcho, "scores", change_later_ones)
    as_if_all_were_held(deep(), prompts(60, 44), **SMALL)


def test_what_is_held_while_a_prompt_is_read():
    """Layers must hold no more than an eighth above the keys that all heads will keep, and no more
    memory than the keys held need."""
    (document,), heads, rows = prompts(90), [], []
    pool = 6 * 2 * POOL

    def watching(self, *layer_and_prompt):
        divided = take(self, *layer_and_prompt)
        waiting = self.waiting.values()
        heads.append(self.keys_held)
        tensors = [x for w in waiting for x in (w.prompt.keys, w.prompt.values)]
        rows.append(sum(x.untyped_storage().nbytes() for x in tensors if x.ndim == 2))
        return divided

    with pytest.MonkeyPatch.context() as patch:
        take = CrossHeadBudget.take
        patch.setattr(CrossHeadBudget, "take", watching)
        read(deep(), [document], **SMALL)
    read_by_then = [2 * 90 * layer for layer in range(1, 6)]
    assert heads[:-1] == [min(n, held) for n, held in zip(read_by_then, heads[:-1], strict=True)]
    assert heads[-1] == 0
    assert max(heads) <= ROOM * pool < read_by_then[1]
    assert rows == [2 * held * 8 * 4 for held in heads]


def test_all_is_held_where_the_mean_decays():
    held, of = as_if_all_were_held(deep(), prompts(60), **SMALL, decay=0.9)
    assert held == of == 5 * 2 * 60


def test_a_pass_that_broke_off_raises_no_bar():
    ours, (document, other) = deep(), prompts(60, 60)
    cache = H2OCache(ours.config, **SMALL)
    inner = ours.model.layers[4].self_attn
    with failing(inner):
        ours(document, **with_cache(cache))
    ours(other, **with_cache(cache))
    assert positions(cache) == positions(read(ours, [other], **SMALL))


def test_layers_that_have_more_places_than_were_foreseen(monkeypatch):
    """All heads together must keep no more keys than were foreseen at the first layer."""
    foresee = CrossHeadBudget._count_pool

    def foresee_less(self, layer, prompt):
        foresee(self, layer, prompt)
        self.pool = [n - 20 for n in self.pool]

    monkeypatch.setattr(CrossHeadBudget, "_count_pool", foresee_less)
    cache = read(deep(), prompts(60), **SMALL)
    heads = [n for layer in cache.report().layers for n in layer.kept_by_head[0]]
    assert sum(heads) == POOL * len(heads) - 20


def test_a_part_of_the_heads_cannot_choose(monkeypatch):
    monkeypatch.setattr(h2o.hf.model_traits.tensor_parallel, "is_distributed", lambda: True)
    monkeypatch.setattr(h2o.hf.model_traits.tensor_parallel, "part", lambda module: (0, 2))
    with pytest.raises(UnsupportedError, match="cut over several processes"):
        read(shared("llama"), prompts(60), **SMALL)
