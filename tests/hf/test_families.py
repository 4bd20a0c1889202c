"""Every family crossed with every mode and every policy."""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface
from transformers.generation import GenerationMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from h2o import H2OCache, H2OConfig, supports
from h2o.compat import with_cache
from h2o.hf.model_traits.layer_kinds import kind_of
from tests.hf.modes import MODES, POLICIES, TOKENS, policy
from tests.hf.tiny import (
    FAMILIES,
    HYBRID,
    LATENT,
    LATENT_AND_STATES,
    PURE,
    TWINS,
    WITH_STATES,
    batch,
    greedy,
    model,
    prompts,
    shared,
    slow_if,
    with_image,
)

LENGTHS = (5, 17, 23, 30)


LATENTS = [*LATENT, *LATENT_AND_STATES]
EVERY = FAMILIES | LATENT | LATENT_AND_STATES


def modes_of(name: str) -> list[str]:
    return [mode for mode in MODES if mode not in EVERY[name].lacks]


PADDED = [name for name in PURE + HYBRID + WITH_STATES + LATENTS if modes_of(name)]
"""Families whose padded rows must give what the rows give alone."""

OF_ATTENTION = ("greedy", "chunked prompt", "inputs_embeds", "model(...) by hand")
"""Modes that call a model's own code in different ways. The other modes choose tokens and rows of
the cache, which is the work of generate() and of the cache."""

GENERATED_ALIKE = (
    "gpt_oss",
    "qwen2-mixed",
    "gemma2",
    "gemma3n_text",
    "gemma4_text",
    "llama, int8 weights",
    "qwen3, int4 weights",
)
"""Families that have their own attention but llama's generate()."""
KEPT_ALIKE = {
    "qwen2-mixed": "gemma3",
    "llava": "llama",
    "qwen2_vl": "llama",
    "gemma3n_text": "gemma4_text",
    "gemma4": "gemma4_text",
    "llama, int8 weights": "llama",
    "qwen3, int4 weights": "llama",
    "phi3": "llama",
}
"""Families whose layers are of the same kinds as another family's, so they use a cache alike."""
WHOLE = ("llama", "gemma3", "deepseek_v2")
"""Families that run all policies and modes. They have grouped heads, sliding windows and
latents."""
STATES_ALIKE = {
    "qwen3_5": "qwen3_next",
    "qwen3_5, whole": "qwen3_next",
    "olmo_hybrid": "qwen3_next",
    "granitemoehybrid": "bamba",
    "lfm2_moe": "lfm2",
    "lfm2_vl": "lfm2",
    "zamba": "zamba2",
    "kimi_linear": "bailing_hybrid",
}
"""Families that have the same states and the same other layers as another family."""
ALIKE = {*TWINS, *KEPT_ALIKE, *STATES_ALIKE}
"""Families that use a cache like another family."""


def slow_mode(i: int, name: str, j: int, mode: str) -> bool:
    if name in WITH_STATES or name in LATENT_AND_STATES:
        return mode != "greedy" or name in STATES_ALIKE
    if name in WHOLE:
        return False
    if name in LATENT:
        return mode != "greedy" and (i + j) % 4 > 0
    if mode in OF_ATTENTION:
        return name in TWINS and mode != "greedy" and (i + j) % 6 > 0
    return name in TWINS or (i + j) % (12 if name in GENERATED_ALIKE else 6) > 0


def slow_policy(i: int, name: str, j: int, chosen: str, side: str) -> bool:
    """Whether a case is slow. A policy sees only queries, keys and values. Each policy runs with a
    third of the families that are not in WHOLE, on one side or the other, and with a sixth of those
    whose layers are another family's. Padding on the right concerns masks, which do not depend on
    the policy."""
    if name in WITH_STATES or name in LATENT_AND_STATES:
        return chosen != "h2o" or side == "right" or name in STATES_ALIKE
    place = i + j + 3 * (side == "left")
    if name in TWINS or name in KEPT_ALIKE:
        return place % 12 > 0
    return (side == "right" or name not in WHOLE) and place % 6 > 0


