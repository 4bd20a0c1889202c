"""Models that store the offset between positions and number of tokens outside the cache. An
H2OCache carries the offset along, so the offset of another text is never used."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

import h2o
from h2o import H2OCache, H2OConfig
from h2o.compat import with_cache
from h2o.hf.conversation.state import RowState
from tests.hf.tiny import FAMILIES, batch, greedy, model, prompts, with_image

pytestmark = pytest.mark.timeout(120)

NAMES = [name for name, x in FAMILIES.items() if "image_grid_thw" in x.image]


def picture(name, seed=0):
    return with_image(name, batch(prompts(40, seed=seed)))


def asked(ours, read, cache):
    """Answer to a question that follows `read`, the tokens that `cache` has seen."""
    more = prompts(6, seed=9)[0] % 90 + 2
    ids = torch.cat([read, more], 1)
    return greedy(ours, {"input_ids": ids}, 8, **with_cache(cache)).tolist()


def answered(name):
    """A model and a cache that have seen a picture, all tokens seen, and the next answer."""
    ours = model(name)
    cache = H2OCache(ours.config, H2OConfig.full())
    inputs = picture(name)
    new = greedy(ours, inputs, 4, **with_cache(cache))
    read = torch.cat([inputs["input_ids"], new], 1)
    assert int(ours.model.rope_deltas) != 0
    expected = asked(ours, read, cache.fork())
    forgot = copy.deepcopy(ours)
    forgot.model.rope_deltas = torch.zeros(1, 1, dtype=torch.long)
    unknown = cache.fork()
    unknown.guard.put(unknown.guard.state._replace(rows=(RowState(None),)))
    assert asked(forgot, read, unknown) != expected, "the number must matter"
    return ours, cache, read, expected


@pytest.mark.parametrize("name", NAMES)
def test_a_file_has_it(name, tmp_path):
    ours, cache, read, expected = answered(name)
    cache.save(tmp_path / "cache.safetensors")
    fresh = model(name)
    assert fresh.model.rope_deltas is None
    assert asked(fresh, read, H2OCache.load(tmp_path / "cache.safetensors", fresh)) == expected
    assert asked(ours, read, cache) == expected


@pytest.mark.parametrize("name", NAMES)
def test_texts_in_turn(name):
    """A fork must continue with its own offset after the model has seen another text, without a
    picture or with another kind of cache."""
    ours, cache, read, expected = answered(name)
    texts = prompts(30, seed=3)[0] % 90 + 2
    other = H2OCache(ours.config, H2OConfig.full())
    greedy(ours, {"input_ids": texts}, 4, **with_cache(other))
    assert asked(ours, read, cache.fork()) == expected
    greedy(ours, {"input_ids": texts}, 4, **with_cache(DynamicCache(config=ours.config)))
    assert asked(ours, read, cache.fork()) == expected
    ours(texts, **with_cache(H2OCache(ours.config, H2OConfig.full())))
    two = cache.fork(2)
    more = torch.cat([read, prompts(6, seed=9)[0] % 90 + 2], 1).repeat(2, 1)
    assert greedy(ours, {"input_ids": more}, 8, **with_cache(two)).tolist() == expected * 2


@pytest.mark.parametrize("name", NAMES)
def test_a_text_after_a_picture_is_numbered_from_0(name):
    """A text after a picture must be numbered from 0. The model itself, when called directly, would
    keep the picture's offset."""
    ours, *_ = answered(name)
    texts, fresh = prompts(30, seed=3)[0] % 90 + 2, model(name)
    logits = []
    for one in (ours, fresh):
        cache = H2OCache(one.config, H2OConfig.full())
        one(texts[:, :20], **with_cache(cache))
        logits.append(one(texts[:, 20:], **with_cache(cache)).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_that_another_one_has_filled(name, tmp_path):
    """A converted cache takes the model's offset in its first pass, also after it was a file."""
    ours, *_ = answered(name)
    inputs, full = picture(name), DynamicCache(config=ours.config)
    new = greedy(ours, inputs, 4, **with_cache(full))
    read = torch.cat([inputs["input_ids"], new], 1)
    cache = H2OCache.from_dynamic_cache(full, ours.config, H2OConfig.full())
    cache.save(tmp_path / "cache.safetensors", ours)
    more = torch.cat([read, prompts(6, seed=9)[0] % 90 + 2], 1)
    for one in (H2OCache.load(tmp_path / "cache.safetensors", ours), cache):
        greedy(ours, {"input_ids": more}, 1, **with_cache(one))
        model_number = int(ours.model.rope_deltas)
        assert one.guard.state.row(0).offset == model_number != 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 2])
