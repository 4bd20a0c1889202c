"""Families whose kinds of layers tiny.py covers with other models: newer families, and language
models inside vision-language models."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers
from transformers import AutoModelForImageTextToText

from h2o import H2OCache, H2OConfig, supports
from h2o.compat import CACHE, with_cache
from h2o.hf.model_traits.layer_kinds import kind_of
from h2o.hf.model_traits.shared_keys import SHARES_KEYS
from tests.hf import families
from tests.hf.test_simulation import prove, text
from tests.hf.tiny import (
    FAMILIES,
    LATENT,
    LATENT_AND_STATES,
    Family,
    batch,
    greedy,
    prompts,
)

pytestmark = [
    pytest.mark.slow,  # tests with the models of tiny.py cover the code that these families run
    pytest.mark.skipif(
        not SHARES_KEYS,
        reason="all of these kinds as of transformers 5.21",
    ),
]
SMALL = {"heavy": 6, "recent": 6}

_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
_EYE = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "image_size": 8}
_EYE |= {"num_hidden_layers": 1, "patch_size": 4, "insert_layer_id": 0}
_OCR_EYE = {"hidden_size": 16, "output_channels": 16, "num_hidden_layers": 1, "mlp_dim": 16}
_OCR_EYE |= {"num_attention_heads": 2, "image_size": 64, "patch_size": 16}
_OCR_EYE |= {"global_attn_indexes": [0]}

_GPTJ = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 512, "rotary_dim": 4}
_ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 4}
_ROUTED |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
_LARA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
_LARA |= {"linear_value_head_dim": 8, "sliding_window": 10, "num_experts_per_tok": 2}
_LARA |= {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
_LARA |= {"layer_types": [f"{x}_attention" for x in ("linear", "sliding", "linear", "full")]}
SINCE_5_24 = [
    Family("gptj", _GPTJ),
    Family("codegen", _GPTJ),
    Family("exaone"),
    Family("apertus1p5_text"),
    Family("sarvam_moe", _ROUTED),
    Family("lara_mini", _LARA, layers=("states", "sliding", "states", "h2o")),
    Family("sarvam_mla", _ROUTED | LATENT["deepseek_v3"].config),
]
"""Families that transformers 5.24 added, or moved to its attention interface."""
MORE = {family.name: family for family in SINCE_5_24 if CACHE == "cache"}
if "qwen3_5" in FAMILIES:
    _MOE = FAMILIES["qwen3_5"].config | _EXPERTS
    MORE["qwen3_5_moe_text"] = dataclasses.replace(
        FAMILIES["qwen3_5"], name="qwen3_5_moe_text", model_type="", config=_MOE
    )

WITHIN = {
    "qwen3_5": ("qwen3_5", {"depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 2,
                            "intermediate_size": 24, "out_hidden_size": 32}, {}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {"depth": 1, "hidden_size": 16, "num_heads": 2,
                                         "intermediate_size": 24, "out_hidden_size": 32}, {}),
    "lfm2_vl": ("lfm2", {"model_type": "siglip2_vision_model", **_EYE, "num_patches": 16}, {}),
    "lfm3_vl": ("lfm3", {**_EYE, "num_key_value_heads": 2}, {"projector_hidden_size": 16}),
    "minicpm_ocr": ("qwen3_5", _EYE, {"insert_layer_id": 0}),
    "minicpmv4_6": ("qwen3_5", _EYE, {"insert_layer_id": 0}),
    "minicpmv4_7": ("qwen3_5", _EYE, {"insert_layer_id": 0}),
    "nemotron_h_omni": ("nemotron_h", {**_EYE, "video_temporal_patch_size": 2},
                        {"projector_hidden_size": 16, "vision_hidden_size": 16}),
    "kimi_k25": ("deepseek_v3", {**_EYE, "pos_emb_height": 4, "pos_emb_width": 4},
                 {"projection_hidden_size": 16}),
    "got_ocr2": ("qwen2", _OCR_EYE, {}),
    "pp_chart2table": ("qwen2", _OCR_EYE, {}),
}  # fmt: skip
"""Vision-language models: family of the language model inside, vision config, further fields."""

NAMES = [*MORE, *(f"{name}, whole" for name in WITHIN)]
every = pytest.mark.parametrize("name", NAMES)


def made(name: str, attention: str = "h2o"):
    """A tiny model, always with the same weights."""
    torch.manual_seed(1)
    if name in MORE:
        built = transformers.AutoModelForCausalLM.from_config(MORE[name].build_config())
    else:
        name = name.partition(",")[0]
        text, vision, more = WITHIN[name]
        numbers = (FAMILIES | LATENT | MORE)[text].build_config().to_dict()
        config = transformers.AutoConfig.for_model(
            name, text_config=numbers, vision_config=vision, pad_token_id=0,
            tie_word_embeddings=False, **more,
        )  # fmt: skip
        built = AutoModelForImageTextToText.from_config(config)
    built.set_attn_implementation(attention)
    return built.eval()


def test_every_family_of_these_kinds_has_a_case():
    named = {*FAMILIES, *LATENT, *LATENT_AND_STATES, *MORE, *WITHIN}
    named |= {FAMILIES[name].model_type for name in named if name in FAMILIES}
    named |= {"gemma3n"}  # gemma3n_text, with a vision tower from timm
    for verdicts in families.written(families.PAGE).values():
        for name, verdict in verdicts.items():
            if any(words in verdict for words in ("states instead", "store nothing")):
                assert name in named, name


@every
def test_a_budget_for_all_gives_the_full_caches_tokens(name):
    ours, inputs = made(name), batch(prompts(17, 23))
    expected = greedy(made(name, "sdpa"), inputs, 32)
    cache = H2OCache(ours.config, H2OConfig.full())
    assert greedy(ours, inputs, 32, **with_cache(cache)).tolist() == expected.tolist()
    assert len(expected.unique()) > 5


@every
def test_rows_are_rows_alone_and_the_budget_holds(name):
    ours, rows = made(name), prompts(17, 30)
    cache = H2OCache(ours.config, **SMALL)
    tokens = greedy(ours, batch(rows), 12, **with_cache(cache))
    for b, row in enumerate(rows):
        alone = H2OCache(ours.config, **SMALL)
        expected = greedy(ours, {"input_ids": row}, 12, **with_cache(alone))
        assert tokens[b].tolist() == expected[0].tolist()
    kinds = supports(ours.config).layers
    assert "h2o" in kinds
    for index, kind in enumerate(kinds):
        assert kind == kind_of(cache.layers[index])
        if kind == "h2o":
            assert (cache.kept(index)[0] >= 0).sum(-1).unique().tolist() == [12]


@every
def test_the_simulation_is_the_cache(name):
    prove(made(name), text(tokens=40), 20, 5e-3, **SMALL)
