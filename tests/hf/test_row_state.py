"""What a cache knows about each row besides its keys: the position that comes next, and padding. A
pass that contradicts it is refused, and copies, files and crops carry it along."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from transformers import DynamicCache

import h2o
from h2o import H2OCache, H2OConfig
from h2o.compat import with_cache
from tests.hf.test_continuation import PLAIN
from tests.hf.tiny import (
    FAMILIES,
    IMAGE,
    batch,
    greedy,
    model,
    prompts,
    shared,
    with_image,
)

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:nothing is evicted"),
]

ROOM = {"heavy": 60, "recent": 60}
WINDOWS = ["gemma2", "gemma3", "qwen2-mixed", "mistral-window"]
IMAGES = [name for name, x in FAMILIES.items() if "image_grid_thw" in x.image]
REFUSED = pytest.raises(ValueError, match="Pass the earlier mask unchanged")
MORE = torch.tensor([[11, 12, 13]])


def numbered(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


def padded(*lengths):
    """A batch padded on the left, with positions that skip padding, and its rows alone."""
    rows = prompts(*lengths)
    inputs = batch(rows)
    return inputs | {"position_ids": numbered(inputs["attention_mask"])}, rows


def logits_after(name, row):
    """Logits of MORE after a row, by plain transformers in one pass."""
    return shared(name)(torch.cat([row, MORE], 1), use_cache=False).logits[:, -3:]


def close(got, expected):
    return torch.allclose(got, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("with_positions", [True, False], ids=["numbered", "by_columns"])
@pytest.mark.parametrize("name", PLAIN)
def test_a_pass_without_a_mask_after_padding(name, with_positions):
    """The model counts columns then. That is right only if it has counted padding before."""
    if name in ("jamba", "zamba"):
        pytest.skip("its states of one pass are not used in the next")
    ours, (inputs, rows) = shared(name), padded(8, 12)
    positions = inputs.pop("position_ids")
    cache = H2OCache(ours.config, **ROOM)
    more = MORE.repeat(2, 1)
    ours(**inputs, **with_cache(cache), **({"position_ids": positions} if with_positions else {}))
    refusal = ""
    try:
        got = ours(more, **with_cache(cache)).logits
    except ValueError as error:
        refusal = str(error)
    if refusal:
        restarts = name == "bamba" and "pass position_ids" in refusal  # it numbers passes from 0
        assert restarts or "Pass the earlier mask unchanged" in refusal
        assert cache.get_seq_length() == 12
        return
    mask = torch.ones(2, 15, dtype=torch.long)
    mask[:, :12] = inputs["attention_mask"]
    whole = ours(torch.cat([inputs["input_ids"], more], 1), attention_mask=mask, use_cache=False)
    assert close(got[1:], logits_after(name, rows[1]))
    assert close(got[:1], logits_after(name, rows[0])) or close(got, whole.logits[:, -3:])


COPIES = {
    "itself": lambda cache, path, ours: cache,
    "fork": lambda cache, path, ours: cache.fork(),
    "deepcopy": lambda cache, path, ours: copy.deepcopy(cache),
    "file": lambda cache, path, ours: cache.save(path, ours) or H2OCache.load(path, ours),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("side", ["prompt", "left", "right"])
def test_copies_know_that_positions_skip_padding(side, way, tmp_path):
    """The padding is in the prompt, or on one side of a second turn."""
    ours, (inputs, rows) = shared("llama"), padded(8, 12)
    cache = H2OCache(ours.config, **ROOM)
    if side == "prompt":
        ours(**inputs, **with_cache(cache))
        real, seen = [rows[0], rows[1]], 12
    else:
        ids, turn, seen = torch.cat(prompts(8, 8)), torch.cat(prompts(4, 4, seed=1)), 12
        mask = torch.ones(2, 12, dtype=torch.long)
        mask[0, slice(8, 10) if side == "left" else slice(10, 12)] = 0
        ours(ids, **with_cache(cache))
        new = {"attention_mask": mask, "position_ids": numbered(mask)[:, 8:]}
        ours(turn, **new, **with_cache(cache))
        kept = turn[:1][:, mask[0, 8:].bool()]
        real = [torch.cat([ids[:1], kept], 1), torch.cat([ids[1:], turn[1:]], 1)]
    cache = COPIES[way](cache, tmp_path / "cache.safetensors", ours)
    with REFUSED:
        ours(MORE.repeat(2, 1), **with_cache(cache))
    assert cache.get_seq_length() == seen
    lengths = torch.tensor([[row.shape[1]] for row in real])
    positions = lengths + torch.arange(3)
    got = ours(MORE.repeat(2, 1), position_ids=positions, **with_cache(cache)).logits
    for row, alone in zip(got, real, strict=True):
        torch.testing.assert_close(row[None], logits_after("llama", alone), rtol=0, atol=2e-3)


def test_a_converted_cache_does_not_know_how_positions_were_counted():
    """A DynamicCache does not record positions, so padding makes a mask necessary, whichever way
    its positions were counted. Without padding there is only one way."""
    ours, (inputs, _) = shared("llama"), padded(8, 12)
    full = DynamicCache(config=ours.config)
    ours(**inputs, **with_cache(full))
    mask = inputs["attention_mask"]
    converted = H2OCache.from_dynamic_cache(full, ours, attention_mask=mask, **ROOM)
    with REFUSED:
        ours(MORE.repeat(2, 1), **with_cache(converted))
    full = DynamicCache(config=ours.config)
    ours(inputs["input_ids"], **with_cache(full))
    converted = H2OCache.from_dynamic_cache(full, ours, **ROOM)
    got = ours(MORE.repeat(2, 1), **with_cache(converted)).logits
    for row, alone in zip(got, inputs["input_ids"], strict=True):
        expected = logits_after("llama", alone[None])
        torch.testing.assert_close(row[None], expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_cropped_padding_is_forgotten(name):
    """A turn ends in padding, which is then cropped. The next pass needs no mask."""
    ours, rows = shared(name), torch.cat(prompts(12, 12))
    cache = H2OCache(ours.config, **ROOM)
    cache.activate_past_recording()
    ours(rows, **with_cache(cache))
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 14:] = 0
    turn = torch.cat(prompts(4, 4, seed=1))
    new = {"attention_mask": mask, "position_ids": numbered(mask)[:, 12:]}
    ours(turn, **new, **with_cache(cache))
    cache.crop(-2)
    got = ours(MORE.repeat(2, 1), **with_cache(cache)).logits
    for row, alone in zip(got, torch.cat([rows, turn[:, :2]], 1), strict=True):
        torch.testing.assert_close(row[None], logits_after(name, alone[None]), rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", ["llama", "gemma2", "opt"])
def test_a_prompt_whose_positions_count_padding(name):
    """generate() does not count padding, so its new tokens would overlap those of a prompt that the
    model itself has numbered by columns. A model that numbers by the mask is served."""
    ours, (inputs, rows) = shared(name), padded(8, 12)
    del inputs["position_ids"]
    cache = H2OCache(ours.config, **ROOM)
    ours(**inputs, **with_cache(cache))
    more = {
        "input_ids": torch.cat([inputs["input_ids"], MORE.repeat(2, 1)], 1),
        "attention_mask": torch.cat([inputs["attention_mask"], torch.ones(2, 3).long()], 1),
    }
    if name != "opt":
        with pytest.raises(ValueError, match=r"count padding.*position_ids=\(attention_mask"):
            greedy(ours, more, 3, **with_cache(cache))
        assert cache.get_seq_length() == 12
        return
    got = greedy(ours, more, 3, **with_cache(cache))
    for row, alone in zip(got.tolist(), rows, strict=True):
        text = {"input_ids": torch.cat([alone, MORE], 1)}
        assert [row] == greedy(ours, text, 3).tolist()


@pytest.mark.parametrize("name", WINDOWS)
def test_a_mask_that_does_not_cover_the_text(name):
    """Sliding windows would take a mask of the new columns for that of the oldest ones."""
    ours, (row,) = shared(name), prompts(12)
    cache = H2OCache(ours.config, **ROOM)
    ours(row, **with_cache(cache))
    for columns in (3, 14, 16):
        mask = torch.ones(1, columns, dtype=torch.long)
        with pytest.raises(ValueError, match=f"attention_mask has {columns} columns; expected 15"):
            ours(MORE, attention_mask=mask, **with_cache(cache))
    whole = torch.ones(1, 15, dtype=torch.long)
    got = ours(MORE, attention_mask=whole, **with_cache(cache)).logits
    torch.testing.assert_close(got, logits_after(name, row), rtol=0, atol=2e-3)


def test_fewer_ids_in_a_model_of_windows_only():
    """No layer of h2o's own counts the tokens of its rows."""
    ours, (inputs, _) = shared("mistral-window"), padded(8, 12)
    del inputs["position_ids"]
    cache = H2OCache(ours.config, **ROOM)
    new = greedy(ours, inputs, 3, **with_cache(cache))
    ids = torch.cat([inputs["input_ids"], new], 1)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(new)], 1)
    less = {"input_ids": ids[:, :13], "attention_mask": mask[:, :13]}
    with pytest.raises(ValueError, match="input_ids must be everything seen so far"):
        greedy(ours, less, 3, **with_cache(cache))
    with pytest.raises(ValueError, match="use_cache=False"):
        greedy(ours, {"input_ids": ids, "attention_mask": mask}, 3, use_cache=False,
               **with_cache(cache))  # fmt: skip
    with REFUSED:
        ours(MORE.repeat(2, 1), **with_cache(cache))


