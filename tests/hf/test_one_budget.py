"""shares="scores" and "layer": a prompt's places go to the highest ranks of several heads."""

from __future__ import annotations

import functools
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import h2o
from h2o import H2OCache, H2OConfig, Unsupported
from h2o.borrowed import with_cache
from h2o.hf.layer import H2OLayer
from h2o.hf.layer_kinds import HYBRIDS
from h2o.hf.layer_state import state_of
from h2o.hf.one_budget import ROOM, OneBudget
from tests.hf.modes import MODES
from tests.hf.test_reading import positions
from tests.hf.tiny import DEVICE, LATENT, Family, batch, greedy, model, prompts, shared

SMALL = {"heavy": 8, "recent": 4, "sinks": 2}
RANKINGS = {
    "sum": {},
    "mean, weighted": {"rank_by": "mean", "value_weighted": True},
    "decayed mean": {"rank_by": "mean", "decay": 0.9},
    "max": {"rank_by": "max"},
}


def read(ours, document, **parameters):
    """A cache that has read a document, or documents, and the logits."""
    inputs = batch(document) if isinstance(document, list) else {"input_ids": document}
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    more = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0), "attention_mask": mask}
    cache = H2OCache(ours.config, **parameters)
    with torch.no_grad():
        logits = ours(inputs["input_ids"], **with_cache(cache), **more).logits
    return cache, logits


def wanted(ours, document, policy, scope):
    """What each head of each layer keeps: sinks, recent keys, and of what is left the best of all
    heads in the scope, by the ranks of a cache that holds all."""
    sinks, n = SMALL["sinks"], document.shape[1]
    cache, _ = read(ours, document, heavy=500, recent=0, sinks=sinks, **policy)
    ranks = []
    for layer in range(len(cache.layers)):
        rank = cache.kept(layer).scores[0].double()
        if policy.get("rank_by") == "mean":
            decay = policy.get("decay", 1.0)
            rank = rank / torch.tensor([sum(decay**i for i in range(n - j)) for j in range(n)])
        if policy.get("value_weighted"):
            rank = rank * list(cache)[layer][1][0].norm(dim=-1)
        ranks.append(rank)
    ranks = torch.stack(ranks)  # [layers, G, n]
    L, G, _ = ranks.shape
    kept = torch.zeros(ranks.shape, dtype=torch.bool)
    kept[..., :sinks] = kept[..., n - SMALL["recent"] :] = True
    rest, flat = ranks.masked_fill(kept, -1), kept.flatten(1 if scope == "layer" else 0)
    places = SMALL["heavy"] * G * (1 if scope == "layer" else L)
    flat.scatter_(-1, rest.reshape(flat.shape).topk(places).indices, True)
    return [[row.nonzero()[:, 0].tolist() for row in layer] for layer in flat.view(kept.shape)]


@pytest.mark.parametrize("scope", ["scores", "layer"])
@pytest.mark.parametrize("ranking", RANKINGS)
@pytest.mark.parametrize("name", ["phi", "qwen3", "gpt_neox"])
def test_what_is_kept(name, ranking, scope):
    ours, (document,) = shared(name), prompts(60)
    policy = RANKINGS[ranking]
    cache, _ = read(ours, document, **SMALL, **policy, shares=scope)
    expected = wanted(ours, document, policy, scope)
    assert positions(cache) == expected
    assert len({len(head) for layer in expected for head in layer}) > 1, "heads never differ"


@pytest.mark.parametrize("scope", ["scores", "layer"])
def test_rows_of_a_batch_choose_alone(scope):
    ours, documents = shared("llama"), prompts(60, 25, 44)
    settings = {"heavy": 0.2, "recent": 0.1, "min_tokens": 0, "rank_by": "max", "shares": scope}
    together, _ = read(ours, documents, **settings)
    for row, document in enumerate(documents):
        assert positions(together, row) == positions(read(ours, document, **settings)[0])


@pytest.mark.parametrize("ranking", ["sum", "max"])
def test_budgets_stay_what_they_have_become(ranking):
    ours, (document, more) = model("llama"), prompts(60, 30)
    cache, _ = read(ours, document, **SMALL, **RANKINGS[ranking], shares="scores")
    before = [layer.kept_by_head for layer in cache.report().layers]
    assert before == [layer.budget_by_head for layer in cache.report().layers]
    with torch.no_grad():
        ours(more, **with_cache(cache))
        for token in more.split(1, dim=1):
            ours(token, **with_cache(cache))
    assert before == [layer.kept_by_head for layer in cache.report().layers]
    heads = [n for layer in before for n in layer[0]]
    assert sum(heads) == sum(SMALL.values()) * len(heads)


