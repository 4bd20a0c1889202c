"""rank_by="echo": a cache against the definition, pass by pass, and through whole models."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import h2o
from h2o import H2OCache, H2OConfig, Unsupported, reference, reference_echo
from h2o.borrowed import with_cache
from h2o.hf import echo_scores
from h2o.hf.layer_kinds import HYBRIDS
from h2o.policy import Policy
from h2o.slots import new_slots
from tests import inputs
from tests.cases import checkered
from tests.hf import drive, tiny
from tests.hf.modes import MODES
from tests.hf.test_families import KEPT_ALIKE
from tests.hf.test_hybrids import prove_stepwise
from tests.hf.test_simulation import PROMPT, fitted, prove, text
from tests.hf.tiny import LATENT, ROTARY, TWINS, batch, greedy, model, prompts, shared, slow_if

SMALL = {"heavy": 6, "recent": 4, "sinks": 1, "rank_by": "echo"}
CALLS = [20, 1, 1, 1, 7, 1, 1, 3, *[1] * 20]


def turn(x, distance):
    """Llama's rotation, of 8 elements."""
    angles = distance * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    a, b = x[..., :4].double(), x[..., 4:].double()
    cos, sin = angles.double().cos(), angles.double().sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def judged(cache, seed, calls, mask=None, kv_dtype=None, heads=None, **kwargs):
    """Feeds a drifting text to a cache of one layer and to the oracle; they keep the same keys.
    Returns how often a key was evicted that is not the one to leave the recent window."""
    rows = 1 if mask is None else len(mask)
    N = sum(calls)
    text = inputs.drifting(seed, rows, 4, 2, N, 8)
    config = cache.layers[0].config
    budgets = heads or [(config.heavy, config.recent)] * 2
    tensors = [torch.from_numpy(x.copy()) for x in text]
    capacity = [N + 1] * 2 if heads else N + 1
    slots = new_slots(tensors[1], capacity, kv_dtype=kv_dtype, value_weighted=config.value_weighted)
    slots.budget.copy_(torch.tensor(budgets if heads else budgets[0]))
    queries, stop, changes = [], 0, 0
    how = {"softcap": kwargs.get("softcap") or 0.0, "sink_logits": kwargs.get("s_aux")}
    for columns in calls:
        start, stop = stop, stop + columns
        piece = text.cut(start, stop)
        got = drive.forward(cache, piece, mask, **kwargs)
        before = reference.kept(slots)[0]
        part = None if mask is None else torch.from_numpy(mask[:, start:stop])
        want, _ = reference_echo.forward(
            *(x[:, :, start:stop] for x in tensors), slots, queries, turn,
            Policy(config.sinks, value_weighted=config.value_weighted), mask=part, **how,
        )  # fmt: skip
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 if kv_dtype is None else 1e-2)
        for ours, theirs in zip(cache.kept(0), reference.kept(slots), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=1e-6)
        if columns == 1 and start:
            gone = set(before.flatten().tolist()) - set(reference.kept(slots)[0].flatten().tolist())
            changes += bool(gone - {stop - 1 - budgets[0][1]})
    return changes


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"value_weighted": True},
        {"recent": 0},
        {"kv_dtype": "int8"},
        {"heavy": 60},
        {"sinks": 0, "heavy": 1, "recent": 1},
    ],
    ids=str,
)
def test_a_cache_is_the_definition(more):
    config = SMALL | more
    changes = judged(drive.new_cache(**config), 1, CALLS, kv_dtype=config.get("kv_dtype"))
    assert changes >= 3 or config["heavy"] in (1, 60)


@pytest.mark.parametrize("make", [inputs.left, inputs.right, lambda n, Q: inputs.holes(3, n, Q)])
def test_pads_do_not_count(make):
    """Rows of 20, 3 and no tokens before the first pass ends; later ones are all real."""
    mask = make([20, 3, 0], CALLS[0])
    mask = np.concatenate([mask, np.ones((3, sum(CALLS[1:])), bool)], axis=1)
    assert judged(drive.new_cache(**SMALL), 2, CALLS, mask) >= 3


def test_pads_behind_the_prompt():
    """A row that waits for others remembers its queries, in a step and in a chunk."""
    mask = np.ones((2, sum(CALLS)), bool)
    mask[1, 21:25] = mask[1, 35:40] = False
    assert judged(drive.new_cache(**SMALL), 3, CALLS, mask) >= 3


def test_softcap_and_learned_sinks():
    sinks = torch.from_numpy(inputs.sink_logits(1, 4))
    judged(drive.new_cache(**SMALL), 4, CALLS, s_aux=sinks)
    judged(drive.new_cache(**SMALL), 5, CALLS, softcap=2.0)


def test_heads_with_budgets_of_their_own():
    cache = drive.new_cache(**SMALL | {"heavy": [[3, 9]], "recent": [[2, 5]]})
    judged(cache, 6, CALLS, heads=[(3, 2), (9, 5)])