MODE_CASES = [
    slow_if(slow_mode(i, name, j, mode), name, mode)
    for i, name in enumerate(EVERY)
    for j, mode in enumerate(modes_of(name))
]
POLICY_CASES = [
    slow_if(slow_policy(i, name, j, chosen, side), name, chosen, side)
    for i, name in enumerate(PADDED)
    for j, chosen in enumerate(POLICIES)
    for side in ("left", "right")
    if name not in LATENTS or chosen != "head_shares"  # all heads share the latents
]


EAGER = ("gemma2", "gpt_oss")
"""Families that need soft-capped logits or learned sinks, which sdpa lacks."""


def peer(name: str):
    """The model under transformers' own attention: sdpa if it can do what the model needs."""
    return shared(name, "eager" if name in EAGER else "sdpa")


def generation(ours) -> set[str]:
    """Methods of transformers' generate() that a model's class overrides, except the one that says
    which caches the model supports."""
    kind = type(ours)
    names = [x for x in vars(GenerationMixin) if callable(getattr(GenerationMixin, x))]
    overridden = {x for x in names if getattr(kind, x) is not getattr(GenerationMixin, x)}
    return {x for x in overridden if not x.startswith("__")} - {"_supports_default_dynamic_cache"}


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_is_generated_from_as_its_likes_are(name):
    """Cases of twins are left out because twins have llama's or opt's generate(), layers and
    shapes. A twin that differs must get its own cases."""
    likes = [shared(like) for like in ("llama", "opt")]
    ours = shared(name)
    assert not generation(ours)
    assert all(not generation(like) for like in likes)
    assert FAMILIES[name].layers == FAMILIES["llama"].layers
    assert not FAMILIES[name].image
    assert not FAMILIES[name].weights
    assert getattr(ours.config, "attn_logit_softcapping", None) is None
    assert shapes(ours) in [shapes(like) for like in likes]


@pytest.mark.parametrize("name", [name for name in GENERATED_ALIKE if name in FAMILIES])
def test_what_is_generated_alike(name):
    """Modes are left out for these families because their generate() is llama's. This must stay
    true with new versions of transformers."""
    assert not generation(shared(name))
    assert not FAMILIES[name].image


@pytest.mark.parametrize("name", [name for name in KEPT_ALIKE if name in FAMILIES])
def test_what_is_kept_alike(name):
    """Policies are left out for these families because their layers are of the same kinds as
    another family's. This must stay true with new versions of transformers."""
    ours, like = shared(name), shared(KEPT_ALIKE[name])
    kinds, wanted = ({kind_of(x) for x in H2OCache(m.config, heavy=1).layers} for m in (ours, like))
    assert kinds == wanted
    assert KEPT_ALIKE[name] not in KEPT_ALIKE
    assert name not in WHOLE
    text = ours.config.get_text_config()
    assert getattr(text, "attn_logit_softcapping", None) is None


def shapes(ours) -> list[tuple[int, ...]]:
    """Shapes of the queries, keys and values of each layer."""
    seen = []

    def attend(module, query, key, value, *args, **kwargs):
        seen.append((*query.shape, *key.shape, *value.shape))
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    before = ours.config._attn_implementation
    AttentionInterface.register("shapes", attend)
    try:
        ours.set_attn_implementation("shapes")
        ours(prompts(9)[0], use_cache=False)
    finally:
        ours.set_attn_implementation(before)
    return seen


@pytest.mark.parametrize("name", EVERY)
def test_layers_and_support(name):
    ours = model(name)
    support = supports(ours.config)
    assert support
    assert support.layers == EVERY[name].layers
    cache = H2OCache(ours.config, heavy=1)
    assert tuple(map(kind_of, cache.layers)) == support.layers
    assert f"{support.layers.count('h2o')} of {len(support.layers)} layers by h2o" in str(support)