@pytest.mark.parametrize(
    "name",
    ["llama", "gemma3", *["deepseek_v3"] * bool(LATENT), *["falcon_h1", "qwen3_next"] * HYBRIDS],
)
def test_the_prompt_is_attended_to_as_a_whole(name):
    """And with room for all the answers are the full cache's."""
    ours, (document,) = model(name), prompts(60)
    inputs = {"input_ids": document}
    theirs = DynamicCache(config=ours.config)
    full = greedy(model(name, "sdpa"), inputs, **with_cache(theirs))
    roomy = H2OCache(ours.config, heavy=500, recent=4, rank_by="max", shares="scores")
    assert torch.equal(greedy(ours, inputs, **with_cache(roomy)), full)
    cache, logits = read(ours, document, **SMALL, shares="scores")
    dense = read(ours, document, heavy=500, recent=0)[1]
    torch.testing.assert_close(logits, dense, rtol=0, atol=1e-5)
    report = [layer.kept_by_head[0] for layer in cache.report().layers if layer.kind == "h2o"]
    heads = [n for layer in report for n in layer]
    assert sum(heads) == sum(SMALL.values()) * len(heads)


@pytest.mark.parametrize("scope", ["scores"])
def test_no_head_keeps_fewer_than_the_floor(scope):
    """Each head's own best keys come first, and the others go to the highest ranks of all."""
    ours, (document,) = shared("qwen3"), prompts(70)
    config = {"heavy": 0.3, "recent": 0.05, "min_tokens": 22, "shares": scope, "rank_by": "max"}
    cache, _ = read(ours, document, **config)
    free, _ = read(ours, document, **config | {"min_tokens": 0})
    held, least = positions(cache), positions(free)
    heads = [len(head) for layer in held for head in layer]
    assert min(heads) == 22
    assert min(len(head) for layer in least for head in layer) < 22
    assert sum(heads) == sum(len(head) for layer in least for head in layer)
    assert any(layer.floored for layer in cache.report().layers)
    assert not any(layer.floored for layer in free.report().layers)


def test_no_head_is_left_without_a_key():
    ours, (document,) = shared("qwen3"), prompts(70)
    cache, _ = read(ours, document, heavy=2, recent=0, rank_by="max", shares="scores")
    heads = [len(head) for layer in positions(cache) for head in layer]
    assert min(heads) >= 1
    assert sum(heads) == 2 * len(heads)


def test_room_that_a_short_prompt_leaves_is_for_what_follows():
    ours, (document, more) = model("llama"), prompts(10, 60)
    cache, _ = read(ours, document, **SMALL, shares="scores")
    with torch.no_grad():
        ours(more, **with_cache(cache))
    heads = [n for layer in cache.report().layers for n in layer.kept_by_head[0]]
    assert heads == [sum(SMALL.values())] * len(heads)


@pytest.mark.parametrize("mode", MODES)
def test_every_way_to_generate(mode):
    ours, made = model("llama"), []

    def make():
        made.append(H2OCache(ours.config, **SMALL, rank_by="max", shares="scores"))
        return made[-1]

    MODES[mode](ours, batch(prompts(23, 17)), make)
    heads = [n for x in made[-1].report().layers for row in x.kept_by_head for n in row]
    assert sum(heads) == sum(SMALL.values()) * len(heads)


@pytest.mark.parametrize(
    "more",
    [
        {"kv_dtype": "int8"},
        {"merge": 0.5},
        {"positions": "rolled"},
        {"compileable": True},
        {"trace": True},
        {
            "rank_by": "max",
            "kv_dtype": "int8",
            "of": "bytes",
            "heavy": 0.3,
            "recent": 0.1,
            "min_tokens": 0,
        },
    ],
    ids=str,
)
def test_settings_that_go_with_it(more, tmp_path):
    """Forks and files go on as the cache does."""
    ours, (document,) = model("llama"), prompts(60)
    cache, _ = read(ours, document, **{**SMALL, "shares": "scores", **more})
    question = {"input_ids": torch.cat([document, *prompts(5, seed=3)], 1)}
    cache.save(tmp_path / "cache", ours)
    copies = [cache.fork(), H2OCache.load(tmp_path / "cache", ours)]
    answers = [greedy(ours, question, **with_cache(copy)) for copy in copies]
    assert torch.equal(*answers)
    if more.get("of") != "bytes":  # fractions are of a prompt, and so a copy's only
        assert torch.equal(greedy(ours, question, **with_cache(cache)), answers[0])
    if "trace" in more:
        assert cache.evicted_at(1).min() == 60


