"""Models on a device that the core has no kernels for: nothing waits for the device or leaves it.

The device does not exist (tests.devices). These tests show that every call runs without reading a
number from the device. test_torch_backend.py and `make test-torch-backend` check the results on
the CPU.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import h2o
from h2o import H2OCache, ops
from h2o.backends.torch_backend import step
from h2o.compat import CACHE, with_cache
from h2o.hf.layers.layer import H2OLayer
from tests.devices import WAITS, moved, on_fake_device
from tests.hf.modes import POLICIES
from tests.hf.test_families import ALIKE
from tests.hf.tiny import FAMILIES, WITH_STATES, llama, model, slow_if

if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    pytest.skip(
        "before torch 2.10 a tensor without memory cannot be shown", allow_module_level=True
    )

OWN_KERNELS = {"gpt_oss", "mixtral", "qwen3_moe", *WITH_STATES}
"""Families whose experts or convolutions run in kernels that need a real device, or whose keys are
linked to their layer in a way that fake tensors do not support."""

SUPPORTED = [
    name for name in FAMILIES if "h2o" in FAMILIES[name].layers and name not in OWN_KERNELS
]


@contextlib.contextmanager
def there(
    name: str = "", attention: str = "h2o", dtype: torch.dtype = torch.float32
) -> Iterator[Any]:
    """A family's model on the device, or a llama of a single layer, because fake tensors take a
    hundred times as long. Tensors that are made in the block are on the device too."""
    ours = (model(name) if name else llama(1)).to(dtype)
    ours.set_attn_implementation(attention)
    with on_fake_device():
        yield moved(ours)


def ids(B: int, n: int) -> Tensor:
    return torch.ones(B, n, dtype=torch.long)


def converse(ours, cache, mask: Tensor | None = None) -> Tensor:
    """Run a prompt, a chunk and a decode step. Returns the last logits."""
    for n in (20, 4, 1):
        if mask is not None and mask.shape[1] < cache.get_seq_length() + n:
            mask = torch.cat([mask, mask.new_ones(len(mask), n)], dim=1)
        out = ours(ids(2, n), attention_mask=mask, **with_cache(cache))
    return out.logits


def on_the_device(cache) -> bool:
    slots = [layer.slots for layer in cache.layers if isinstance(layer, H2OLayer)]
    return all(x.device.type == "cuda" for each in slots for x in each if x is not None)


# The slow families differ in transformers' code only, and use a cache like another family.
@pytest.mark.parametrize("name", [slow_if(x in ALIKE, x) for x in SUPPORTED])
def test_families(name):
    with there(name) as ours:
        cache = H2OCache(ours.config, heavy=6, recent=6)
        logits = converse(ours, cache)
        assert logits.device.type == "cuda"
        assert on_the_device(cache)
        held = {layer.slots.keys.shape[2] for layer in cache.layers if isinstance(layer, H2OLayer)}
        assert held == {13}


# The slow policies differ from others in their numbers only.
@pytest.mark.parametrize(
    "chosen", [slow_if(x in ("h2o", "local", "heavy-only", "streaming"), x) for x in POLICIES]
)
def test_policies(chosen):
    config = replace(POLICIES[chosen], ratio_of="prompt")
    if config.head_shares is not None:
        config = replace(config, head_shares=[[0.4, 1.6]])
    with there(dtype=torch.bfloat16) as ours:
        cache = H2OCache(ours.config, config)
        converse(ours, cache)
        assert on_the_device(cache)


@pytest.mark.parametrize(
    ("shares", "kv_dtype"),
    [(None, "int8"), ([[0.4, 1.6]], None)],
    ids=["even", "shares"],
)
def test_slots_that_grow(shares, kv_dtype):
    """Growing slots, with a trace or without, must not read from the device."""
    with there() as ours:
        more = {"head_shares": shares, "kv_dtype": kv_dtype, "trace": shares is None}
        cache = H2OCache(ours.config, heavy=12, recent=12, **more)
        ours(ids(2, 4), **with_cache(cache))
        first = cache.layers[0].slots.keys.shape
        while cache.layers[0].slots.keys.shape == first:
            assert cache.get_seq_length() < 24
            ours(ids(2, 1), **with_cache(cache))


@pytest.fixture(autouse=True)
def _texts_are_not_compared(monkeypatch):
    """Skip the comparison of masks and positions with the text seen so far, for which each prompt
    and turn waits once. Fake tensors have no numbers to compare."""
    monkeypatch.setattr(h2o.hf.cache.cache, "plan_pass", lambda *_: None)


@pytest.mark.parametrize("name", ["llama", slow_if(True, "opt"), "gemma3"])
def test_padding(name):
    """With budgets in tokens the lengths of padded rows must not be read from the device."""
    with there(name) as ours:
        cache = H2OCache(ours.config, heavy=6, recent=6, sinks=1)
        converse(ours, cache, torch.ones(2, 20, dtype=torch.long))
        assert on_the_device(cache)


def test_fractions_of_padded_rows_are_read_once():
    fractions = {"heavy": 0.3, "recent": 0.3, "min_tokens": 0, "ratio_of": "prompt"}
    with there() as ours:
        mask = torch.ones(2, 20, dtype=torch.long)
        with pytest.raises(RuntimeError, match=WAITS):
            converse(ours, H2OCache(ours.config, **fractions), mask)
        cache = H2OCache(ours.config, **fractions, prompt_length=[20, 17])
        converse(ours, cache, mask)


def test_growing_budgets_are_read_when_they_grow():
    """A fraction of the text so far counts the tokens of each row on the device, but only in the
    passes in which it grows."""
    with there() as ours:
        cache = H2OCache(ours.config, heavy=0.3, recent=0.3, min_tokens=0)
        ours(ids(2, 100), **with_cache(cache))
        for _ in range(cache.guard.state.grows_at - 101):
            ours(ids(2, 1), **with_cache(cache))
        with pytest.raises(RuntimeError, match=WAITS):
            ours(ids(2, 1), **with_cache(cache))


def test_beams():
    with there() as ours:
        cache = H2OCache(ours.config, heavy=6, recent=6, head_shares=[[0.5, 1.5]])
        converse(ours, cache)
        cache.reorder_cache(torch.zeros(2, dtype=torch.long))
        ours(ids(2, 1), **with_cache(cache))
        cache.batch_repeat_interleave(3)
        ours(ids(6, 1), **with_cache(cache))
        cache.batch_select_indices(torch.zeros(4, dtype=torch.long))
        ours(ids(4, 1), **with_cache(cache))
        assert on_the_device(cache)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_patched(name):
    with there(name, "sdpa") as ours:
        with h2o.patched(ours, heavy=6, recent=6, score_by="mean", decay=0.9) as patch:
            out = ours(ids(2, 20))
            for _ in range(3):
                out = ours(ids(2, 1), **with_cache(out[CACHE]))
            assert on_the_device(patch.cache)
            assert out.logits.device.type == "cuda"


@pytest.mark.parametrize(
    "parameters",
    [
        {"kv_dtype": "int8", "sinks": 2, "decay": 0.9},
        slow_if(True, {}),  # the case above covers these two
        slow_if(True, {"kv_dtype": "int8"}),
    ],
)
def test_simulated(parameters):
    """A simulation must not read from the device. The test passes a mask, because without one
    transformers itself reads from the device to detect packed texts."""
    with there(attention="sdpa") as ours:
        mask = torch.ones(2, 12, dtype=torch.long)
        with h2o.simulated(
            ours, heavy=3, recent=3, prompt_length=4, trace=True, **parameters
        ) as run:
            out = ours(ids(2, 12), attention_mask=mask, use_cache=False)
        assert out.logits.device.type == "cuda"
        assert run.evicted_at(0).device.type == "cuda"


def test_shapes_are_fixed():
    """A step must run the same operations on the same shapes, however much was seen before."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.seen.append((str(func), getattr(out, "shape", None)))
            return out

    with there() as ours:
        cache = H2OCache(ours.config, heavy=6, recent=6)
        converse(ours, cache)
        histories = []
        for _ in range(3):
            with Recorder() as recorder:
                ours(ids(2, 1), **with_cache(cache))
            histories.append(recorder.seen)
        assert len(histories[0]) > 100
        assert histories[0] == histories[1] == histories[2]


