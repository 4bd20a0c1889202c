"""transformers' own model tests, with its attention and cache replaced by h2o's.

`make test-hf` fetches the tests of the installed transformers version and runs them twice: as they
are, and with the name "sdpa" leading to h2o's attention and DynamicCache to an H2OCache whose
budget is larger than any text here. Both runs must pass the same tests. LEFT_OUT lists the tests
that are left out, with reasons.

Environment: H2O_SUITE is the folder that fetch.py made. H2O_REDIRECT=0 runs transformers unchanged.
"""

import importlib
import os
import sys
import unittest

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

import h2o

sys.path.insert(0, os.environ["H2O_SUITE"])

from transformers_tests import test_modeling_common as common

REDIRECT = os.environ.get("H2O_REDIRECT", "1") != "0"

LEFT_OUT = {
    "test_generation_tester_mixin_inheritance": "asserts that the generation mixin is inherited, "
    "which the source distribution does not carry",
}
OF_STATES = {"test_attention_outputs": "counts a matrix of attention for every layer"}
FAILS = "fails without h2o too, in a model as small as this"
PADS = (
    "fp32_pad_left_sdpa_kernels",
    "fp32_pad_left",
    "fp32_pad_right_sdpa_kernels",
    "fp32_pad_right",
)
SMALL = {"test_num_layers_is_small": "sharing keys by kinds of layers takes four"}
OF_A_FAMILY = {
    "Gemma3nText": SMALL
    | {
        f"test_eager_matches_sdpa_inference_{number}_{how}": FAILS
        for number, how in zip(("08", "09", "12", "13"), PADS, strict=True)
    }
    | {"test_eager_matches_sdpa_inference_24_fp32_pad_left_output_attentions": FAILS},
    "Gemma4Text": SMALL
    | dict.fromkeys(
        (
            "test_eager_matches_batched_and_grouped_inference_0_fp16",
            "test_eager_matches_batched_and_grouped_inference_1_fp32",
            "test_eager_matches_batched_and_grouped_inference_2_bf16",
            "test_tp_plan_matches_params",
        ),
        "asks for experts, of which this one has none",
    ),
}
if REDIRECT:
    LEFT_OUT |= dict.fromkeys(
        (
            "test_capture_outputs_decorator",
            "test_eager_matches_sdpa_inference_24_fp32_pad_left_output_attentions",
            "test_model_outputs_equivalence",
        ),
        "asks for output_attentions=True, which h2o refuses: it never makes the whole matrix",
    )


class FullCache(h2o.H2OCache):
    """An H2OCache that never evicts, with DynamicCache's constructor.

    For eager attention and training, which h2o does not support, it is a DynamicCache.
    """

    def __new__(cls, ddp_cache_data=None, config=None, **ignored):
        if config is None or config._attn_implementation != "sdpa" or torch.is_grad_enabled():
            return DynamicCache(ddp_cache_data, config=config, **ignored)
        return super().__new__(cls)

    def __init__(self, ddp_cache_data=None, config=None, **ignored):
        super().__init__(config, h2o.H2OConfig.full())


@pytest.fixture(scope="module", autouse=True)
def redirected():
    """Replace sdpa and DynamicCache in transformers by h2o's, while this module runs."""
    if not REDIRECT:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for interface in (AttentionInterface, AttentionMaskInterface):
            patch.setitem(interface._global_mapping, "sdpa", interface._global_mapping["h2o"])
        patch.setattr(transformers.generation.utils, "DynamicCache", FullCache)
        for name in FAMILIES:
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
            patch.setattr(module, "DynamicCache", FullCache)
        yield


class FamilyTester:
    """The model_tester that ModelTesterMixin needs, for one family's tiny configuration."""

    batch_size = 3
    seq_length = 7
    is_training = True
    hidden_size = 32
    num_attention_heads = 4
    vocab_size = 99

    def __init__(self, config_class, **changes):
        self.config_class = config_class
        self.changes = changes
        self.num_hidden_layers = changes.get("num_hidden_layers", 2)

    def get_config(self):
        common = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "intermediate_size": 37,
            "max_position_embeddings": 512,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        return self.config_class(**(common | self.changes))

    def prepare_config_and_inputs_for_common(self):
        ids = common.ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}


GQA = {"num_key_value_heads": 2}
WHOLE = {"intermediate_size": 32}
"""Width that torch's products of experts require: rows of a multiple of 16 bytes."""
SHARED = {
    "num_hidden_layers": 4, "layer_types": ["full_attention", "sliding_attention"] * 2,
    "sliding_window": 10, "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8,
}  # fmt: skip
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 10}
FAMILIES = {
    "llama": ("Llama", GQA),
    "opt": ("OPT", {"ffn_dim": 37, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 1.0}),
    "qwen2": ("Qwen2", GQA),
    "qwen3": ("Qwen3", GQA | {"head_dim": 8}),
    "mistral": ("Mistral", GQA | {"sliding_window": None}),
    "qwen3_next": (
        "Qwen3Next",
        GQA
        | {
            "head_dim": 32, "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        },
    ),
    "lfm2": ("Lfm2", GQA | {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
        },
    ),
    "falcon_h1": (
        "FalconH1",
        GQA
        | {
            "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1,
            "mamba_d_state": 8, "mamba_chunk_size": 8,
        },
    ),
    "gpt_oss": (
        "GptOss",
        GQA
        | WHOLE
        | MIXED
        | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gemma3n": (
        "Gemma3nText",
        GQA
        | {
            **SHARED, "head_dim": 8, "laurel_rank": 8, "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "gemma4": (
        "Gemma4Text",
        GQA
        | {
            **SHARED, "head_dim": 8, "global_head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "flex_olmo": ("FlexOlmo", GQA | WHOLE | {"num_experts": 4, "num_experts_per_tok": 2}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        GQA
        | WHOLE
        | {
            "layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 4,
            "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8,
            "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32,
            "position_embedding_type": "rope",
        },
    ),
    "olmo_hybrid": (
        "OlmoHybrid",
        GQA
        | {
            "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        },
    ),
}  # fmt: skip
WITH_STATES = ("Qwen3Next", "Lfm2", "GraniteMoeHybrid", "OlmoHybrid")
"""Families with layers that keep states instead of keys."""


def suite(prefix, changes):
    """Make the test case class of one family."""
    names = f"{prefix}Model", f"{prefix.removesuffix('Text')}ForCausalLM"
    classes = [getattr(transformers, name) for name in names]

    def set_up(self):
        self.model_tester = FamilyTester(getattr(transformers, prefix + "Config"), **changes)

    reasons = OF_A_FAMILY.get(prefix, {}) | LEFT_OUT
    reasons |= OF_STATES if prefix in WITH_STATES else {}
    left_out = {name: unittest.skip(reason)(lambda self: None) for name, reason in reasons.items()}
    body = {"all_model_classes": tuple(classes), "setUp": set_up, **left_out}
    return type(f"{prefix}Test", (common.ModelTesterMixin, unittest.TestCase), body)


for prefix, changes in FAMILIES.values():
    globals()[f"{prefix}Test"] = suite(prefix, changes)
