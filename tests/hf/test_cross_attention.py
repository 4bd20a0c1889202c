"""Mllama: layers that attend to images keep the images' keys, and the others are H2O layers.

test_families.py crosses Mllama with modes and policies, and test_images.py tests its images.
"""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from h2o import H2OCache, H2OConfig, UnsupportedError, enable, generate_all, patched, supports
from h2o.compat import CROPS_TO_LENGTH, with_cache
from tests.hf.tiny import batch, greedy, model, prompts, shared, with_image

NAME, SMALL, IMAGES = "mllama", {"heavy": 6, "recent": 6}, 1
"""IMAGES: index of the one layer, of three, that attends to images."""


def illustrated(*lengths, **how):
    return with_image(NAME, batch(prompts(*lengths, **how)))


def read(ours, inputs, cache):
    return ours(**inputs, **with_cache(cache)).logits


def image_of(cache):
    layer = cache.layers[IMAGES]
    return layer.keys, layer.values


def test_what_is_said_of_it():
    ours = shared(NAME)
    assert "2 of 3 layers by h2o, 1 attend to images" in str(supports(ours))
    cache = H2OCache(ours.config, **SMALL)
    greedy(ours, illustrated(17, 23), 4, **with_cache(cache))
    keys, values = image_of(cache)
    report = cache.report().layers[IMAGES]
    assert report.kind == "cross"
    assert report.bytes_held == report.bytes_full == keys.nbytes + values.nbytes > 0
    with pytest.raises(ValueError, match=r"layer 1 attends to images.* h2o are \[0, 2\]"):
        cache.kept(IMAGES)
    assert [len(x) for x in list(cache)] == [3] * 3


@pytest.mark.skipif(CROPS_TO_LENGTH, reason="masks of images are cut wrongly there")
def test_an_image_may_come_later_or_not_at_all():
    ours, theirs = shared(NAME), shared(NAME, "sdpa")
    first, inputs = prompts(9)[0], illustrated(20, seed=1)
    cache, full = H2OCache(ours.config, H2OConfig.full()), DynamicCache(config=ours.config)
    for one, of in ((ours, cache), (theirs, full)):
        read(one, {"input_ids": first}, of)
    assert image_of(cache) == (None, None)
    assert cache.fork().layers[IMAGES].get_seq_length() == 0
    inputs["attention_mask"] = torch.ones(1, 29, dtype=torch.long)
    for _ in range(2):  # the second image is seen together with the first
        got, expected = read(ours, inputs, cache), read(theirs, inputs, full)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
        inputs["attention_mask"] = torch.ones(1, 49, dtype=torch.long)
        shown = inputs["cross_attention_mask"]
        inputs["cross_attention_mask"] = torch.cat([torch.ones_like(shown), shown], 2)
    assert torch.equal(image_of(cache)[0], full.layers[IMAGES].keys)
    cache.reset()
    assert image_of(cache) == (None, None)
    assert read(ours, {"input_ids": first}, cache).shape[1] == 9


def test_an_image_without_a_mask_is_seen_whole():
    """Without a mask every token must attend to the whole image, as under "eager". Under "sdpa"
    this attention would be causal."""
    ours, theirs = shared(NAME), shared(NAME, "eager")
    for length in (20, 5):  # as many as the image has keys
        inputs = illustrated(length + 12)
        del inputs["cross_attention_mask"]
        cache = H2OCache(ours.config, H2OConfig.full())
        expected = read(theirs, inputs, DynamicCache(config=ours.config))
        torch.testing.assert_close(read(ours, inputs, cache), expected, rtol=0, atol=1e-4)
        assert image_of(cache)[0].shape[2] == 5


@pytest.mark.skipif(CROPS_TO_LENGTH, reason="recorded from 5.16 on by minus a number")
def test_text_goes_back_and_the_image_stays():
    ours, inputs = shared(NAME), illustrated(20)
    cache, expected = H2OCache(ours.config, **SMALL), H2OCache(ours.config, **SMALL)
    cache.activate_past_recording()
    read(ours, inputs, cache)
    cache.crop(-3)
    shorter = inputs | {name: inputs[name][:, :17] for name in ("input_ids", "attention_mask")}
    read(ours, shorter | {"cross_attention_mask": inputs["cross_attention_mask"][:, :17]}, expected)
    step = {"input_ids": inputs["input_ids"][:, 17:18]}
    torch.testing.assert_close(read(ours, step, cache), read(ours, step, expected))
    inputs["input_ids"] = inputs["input_ids"][:, -4:].repeat(1, 6)
    inputs |= {"attention_mask": torch.ones_like(inputs["input_ids"])}
    inputs["cross_attention_mask"] = torch.ones(1, 24, 1, 1, dtype=torch.long)
    plain = greedy(shared(NAME, "sdpa"), inputs, 12)
    cache = H2OCache(ours.config, H2OConfig.full())
    looked_up = greedy(ours, inputs, 12, **with_cache(cache), prompt_lookup_num_tokens=3)
    assert looked_up.tolist() == plain.tolist()


def test_a_dynamic_cache_without_an_image_is_taken_over():
    ours, inputs, (more,) = shared(NAME), illustrated(20), prompts(4, seed=1)
    full = DynamicCache(config=ours.config)
    read(ours, {"input_ids": inputs["input_ids"]}, full)
    cache = H2OCache.from_dynamic_cache(full, ours.config, H2OConfig.full())
    again = {"input_ids": torch.cat([inputs["input_ids"], more], dim=1)}
    got = greedy(ours, again, 8, **with_cache(cache))
    assert got.tolist() == greedy(ours, again, 8, **with_cache(full)).tolist()


def test_enabled_patched_and_with_beams():
    ours, inputs = model(NAME), illustrated(17, 23)
    expected = greedy(ours, inputs, 8, **with_cache(H2OCache(ours.config, **SMALL)), num_beams=3)
    with patched(ours, **SMALL) as patch:
        assert greedy(ours, inputs, 8, num_beams=3).tolist() == expected.tolist()
        assert patch.cache.report().layers[IMAGES].bytes_held > 0
    patch = enable(ours, **SMALL)
    assert greedy(ours, inputs, 8, num_beams=3).tolist() == expected.tolist()
    patch.undo()


def test_what_does_not_go_with_images():
    with pytest.raises(UnsupportedError, match="full attention or states in all"):
        list(generate_all(shared(NAME), [[5, 6, 7]], rows=2, **SMALL))