def test_a_pass_that_broke_off_is_forgotten():
    ours, (document,) = model("llama"), prompts(60)
    cache = H2OCache(ours.config, **SMALL, shares="scores")
    inner = ours.model.layers[1].self_attn
    hook = inner.register_forward_pre_hook(lambda *_: 1 / 0)
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        ours(document, **with_cache(cache))
    hook.remove()
    cache.reset()
    assert not cache.layers[0].one_budget.waiting
    with torch.no_grad():
        ours(document, **with_cache(cache))
    assert positions(cache) == positions(read(ours, document, **SMALL, shares="scores")[0])


def test_tokens_of_a_prompt_are_taken_back():
    ours, (document,) = model("llama"), prompts(60)
    cache = H2OCache(ours.config, **SMALL, rank_by="max", shares="scores")
    cache.activate_past_recording()
    with torch.no_grad():
        ours(document, **with_cache(cache))
        cache.crop(50 if h2o.hf.pass_state.CROPS_TO_LENGTH else -10)
    alone, _ = read(ours, document[:, :50], **SMALL, rank_by="max", shares="scores")
    assert positions(cache) == positions(alone)


def test_a_dynamic_cache_goes_on():
    ours, (document,) = model("llama"), prompts(60)
    full = DynamicCache(config=ours.config)
    with torch.no_grad():
        ours(document[:, :50], **with_cache(full))
        cache = H2OCache.from_dynamic_cache(full, ours.config, **SMALL, shares="scores")
        ours(document[:, 50:], **with_cache(cache))
    heads = [n for layer in cache.report().layers for n in layer.kept_by_head[0]]
    assert sum(heads) == sum(SMALL.values()) * len(heads)
    assert len(set(heads)) > 1


def test_answers_to_many_prompts():
    ours, ids = model("llama"), [x[0] for x in prompts(30, 22, 41)]
    config = H2OConfig(**SMALL, rank_by="max", shares="scores")
    for prompt, got in zip(
        ids, h2o.generate_all(ours, ids, config, max_new_tokens=6, rows=2), strict=True
    ):
        cache = H2OCache(ours.config, config)
        alone = greedy(ours, {"input_ids": prompt[None]}, 6, **with_cache(cache))
        assert got.ids == alone[0].tolist()


@functools.cache
def deep(**more):
    """Of six layers: what the first ones have read is dropped several times."""
    torch.manual_seed(5)
    config = Family("llama", more, layers=("h2o",) * 6).build_config()
    built = AutoModelForCausalLM.from_config(config).eval().to(DEVICE)
    built.set_attn_implementation("h2o")
    return built


def as_if_all_were_held(ours, documents, **parameters):
    """All tensors of all layers are what they are where nothing is dropped before the end. Returns
    how many keys were held, at most, of how many."""
    caches, most = [], []
    for drops in (True, False):
        with watched(ours, drops) as held:
            caches.append(read(ours, documents, **parameters, shares="scores")[0])
        most.append(max(held))
    for ours_, theirs in zip(*(cache.layers for cache in caches), strict=True):
        got, wanted = state_of(ours_), state_of(theirs)
        assert got.numbers == wanted.numbers
        torch.testing.assert_close(got.tensors, wanted.tensors, rtol=0, atol=0, equal_nan=True)
    return most


@contextmanager
def watched(ours, drops=True):
    """Keys that wait, before each layer reads."""
    held, take = [], OneBudget.take

    def watching(self, layer, prompt):
        self.alike = self.alike and drops
        held.append(self.keys_held)
        take(self, layer, prompt)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OneBudget, "take", watching)
        yield held


DROPPING = {
    "sum": {},
    "weighted": {"value_weighted": True},
    "mean, weighted": {"rank_by": "mean", "value_weighted": True},
    "max, heads that keep but one key": {"rank_by": "max", "heavy": 2, "recent": 0, "sinks": 0},
    "int8": {"kv_dtype": "int8"},
    "a part of the bytes": {
        "heavy": 0.3,
        "recent": 0.1,
        "min_tokens": 0,
        "of": "bytes",
    },
    "layers of different budgets": {"heavy": [2, 12, 3, 9, 1, 5], "recent": [1, 2, 3, 1, 2, 3]},
    "parts": {"heavy": 0.1, "recent": 0.1, "min_tokens": 0},
    "no heavy hitters": {"heavy": 0},
    "no head below": {"heavy": 0.2, "recent": 0.1, "min_tokens": 9, "value_weighted": True},
}


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", DROPPING)
def test_dropping_early_changes_nothing(name, seed):
    documents = prompts(60, 25, 44, seed=seed)
    for batched in (documents, documents[0]):
        held, of = as_if_all_were_held(deep(), batched, **SMALL | DROPPING[name])
        assert held < 0.7 * of


