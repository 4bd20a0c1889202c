"""Fractions of short prompts: `min_tokens`, chats, one-token prompts, and one number as budget."""

from __future__ import annotations

import copy
import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from transformers import GenerationConfig

import h2o
from h2o import H2OCache, H2OConfig
from h2o.compat import with_cache
from h2o.config import PRESETS
from h2o.config.layer_plan import LayerPlan
from h2o.evaluation.setting import parse
from h2o.hf.cache import cache_plan
from h2o.hf.prompt import echo_scorer
from tests.hf.tiny import batch, greedy, model, prompts, shared

LEAST = 24
UNEVEN = [[0.2, 1.8], [1.5, 0.5]]
FLOORED = {
    "keys": {"heavy": 0.15, "recent": 0.05, "sinks": 2},
    "bytes": {"heavy": 0.05, "recent": 0.02, "budget_unit": "bytes", "kv_dtype": "int8"},
    "lists": {"heavy": [[0.1, 0.5], 0.01], "recent": [0.1, [0.1, 2]]},
    "head_shares": {"heavy": 0.3, "recent": 0.1, "head_shares": UNEVEN},
    "local": {"heavy": 0, "recent": 0.1},
    "heavy only": {"heavy": 0.1, "recent": 0},
    "echo": {"heavy": 0.3, "recent": 0.06, "score_by": "mean-echo", "head_shares": "echo"},
    "compileable": {"heavy": 0.1, "recent": 0.1},
}


