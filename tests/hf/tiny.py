"""Tiny models of many families, with random weights that make attention sharp.

One table lists the name of each family, what its config needs beyond the common numbers, and which
of its layers are H2O layers. Tests cross the table with modes and policies.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from h2o import H2OConfig
from h2o.compat import HYBRIDS
from h2o.hf.model_traits.shared_keys import SHARES_KEYS
from tests.torch.calls import TABLE

needs_compiler = pytest.mark.skipif(
    not TABLE,
    reason="torch 2.6 does not take transformers' models whole; not tried between it and 2.13",
)

VOCABULARY = 97
IMAGE_STARTS, IMAGE, IMAGE_TOKENS = 95, 96, 4
DEVICE = torch.device("cuda" if os.environ.get("H2O_TEST_DEVICE") == "cuda" else "cpu")
"""Device of models and token ids; see tests/cuda/carry.py."""
SPREAD = 0.5  # std of the weights; at the usual 0.02 attention is flat and all tokens are equal


def exact(config: H2OConfig, **changes: Any) -> H2OConfig:
    """`config` without `min_tokens`, so that fractions of a short prompt are not raised."""
    return dataclasses.replace(config, min_tokens=0, **changes)


@dataclasses.dataclass(frozen=True)
class Family:
    name: str
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    model_type: str = ""
    layers: tuple[str, ...] = ("h2o", "h2o")
    vision: dict[str, Any] | None = None
    """Config of the vision tower; None for a text model."""
    image: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Model inputs for one image, which occupies IMAGE_TOKENS tokens of the text."""
    lacks: tuple[str, ...] = ()
    """Modes in which transformers itself fails, even with its own cache."""
    weights: str = ""
    """How torchao quantizes the weights, "int8" or "int4"; empty: not quantized."""
    architecture: str = ""
    """The model's class, if AutoModelForCausalLM does not know the family."""

    def build_config(self) -> Any:
        numbers = {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": len(self.layers),
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "max_position_embeddings": 512,
            "initializer_range": SPREAD,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": None,
        }
        if self.vision is not None:
            text = {"model_type": self.model_type, **numbers, **self.config}
            return AutoConfig.for_model(
                self.name.partition(",")[0],
                text_config=text,
                vision_config=self.vision,
                tie_word_embeddings=False,
                image_token_id=IMAGE,
                vision_start_token_id=IMAGE_STARTS,
                pad_token_id=0,
            )
        return AutoConfig.for_model(self.model_type or self.name, **(numbers | self.config))