@pytest.mark.parametrize("name", ["gemma3", *["deepseek_v3"] * bool(LATENT), "gemma2"])
def test_models_whose_keys_are_held_in_another_way(name):
    held, of = as_if_all_were_held(shared(name), prompts(60)[0], **SMALL)
    assert held < of


@pytest.mark.parametrize(
    "change",
    [
        lambda scores: (scores * 8).round() / 8,
        lambda scores: scores * 0,
        lambda scores: scores.index_fill(2, torch.tensor([7], device=DEVICE), torch.nan),
        lambda scores: scores.index_fill(2, torch.tensor([7], device=DEVICE), torch.inf),
    ],
    ids=["ties", "zeros", "NaN", "infinity"],
)
def test_scores_that_are_hard_to_order(change, monkeypatch):
    attend = H2OLayer._attention

    def attend_and_change(self, tokens, slots):
        out, scores = attend(self, tokens, slots)
        return out, change(scores)

    monkeypatch.setattr(H2OLayer, "_attention", attend_and_change)
    as_if_all_were_held(deep(), prompts(60, 44), **SMALL, rank_by="max")


def test_what_is_held_while_a_prompt_is_read():
    """At most what all heads will keep and an eighth more, of the layers read before; and what is
    held takes no more memory than that."""
    (document,), heads, rows = prompts(90), [], []
    places = 6 * 2 * sum(SMALL.values())

    def watching(self, layer, prompt):
        take(self, layer, prompt)
        waiting = self.waiting.values()
        heads.append(self.keys_held)
        tensors = [x for w in waiting for x in (w.prompt.keys, w.prompt.values)]
        rows.append(sum(x.untyped_storage().nbytes() for x in tensors if x.ndim == 2))

    with pytest.MonkeyPatch.context() as patch:
        take = OneBudget.take
        patch.setattr(OneBudget, "take", watching)
        read(deep(), document, **SMALL, rank_by="max", shares="scores")
    read_by_then = [2 * 90 * layer for layer in range(1, 6)]
    assert heads[:-1] == [min(n, held) for n, held in zip(read_by_then, heads[:-1], strict=True)]
    assert heads[-1] == 0
    assert max(heads) <= ROOM * places < read_by_then[1]
    assert rows == [2 * held * 8 * 4 for held in heads]


@pytest.mark.parametrize("more", [{"merge": 0.5}, {"rank_by": "mean", "decay": 0.9}], ids=str)
def test_all_is_held_where_more_than_ranks_decides(more):
    held, of = as_if_all_were_held(deep(), prompts(60)[0], **SMALL, **more)
    assert held == of == 5 * 2 * 60


def test_a_pass_that_broke_off_raises_no_bar():
    ours, (document, other) = deep(), prompts(60, 60)
    cache = H2OCache(ours.config, **SMALL, shares="scores")
    inner = ours.model.layers[4].self_attn
    hook = inner.register_forward_pre_hook(lambda *_: 1 / 0)
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        ours(document, **with_cache(cache))
    hook.remove()
    with torch.no_grad():
        ours(other, **with_cache(cache))
    assert positions(cache) == positions(read(ours, other, **SMALL, shares="scores")[0])


def test_layers_that_have_more_places_than_were_foreseen(monkeypatch):
    """All keep no more than that."""
    foresee = OneBudget._foresee

    def foresee_less(self, layer, prompt):
        foresee(self, layer, prompt)
        self.places = [n - 20 for n in self.places]

    monkeypatch.setattr(OneBudget, "_foresee", foresee_less)
    cache, _ = read(deep(), prompts(60)[0], **SMALL, shares="scores")
    heads = [n for layer in cache.report().layers for n in layer.kept_by_head[0]]
    assert sum(heads) == sum(SMALL.values()) * len(heads) - 20


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"shares": "best"}, '"scores" or "layer", not'),
        ({"shares": "scores", "heavy": [[3, 4], [5, 6]]}, "shares divide"),
    ],
)
def test_refusals(parameters, message):
    with pytest.raises((TypeError, ValueError), match=message):
        H2OConfig(**parameters)


def test_it_cannot_be_simulated():
    with pytest.raises(ValueError, match='shares="scores" cannot be simulated'):
        h2o.simulated(shared("llama"), **SMALL, shares="scores").__enter__()


def test_a_part_of_the_heads_cannot_choose(monkeypatch):
    monkeypatch.setattr(h2o.hf.tensor_parallel, "part", lambda module: (0, 2))
    with pytest.raises(Unsupported, match="cut over several processes"):
        read(shared("llama"), prompts(60)[0], **SMALL, shares="scores")
