"""torch's default device and default dtype change nothing in h2o.

tests/test_layering.py checks the sources for calls that make tensors. Here these calls run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import h2o
from h2o import H2OCache, H2OConfig, patched, simulated
from h2o.compat import with_cache
from h2o.hf.families.layer_kinds import HYBRIDS
from h2o.hf.families.shared_keys import SHARES_KEYS
from tests.devices import forget_default_device
from tests.hf.modes import MODES, policy
from tests.hf.tiny import FAMILIES, LATENT, batch, prompts, shared

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
OTHERS = ["deepseek_v3"] * bool(LATENT) + ["lfm2", "qwen3_next"] * HYBRIDS
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


SETTINGS = {"device": {"device": "meta"}, "dtype": {"dtype": torch.bfloat16}}


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


def test_patched_simulated_and_copies(tmp_path):
    ours = shared("llama")

    def answers():
        with patched(ours, heavy=6, recent=6) as patch:
            logits = [ours(**inputs()).logits]
            assert patch.cache.fork().kept(0).positions.shape[-1] == 12
        patch.cache.save(tmp_path / "cache", model=ours)
        loaded = H2OCache.load(tmp_path / "cache", ours)
        ids = inputs()["input_ids"][:, :1]
        logits += [ours(ids, **with_cache(x)).logits for x in (loaded, patch.cache)]
        return [*logits, *held(loaded)]

    alike(answers)


@pytest.mark.parametrize("score_by", ["sum", "mean-echo"])
def test_simulated(score_by):
    ours = shared("llama")
    more = {"score_by": score_by, "value_weighted": score_by == "sum", "prompt_length": 12}

    def answers():
        with simulated(ours, **ECHO, **more, trace=True) as simulation:
            logits = ours(**inputs(), use_cache=False).logits
            return [logits, simulation.evicted_at(0)]

    alike(answers)


def test_read():
    ours, document = shared("llama"), prompts(40)[0]
    question = torch.tensor([[5, 9, 2]])

    def answers():
        cache = h2o.compress_document(ours, document, heavy=12, recent=8, readings=2, repeat=[5, 9])
        return [*held(cache), ours(question, **with_cache(cache)).logits]

    alike(answers)


def test_generate_all():
    ours = shared("llama")
    texts = [[2, 5, 9, 7] * 5, prompts(23)[0], torch.arange(3, 20, dtype=torch.int32)]

    def answers():
        results = h2o.generate_all(ours, texts, rows=2, heavy=6, recent=6, max_new_tokens=5)
        return [result.ids for result in results]

    alike(answers)


def test_from_dynamic_cache():
    ours = shared("llama")
    ids, mask = inputs()["input_ids"], inputs()["attention_mask"]

    def answers():
        full = DynamicCache(config=ours.config)
        ours(ids, attention_mask=mask, **with_cache(full))
        cache = H2OCache.from_dynamic_cache(
            full, ours.config, heavy=6, recent=6, attention_mask=mask.tolist()
        )
        longer = torch.cat([mask, mask[:, -1:]], dim=1)
        return [ours(ids[:, :1], attention_mask=longer, **with_cache(cache)).logits]

    alike(answers)