_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_local_experts": 4}
_SLIDING = {"sliding_window": 10}
_FULL_FIRST = {"layer_types": ["full_attention", "sliding_attention"] * 2}
_EYE = {"hidden_size": 16, "intermediate_size": 24, "initializer_range": SPREAD, "image_size": 8}
_LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
_LINEAR |= {"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2}
_MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_d_head": 16}
_MAMBA |= {"mamba_chunk_size": 8}
_CONV = {"conv_L_cache": 3, "layer_types": ["conv", "full_attention"] * 2}
_BLOCKS = {"layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8}
_TWICE = ("states", "h2o") * 2
_EMBEDS = ("inputs_embeds",)
_SHARING = ("h2o", "sliding", "h2o", "none", "none", "none")
_GEMMA_3N = {
    **_SLIDING, "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 8, "altup_num_inputs": 2,
    "activation_sparsity_pattern": [0.0] * 6,
    "layer_types": [f"{kind}_attention" for kind in "full sliding full sliding full full".split()],
}  # fmt: skip
_GEMMA_4 = {name: _GEMMA_3N[name] for name in list(_GEMMA_3N)[:4]}
_GEMMA_4 |= {"layer_types": _GEMMA_3N["layer_types"], "global_head_dim": 16}
_PIXELS = torch.linspace(-1, 1, 192).sin()

FAMILIES = {
    family.name: family
    for family in [
        Family("llama"),
        Family("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": SPREAD}),
        Family("gpt_neox"),
        Family("qwen2"),
        Family("qwen3"),
        Family("mistral", {"sliding_window": None}),
        Family("mixtral", {**_MOE, "sliding_window": None}),
        Family("qwen3_moe", {**_MOE, "num_experts": 4, "decoder_sparse_step": 1}),
        Family("phi"),
        Family("phi3", {"sliding_window": None}),
        Family("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 512}),
        Family("gemma"),
        Family("olmo2"),
        Family("granite"),
        Family("smollm3"),
        Family("stablelm"),
        Family("cohere"),
        Family("starcoder2", {"sliding_window": None}),
        Family("gemma2", _SLIDING, layers=("sliding", "h2o", "sliding", "h2o")),
        Family(
            "gemma3",
            {**_SLIDING, "layer_types": ["sliding_attention", "full_attention"] * 2},
            model_type="gemma3_text",
            layers=("sliding", "h2o", "sliding", "h2o"),
        ),
        Family(
            "gpt_oss",
            {**_SLIDING, **_MOE, "layer_types": ["sliding_attention", "full_attention"] * 2},
            layers=("sliding", "h2o", "sliding", "h2o"),
        ),
        Family(
            "qwen2-mixed",
            {**_SLIDING, "use_sliding_window": True, "max_window_layers": 1},
            model_type="qwen2",
            layers=("h2o", "sliding", "sliding"),
        ),
        Family(
            "llava",
            model_type="llama",
            vision={
                **_EYE,
                "model_type": "clip_vision_model",
                "patch_size": 4,
                "projection_dim": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
            },
            image={"pixel_values": _PIXELS.reshape(1, 3, 8, 8)},
        ),
        Family(
            "qwen2_vl",
            {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
            model_type="qwen2_vl_text",
            vision={
                "depth": 1,
                "embed_dim": 16,
                "hidden_size": 32,
                "num_heads": 2,
                "mlp_ratio": 2,
                "patch_size": 2,
                "temporal_patch_size": 1,
                "initializer_range": SPREAD,
            },
            image={
                "pixel_values": _PIXELS.reshape(16, 12),
                "image_grid_thw": torch.tensor([[1, 4, 4]]),
            },
            lacks=("guidance",),
        ),
        *[
            Family("qwen3_next", _LINEAR | _MOE | {"num_experts": 4}, layers=_TWICE),
            Family("qwen3_5", _LINEAR, model_type="qwen3_5_text", layers=_TWICE),
            Family("olmo_hybrid", _LINEAR, layers=_TWICE),
            Family(
                "jamba",
                {
                    "attn_layer_period": 2,
                    "attn_layer_offset": 1,
                    "num_experts": 4,
                    "mamba_d_state": 8,
                    "mamba_dt_rank": 4,
                },
                layers=_TWICE,
                lacks=("chat turns",),  # the states of one turn are not used in the next
            ),
            Family(
                "bamba",  # without position_ids it counts positions from 0 in each pass
                _MAMBA | {"attn_layer_indices": [1, 3]},
                layers=_TWICE,
                lacks=_EMBEDS,
            ),
            Family(
                "granitemoehybrid",
                _MAMBA
                | _MOE
                | {
                    "shared_intermediate_size": 32,
                    "layer_types": _LINEAR["layer_types"],
                    "attention_multiplier": 0.1,  # with more, attention reaches 1 and ranks tie
                },
                layers=_TWICE,
            ),
            Family(
                "qwen3_5, whole",
                _LINEAR | {"head_dim": 16},
                model_type="qwen3_5_text",
                layers=_TWICE,
                vision={
                    **_EYE,
                    "depth": 1,
                    "num_heads": 2,
                    "patch_size": 2,
                    "temporal_patch_size": 1,
                    "out_hidden_size": 32,
                    "num_position_embeddings": 16,
                },
                image={
                    "pixel_values": _PIXELS.reshape(16, 12),
                    "image_grid_thw": torch.tensor([[1, 4, 4]]),
                },
                lacks=("guidance",),
            ),
            Family("lfm2", _CONV, layers=_TWICE),
            Family(
                "lfm2_vl",
                _CONV,
                model_type="lfm2",
                layers=_TWICE,
                vision={
                    **_EYE,
                    "model_type": "siglip2_vision_model",
                    "patch_size": 2,
                    "num_patches": 16,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                },
                image={
                    "pixel_values": _PIXELS.reshape(1, 16, 12),
                    "spatial_shapes": torch.tensor([[4, 4]]),
                    "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long),
                },
            ),
            Family("lfm2_moe", _CONV | _MOE | {"num_experts": 4}, layers=_TWICE),
            Family(
                "lfm3",
                _MOE
                | _SLIDING
                | {
                    "conv_L_cache": 3,
                    "num_experts": 4,
                    "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
                },
                layers=("states", "sliding", "h2o", "states"),
            ),
            Family(
                "nemotron_h",
                {
                    "layers_block_type": ["mlp", "mamba", "attention", "mamba"],
                    "mamba_num_heads": 4,
                    "mamba_head_dim": 16,
                    "ssm_state_size": 8,
                    "n_groups": 1,
                    "chunk_size": 8,
                    "initializer_range": 0.2,  # with more, the model amplifies rounding errors
                },
                layers=("none", "states", "h2o", "states"),
                lacks=_EMBEDS,
            ),
            Family("falcon_h1", _MAMBA | {"mamba_d_ssm": 64}, lacks=_EMBEDS),
            Family(
                "zamba",
                _BLOCKS | {"n_mamba_heads": 2, "mamba_dt_rank": 4, "attention_head_dim": 16},
                layers=_TWICE,
                lacks=("chat turns", *_EMBEDS),
            ),
            Family(
                "zamba2",
                _BLOCKS
                | {
                    "mamba_ngroups": 1,
                    "n_mamba_heads": 4,
                    "mamba_headdim": 16,
                    "chunk_size": 8,
                    "num_mem_blocks": 1,
                    "adapter_rank": 4,
                    "initializer_range": 0.1,
                },
                layers=_TWICE,
                lacks=_EMBEDS,
            ),
            Family("zaya"),
        ]
        * HYBRIDS,
        *[
            Family("gemma3n_text", _GEMMA_3N, layers=_SHARING),
            Family("gemma4_text", _GEMMA_4, layers=_SHARING),
            Family(
                "gemma4",
                _GEMMA_4,
                model_type="gemma4_text",
                layers=_SHARING,
                vision={
                    **_EYE,
                    "patch_size": 2,
                    "pooling_kernel_size": 2,
                    "position_embedding_size": 8,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                    "head_dim": 8,
                },
                image={
                    "pixel_values": _PIXELS.reshape(1, 16, 12),
                    "image_position_ids": torch.cartesian_prod(*[torch.arange(4)] * 2)[None],
                },
                lacks=_EMBEDS,
            ),
        ]
        * SHARES_KEYS,
        Family("mistral-window", _SLIDING, model_type="mistral", layers=("sliding", "sliding")),
    ]
}
if importlib.util.find_spec("torchao"):
    FAMILIES["llama, int8 weights"] = Family("llama", model_type="llama", weights="int8")
    if DEVICE.type == "cpu":  # this int4 layout is for CPUs only
        FAMILIES["qwen3, int4 weights"] = Family("qwen3", model_type="qwen3", weights="int4")

_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12, "v_head_dim": 10,
}  # fmt: skip
_LATENT_MOE = {
    **_LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
_LONGCAT = {
    **_LATENT, "num_layers": 1, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 32,
    "moe_topk": 2, "zero_expert_num": 2, "n_routed_experts": 4,
}  # fmt: skip
LATENT = {
    family.name: family
    for family in [
        Family("deepseek_v2", {**_LATENT_MOE, "topk_method": "greedy"}),
        Family("deepseek_v3", {**_LATENT_MOE, "q_lora_rank": None}),
        Family("glm4_moe_lite", _LATENT_MOE),
        Family("minicpm3", _LATENT),
        Family("mistral4", {**_LATENT_MOE, "head_dim": 20}, architecture="Mistral4ForCausalLM"),
        Family("youtu", {**_LATENT, "num_attention_heads": 32, "num_key_value_heads": 32}),
        Family("axk1", {**_LATENT_MOE, "v_head_dim": 20}),
        Family("longcat_flash", _LONGCAT),
    ]
}
"""Families with multi-head latent attention. youtu has so many heads that a decode step is a matrix
product; the values of axk1 have the size of its keys."""

_WITH_KEYS = ("falcon_h1", "zaya")
LATENT_AND_STATES = {
    family.name: family
    for family in [
        Family(
            "kimi_linear",
            {
                **_LATENT,
                "q_lora_rank": None,
                "moe_intermediate_size": 32,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "linear_head_dim": 8,
                "linear_num_heads": 4,
                "layer_types": _LINEAR["layer_types"],
            },
            layers=_TWICE,
        ),
        Family(
            "bailing_hybrid",
            {
                **_LATENT,
                "moe_intermediate_size": 32,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "n_group": 1,
                "topk_group": 1,
                "layer_types": _LINEAR["layer_types"],
            },
            layers=_TWICE,
        ),
    ]
    if HYBRIDS and family.name in transformers.CONFIG_MAPPING
}
"""Families that have layers with latents and layers with states."""
WITH_STATES = [name for name, x in FAMILIES.items() if "states" in x.layers or name in _WITH_KEYS]
"""Families with convolution or recurrent states, next to keys or instead of them."""
LAYOUTS = ["qwen3_next", "lfm3", "nemotron_h", "falcon_h1", "zamba2"] if HYBRIDS else []
"""One family for each layout: layers with states before layers with keys, next to a sliding window,
or next to layers with neither; states and keys in one layer; states in a shared block."""
OTHERS = [name for name in FAMILIES if name not in WITH_STATES]
PURE = [name for name in OTHERS if "sliding" not in FAMILIES[name].layers]
HYBRID = [name for name in OTHERS if name not in PURE and "h2o" in FAMILIES[name].layers]
TWINS = tuple(
    "gpt_neox qwen2 qwen3 mistral mixtral qwen3_moe phi gpt2 gemma olmo2 granite smollm3 stablelm"
    " cohere starcoder2".split()
)
"""Families that look to h2o like llama or opt, except for a scale: generate() runs the same code,
and shapes and kinds of layers are the same (test_families.py checks this). A mode or a policy that
works with these two works with the twins, so the tests that are not slow cross the twins with only
a few modes and policies."""

WITHOUT_ROTARY = ("opt", "gpt2", "jamba", "granitemoehybrid", "nemotron_h", "zamba", "zamba2")
"""Families with learned positions or none. Granite 4 and Zamba 2 can be configured to use rotary
positions."""
ROTARY = [
    name
    for name, family in FAMILIES.items()
    if name not in WITHOUT_ROTARY and "h2o" in family.layers
    and not (family.vision or family.weights)
]  # fmt: skip


@functools.cache
def _model(name: str) -> Any:
    torch.manual_seed(len(name))
    family = (FAMILIES | LATENT | LATENT_AND_STATES)[name]
    auto = AutoModelForImageTextToText if family.image else AutoModelForCausalLM
    config = family.build_config()
    if family.architecture:
        made = getattr(transformers, family.architecture)(config).eval()
    else:
        made = auto.from_config(config).eval()
    for part, gate in made.named_parameters():
        if part.endswith(("attn_gate", "mlp_gate")):  # 0 until a model is trained
            torch.nn.init.constant_(gate, 0.3)
    if family.weights:
        quantize(made, family.weights)
    return made


def quantize(model: Any, weights: str) -> None:
    """Quantize the weights of linear layers with torchao. int4 needs multiples of 16 outputs."""
    from torchao.prototype.quantization.int4.inference_workflow import (
        PrototypeInt4WeightOnlyConfig,  # it has a layout for CPUs
    )
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    settings = {"int8": Int8WeightOnlyConfig, "int4": PrototypeInt4WeightOnlyConfig}[weights]
    quantize_(
        model,
        settings() if weights == "int8" else settings(group_size=32),
        lambda x, _: isinstance(x, torch.nn.Linear) and x.out_features % 16 == 0,
    )


def model(name: str, attention: str = "h2o") -> Any:
    """A fresh copy of a family's model in fp32, always with the same weights."""
    twin = copy.deepcopy(_model(name)).to(DEVICE)
    twin.set_attn_implementation(attention)
    return twin


def llama(layers: int, **config: Any) -> Any:
    """A llama in fp32 with this number of layers; `config` overrides the family's numbers."""
    torch.manual_seed(5)
    config = Family("llama", config, layers=("h2o",) * layers).build_config()
    built = AutoModelForCausalLM.from_config(config).eval().to(DEVICE)
    built.set_attn_implementation("h2o")
    return built


@functools.cache
def shared(name: str, attention: str = "h2o") -> Any:
    """One model for all tests that do not change it. A copy takes as long as ten steps."""
    return model(name, attention)


@contextlib.contextmanager
def failing(part: torch.nn.Module) -> Iterator[None]:
    """Make a part of a model raise ZeroDivisionError, and expect the block to raise it."""
    hook = part.register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError):
            yield
    finally:
        hook.remove()


def slow_if(slow: bool, *values: Any) -> Any:
    """A case for parametrize, marked as slow if another case runs the same code."""
    return pytest.param(*values, marks=[pytest.mark.slow] if slow else [])


def prompts(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    """Random token ids, [1, length] for each length."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(2, VOCABULARY, (1, length), generator=generator) for length in lengths]
    return [row.to(DEVICE) for row in rows]


def batch(rows: list[torch.Tensor], side: str = "left") -> dict[str, torch.Tensor]:
    """Rows of different lengths as one padded batch: input_ids and attention_mask [B, N]."""
    N = max(row.shape[1] for row in rows)
    ids = rows[0].new_zeros(len(rows), N)
    mask = torch.zeros_like(ids)
    for b, row in enumerate(rows):
        place = slice(N - row.shape[1], None) if side == "left" else slice(row.shape[1])
        ids[b, place] = row[0]
        mask[b, place] = 1
    return {"input_ids": ids, "attention_mask": mask}


def with_image(name: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch with a different image in the middle of each row, if the family has images."""
    image = (FAMILIES | LATENT | LATENT_AND_STATES)[name].image
    if not image:
        return inputs
    B = len(inputs["input_ids"])
    ids = inputs["input_ids"].clone()
    ids[ids >= IMAGE_STARTS] = 2
    ids[:, -13], ids[:, -12 : -12 + IMAGE_TOKENS] = IMAGE_STARTS, IMAGE
    more = {key: value.repeat(B, *[1] * (value.ndim - 1)) for key, value in image.items()}
    pixels = more["pixel_values"]
    more["pixel_values"] = (
        pixels * torch.linspace(1, 2, len(pixels))[(..., *[None] * (pixels.ndim - 1))]
    )
    more = {key: value.to(ids.device) for key, value in more.items()}
    if "image_grid_thw" in image:
        more["mm_token_type_ids"] = (ids == IMAGE).long()
    return {**inputs, "input_ids": ids, **more}


def greedy(model: Any, inputs: dict[str, Any], tokens: int = 16, **kwargs: Any) -> torch.Tensor:
    """Generate greedily and return the new tokens [B, tokens]."""
    out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, **kwargs)
    return out[:, -tokens:]