def test_a_prefix_with_a_picture(name, rows):
    ours, cache, read, expected = answered(name)
    more = prompts(6, seed=9)[0] % 90 + 2
    text = torch.cat([read, more], 1)[0].tolist()
    how = {"rows": rows, "prefix": cache, "max_new_tokens": 8}
    results = h2o.generate_all(ours, [text] * 3, H2OConfig.full(), **how)
    assert [(x.error, x.ids) for x in results] == [(None, expected[0])] * 3


@pytest.mark.parametrize("name", NAMES)
def test_the_same_picture_again(name):
    ours, cache, *_ = answered(name)
    with pytest.raises(ValueError, match="input_ids must be everything seen so far"):
        greedy(ours, picture(name), 4, **with_cache(cache))
    assert cache.get_seq_length() == 43


def two_pictures(name):
    """Two rows, each with a picture of another shape, and the rows alone."""
    inputs = with_image(name, batch(prompts(40, 40)))
    inputs["image_grid_thw"] = torch.tensor([[1, 4, 4], [1, 2, 8]])
    alone = [{key: x.chunk(2)[row] for key, x in inputs.items()} for row in range(2)]
    return inputs, alone


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_reordered_rows(name):
    ours, (inputs, _) = model(name), two_pictures(name)
    cache = H2OCache(ours.config, H2OConfig.full())
    ours(**inputs, **with_cache(cache))
    assert len(set(ours.model.rope_deltas.flatten().tolist())) == 2
    step = torch.tensor([[5], [5]])
    swapped = cache.fork()
    swapped.reorder_cache(torch.tensor([1, 0]))
    expected = ours(step, **with_cache(cache)).logits.flip(0)
    torch.testing.assert_close(ours(step, **with_cache(swapped)).logits, expected)


@pytest.mark.parametrize("name", NAMES)
def test_beams_of_two_pictures(name):
    ours, (inputs, alone) = model(name), two_pictures(name)

    def beams(inputs):
        cache = H2OCache(ours.config, H2OConfig.full())
        return greedy(ours, inputs, 6, num_beams=3, **with_cache(cache)).tolist()

    assert beams(inputs) == [beams(row)[0] for row in alone]


@pytest.mark.parametrize("name", NAMES)
def test_sampled_answers_to_two_pictures_continue(name):
    """generate() repeats the rows after the model has computed one number for each prompt."""
    ours, (inputs, alone) = model(name), two_pictures(name)
    cache = H2OCache(ours.config, H2OConfig.full())
    how = {"do_sample": True, "num_return_sequences": 2, "min_new_tokens": 4, "max_new_tokens": 4}
    torch.manual_seed(0)
    read = ours.generate(**inputs, **how, **with_cache(cache))
    more = torch.cat([read, torch.full((4, 3), 7)], 1)
    mask = torch.ones_like(more)  # a sampled token may be the padding token
    answers = greedy(
        ours, {"input_ids": more, "attention_mask": mask}, 4, **with_cache(cache)
    ).tolist()
    for row, answer in enumerate(answers):
        cache = H2OCache(ours.config, H2OConfig.full())
        one = alone[row // 2] | {"input_ids": more[row : row + 1]}
        for key, new in (("attention_mask", 1), ("mm_token_type_ids", 0)):
            one[key] = torch.nn.functional.pad(one[key], (0, 7), value=new)
        assert greedy(ours, one, 4, **with_cache(cache)).tolist() == [answer]
