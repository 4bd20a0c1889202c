"""Conversations that change torch's mode between turns: autocast, dtype, inference_mode."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import pytest
import torch
from transformers import DynamicCache

import h2o
from h2o import H2OCache, H2OConfig, backends, generate_all
from h2o.compat import with_cache
from tests.cases import checkered
from tests.hf.modes import POLICIES, policy
from tests.hf.tiny import FAMILIES, LATENT, WITH_STATES, greedy, model, prompts, shared, slow_if

CONFIGS = POLICIES | {
    "robust bytes": H2OConfig.robust(0.3, budget_unit="bytes"),
    "echo": H2OConfig(heavy=6, recent=4, score_by="mean-echo"),
    "echo int8": H2OConfig(heavy=6, recent=4, score_by="mean-echo", kv_dtype="int8"),
    "cache_relative": H2OConfig(heavy=6, recent=4, positions="cache_relative"),
    "rolled int8": H2OConfig(heavy=6, recent=4, positions="cache_relative", kv_dtype="int8"),
    "by rank": H2OConfig(heavy=6, recent=4, score_by="mean-echo", head_shares="echo"),
}
OTHERS = [x for x in ("gemma3n_text", "deepseek_v3", "gemma2")
          if x in FAMILIES | LATENT]  # fmt: skip
CASES = [("llama", name) for name in CONFIGS] + [
    (name, chosen) for name in OTHERS for chosen in ("h2o", "int8")
]


def config_of(chosen, ours):
    return policy(chosen, ours) if chosen in POLICIES else CONFIGS[chosen]


def turns(ours, cache, first, second=contextlib.nullcontext):
    """Tokens of the second of two turns, each of which runs in its own context."""
    prompt, question = prompts(40, 5)
    with first():
        answer = greedy(ours, {"input_ids": prompt}, 3, **with_cache(cache))
    if answer.shape[1] == 3:
        answer = torch.cat([prompt, answer], 1)
    with second():
        text = torch.cat([answer.clone(), question], 1)
        return greedy(ours, {"input_ids": text}, 3, **with_cache(cache)).tolist()


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize(("case", "begins"), checkered(CASES, [True, False]), ids=str)
def test_autocast_ends_or_begins(case, begins):
    name, chosen = case
    ours = shared(name)
    modes = (contextlib.nullcontext, autocast) if begins else (autocast, contextlib.nullcontext)
    config = config_of(chosen, ours)
    for backend in (contextlib.nullcontext, backends.by_torch):
        with backend():
            assert turns(ours, H2OCache(ours.config, config), *modes)
    for seed in range(5):
        mixed, plain = (
            continued(ours, config, prompts(40, 1, seed=seed), *of)
            for of in (modes, [contextlib.nullcontext] * 2)
        )
        if all(map(torch.equal, mixed.kept, plain.kept)):  # else two keys' ranks are nearly equal
            break
    assert (mixed.logits - plain.logits).abs().mean() < 0.2 * plain.logits.abs().mean()


class Continued(NamedTuple):
    kept: list[torch.Tensor]
    """Positions of the prompt's keys that each layer keeps"""
    logits: torch.Tensor
    """After the second turn, float32"""


def continued(ours, config, texts, first, second) -> Continued:
    """Two turns, each in its own context."""
    cache = H2OCache(ours.config, config)
    with first():
        ours(texts[0], **with_cache(cache))
    kept = [cache.kept(x.layer_idx).positions for x in cache.layers if hasattr(x, "slots")]
    with second():
        return Continued(kept, ours(texts[1], **with_cache(cache)).logits.float())


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("name", ["llama", *OTHERS])
def test_a_dynamic_cache_filled_under_autocast(name, ends):
    """Its rotated keys are in float32 and its values are not. The converted cache must answer as an
    H2OCache that has processed the text, also if autocast ends after the conversion."""
    ours, (prompt, question), answers = shared(name), prompts(40, 5), []
    with autocast(), torch.no_grad():
        full, cache = DynamicCache(config=ours.config), H2OCache(ours.config, heavy=64, recent=64)
        for x in (full, cache):
            ours(prompt, **with_cache(x))
        taken = H2OCache.from_dynamic_cache(full, ours.config, heavy=64, recent=64)
    with contextlib.nullcontext() if ends else autocast(), torch.no_grad():
        for x in (taken, cache):
            answers.append(ours(question, **with_cache(x)).logits.float())
    assert (answers[0] - answers[1]).abs().mean() < 0.1 * answers[1].abs().mean()