def test_long_passes_are_asked_some_rows_at_a_time(monkeypatch):
    monkeypatch.setattr(echo_scores, "ENTRIES", 3 * 40 * 4)
    judged(drive.new_cache(**SMALL), 7, [12, 1, 30, 1, 30])


def test_chunks_are_single_tokens_as_long_as_nothing_is_evicted():
    ours, (ids,) = shared("llama"), prompts(60)
    scores = []
    for pieces in ([1] * 60, [1, 2, 37, 20]):
        cache = H2OCache(ours.config, heavy=500, recent=0, rank_by="echo")
        for piece in ids.split(pieces, dim=1):
            with torch.no_grad():
                ours(piece, **with_cache(cache))
        scores.append(cache.kept(1).scores)
    torch.testing.assert_close(*scores, rtol=1e-3, atol=1e-5)


# ---- Simulation is the cache -------------------------------------------------------------------

POLICIES = {
    "plain": SMALL,
    "no window": {"heavy": 9, "recent": 0, "sinks": 1, "value_weighted": True, "rank_by": "echo"},
    "shares": SMALL | {"heavy": 9, "shares": [[0.4, 2.5, 1.0, 0.9]] * 2},
    "int8": SMALL | {"kv_dtype": "int8"},
    "large": {"heavy": 40, "recent": 30, "rank_by": "echo"},
}


@pytest.mark.parametrize(("chosen", "prompt_length"), checkered(POLICIES, [1, PROMPT, 40, 96]))
def test_simulation_equals_the_cache(chosen, prompt_length):
    ours = tiny.model("llama", "sdpa")
    settings = fitted(POLICIES[chosen], ours)
    swaps = prove(ours, text(1), prompt_length, 2e-2 if chosen == "int8" else 2e-4, **settings)
    assert swaps >= 3 or chosen == "large" or prompt_length == 96


@pytest.mark.parametrize(
    "family", [slow_if(name in TWINS or name in KEPT_ALIKE, name) for name in ROTARY]
)
def test_every_model_type(family):
    ours, (ids,) = model(family), prompts(36)
    prove_stepwise(ours, ids, **SMALL)