@pytest.mark.parametrize("how", ["patched", "enabled"])
def test_a_patched_model_with_cache_relative_positions_checks_the_given_ones(how):
    """A patch gives the model positions of 0. The cache must check those that it replaced."""
    ours, (row,) = model("llama"), prompts(14)
    config = H2OConfig(positions="cache_relative", **ROOM)
    block = h2o.patched(ours, config) if how == "patched" else None
    if block is None:
        h2o.enable(ours, config)
    else:
        block.__enter__()
    cache = H2OCache(ours.config, config)
    ours(row, **with_cache(cache))
    for tokens in (14, 13, 9):
        with pytest.raises(ValueError, match="input_ids must be everything seen so far"):
            greedy(ours, {"input_ids": row[:, :tokens]}, 1, **with_cache(cache.fork()))
    longer = {"input_ids": torch.cat([row, MORE], 1)}
    with pytest.raises(ValueError, match="use_cache=False"):
        greedy(ours, longer, 4, use_cache=False, **with_cache(cache.fork()))
    expected = greedy(shared("llama"), longer, 4).tolist()
    assert greedy(ours, longer, 4, **with_cache(cache)).tolist() == expected
    embeds = {"inputs_embeds": ours.get_input_embeddings()(longer["input_ids"])}
    assert greedy(ours, embeds, 4).tolist() == expected
    if block is None:
        h2o.disable(ours)
    else:
        block.__exit__(None, None, None)


