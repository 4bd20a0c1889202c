"""torch's global settings, a default device and a default dtype, are not h2o's business."""

from __future__ import annotations

import contextlib

import pytest
import torch

from h2o import H2OCache, H2OConfig, patched, simulated
from tests.devices import forget_default_device
from tests.hf.modes import MODES, policy
from tests.hf.tiny import batch, model, prompts

CACHES = {
    "h2o": {},
    "shares": {},
    "int8": {},
    "merge": {},
    "rolled": {"positions": "rolled"},
    "compileable": {"compileable": True},
}


@contextlib.contextmanager
def settings(device: str | None = None, dtype: torch.dtype = torch.float32):
    """torch.set_default_device and set_default_dtype, put back afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        forget_default_device()
        torch.set_default_dtype(before)


SETTINGS = {"device": {"device": "meta"}, "dtype": {"dtype": torch.bfloat16}}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", CACHES)
def test_every_cache_reads_and_decodes(kind, setting):
    """By hand: generate() itself makes tensors on torch's default device."""
    ours, inputs = model("llama"), batch(prompts(17, 23, 30))
    how = dict(CACHES[kind])
    config = policy(kind if kind in ("h2o", "shares", "int8", "merge") else "h2o", ours)
    if "positions" in how:
        config = H2OConfig(heavy=6, recent=6, positions="rolled")

    def text():
        cache = H2OCache(
            ours.config, config, prompt_length=[17, 23, 30], compileable="compileable" in how
        )
        tokens = MODES["model(...) by hand"](ours, inputs, lambda: cache)
        return tokens.tolist(), str(cache.report()), cache.kept(0).positions.tolist()

    expected = text()
    with settings(**SETTINGS[setting]):
        assert text() == expected


@pytest.mark.parametrize("setting", SETTINGS)
def test_patched_simulated_and_copies(setting):
    ours, inputs = model("llama"), batch(prompts(17, 23, 30))

    def answers():
        with torch.no_grad(), patched(ours, heavy=6, recent=6) as patch:
            logits = [ours(**inputs).logits]
            assert patch.cache.fork().kept(0).positions.shape[-1] == 12
        with (
            torch.no_grad(),
            simulated(ours, heavy=6, recent=6, value_weighted=True, trace=True) as simulation,
        ):
            logits.append(ours(**inputs, use_cache=False).logits)
            evicted = simulation.evicted_at(0)
        return [*logits, evicted]

    expected = answers()
    with settings(**SETTINGS[setting]):
        assert all(torch.equal(a, b) for a, b in zip(answers(), expected, strict=True))