@pytest.mark.parametrize("ranking", ["echo", "mean-echo"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_batch_are_alone(side, ranking):
    ours, settings = tiny.model("llama", "sdpa"), SMALL | {"rank_by": ranking}
    rows, lengths = [text(seed, n) for seed, n in enumerate([50, 23, 64])], [20, 9, 30]
    padded = tiny.batch(rows, side)
    padded["position_ids"] = (padded["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        with h2o.simulated(ours, prompt_length=lengths, trace=True, **settings) as together:
            batched = ours(**padded, use_cache=False).logits
        for b, row in enumerate(rows):
            with h2o.simulated(ours, prompt_length=lengths[b], trace=True, **settings) as alone:
                logits = ours(row, use_cache=False).logits[0]
            real = padded["attention_mask"][b].bool()
            torch.testing.assert_close(batched[b, real], logits, atol=2e-4, rtol=0)
            first, n = int(real.nonzero()[0]), row.shape[1]
            left = together.evicted_at(1)[b]
            assert (left[:, ~real] == 0).all()
            left = torch.where(left[:, real] == len(real), n, left[:, real] - first)
            assert torch.equal(left, alone.evicted_at(1)[0].long())


# ---- What a cache can do -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_every_way_to_generate(mode):
    """With room for all it answers as the full cache; with little it keeps its budget."""
    ours, theirs = model("llama"), model("llama", "eager")
    inputs_ = batch(prompts(23, 17))
    made = []

    def make(**budget):
        made.append(H2OCache(ours.config, rank_by="echo", **budget))
        return made[-1]

    roomy = MODES[mode](ours, inputs_, lambda: make(heavy=500, recent=0))
    full = MODES[mode](theirs, inputs_, lambda: DynamicCache(config=theirs.config))
    assert torch.equal(roomy, full)
    MODES[mode](ours, inputs_, lambda: make(heavy=4, recent=3, sinks=1))
    assert max(made[-1].layers[0].report().kept) == 8


def test_forks_files_and_rows_go_on_as_the_cache_does(tmp_path):
    ours, (ids,) = model("llama"), prompts(40)
    cache = H2OCache(ours.config, **SMALL)
    with torch.no_grad():
        ours(ids, **with_cache(cache))
    cache.save(tmp_path / "cache", ours)
    more = {"input_ids": torch.cat([ids, *prompts(6, seed=4)], 1)}
    copies = [cache.fork(), H2OCache.load(tmp_path / "cache", ours), cache.fork(2)]
    wanted = greedy(ours, more, **with_cache(cache))
    for copy in copies[:2]:
        assert torch.equal(greedy(ours, more, **with_cache(copy)), wanted)
        assert torch.equal(copy.kept(1).scores, cache.kept(1).scores)
    both = greedy(ours, {"input_ids": more["input_ids"].repeat(2, 1)}, **with_cache(copies[2]))
    assert torch.equal(both, wanted.repeat(2, 1))


def test_tokens_are_taken_back():
    ours, (ids,) = model("llama"), prompts(40)
    caches = [H2OCache(ours.config, **SMALL) for _ in range(2)]
    caches[0].activate_past_recording()
    with torch.no_grad():
        for cache in caches:
            ours(ids[:, :30], **with_cache(cache))
        ours(ids[:, 30:36], **with_cache(caches[0]))
        caches[0].crop(33 if h2o.hf.pass_state.CROPS_TO_LENGTH else -3)
        ours(ids[:, 30:33], **with_cache(caches[1]))
        logits = [ours(ids[:, 33:34], **with_cache(cache)).logits for cache in caches]
    # Torch's products of other shapes round otherwise on some processors.
    torch.testing.assert_close(*logits, rtol=0, atol=2e-5)
    for one, other in zip(caches[0].kept(1), caches[1].kept(1), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


def test_prompts_of_many_lengths_in_one_batch():
    ours, ids = model("llama"), [x[0] for x in prompts(30, 22, 41, 9)]
    config = H2OConfig(**SMALL)
    together = list(h2o.generate_all(ours, ids, config, max_new_tokens=6, rows=2))
    for prompt, got in zip(ids, together, strict=True):
        cache = H2OCache(ours.config, config)
        alone = greedy(ours, {"input_ids": prompt[None]}, 6, **with_cache(cache))
        assert got.ids == alone[0].tolist()
        assert got.report["kept"] == 11


def test_queries_that_are_remembered_are_counted():
    ours, (ids,) = model("llama"), prompts(40)
    plain, echo = (H2OCache(ours.config, **SMALL | {"rank_by": x}) for x in ("max", "echo"))
    for cache in (plain, echo):
        with torch.no_grad():
            ours(ids, **with_cache(cache))
    config = ours.config
    D = config.hidden_size // config.num_attention_heads
    more = 2 * 4 * config.num_attention_heads * D * 4  # layers, tokens, heads, elements, bytes
    counted = [cache.report().total.bytes_bookkeeping for cache in (plain, echo)]
    assert counted[1] - counted[0] == more


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_budget_in_bytes_counts_them_too(dtype):
    """Whatever dtype the config tells of."""
    ours, (ids,) = model("llama").to(dtype), prompts(100)
    more = {
        "heavy": 0.4,
        "recent": 0.2,
        "min_tokens": 0,
        "of": "bytes",
        "sinks": 1,
        "kv_dtype": "int8",
    }
    held = {}
    for rank_by in ("max", "echo"):
        cache = H2OCache(ours.config, rank_by=rank_by, **more)
        with torch.no_grad():
            ours(ids, **with_cache(cache))
        total = cache.report().total
        held[rank_by] = total.bytes_held + total.bytes_bookkeeping
        assert held[rank_by] <= 0.6 * total.bytes_full
    assert held["echo"] > held["max"] - 2 * 2 * 200  # a slot or so is lost in rounding down


# ---- What it refuses ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["opt", "gpt2", *["deepseek_v3"] * bool(LATENT), *["granitemoehybrid", "zamba2"] * HYBRIDS],
)
def test_models_that_it_does_not_serve(name):
    words = r'rank_by="echo" cannot serve .*use rank_by="max", or h2o.read for a document'
    with pytest.raises(Unsupported, match=words):
        H2OCache(shared(name).config, **SMALL)
    with pytest.raises(Unsupported, match=words), h2o.simulated(shared(name), **SMALL):
        pass


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"decay": 0.9}, "decay"),
        ({"merge": 0.8}, "merge"),
        ({"positions": "rolled"}, "rolled"),
    ],
)
def test_what_does_not_go_with_it(more, words):
    with pytest.raises(ValueError, match=f'rank_by="echo" does not go with .*{words}'):
        H2OConfig(**SMALL | more)
    assert dataclasses.replace(H2OConfig(**SMALL), rank_by="max").rank_by == "max"


def test_what_has_no_queries():
    ours, (ids,) = model("llama"), prompts(20)
    with pytest.raises(Unsupported, match="compileable=True does not go with rank_by"):
        H2OCache(ours.config, compileable=True, **SMALL)
    full = DynamicCache(config=ours.config)
    with torch.no_grad():
        ours(ids, **with_cache(full))
    with pytest.raises(Unsupported, match="a DynamicCache, which has no queries"):
        H2OCache.from_dynamic_cache(full, ours.config, **SMALL)
    with pytest.raises(ValueError, match="rank_by"):
        h2o.ops.step(*[torch.zeros(1, 1, 1, 4)] * 3, new_slots(torch.zeros(1, 1, 1, 4), 3),
                     rank_by="echo")  # fmt: skip