@pytest.mark.parametrize("chosen", ["h2o", "robust bytes", "echo int8"])
def test_a_model_that_is_cast_between_turns(chosen):
    ours = model("llama")
    cache = H2OCache(ours.config, CONFIGS[chosen])
    prompt, question = prompts(40, 5)
    text = torch.cat([prompt, greedy(ours, {"input_ids": prompt}, 3, **with_cache(cache))], 1)
    ours.to(torch.bfloat16)
    assert greedy(
        ours, {"input_ids": torch.cat([text, question], 1)}, 3, **with_cache(cache)
    ).numel()


@pytest.mark.parametrize(("case", "by"), checkered(CASES, ["core", "torch"]), ids=str)
def test_inference_mode_ends(case, by):
    name, chosen = case
    ours = shared(name)
    config = config_of(chosen, ours)
    with backends.by_torch() if by == "torch" else contextlib.nullcontext():
        wanted = turns(ours, H2OCache(ours.config, config), contextlib.nullcontext)
        for second in (contextlib.nullcontext, torch.inference_mode):
            cache = H2OCache(ours.config, config)
            assert turns(ours, cache, torch.inference_mode, second) == wanted
            for layer in cache.layers:
                held = [x for x in getattr(layer, "slots", None) or () if x is not None]
                assert not any(x.is_inference() for x in held)


@pytest.mark.parametrize("by", ["core", "torch"])
def test_all_that_is_done_to_a_cache_of_inference_mode(by, tmp_path):
    """A cache that was made, filled, saved or loaded under inference_mode must work outside of
    it."""
    ours = shared("llama")
    prompt, question = prompts(40, 5)
    with backends.by_torch() if by == "torch" else contextlib.nullcontext():
        for more in ({"compileable": True}, {"trace": True}, {}):
            with torch.inference_mode():
                cache = H2OCache(ours.config, heavy=6, recent=6, **more)
                ours(prompt, **with_cache(cache))
                cache.save(tmp_path / "cache.safetensors", ours)
                loaded = H2OCache.load(tmp_path / "cache.safetensors", ours)
                fork = cache.fork(2)
            texts = torch.cat([prompt, question], 1)
            for each, rows in ((loaded, 1), (fork, 2), (cache, 1)):
                greedy(ours, {"input_ids": texts.repeat(rows, 1)}, 3, **with_cache(each))
            if not more:
                with torch.inference_mode():
                    prefix = H2OCache.load(tmp_path / "cache.safetensors", ours)
                rows = [texts[0].tolist()] * 2
                results = generate_all(
                    ours, rows, prefix.config, rows=2, prefix=prefix, max_new_tokens=3
                )
                assert [len(x.ids) for x in results] == [3, 3]
            cache.reset()
            greedy(ours, {"input_ids": prompt}, 3, **with_cache(cache))


@pytest.mark.parametrize(
    "name", [slow_if(x not in ("falcon_h1", "qwen3_5"), x) for x in WITH_STATES]
)
def test_states_of_inference_mode(name):
    """States made under inference_mode must be usable outside of it. transformers' own cache fails
    there."""
    ours = shared(name)
    prompt, question = prompts(20, 4)
    positions = torch.arange(20, 24)[None]  # transformers 5.24's bamba counts from 0 in each pass
    answers = []
    for mode in (torch.no_grad, torch.inference_mode):
        cache = H2OCache(ours.config, heavy=6, recent=6)
        with mode():
            ours(prompt, **with_cache(cache))
        with_positions = {"position_ids": positions, **with_cache(cache)}
        answers.append(ours(question, **with_positions).logits)
    assert torch.equal(*answers)


def test_a_document_read_under_inference_mode():
    ours = shared("llama")
    prompt, question = prompts(40, 5)
    request = torch.tensor([5, 6])
    with backends.by_torch(), torch.inference_mode():
        cache = h2o.compress_document(ours, prompt, heavy=6, recent=6, readings=2, repeat=request)
    with backends.by_torch():
        text = torch.cat([prompt, question], 1)
        assert greedy(ours, {"input_ids": text}, 3, **with_cache(cache)).numel()
