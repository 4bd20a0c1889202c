"""Models that accelerate keeps partly on disk give the same tokens and the same fingerprint."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from h2o import (
    H2OCache,
    calibrate,
    compress_document,
    generate_all,
    model_identity,
    patched,
    simulated,
)
from h2o.compat import with_cache
from h2o.evaluation.generation import time_tokens
from h2o.hf.model_traits.wrappers import input_device
from h2o.models import embedded_folder
from tests.hf.drive import feed, new_cache
from tests.hf.tiny import FAMILIES, batch, greedy, model, prompts, slow_if
from tests.inputs import drifting

SMALL = {"heavy": 6, "recent": 6}
ALL = (*(f"model.{x}" for x in ("embed_tokens", "layers.0", "layers.1", "norm")), "lm_head")


def spread(*on_disk):
    """A device_map of the tiny llama with these parts on disk."""
    return dict.fromkeys((*ALL, "model.rotary_emb"), "cpu") | dict.fromkeys(on_disk, "disk")


MAPS = {
    "a layer": spread("model.layers.1"),
    "layers and head": spread("model.layers.0", "model.layers.1", "lm_head"),
    "all": spread(*ALL),
}


NAMES = [x for x in ("qwen3_next", "qwen3_5", "bamba", "lfm2", "falcon_h1") if x in FAMILIES]
"""Families with states of gated delta rules, Mamba 2 or convolutions, in layers without keys or in
one layer with them."""


FIRST = ("all", "lfm2", "falcon_h1")
"""Cases that are not slow: the map with most parts on disk, a family with states in layers without
keys, and one with both in a layer."""


def mapped(name, ours):
    """One of MAPS, or a device_map that puts two of three layers of a family on disk."""
    if name in MAPS:
        return MAPS[name]
    parts = [f"model.{x}" for x, _ in ours.base_model.named_children() if x != "layers"]
    layers = {
        f"model.layers.{i}": "cpu" if i % 3 == 2 else "disk"
        for i in range(len(ours.base_model.layers))
    }
    return dict.fromkeys((*parts, "lm_head"), "cpu") | layers


def everything(ours):
    """Tokens generated with a cache, with generate_all, from a compressed document and with
    patched(); logits of a simulation."""
    inputs = batch(prompts(40, 33))
    cache = H2OCache(ours.config, **SMALL)
    tokens = [greedy(ours, inputs, 9, **with_cache(cache)).tolist()]
    asked = [ids[0].tolist() for ids in prompts(40, 33, 7)]
    rows = generate_all(ours, asked, **SMALL, rows=2, max_new_tokens=9)
    tokens += [result.ids for result in rows]
    document, question = prompts(30, 4)
    cache = compress_document(ours, document, **SMALL, readings=2, repeat=torch.tensor([[5, 6]]))
    ids = torch.cat([document, question], dim=1)
    tokens.append(greedy(ours, {"input_ids": ids}, 9, **with_cache(cache)).tolist())
    with patched(ours, heavy=0.2, recent=0.1, min_tokens=0):
        tokens.append(greedy(ours, inputs, 9).tolist())
    with simulated(ours, **SMALL):
        return tokens, ours(**inputs, use_cache=False).logits


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # accelerate keeps files open
@pytest.mark.filterwarnings("ignore:You are calling .generate")  # the model's device may be meta
@pytest.mark.parametrize("name", [slow_if(x not in FIRST, x) for x in (*MAPS, *NAMES)])
def test_parts_on_the_disk(tmp_path, name):
    plain = model("llama" if name in MAPS else name)
    plain.save_pretrained(tmp_path / "model")
    ours = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        attn_implementation="h2o",
        device_map=mapped(name, plain),
        offload_folder=tmp_path / "offloaded",
    )
    assert any(parameter.is_meta for parameter in ours.parameters())
    (tokens, logits), (expected, wanted) = everything(ours), everything(plain)
    assert tokens == expected
    assert torch.equal(logits, wanted)
    assert model_identity.model_fingerprint(ours) == model_identity.model_fingerprint(plain)
    (ids,) = prompts(30)
    cache = H2OCache(ours.config, **SMALL)
    ours(ids[:, :24], **with_cache(cache))
    cache.save(tmp_path / "cache.safetensors", ours)
    loaded = H2OCache.load(tmp_path / "cache.safetensors", ours)
    how = {"position_ids": torch.arange(24, 30)[None]}
    got, expected = (ours(ids[:, 24:], **how, **with_cache(x)).logits for x in (loaded, cache))
    assert torch.equal(got, expected)


def test_another_model_on_the_disk_is_another_one(tmp_path):
    """Two models must have different fingerprints even when their tensors are offloaded and have no
    numbers."""
    identities = set()
    for factor in (1.0, 1.5):
        ours = model("llama")
        ours.lm_head.weight.mul_(factor)
        ours.save_pretrained(tmp_path / str(factor))
        offloaded = AutoModelForCausalLM.from_pretrained(
            tmp_path / str(factor),
            device_map=spread(*ALL),
            offload_folder=tmp_path / f"offloaded-{factor}",
        )
        identities.add(model_identity.model_fingerprint(offloaded))
    assert len(identities) == 2


@pytest.mark.parametrize("trace", [False, True])
def test_what_is_held_follows_the_keys(trace):
    """The tensors of a layer must move to the device of its new keys, because a file does not
    record devices."""
    cache = new_cache(**SMALL, trace=trace)
    feed(cache, drifting(3, B=1, N=20), [20])
    layer = cache.layers[0]
    key = torch.empty(1, 2, 1, 16, device="meta")
    layer.update(key, key)
    tensors = [x for x in layer.slots if x is not None]
    tensors += [layer.trace.real, layer.trace.evicted_after] if trace else []
    assert {x.device.type for x in tensors} == {"meta"}
    assert layer.seen == 20


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_default_model(tmp_path):
    folder = str(embedded_folder())
    config = AutoConfig.from_pretrained(folder, num_hidden_layers=4)
    where = {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(4)}
    where |= {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    where |= {"lm_head": "cpu"}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("The keeper of the lighthouse wrote a letter every evening. " * 6,
                       return_tensors="pt")  # fmt: skip
    tokens = []
    for more in ({}, {"device_map": where, "offload_folder": tmp_path}):
        ours = AutoModelForCausalLM.from_pretrained(
            folder, config=config, attn_implementation="h2o", **more
        )
        cache = H2OCache(ours.config, heavy=16, recent=16)
        tokens.append(greedy(ours, inputs, 24, **with_cache(cache)).tolist())
    assert tokens[0] == tokens[1]


@pytest.mark.filterwarnings("ignore:You are calling .generate")
@pytest.mark.parametrize("name", ["llama", *(x for x in ("qwen2_vl", "llava") if x in FAMILIES)])
def test_all_parts_in_host_memory(name):
    """A text prompt of a model whose weights accelerate brings to the device module by module. Its
    parameters are on the device "meta", also those of the part that reads images."""
    accelerate = pytest.importorskip("accelerate")
    plain, ours = model(name), model(name)
    accelerate.cpu_offload(ours, torch.device("cpu"))
    assert all(parameter.is_meta for parameter in ours.parameters())
    assert input_device(ours) == torch.device("cpu")
    (tokens, logits), (expected, wanted) = everything(ours), everything(plain)
    assert tokens == expected
    assert torch.equal(logits, wanted)
    (ids,) = prompts(40)
    caches = [DynamicCache(config=x.config.get_text_config()) for x in (ours, plain)]
    after = []
    for each, full in zip((ours, plain), caches, strict=True):
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        new = greedy(each, inputs, 4, **with_cache(full))
        cache = H2OCache.from_dynamic_cache(full, each, **SMALL)
        longer = torch.cat([ids, new, ids[:, :3]], 1)
        inputs = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
        after.append(greedy(each, inputs, 4, **with_cache(cache)).tolist())
    assert after[0] == after[1]
    text = ids[0].repeat(8)
    shares = [
        calibrate(x, text, window=64, windows=2, fractions=[0.2]).shares for x in (ours, plain)
    ]
    assert shares[0] == shares[1]


def test_the_speed_of_a_model_in_host_memory():
    """`h2o recommend` must time an offloaded model on the device that computes."""
    accelerate = pytest.importorskip("accelerate")
    ours, (ids,) = model("llama"), prompts(20)
    accelerate.cpu_offload(ours, torch.device("cpu"))
    times = time_tokens(ours, ids, H2OCache(ours, **SMALL), max_new_tokens=3, min_new_tokens=3)
    assert len(times.tokens) == 3