# ---- Reads are noticed -------------------------------------------------------------------------

SEEDS = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x.any()),
    "int": lambda x: int(x.max()),
    "boolean index": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "another device": lambda x: x + torch.ones(x.shape, dtype=x.dtype, device="cpu"),
}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_read_is_caught(seed):
    words = "devices" if seed == "another device" else WAITS
    with on_fake_device(), pytest.raises(RuntimeError, match=words):
        SEEDS[seed](torch.ones(4, dtype=torch.int32))


def test_a_read_in_the_step_is_caught(monkeypatch):
    with there() as ours:
        cache = H2OCache(ours.config, heavy=6, recent=6)
        ours(ids(2, 20), **with_cache(cache))
        honest = step.lowest

        def seeded(keys: Tensor, positions: Tensor) -> Tensor:
            positions.sum().item()
            return honest(keys, positions)

        monkeypatch.setattr(step, "lowest", seeded)
        with pytest.raises(RuntimeError, match=WAITS):
            ours(ids(2, 1), **with_cache(cache))


@pytest.mark.filterwarnings("ignore:the torch backend is used:RuntimeWarning")  # kernels, no driver
def test_devices_that_differ_are_told():
    slots = ops.new_slots(torch.ones(1, 2, 1, 8), 5, 2, 2)
    with on_fake_device():
        x = torch.ones(1, 2, 1, 8)
    with (
        pytest.raises(ValueError, match=re.escape("slots.keys: is on CPU device 0, but query on")),
    ):
        ops.step(x, x, x, slots)


def test_a_device_without_float64():
    with on_fake_device("mps"):
        x = torch.ones(1, 2, 1, 8)
        slots = ops.new_slots(x, 5, 2, 2)
        assert slots.evicted_score.dtype == torch.float32
        ops.step(x, x, x, slots)