@pytest.mark.parametrize(("name", "mode"), MODE_CASES)
def test_full_budget_is_the_full_cache(name, mode):
    ours, theirs = shared(name), peer(name)
    lengths = LENGTHS[1:3]
    if mode == "prompt token by token" and H2OCache(ours.config).guard.has_states:
        lengths = lengths[:1] * 2  # states would count columns of padding
    inputs = batch(prompts(*lengths))
    if mode != "guidance":  # transformers then runs the text a second time, without the image
        inputs = with_image(name, inputs)

    def make():
        return H2OCache(ours.config, H2OConfig.full())

    expected = MODES[mode](theirs, inputs, lambda: None)
    got = MODES[mode](ours, inputs, make)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize(("name", "chosen", "side"), POLICY_CASES)
def test_each_row_is_the_row_alone(name, chosen, side):
    """A padded row must give what the row gives alone. If a policy does not count a row's tokens,
    only two rows are compared during generation: one shorter than the budget, and one in the
    middle."""
    ours = shared(name)
    config = policy(chosen, ours)
    rows = prompts(*LENGTHS)
    if side == "right":  # generate() needs padding on the left; a forward pass supports both
        inputs = batch(rows, side)
        cache = H2OCache(ours.config, config)
        logits = ours(**inputs, **with_cache(cache)).logits
    else:
        cache = H2OCache(ours.config, config)
        tokens = greedy(ours, batch(rows), TOKENS, **with_cache(cache))
    for b, row in enumerate(rows):
        if side == "left" and b % 2 and chosen not in ("h2o", "fractions"):
            continue
        alone = H2OCache(ours.config, config)
        if side == "right":
            expected = ours(row, **with_cache(alone)).logits
            torch.testing.assert_close(
                logits[b : b + 1, : row.shape[1]], expected, rtol=0, atol=1e-4
            )
        else:
            expected = greedy(ours, {"input_ids": row}, TOKENS, **with_cache(alone))
            assert tokens[b].tolist() == expected[0].tolist()
        seen = row.shape[1] + (TOKENS - 1 if side == "left" else 0)
        for layer, kind in enumerate(EVERY[name].layers):
            if kind == "h2o":
                assert held(cache, layer, b) == held(alone, layer, 0)
                assert chosen != "h2o" or set(map(len, held(alone, layer, 0))) == {min(12, seen)}


def held(cache, layer, b):
    """Positions that each head holds of row b."""
    return [[j for j in head if j >= 0] for head in cache.kept(layer)[0][b].tolist()]


def test_small_budgets_change_the_text():
    """Small budgets must change the text. Otherwise the tests above would pass with a cache that
    evicts nothing."""
    rows = batch(prompts(*LENGTHS))
    for name in ("llama", "gemma3"):
        ours = model(name)
        full = greedy(ours, rows, TOKENS)
        texts = {name: full.tolist()}
        for chosen in POLICIES:
            cache = H2OCache(ours.config, policy(chosen, ours))
            texts[chosen] = greedy(ours, rows, TOKENS, **with_cache(cache)).tolist()
        distinct = {str(text) for text in texts.values()}
        assert len(distinct) >= len(texts) - 2, texts  # fractions of 30 are near 6 + 6


def test_heavy_sets_move_while_generating():
    """Keys other than the oldest recent one must be evicted during decode. Otherwise the tests
    above would say nothing about scores after the prompt."""
    for name in ("llama", "opt", "gpt_neox"):
        ours = model(name)
        cache = H2OCache(ours.config, POLICIES["h2o"], trace=True)
        greedy(ours, batch(prompts(*LENGTHS)), 24, **with_cache(cache))
        moved = 0
        for layer in range(2):
            evicted_at = cache.evicted_at(layer)
            N = evicted_at.shape[-1]
            column = torch.arange(N, device=evicted_at.device)
            while_generating = (evicted_at > LENGTHS[-1]) & (evicted_at < N)
            oldest_recent = evicted_at - 1 - 6 == column
            moved += int((while_generating & ~oldest_recent).sum())
        assert moved >= 5, name
