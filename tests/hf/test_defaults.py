"""torch's default device and default dtype change nothing in h2o."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

import h2o
from h2o import H2OCache, H2OConfig
from h2o.hf.model_traits.shared_keys import SHARES_KEYS
from tests.devices import forget_default_device
from tests.hf.modes import MODES, policy
from tests.hf.tiny import FAMILIES, batch, prompts, shared

ECHO = {"heavy": 6, "recent": 6, "sinks": 1}
CACHES = {
    "h2o": {},
    "head_shares": {},
    "int8": {},
    "fractions": {},
    "cache_relative": {"positions": "cache_relative"},
    "compileable": {},
    "echo": {"score_by": "mean-echo", "head_shares": "echo"},
    "mean-echo": {"score_by": "mean-echo"},
}
OTHERS = ["deepseek_v3", "lfm2", "qwen3_next"]
OTHERS += ["gemma4_text"] * SHARES_KEYS
ROWS = (17, 23, 30)


@contextlib.contextmanager
def settings(device: str | None = None, dtype: torch.dtype = torch.float32):
    """Set torch's default device and dtype, and restore them afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        forget_default_device()
        torch.set_default_dtype(before)


SETTINGS = {
    "device": {"device": "meta"},
    "dtype": {"dtype": torch.bfloat16},
    "wide dtype": {"dtype": torch.float64},
}


def without_windows(name):
    """A model with full attention in place of sliding windows, because transformers' own layers for
    these make tensors on the default device."""
    family = FAMILIES.get(name)
    if family is None or "sliding" not in family.layers:
        return shared(name)
    kinds = {"layer_types": ["full_attention"] * len(family.layers)}
    config = dataclasses.replace(family, config=family.config | kinds).build_config()
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="h2o").eval()


@functools.cache
def inputs():
    return batch(prompts(*ROWS))


def alike(answers):
    """Assert that `answers` returns the same under each of the settings as without them."""
    expected = answers()
    for setting in SETTINGS.values():
        with settings(**setting):
            got = answers()
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b, setting


def by_hand(ours, cache):
    """Decode without generate(), which itself makes tensors on torch's default device."""
    tokens = MODES["model(...) by hand"](ours, inputs(), lambda: cache)
    return [tokens, str(cache.report()), *held(cache)]


def held(cache):
    """Positions and scores of the first H2O layer."""
    first = next(i for i, x in enumerate(cache.layers) if isinstance(x, h2o.H2OLayer))
    return [cache.kept(first).positions, cache.kept(first).scores]


@pytest.mark.parametrize("kind", CACHES)
def test_every_cache_reads_and_decodes(kind):
    ours, how = shared("llama"), CACHES[kind]
    config = H2OConfig(**ECHO, **how) if how else policy(kind.replace("compileable", "h2o"), ours)
    compileable = kind == "compileable"
    alike(
        lambda: by_hand(
            ours,
            H2OCache(ours.config, config, prompt_length=list(ROWS), compileable=compileable),
        )
    )


@pytest.mark.parametrize("name", OTHERS)
def test_other_families(name):
    """States, latents and keys that layers share must not follow the default device or dtype."""
    ours = without_windows(name)
    alike(lambda: by_hand(ours, H2OCache(ours.config, heavy=6, recent=6)))


def test_documents_read_twice():
    ours, repeat = shared("llama"), torch.tensor([5, 9])
    document = prompts(30)[0]
    alike(
        lambda: held(
            h2o.compress_document(ours, document, heavy=8, recent=8, readings=2, repeat=repeat)
        )
    )
