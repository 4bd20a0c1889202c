"""rank_by="mean-echo": most of a prompt's attention is given out anew, to keys that echo finds."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import h2o
from h2o import H2OCache, H2OConfig
from h2o.borrowed import with_cache
from h2o.hf.layer_kinds import HYBRIDS
from h2o.hf.prompt_echo import PART
from tests.cases import checkered
from tests.hf import tiny
from tests.hf.modes import MODES
from tests.hf.test_families import KEPT_ALIKE
from tests.hf.test_hybrids import prove_stepwise
from tests.hf.test_reading import positions
from tests.hf.test_simulation import PROMPT, fitted, prove, text, text_of_all_words
from tests.hf.tiny import ROTARY, TWINS, batch, greedy, model, prompts, shared, slow_if

SMALL = {"heavy": 6, "recent": 4, "sinks": 2, "rank_by": "mean-echo"}
ROOMY = {"heavy": 500, "recent": 0}


def read(ours, documents, **parameters):
    """A cache that has read documents, padded on the left."""
    inputs = batch(documents)
    mask = inputs["attention_mask"]
    cache = H2OCache(ours.config, **parameters)
    with torch.no_grad():
        ours(
            **inputs, position_ids=(mask.cumsum(1) - 1).clamp(min=0), **with_cache(cache),
        )  # fmt: skip
    return cache


def wanted(ours, document, layer, sinks, decay=1.0):
    """The scores of a document's keys, [G, n], from those of attention alone and of echo alone."""
    n = document.shape[1]
    received, echo = (
        read(ours, [document], **ROOMY, rank_by=name, decay=part).kept(layer).scores[0].double()
        for name, part in (("mean", decay), ("echo", 1.0))
    )
    queries = torch.tensor([sum(decay**i for i in range(n - j)) for j in range(n)])
    means = echo[:, sinks:]  # the mean attention that is given out is in proportion to these
    each = received[:, sinks:].sum(1, keepdim=True) / (means * queries[sinks:]).sum(1, keepdim=True)
    anew = torch.cat([received[:, :sinks], means * each * queries[sinks:]], 1)
    return (1 - PART) * received + PART * anew


@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "qwen3", *["falcon_h1"] * HYBRIDS])
def test_scores_of_a_prompt(name, sinks, decay):
    """And a row of a batch has those that it has alone."""
    ours, documents = shared(name), prompts(50, 23, 1)
    cache = read(ours, documents, **ROOMY, sinks=sinks, rank_by="mean-echo", decay=decay)
    for layer, report in enumerate(cache.report().layers):
        if report.kind != "h2o":
            continue
        got = cache.kept(layer).scores
        for row, document in enumerate(documents):
            want = wanted(ours, document, layer, sinks, decay)
            torch.testing.assert_close(
                got[row, :, : document.shape[1]], want.float(), rtol=1e-3, atol=1e-5
            )


def test_the_attention_stays_what_it_was():
    ours, (document,) = shared("llama"), prompts(60)
    heads = ours.config.num_attention_heads // ours.config.num_key_value_heads
    cache = read(ours, [document], **SMALL)
    for layer in cache.report().layers:
        total = layer.mass_evicted + layer.mass_kept
        assert total == pytest.approx(60 * heads * len(layer.kept_by_head[0]), rel=1e-4)


def test_other_keys_are_kept():
    """Than by either alone."""
    ours, (document,) = shared("llama"), prompts(60)
    kept = [
        positions(read(ours, [document], **SMALL | {"rank_by": name}))
        for name in ("mean", "echo", "mean-echo")
    ]
    assert kept[2] not in kept[:2]


# ---- Simulation is the cache -------------------------------------------------------------------

POLICIES = {
    "plain": SMALL,
    "no window": SMALL | {"heavy": 9, "recent": 0, "sinks": 0, "value_weighted": True},
    "shares": SMALL | {"heavy": 9, "shares": [[0.4, 2.5, 1.0, 0.9]] * 2},
    "decay": SMALL | {"decay": 0.95},
    "int8": SMALL | {"kv_dtype": "int8", "value_weighted": True},
    "merge": SMALL | {"merge": 0.4},
    "large": SMALL | {"heavy": 40, "recent": 30},
}


