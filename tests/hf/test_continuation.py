"""New tokens that contradict what a cache has seen are refused, before anything is stored."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

import h2o
from h2o import H2OCache, H2OConfig, patched
from h2o.compat import HYBRIDS, with_cache
from tests.hf.tiny import FAMILIES, LATENT, batch, greedy, prompts, shared

pytestmark = pytest.mark.timeout(120)

SMALL = {"heavy": 6, "recent": 6}
PLAIN = [name for name, x in (FAMILIES | LATENT).items() if not (x.image or x.weights)]
REFUSED = pytest.raises(ValueError, match="input_ids must be everything seen so far")


def asked(ours, ids, **config):
    """A cache that has read a prompt and answered it."""
    cache = H2OCache(ours.config, **(config or SMALL))
    greedy(ours, {"input_ids": ids}, 5, **with_cache(cache))
    return cache


def held(cache):
    return [layer.slots.keys.clone() for layer in cache.layers if hasattr(layer, "slots")]


@pytest.mark.parametrize("name", PLAIN)
def test_the_same_prompt_again(name):
    """A notebook's cell that is run twice."""
    ours, (ids,) = shared(name), prompts(30)
    cache = asked(ours, ids)
    before = held(cache)
    with REFUSED:
        greedy(ours, {"input_ids": ids}, 5, **with_cache(cache))
    assert cache.get_seq_length() == 34
    assert all(map(torch.equal, held(cache), before))
    cache.reset()
    again = greedy(ours, {"input_ids": ids}, 5, **with_cache(cache))
    expected = greedy(ours, {"input_ids": ids}, 5, **with_cache(H2OCache(ours.config, **SMALL)))
    assert again.tolist() == expected.tolist()


@pytest.mark.parametrize("tokens", [33, 25, 18])
@pytest.mark.parametrize("positions", ["original", "cache_relative"])
def test_a_prompt_shorter_than_what_was_seen(tokens, positions):
    """As templates make it that strip earlier thoughts. 18 of 35 leave a single new token."""
    ours, (ids,) = shared("llama"), prompts(31)
    cache = asked(ours, ids, **SMALL, positions=positions)
    with REFUSED:
        greedy(
            ours, {"input_ids": ids[:, :tokens].repeat(1, 2)[:, :tokens]}, 4, **with_cache(cache)
        )
    assert cache.get_seq_length() == 35


def test_embeddings_of_the_same_prompt_again():
    ours, (ids,) = shared("llama"), prompts(30)
    cache, embedded = asked(ours, ids), ours.get_input_embeddings()(ids)
    with REFUSED:
        greedy(ours, {"inputs_embeds": embedded}, 5, **with_cache(cache))


def test_copies_and_files(tmp_path):
    ours, (ids,) = shared("llama"), prompts(30)
    cache = asked(ours, ids)
    cache.save(tmp_path / "cache.safetensors", ours)
    for copy in (cache.fork(), H2OCache.load(tmp_path / "cache.safetensors", ours)):
        with REFUSED:
            greedy(ours, {"input_ids": ids}, 5, **with_cache(copy))


def test_direct_passes_at_earlier_positions():
    ours, (ids,) = shared("llama"), prompts(30)
    cache = asked(ours, ids)
    with REFUSED:
        ours(ids[:, :1], position_ids=torch.tensor([[3]]), **with_cache(cache))
    ours(ids[:, :1], position_ids=torch.tensor([[34]]), **with_cache(cache))
    assert cache.get_seq_length() == 35


@pytest.mark.parametrize("name", ["llama", *["bamba"] * HYBRIDS])
def test_chunks_are_numbered_as_generate_numbers_them(name):
    """Bamba itself would count each forward pass from 0."""
    ours, (ids,) = shared(name), prompts(40)
    settings = GenerationConfig(prefill_chunk_size=16, max_new_tokens=8, do_sample=False)
    (result,) = h2o.generate_all(
        ours, [ids[0].tolist()], rows=1, generation_config=settings, **SMALL
    )
    cache = H2OCache(ours.config, **SMALL)
    out = ours.generate(ids, generation_config=settings, **with_cache(cache))
    assert result.ids == out[0, 40:].tolist()


def test_a_mask_with_other_pads():
    ours, rows = shared("llama"), prompts(20, 12)
    padded, cache = batch(rows), H2OCache(shared("llama").config, **SMALL)
    mask = padded["attention_mask"]
    new = greedy(ours, padded, 5, **with_cache(cache))
    ids = torch.cat([padded["input_ids"], new, *[new] * 2], 1)
    more = torch.ones_like(ids)
    with pytest.raises(ValueError, match="attention_mask"):
        greedy(ours, {"input_ids": ids, "attention_mask": more}, 3, **with_cache(cache))
    moved = torch.cat([mask.roll(1, 1), more[:, 20:]], 1)
    moved[:, 3] = 0
    with pytest.raises(ValueError, match="attention_mask counts"):
        greedy(ours, {"input_ids": ids, "attention_mask": moved}, 3, **with_cache(cache))
    assert cache.get_seq_length() == 24
    right = torch.cat([mask, more[:, 20:]], 1)
    greedy(ours, {"input_ids": ids, "attention_mask": right}, 3, **with_cache(cache))
    assert cache.get_seq_length() == 37


def test_patched_answers_anew():
    ours, (ids,) = shared("llama"), prompts(30)
    with patched(ours, **SMALL):
        first, second = (greedy(ours, {"input_ids": ids}, 5).tolist() for _ in range(2))
    assert first == second


def test_a_prefix_longer_than_a_prompt():
    ours, (ids,) = shared("llama"), prompts(30)
    cache = asked(ours, ids)
    (result,) = h2o.generate_all(
        ours, [ids[0].tolist()], rows=1, prefix=cache, max_new_tokens=4, **SMALL
    )
    assert "contains the prefix and more" in str(result.error)


@pytest.mark.parametrize("name", ["llama", *LATENT])
@pytest.mark.parametrize("tokens", [1, 9])
def test_a_turn_of_one_token_more_than_the_prompt(name, tokens):
    """What a model would read if it had no cache has as many tokens."""
    ours = shared(name)
    ids, more = prompts(tokens, tokens + 1)
    text = torch.cat([ids, more], dim=1)
    cache, whole = (H2OCache(ours.config, H2OConfig.full()) for _ in range(2))
    with torch.no_grad():
        expected = ours(text, **with_cache(whole)).logits[:, tokens:]
        ours(ids, **with_cache(cache))
        found = ours(more, **with_cache(cache)).logits
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)
