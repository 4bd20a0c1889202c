"""h2o finds the rotation of a model's keys in its code, and rejects anything but a rotation."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_utils import AttentionInterface

from h2o import UnsupportedError
from h2o.hf.rotary import model_rotary, rotary_parts
from h2o.hf.rotary.model_rotary import rotary_of
from tests.hf.tiny import FAMILIES, ROTARY, WITHOUT_ROTARY, Family


@pytest.mark.parametrize("name", ROTARY)
def test_every_rotary_family_is_proven(name):
    family = FAMILIES[name]
    rotary = rotary_of(family.build_config())
    assert rotary.rotated_layers == {i for i, kind in enumerate(family.layers) if kind == "h2o"}


@pytest.mark.skipif("gemma4_text" not in FAMILIES, reason="newer versions of transformers")
def test_layers_that_differ_in_their_heads():
    """The large models of Gemma 4 have other numbers of heads in sliding windows, and transformers
    raises an error where the config is asked for one number."""
    more = FAMILIES["gemma4_text"].config | {
        "attention_k_eq_v": True, "num_key_value_heads": 4, "num_global_key_value_heads": 2,
        "num_kv_shared_layers": 0,
    }  # fmt: skip
    rotary = rotary_of(Family("gemma4_text", more, layers=("h2o",) * 6).build_config())
    assert rotary.rotated_layers == {0, 2, 4, 5}


@pytest.mark.parametrize("name", [name for name in WITHOUT_ROTARY if name in FAMILIES])
def test_what_has_none(name):
    with pytest.raises(UnsupportedError, match=r"no rotary position embedding|is not known"):
        rotary_of(FAMILIES[name].build_config())


def test_layers_without_positions():
    """Some layers of SmolLM3 and all full-attention layers of Cohere 2 have no rotary positions."""
    smollm3 = Family("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, layers=("h2o",) * 4)
    assert rotary_of(smollm3.build_config()).rotated_layers == {0, 2}
    assert rotary_of(AutoConfig.for_model("cohere2", num_hidden_layers=4)).rotated_layers == set()


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("hunyuan_v1_dense", {}),  # it multiplies rotated elements by weights
        (
            "ministral3",  # its queries are scaled by their positions, from 300 on
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "llama_4_scaling_beta": 0.5,
                    "original_max_position_embeddings": 300,
                }
            },
        ),
        ("llama4_text", {"no_rope_layers": [1, 0], "floor_scale": 300}),  # likewise, unrotated
    ],
)
def test_a_model_that_does_more_than_turn(name, more):
    reason = "not known: (layer 0 does more|.*apply_rotary_emb takes other angles)"
    with pytest.raises(UnsupportedError, match=f"its rotation of keys is {reason}"):
        rotary_of(Family(name, more).build_config())


def test_a_proof_is_made_once_and_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(model_rotary, "_found", {})
    before = set(AttentionInterface._global_mapping)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    rotary_of(FAMILIES["llama"].build_config())
    assert torch.equal(torch.rand(1), expected)
    assert set(AttentionInterface._global_mapping) == before
    monkeypatch.setattr(model_rotary, "attended", lambda *_: 1 / 0)
    rotary_of(FAMILIES["llama"].build_config())


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"attention": torch.nn.Linear}, "its Linear cannot be run"),
        ({"embedding": torch.nn.Linear}, "Linear cannot be created"),
    ],
)
def test_what_is_not_as_expected_says_so(monkeypatch, other, words):
    parts = rotary_parts.parts_of(FAMILIES["llama"].build_config())
    monkeypatch.setattr(model_rotary, "_found", {})
    monkeypatch.setattr(model_rotary, "parts_of", lambda _: parts._replace(**other))
    with pytest.raises(
        UnsupportedError, match=f"llama: its rotation of keys is not known: {words}"
    ):
        rotary_of(FAMILIES["llama"].build_config())