@pytest.mark.parametrize(("chosen", "prompt_length"), checkered(POLICIES, [1, PROMPT, 40, 96]))
def test_simulation_equals_the_cache(chosen, prompt_length):
    ours = tiny.model("llama", "sdpa")
    settings = fitted(POLICIES[chosen], ours)
    ids = text_of_all_words() if chosen == "merge" else text(1)
    swaps = prove(ours, ids, prompt_length, 2e-2 if chosen == "int8" else 2e-4, **settings)
    assert swaps >= 3 or chosen == "large" or prompt_length == 96


@pytest.mark.parametrize(
    "family", [slow_if(name in TWINS or name in KEPT_ALIKE, name) for name in ROTARY]
)
def test_every_model_type(family):
    ours, (ids,) = model(family), prompts(36)
    prove_stepwise(ours, ids, **SMALL)


def test_a_first_token_is_no_prompt():
    """What evicts from the first token on is the mean, bit for bit."""
    ours, ids = tiny.model("llama", "sdpa"), text(1)
    logits = []
    for name in ("mean", "mean-echo"):
        with h2o.simulated(ours, **SMALL | {"rank_by": name}), torch.no_grad():
            logits.append(ours(ids, use_cache=False).logits)
    assert torch.equal(*logits)


# ---- Everything else -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["opt", *["deepseek_v3"] * bool(tiny.LATENT)])
def test_models_that_echo_does_not_serve(name):
    ours, (document,) = shared(name), prompts(60)
    kept = [
        positions(read(ours, [document], **SMALL | {"rank_by": x})) for x in ("mean", "mean-echo")
    ]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("more", [{"positions": "rolled"}, {"compileable": True}], ids=str)
def test_other_kinds_of_layers(more):
    ours, (document,) = shared("llama"), prompts(60)
    mean, plain, other = (
        positions(read(ours, [document], **SMALL | {"rank_by": name} | change))
        for name, change in (("mean", more), ("mean-echo", {}), ("mean-echo", more))
    )
    assert other == (plain if "compileable" in more else mean)


def test_a_dynamic_cache_goes_on():
    """Its keys have no queries."""
    ours, (document,) = model("llama"), prompts(60)
    kept = []
    for name in ("mean", "mean-echo"):
        full = DynamicCache(config=ours.config)
        with torch.no_grad():
            ours(document[:, :50], **with_cache(full))
            settings = SMALL | {"rank_by": name}
            cache = H2OCache.from_dynamic_cache(full, ours.config, **settings)
            ours(document[:, 50:], **with_cache(cache))
        kept.append(positions(cache))
    assert kept[0] == kept[1]


@pytest.mark.parametrize("mode", MODES)
def test_every_way_to_generate(mode):
    ours = model("llama")
    MODES[mode](ours, batch(prompts(23, 17)), lambda: H2OCache(ours.config, **SMALL))


def test_forks_files_and_crops(tmp_path):
    ours, (document,) = model("llama"), prompts(60)
    cache = H2OCache(ours.config, **SMALL)
    cache.activate_past_recording()
    with torch.no_grad():
        ours(document, **with_cache(cache))
        cache.crop(50 if h2o.hf.pass_state.CROPS_TO_LENGTH else -10)
    assert positions(cache) == positions(read(ours, [document[:, :50]], **SMALL))
    cache.save(tmp_path / "cache", ours)
    copies = [cache, cache.fork(), H2OCache.load(tmp_path / "cache", ours)]
    assert copies[2].config.rank_by == "mean-echo"
    answers = [greedy(ours, {"input_ids": document}, **with_cache(copy)) for copy in copies]
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


def test_a_second_reading_goes_by_the_mean():
    ours, (document,) = shared("llama"), prompts(60)
    kept = [
        positions(h2o.read(ours, document, H2OConfig(**SMALL | more), repeat=[5, 9]))
        for more in ({"rank_by": "mean"}, {}, {"shares": "echo"})
    ]
    assert kept[0] == kept[1] == kept[2]
