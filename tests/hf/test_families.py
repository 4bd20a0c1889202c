"""Every family crossed with every mode and every policy."""

from __future__ import annotations

import pytest
import torch

from h2o import H2OCache, H2OConfig, supports
from tests.hf.modes import MODES, POLICIES, TOKENS, policy
from tests.hf.tiny import FAMILIES, HYBRID, PURE, batch, greedy, model, prompts, with_image

LENGTHS = (5, 17, 23, 30)


def modes_of(name: str) -> list[str]:
    return [mode for mode in MODES if mode not in FAMILIES[name].lacks]


def peer(name: str):
    """The model under transformers' own attention: sdpa, where that can do what it asks for."""
    return model(name, "eager" if name in ("gemma2", "gpt_oss") else "sdpa")


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_and_support(name):
    ours = model(name)
    found = supports(ours.config)
    assert found
    assert found.layers == FAMILIES[name].layers
    cache = H2OCache(ours.config, heavy=1)
    assert tuple("sliding" if x.is_sliding else "h2o" for x in cache.layers) == found.layers
    assert f"{found.layers.count('h2o')} of {len(found.layers)} layers by h2o" in str(found)


@pytest.mark.parametrize(
    ("name", "mode"), [(name, mode) for name in FAMILIES for mode in modes_of(name)]
)
def test_full_budget_is_the_full_cache(name, mode):
    ours, theirs = model(name), peer(name)
    inputs = batch(prompts(*LENGTHS[1:3]))
    if mode != "guidance":  # for which transformers reads the text once more, without the image
        inputs = with_image(name, inputs)

    def make():
        return H2OCache(ours.config, H2OConfig.full())

    expected = MODES[mode](theirs, inputs, lambda: None)
    got = MODES[mode](ours, inputs, make)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("chosen", POLICIES)
@pytest.mark.parametrize("name", PURE + HYBRID)
def test_each_row_is_the_row_alone(name, chosen, side):
    ours = model(name)
    config = policy(chosen, ours)
    rows = prompts(*LENGTHS)
    if side == "right":  # generate() wants left padding; a forward pass takes both
        inputs = batch(rows, side)
        cache = H2OCache(ours.config, config)
        with torch.no_grad():
            logits = ours(**inputs, past_key_values=cache).logits
    else:
        cache = H2OCache(ours.config, config)
        tokens = greedy(ours, batch(rows), TOKENS, past_key_values=cache)
    for b, row in enumerate(rows):
        alone = H2OCache(ours.config, config)
        if side == "right":
            with torch.no_grad():
                expected = ours(row, past_key_values=alone).logits
            torch.testing.assert_close(
                logits[b : b + 1, : row.shape[1]], expected, rtol=0, atol=1e-4
            )
        else:
            expected = greedy(ours, {"input_ids": row}, TOKENS, past_key_values=alone)
            assert tokens[b].tolist() == expected[0].tolist()
        for layer, kind in enumerate(FAMILIES[name].layers):
            if kind == "h2o":
                assert held(cache, layer, b) == held(alone, layer, 0)


def held(cache, layer, b):
    """Positions that each head holds of row b."""
    return [[j for j in head if j >= 0] for head in cache.kept(layer)[0][b].tolist()]


def test_small_budgets_change_the_text():
    """Else the tests above would pass with a cache that evicts nothing."""
    rows = batch(prompts(*LENGTHS))
    for name in ("llama", "opt", "gpt_neox", "gemma3"):
        ours = model(name)
        full = greedy(ours, rows, TOKENS)
        texts = {name: full.tolist()}
        for chosen in POLICIES:
            cache = H2OCache(ours.config, policy(chosen, ours))
            texts[chosen] = greedy(ours, rows, TOKENS, past_key_values=cache).tolist()
        distinct = {str(text) for text in texts.values()}
        assert len(distinct) >= len(texts) - 2, texts  # fractions of 30 are near 6 + 6


def test_heavy_sets_move_while_generating():
    """Else they would show nothing about scores after the prompt."""
    for name in ("llama", "opt", "gpt_neox"):
        ours = model(name)
        cache = H2OCache(ours.config, POLICIES["h2o"], trace=True)
        greedy(ours, batch(prompts(*LENGTHS)), 24, past_key_values=cache)
        moved = 0
        for layer in range(2):
            evicted_at = cache.evicted_at(layer)
            N = evicted_at.shape[-1]
            column = torch.arange(N, device=evicted_at.device)
            while_generating = (evicted_at > LENGTHS[-1]) & (evicted_at < N)
            oldest_recent = evicted_at - 1 - 6 == column
            moved += int((while_generating & ~oldest_recent).sum())
        assert moved >= 5, name
