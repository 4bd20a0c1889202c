"""The models of random programs: tiny families, and some that differ in one setting."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.hf import tiny

_TINY = {**tiny.FAMILIES, **tiny.LATENT, **tiny.LATENT_AND_STATES}


def _with(name: str, layers: tuple[str, ...] = (), **config: Any) -> tiny.Family:
    """A family with other numbers in its config."""
    family = _TINY[name]
    return dataclasses.replace(
        family,
        config=family.config | config,
        model_type=family.model_type or name,
        layers=layers or family.layers,
    )


_FULL = {"layer_types": ["full_attention"] * 6}
_ALL = ("h2o", "h2o", "h2o", "none", "none", "none")
FAMILIES = {
    **_TINY,
    "llama, wide": _with("llama", head_dim=32),
    "llava, wide": _with("llava", head_dim=32),
    "gemma3, wide": _with("gemma3", head_dim=32),
    "lfm2, wide": _with("lfm2", head_dim=32, hidden_size=128),
    "gemma3n_text, wide": _with("gemma3n_text", head_dim=32),
    "gemma3n_text, full": _with("gemma3n_text", _ALL, **_FULL),
}
"""Families of tests/hf/tiny.py, some whose heads are wide enough for four bits, and one that shares
keys without a sliding window"""


def model_of(family: str, attention: str = "h2o") -> Any:
    """The model of a family, one for all programs."""
    return tiny.shared(family, attention) if family in _TINY else _built(family, attention)


@functools.cache
def _built(name: str, attention: str) -> Any:
    torch.manual_seed(7)
    family = FAMILIES[name]
    auto = AutoModelForImageTextToText if family.image else AutoModelForCausalLM
    made = auto.from_config(family.build_config()).eval().to(tiny.DEVICE)
    made.set_attn_implementation(attention)
    return made