@pytest.mark.parametrize("kind", FLOORED)
def test_no_head_keeps_fewer(kind):
    """No head may keep fewer keys than `min_tokens`, or fewer recent keys than a quarter of it."""
    ours, (ids,) = model("llama"), prompts(70)
    more = {"compileable": True, "ratio_of": "prompt"} if kind == "compileable" else {}
    cache = H2OCache(ours.config, **FLOORED[kind], **more, min_tokens=LEAST)
    ours(ids, **with_cache(cache))
    for layer in range(2):
        for head in cache.kept(layer).positions[0]:
            held = head[head >= 0].tolist()
            assert len(held) >= LEAST
            assert held[-LEAST // 4 :] == list(range(70 - LEAST // 4, 70))
    assert any(layer.floored for layer in cache.report().layers)
    assert cache.report().as_dict()["total"]["floored"]
    assert "heads keep min_tokens keys, more than their fraction" in str(cache.report())
    free = H2OCache(ours.config, **FLOORED[kind], **more, min_tokens=0)
    ours(ids, **with_cache(free))
    assert min(min(layer.kept_by_head[0]) for layer in free.report().layers) < LEAST
    assert "min_tokens" not in str(free.report())


def test_the_floor_in_numbers():
    assert H2OConfig().min_tokens == 128
    for n in (0, 1, 47, 500):
        assert H2OConfig.robust(0.2).tokens(n) == (92, 32)  # and four sinks
        assert H2OConfig(heavy=0.1, recent=0.1).tokens(n) == (64, 64)
        assert H2OConfig.local(0.2).tokens(n) == (0, 128)
        assert H2OConfig(heavy=8, recent=0.1).tokens(n) == (8, 120)
        assert H2OConfig(heavy=8, recent=4).tokens(n) == (8, 4), "tokens have no floor"
        assert H2OConfig(heavy=0.0, recent=4).tokens(n) == (0, 4)
        assert LayerPlan.of(H2OConfig(heavy=0.1, recent=0.1), 0, 1).is_floored(n)
    assert H2OConfig.heavy_only(0.1).tokens(47) == (96, 32)
    assert H2OConfig.heavy_only(0.1).tokens(2000) == (168, 32)
    assert not LayerPlan.of(H2OConfig.heavy_only(0.1), 0, 1).is_floored(2000)
    assert H2OConfig(heavy=200, recent=0.001).tokens(47) == (200, 32)
    assert H2OConfig.robust(0.2).tokens(2000) == (300, 100)
    assert not LayerPlan.of(H2OConfig.robust(0.2), 0, 1).is_floored(2000)
    assert H2OConfig.authors(0.2).tokens(40) == (4, 4), "as published"
    with pytest.raises(ValueError, match=r"min_tokens is -1; expected"):
        H2OConfig(min_tokens=-1)
    with pytest.raises(TypeError, match=r"min_tokens is .*; expected an integer"):
        H2OConfig(min_tokens=0.5)


@pytest.mark.parametrize("kind", ["keys", "lists", "head_shares", "echo"])
def test_rows_are_as_alone(kind):
    """Rows that are shorter or longer than `min_tokens` must answer as they do alone, in a batch,
    with `patched` and with `generate_all`."""
    ours, rows = model("llama"), prompts(90, 30, 5)
    settings = FLOORED[kind] | {"min_tokens": LEAST}
    together = greedy(ours, batch(rows), 20, **with_cache(H2OCache(ours.config, **settings)))
    with h2o.patched(ours, **settings):
        assert greedy(ours, batch(rows), 20).tolist() == together.tolist()
    answers = list(
        h2o.generate_all(
            ours, [row[0].tolist() for row in rows], rows=2, max_new_tokens=20, **settings,
            generation_config=GenerationConfig(eos_token_id=None, pad_token_id=0),
        )
    )  # fmt: skip
    for b, row in enumerate(rows):
        cache = H2OCache(ours.config, **settings)
        alone = greedy(ours, {"input_ids": row}, 20, **with_cache(cache))[0]
        assert together[b].tolist() == alone.tolist() == answers[b].ids


@pytest.mark.parametrize("min_tokens", [0, 128])
@pytest.mark.parametrize("reply", [1, 2])
def test_a_later_pass_of_several_tokens_is_a_turn(reply, min_tokens):
    """A second turn must not count as a prompt and change the budget, even after a reply of a
    single token."""
    ours, (first, second) = model("llama"), prompts(60, 9)
    config = dataclasses.replace(H2OConfig.robust(0.2), min_tokens=min_tokens, ratio_of="prompt")
    cache = H2OCache(ours.config, config)
    said = greedy(ours, {"input_ids": first}, reply, **with_cache(cache))
    budget = cache.report().layers[0].budget
    answer = greedy(
        ours, {"input_ids": torch.cat([first, said, second], 1)}, 5, **with_cache(cache)
    )
    assert cache.report().layers[0].budget == budget == [max(4 + 9 + 3, min_tokens)]
    by_hand = H2OCache(ours.config, config)
    # generate() has not fed the last token of the reply
    for tokens in (first, *said[:, :-1].split(1, 1), torch.cat([said[:, -1:], second], 1)):
        if tokens.shape[1]:
            logits = ours(tokens, **with_cache(by_hand)).logits
    assert logits[0, -1].argmax() == answer[0, 0]


@pytest.mark.parametrize("min_tokens", [0, 128])
def test_a_prompt_of_one_token(min_tokens):
    ours, (ids,) = model("llama"), prompts(1)
    settings = {"heavy": 0.2, "recent": 0.2, "min_tokens": min_tokens, "ratio_of": "prompt"}
    cache = H2OCache(ours.config, **settings)
    answer = greedy(ours, {"input_ids": ids}, 12, **with_cache(cache))
    assert cache.report().layers[0].kept == [12 if min_tokens else 2]
    with h2o.patched(ours, **settings):
        assert greedy(ours, {"input_ids": ids}, 12).tolist() == answer.tolist()
    (one,) = h2o.generate_all(ours, [ids[0].tolist()], rows=1, max_new_tokens=12, **settings,
        generation_config=GenerationConfig(eos_token_id=None, pad_token_id=0))  # fmt: skip
    assert one.ids == answer[0].tolist()
    if min_tokens:
        assert answer.tolist() == greedy(model("llama", "sdpa"), {"input_ids": ids}, 12).tolist()


# ---- One number ----------------------------------------------------------------------------------


def test_one_number_is_a_share_of_the_bytes_or_a_number_of_tokens():
    config = model("llama").config
    assert H2OCache(config, budget=0.2).config == H2OConfig.echo(0.2, "bytes").for_model(config)
    assert H2OCache(config, budget=40).config == H2OConfig.echo(40)
    own = H2OCache(config, budget=40, sinks=2, positions="cache_relative").config
    assert own == dataclasses.replace(H2OConfig.robust(40), sinks=2, positions="cache_relative")
    assert H2OCache(config, H2OConfig(budget=40)).config == H2OConfig.echo(40)
    for wrong in ({"heavy": 3}, {"recent": 0.2}, {"heavy": 0.1}):
        with pytest.raises(ValueError, match="either budget, or heavy and recent"):
            H2OConfig(budget=0.2, **wrong)
    for nothing in (0, 0.0):
        with pytest.raises(ValueError, match="keeps nothing"):
            H2OConfig(budget=nothing)
    with pytest.raises(ValueError, match="for_model"):
        H2OConfig(budget=0.2).tokens(100)
    assert H2OConfig(budget=0.2).needs_prompt_length
    assert not H2OConfig(budget=64).needs_prompt_length


@pytest.mark.parametrize(
    "field",
    [
        {"score_by": "sum"},
        {"kv_dtype": None},
        {"value_weighted": False},
        {"head_shares": None},
        {"sinks": 0},
        {"budget_unit": "keys"},
    ],
    ids=str,
)
def test_beside_one_number_a_default_that_is_given_counts(field):
    config = model("llama").config
    asked = H2OConfig(budget=0.2, **field)
    copies = asked, copy.deepcopy(asked), dataclasses.replace(asked, min_tokens=128)
    made = [H2OCache(config, each).config for each in copies]
    made.append(H2OCache(config, budget=0.2, **field).config)
    [(name, value)] = field.items()
    assert all(getattr(each, name) == value for each in made)
    assert made == made[:1] * 4
    assert asked != H2OConfig(budget=0.2)


def test_amounts_have_names():
    for amounts in ((0.2,), (0.1, 0.1), (8, 8, 2)):
        with pytest.raises(TypeError, match=r"Write budget=... for the whole budget, or heavy="):
            H2OConfig(*amounts)
    with pytest.raises(TypeError, match=r"expected an H2OConfig, not 0.2. Write budget=..."):
        H2OCache(model("llama").config, 0.2)


@pytest.mark.parametrize("budget", [0.3, 30])
def test_one_number_everywhere(budget):
    ours, (ids,) = model("llama"), prompts(60)
    inputs, settings = {"input_ids": ids}, {"budget": budget, "min_tokens": 0}
    cache = H2OCache(ours, **settings)
    wanted = greedy(ours, inputs, 9, **with_cache(cache))
    assert wanted.tolist() != greedy(model("llama", "sdpa"), inputs, 9).tolist()
    with h2o.patched(ours, **settings):
        assert greedy(ours, inputs, 9).tolist() == wanted.tolist()
    patch = h2o.enable(ours, **settings)
    assert greedy(ours, inputs, 9).tolist() == wanted.tolist()
    assert patch.cache.config == cache.config
    h2o.disable(ours)
    (one,) = h2o.generate_all(ours, [ids[0].tolist()], rows=1, max_new_tokens=9, **settings,
        generation_config=GenerationConfig(eos_token_id=None, pad_token_id=0))  # fmt: skip
    assert one.ids == wanted[0].tolist()
    how = {"prompt_length": 60, "ratio_of": "seen"}
    with h2o.simulated(ours, **settings, **how):
        logits = ours(torch.cat([ids, wanted[:, :-1]], 1), use_cache=False).logits
    assert logits[0, 59:].argmax(-1).tolist() == wanted[0].tolist()
    read = h2o.compress_document(ours, ids, **settings, readings=2, repeat=torch.tensor([[5, 6]]))
    assert read.config.heavy == cache.config.heavy


def test_what_one_number_stands_for(monkeypatch):
    """`budget=` must mean echo, with equal budgets if a model has few heads, and robust if its
    positions are not rotary."""
    assert H2OConfig.recommended(0.1) == H2OConfig.echo(0.1, budget_unit="bytes")
    assert H2OConfig.recommended(64) == H2OConfig.echo(64)
    assert H2OCache(shared("llama"), budget=0.1).config.head_shares == "echo"
    monkeypatch.setattr(echo_scorer, "FEWEST_HEADS", 16)
    monkeypatch.setattr(cache_plan, "_recent", [])
    cache = H2OCache(shared("llama"), budget=0.1)
    assert (cache.config.head_shares, cache.config.score_by) == (None, "mean-echo")
    assert "the model has 4 key/value heads" in cache.echo_replacement
    assert "the model has 4 key/value heads" in h2o.supports(shared("llama")).not_echo
    cache = H2OCache(shared("opt"), budget=0.1)
    assert cache.config == H2OConfig.robust(0.1, budget_unit="bytes").for_model(shared("opt"))
    words = "no rotary position embedding"
    assert words in cache.echo_replacement
    assert words in h2o.supports(shared("opt")).not_echo
    shared("opt")(prompts(200)[0], **with_cache(cache))
    said = "mean attention and equal budgets for all heads (H2OConfig.robust), because "
    assert cache.report().note.startswith(f"budget=0.1: {said}")
    cache = H2OCache(shared("opt"), H2OConfig.echo(40))
    shared("opt")(prompts(200)[0], **with_cache(cache))
    assert cache.report().note.startswith(f"Instead of echo: {said}")


@pytest.mark.parametrize(
    ("name", "fields"), [("opt", {}), ("llama", {"positions": "cache_relative"})]
)
def test_a_prompt_that_is_not_ranked_by_echo_says_so(name, fields):
    """`score_by="mean-echo"` without one budget for all heads must not turn into the mean in
    silence."""
    cache = H2OCache(shared(name), heavy=8, recent=8, score_by="mean-echo", **fields)
    assert cache.config.score_by == "mean"
    shared(name)(prompts(60)[0], **with_cache(cache))
    assert 'Instead of echo: score_by="mean", because ' in cache.report().note


# ---- A model where a config is wanted ------------------------------------------------------------


def test_a_model_may_stand_for_its_config(tmp_path):
    ours, (ids,) = model("llama"), prompts(40)
    cache = H2OCache(ours, heavy=6, recent=6)
    ours(ids, **with_cache(cache))
    cache.save(tmp_path / "by-config", ours.config)
    for one in (ours, ours.config):
        assert H2OCache.load(tmp_path / "by-config", one).config == cache.config
    assert type(H2OCache(ours.config, heavy=6, recent=6)) is type(cache)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_model_with_another_attention_is_noticed_at_once(name):
    plain = model(name, "sdpa")
    with pytest.warns(UserWarning, match=r"set_attn_implementation\(.h2o.\)") as warned:
        H2OCache(plain, heavy=6, recent=6)
    assert warned[0].filename == __file__
    H2OCache(plain.config, heavy=6, recent=6)  # a config may be for another model
    H2OCache(model(name), heavy=6, recent=6)


# ---- A short question to a real model ------------------------------------------------------------

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def smollm2():
    return h2o.load_model()


def asked(tokenizer) -> dict:
    turns = [{"role": "user", "content": QUESTION}]
    return tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


SETTINGS = {
    "default": {},
    **{f"budget {x}": {"budget": x} for x in (0.04, 0.1, 0.2, 128)},
    **{
        f"{name} {of} {x}": {"h2o_config": H2OConfig.preset(name, x, of)}
        for name in PRESETS
        for of in ("keys", "bytes")
        for x in (0.04, 0.2)
        if name != "authors"
    },
    "authors": {"h2o_config": dataclasses.replace(H2OConfig.authors(0.2), min_tokens=128)},
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_capital_of_france(smollm2, setting):
    ours, tokenizer = smollm2
    inputs = asked(tokenizer)
    cache = H2OCache(ours, **SETTINGS[setting])
    out = ours.generate(**inputs, **with_cache(cache), max_new_tokens=30, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
    assert "min_tokens" in cache.report().note or setting == "budget 128"


@pytest.mark.slow
def test_without_a_floor_it_is_lost(smollm2):
    """Without `min_tokens` the answer must be lost. Otherwise the tests above could not fail."""
    ours, tokenizer = smollm2
    inputs = asked(tokenizer)
    cache = H2OCache(ours, parse("h2o:0.1+0.1").config)
    out = ours.generate(**inputs, **with_cache(cache), max_new_tokens=30, do_sample=False)
    assert "Paris" not in tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--budget", "0.1"], ["--preset", "robust"]], ids=str)
def test_the_command_knows_the_capital_of_france(options):
    command = [sys.executable, "-m", "h2o", "generate", "--prompt", QUESTION]
    done = subprocess.run(
        [*command, *options, "--max-new-tokens", "20"], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONWARNINGS": "error:::h2o"}, timeout=300,
    )  # fmt: skip
    assert "Paris" in done.stdout