def test_a_cache_that_can_be_compiled_knows_its_text():
    """generate() makes the masks of such a cache before forward()."""
    ours, (row,) = shared("llama"), prompts(12)
    cache = H2OCache(ours.config, compileable=True, **ROOM)
    out = ours.generate(row, max_new_tokens=4, do_sample=False, **with_cache(cache))
    longer = torch.cat([out, MORE], 1)
    for column in (3, 13):  # in the prompt and in the answer
        edited = longer.clone()
        edited[0, column] = 90 - edited[0, column]
        with pytest.raises(ValueError, match="are not the ones that the cache has seen"):
            ours.generate(edited, max_new_tokens=4, do_sample=False, **with_cache(cache))
    got = ours.generate(longer, max_new_tokens=4, do_sample=False, **with_cache(cache))
    assert torch.equal(got, ours.generate(longer, max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("before", [True, False])
def test_a_converted_cache_under_another_dtype(before, kv_dtype):
    """Autocast is switched on or off between the DynamicCache and the next pass."""
    ours, (row,) = shared("llama"), prompts(12)
    full = DynamicCache(config=ours.config)
    with torch.autocast("cpu", torch.bfloat16, enabled=before):
        ours(row, **with_cache(full))
    cache = H2OCache.from_dynamic_cache(full, ours, kv_dtype=kv_dtype, **ROOM)
    with torch.autocast("cpu", torch.bfloat16, enabled=not before):
        got = ours(MORE, **with_cache(cache)).logits.float()
    expected = logits_after("llama", row)
    assert (got - expected).abs().max() < 0.05 * expected.abs().max()


# ---- Images --------------------------------------------------------------------------------------


def chat(ours, cache, seed, image):
    """The answer to a text, perhaps with an image, and to a second turn."""
    (ids,) = prompts(40, seed=seed)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if image:
        inputs = with_image(image, inputs)
    out = torch.cat([inputs["input_ids"], greedy(ours, inputs, 4, **with_cache(cache))], 1)
    more = torch.cat([out, prompts(5, seed=seed + 1)[0] % 90 + 2], 1)
    new = {"input_ids": more, "attention_mask": torch.ones_like(more)}
    return greedy(ours, new, 6, **with_cache(cache)).tolist()


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("with_picture", [True, False])
def test_another_chat_while_the_model_looks_at_a_picture(name, with_picture):
    """A second thread's text must not change the number that the model has computed for the
    first."""
    ours, started = model(name), []

    def cache():
        return H2OCache(ours.config, **ROOM)

    def in_between(*_):
        if not started:
            other = name if with_picture else ""
            started.append(threading.Thread(target=chat, args=(ours, cache(), 7, other)))
            started[0].start()
            started[0].join()

    expected = chat(ours, cache(), 1, name)
    hook = ours.model.visual.register_forward_hook(in_between)
    assert chat(ours, cache(), 1, name) == expected
    hook.remove()
    assert started


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("error", ["stale ids", "training", "hook"])
def test_a_refused_call_with_a_picture(name, error):
    """The model has computed the number of a text that the cache then refused."""
    ours, (row,) = model(name), prompts(14)
    row = row % 90 + 2
    cache = H2OCache(ours.config, **ROOM)
    ours(row, **with_cache(cache))
    expected = ours(MORE, **with_cache(cache.fork())).logits
    turn = torch.cat([row, prompts(40, seed=2)[0]], 1)
    inputs = with_image(name, {"input_ids": turn, "attention_mask": torch.ones_like(turn)})
    if error == "stale ids":
        inputs["input_ids"][0, 3] = 91 - inputs["input_ids"][0, 3]
    ours.train(error == "training")
    hooks = []
    if error == "hook":

        def fail(*_):
            raise ValueError("a hook")

        hooks.append(ours.model.language_model.layers[0].register_forward_pre_hook(fail))
    with pytest.raises((ValueError, RuntimeError)):
        greedy(ours, inputs, 2, **with_cache(cache))
    for hook in hooks:
        hook.remove()
    ours.eval()
    assert cache.get_seq_length() == 14
    if cache.guard.has_states and error == "training":
        assert cache.report().broken  # states have seen the text
        return
    assert not cache.report().broken
    torch.testing.assert_close(ours(MORE, **with_cache(cache)).logits, expected)


@pytest.mark.parametrize("name", IMAGES)
def test_beams_of_a_fork_with_several_rows(name):
    """generate() asks for the number of its prompts before it repeats them for beams."""
    ours, ids = model(name), torch.cat(prompts(12, 12)) % 90 + 2
    cache = H2OCache(ours.config, **ROOM)
    read = torch.cat([ids, greedy(ours, {"input_ids": ids}, 3, **with_cache(cache))], 1)
    text = {"input_ids": torch.cat([read, ids[:, :3]], 1)}
    got = greedy(ours, text, 4, num_beams=2, **with_cache(cache.fork(rows=2)))
    assert got.tolist() == greedy(model(name), text, 4, num_beams=2).tolist()


def up_to_image(name):
    """Inputs whose last tokens are those of an image."""
    inputs = with_image(name, batch(prompts(40)))
    end = int((inputs["input_ids"][0] == IMAGE).nonzero().max()) + 1
    return {key: x[:, :end] if x.shape[1:] == (40,) else x for key, x in inputs.items()}


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("other_text", [True, False])
def test_a_text_that_ends_in_an_image(name, other_text):
    ours, plain, inputs = model(name), model(name, "eager"), up_to_image(name)
    cache, full = H2OCache(ours.config, **ROOM), DynamicCache(config=plain.config)
    ours(**inputs, **with_cache(cache))
    plain(**inputs, **with_cache(full))
    if other_text:
        ours(MORE, **with_cache(H2OCache(ours.config, **ROOM)))
    text = {"input_ids": torch.cat([inputs["input_ids"], MORE], 1)}
    expected = plain(MORE, **with_cache(copy.deepcopy(full))).logits
    assert close(ours(MORE, **with_cache(cache.fork())).logits, expected)
    expected = greedy(plain, text, 4, **with_cache(full)).tolist()
    assert greedy(ours, text, 4, **with_cache(cache)).tolist() == expected


@pytest.mark.parametrize("name", IMAGES)
def test_chunks_that_cut_images_and_padding(name):
    ours, plain = model(name), model(name, "eager")
    inputs = with_image(name, batch(prompts(40, 40)))
    inputs["input_ids"][1, :4] = 0
    inputs["attention_mask"][1, :4] = 0
    expected = greedy(plain, inputs, 4).tolist()
    for size in range(2, 20):
        how = {"prefill_chunk_size": size, **with_cache(H2OCache(ours.config, **ROOM))}
        assert greedy(ours, inputs, 4, **how).tolist() == expected, size


@pytest.mark.parametrize("name", IMAGES)
def test_chunks_of_padding_alone(name):
    """A row has no tokens in the first chunks."""
    ours, plain, inputs = model(name), model(name, "eager"), batch(prompts(10, 24))
    inputs["input_ids"] %= 90
    expected = greedy(plain, inputs, 4).tolist()
    how = {"prefill_chunk_size": 4, **with_cache(H2OCache(ours.config, **ROOM))}
    assert greedy(ours, inputs, 4, **how).tolist() == expected
