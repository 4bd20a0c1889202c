"""Padding in models whose sliding windows and states count it as text. A padded row gives what the
row gives alone, or an error is raised before anything is stored."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import DynamicCache

from h2o import H2OCache
from h2o.compat import with_cache
from h2o.hf.cache_state.layer_snapshot import take_snapshot
from tests.hf.tiny import (
    FAMILIES,
    LATENT_AND_STATES,
    WITH_STATES,
    batch,
    greedy,
    model,
    prompts,
    shared,
    slow_if,
)

pytestmark = pytest.mark.timeout(120)

SMALL = {"heavy": 6, "recent": 6}
FEW = ("gemma3", "qwen3_next", "lfm3", "falcon_h1", "mistral-window", "kimi_linear")
NO_IMAGES = [name for name, x in FAMILIES.items() if not (x.image or x.weights)]
COUNTING = [x for x in NO_IMAGES if x in WITH_STATES or "sliding" in FAMILIES[x].layers]
COUNTING += LATENT_AND_STATES
STATES = [x for x in COUNTING if x in WITH_STATES or x in LATENT_AND_STATES]
REFUSED = pytest.raises(ValueError, match=r"has padding between tokens.*Pad on the left")


def few_of(names):
    return [slow_if(name not in FEW, name) for name in names]


def padded(rows, side):
    """A batch whose padding has an embedding that is not 0, unlike the tiny models' own pad id."""
    inputs = batch(rows, side)
    inputs["input_ids"].masked_fill_(inputs["attention_mask"] == 0, 5)
    return inputs


def followed(inputs, columns):
    """A batch with this number of further tokens in each row."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    more = torch.arange(7, 7 + columns, device=ids.device).repeat(len(ids), 1)
    ids, mask = torch.cat([ids, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
    return {"input_ids": ids, "attention_mask": mask}


def read(ours, cache, inputs, *stops):
    """Last logits of a batch that is fed in passes from each of `stops` to the next."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for start, stop in itertools.pairwise(stops):
        how = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        logits = ours(ids[:, start:stop], **how, **with_cache(cache)).logits
    return logits[:, -1]


def contents(cache):
    return [
        {name: x.clone() for name, x in take_snapshot(layer).tensors.items()}
        for layer in cache.layers
    ]


def assert_unchanged(cache, before):
    for here, there in zip(contents(cache), before, strict=True):
        assert here.keys() == there.keys()
        assert all(torch.equal(x, there[name]) for name, x in here.items())


@pytest.mark.parametrize("name", few_of(COUNTING))
def test_nothing_follows_padding_on_the_right(name):
    ours, rows = shared(name), prompts(20, 31)
    cache, inputs = H2OCache(ours.config, **SMALL), padded(rows, "right")

    def error(in_batch, alone):
        """How far the first row's logits are from those of the row alone."""
        both = ours(**inputs, **with_cache(in_batch)), ours(rows[0], **with_cache(alone))
        return (both[0].logits[:1, :20] - both[1].logits).abs().max().item()

    theirs = error(DynamicCache(config=ours.config), DynamicCache(config=ours.config))
    assert error(cache, H2OCache(ours.config, **SMALL)) <= max(1e-4, 2 * theirs)
    before = contents(cache)
    for columns in (1, 3):
        with REFUSED:
            read(ours, cache, followed(inputs, columns), 31, 31 + columns)
    with pytest.raises(ValueError, match="attention_mask"):
        ours(inputs["input_ids"][:, :1], **with_cache(cache))
    assert_unchanged(cache, before)


@pytest.mark.parametrize("name", few_of(COUNTING))
def test_nothing_is_read_with_padding_amid_a_row(name):
    ours, inputs = shared(name), followed(padded(prompts(20, 31), "right"), 3)
    cache = H2OCache(ours.config, **SMALL)
    with REFUSED:
        ours(**inputs, **with_cache(cache))
    assert cache.get_seq_length() == 0
    left = padded(prompts(20, 31), "left")
    read(ours, cache, left, 0, 31)
    before, inputs = contents(cache), followed(left, 4)
    inputs["attention_mask"][0, 31:33] = 0  # turns of two lengths, padded on the left
    with REFUSED:
        read(ours, cache, inputs, 31, 35)
    assert_unchanged(cache, before)


@pytest.mark.parametrize("name", few_of(COUNTING))
@pytest.mark.parametrize("stops", [(0, 31, 32, 33), (0, 8, 31, 32, 33), (0, 33)])
def test_padding_on_the_left(name, stops):
    """Padding on the left must not change a row, even in a pass that has only padding of that
    row."""
    if name in ("jamba", "zamba") and len(stops) == 5:
        pytest.skip("its states of one pass are not used in the next")
    ours, rows = shared(name), prompts(20, 31)
    cache = H2OCache(ours.config, heavy=40, recent=40)
    got = read(ours, cache, followed(padded(rows, "left"), 2), *stops)
    alone = H2OCache(ours.config, heavy=40, recent=40)
    inputs = followed({"input_ids": rows[0], "attention_mask": torch.ones_like(rows[0])}, 2)
    expected = read(ours, alone, inputs, 0, 22)
    torch.testing.assert_close(got[:1], expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", few_of(STATES))
def test_states_would_take_a_column_of_padding_for_a_token(name):
    ours, inputs = shared(name), padded(prompts(20, 31), "left")
    cache = H2OCache(ours.config, **SMALL)
    with pytest.raises(ValueError, match="a single column, and it is padding"):
        read(ours, cache, inputs, 0, 1)
    read(ours, cache, inputs, 0, 8)
    before = contents(cache)
    with pytest.raises(ValueError, match="a single column, and it is padding"):
        read(ours, cache, inputs, 8, 9)
    assert_unchanged(cache, before)
    (row,) = prompts(20)
    greedy(ours, {"input_ids": row}, 2, prefill_chunk_size=1,
           **with_cache(H2OCache(ours.config, **SMALL)))  # fmt: skip


@pytest.mark.parametrize("name", ["gemma3", *["lfm3"] * ("lfm3" in FAMILIES)])
def test_rows_that_have_ended_are_padded(name):
    """Padding after a row has ended must not raise an error, and must not change the other rows."""
    ours, rows = shared(name), prompts(20, 31)
    cache = H2OCache(ours.config, heavy=40, recent=40)
    inputs = followed(padded(rows, "left"), 4)
    inputs["attention_mask"][0, 32:] = 0
    got = read(ours, cache, inputs, 0, 31, 32, 33, 34, 35)
    alone = H2OCache(ours.config, heavy=40, recent=40)
    row = followed({"input_ids": rows[1], "attention_mask": torch.ones_like(rows[1])}, 4)
    torch.testing.assert_close(got[1:], read(ours, alone, row, 0, 35), rtol=0, atol=1e-3)
    more = followed(inputs, 1)
    with REFUSED:
        read(ours, cache, more, 35, 36)
    cache.batch_select_indices(torch.tensor([1]))  # the other row continues
    row = followed(row, 1)
    got = ours(row["input_ids"][:, 35:], **with_cache(cache)).logits[:, -1]
    torch.testing.assert_close(got, read(ours, alone, row, 35, 36), rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["gemma3", *["qwen3_next"] * ("qwen3_next" in FAMILIES)])
def test_copies_and_files_know_their_padding(name, tmp_path):
    ours, inputs = shared(name), padded(prompts(20, 31), "right")
    cache = H2OCache(ours.config, **SMALL)
    ours(**inputs, **with_cache(cache))
    cache.save(tmp_path / "cache.safetensors", ours)
    loaded = H2OCache.load(tmp_path / "cache.safetensors", ours)
    for copy in (cache.fork(), cache.fork(rows=2), loaded):
        rows = [state.ends_in_padding for state in copy.guard.state.rows]
        assert rows == [True] * (len(rows) // 2) + [False] * (len(rows) // 2)
        with pytest.raises(ValueError, match="Pass the earlier mask unchanged"):
            ours(torch.full((len(rows), 1), 7), **with_cache(copy))
    cache.reset()
    row = prompts(20)[0]
    greedy(ours, {"input_ids": row}, 2, **with_cache(cache))


def test_padding_of_a_pass_that_was_rejected():
    """A rejected pass must not change what the cache knows about its padding."""
    ours, ids = model("qwen2-mixed"), torch.cat(prompts(20, 20))
    cache = H2OCache(ours.config, **SMALL)
    ours(ids, **with_cache(cache))
    mask = torch.ones(2, 23, dtype=torch.long, device=ids.device)
    mask[0, 22] = 0
    ours.train()
    with pytest.raises(RuntimeError, match="an H2OCache is for inference"):
        ours(ids[:, :3], attention_mask=mask, **with_cache(cache))
    ours.eval()
    ours(ids[:, :3], **with_cache(cache))
    assert cache.get_seq_length() == 23


@pytest.mark.parametrize("name", ["gemma3", *["qwen3_next"] * ("qwen3_next" in FAMILIES)])
def test_a_dynamic_cache_with_padding(name):
    ours, theirs = shared(name), shared(name, "sdpa")
    inputs = padded(prompts(20, 31), "right")
    full = DynamicCache(config=ours.config)
    theirs(**inputs, **with_cache(full))
    mask = inputs["attention_mask"]
    cache = H2OCache.from_dynamic_cache(full, ours.config, attention_mask=mask, **SMALL)
    with REFUSED:
        read(ours, cache, followed(inputs, 1), 31, 32)
    mask = mask.clone()
    mask[0, 25:] = 1
    with REFUSED:
        H2OCache.from_dynamic_cache(full, ours.config, attention_mask=mask, **SMALL)


LATE = {
    "shared echo": {"budget": 0.5, "min_tokens": 0},
    "echo": {"heavy": 8, "recent": 4, "score_by": "mean-echo"},
    "fractions of an unknown prompt": {"heavy": 0.3, "recent": 0.2, "min_tokens": 0},
    "pins of an unknown prompt": {"heavy": 40, "recent": 4, "pinned": "prompt"},
}


@pytest.mark.parametrize("name", LATE)
def test_a_row_whose_prompt_begins_after_the_first_pass(name):
    """The first pass has only its padding, so that neither echo nor the length of its prompt would
    be known, which also decides what is pinned. It must be refused before anything is stored."""
    ours, rows = shared("llama"), prompts(20, 31)
    inputs = padded(rows, "left")
    cache = H2OCache(ours.config, **LATE[name])
    read(ours, cache, inputs, 0, 8)
    before = contents(cache)
    with pytest.raises(ValueError, match=r"row 0 had only padding .*prefill at least 12 columns"):
        read(ours, cache, inputs, 8, 16)
    assert_unchanged(cache, before)
    cache.reset()
    read(ours, cache, inputs, 0, 12, 16, 31)
    if "unknown" in name:  # generate() knows the whole prompt
        cache.reset()
        greedy(ours, inputs, 2, prefill_chunk_size=8, **with_cache(cache))
        alone = H2OCache(ours.config, **LATE[name])
        greedy(ours, {"input_ids": rows[0]}, 2, prefill_chunk_size=8, **with_cache(alone))
        heads = [x.budget_by_head[0] for x in cache.report().layers]
        assert heads == [x.budget_by_head[0] for x in alone.report().layers]
    else:
        with pytest.raises(ValueError, match=r"prefill_chunk_size=12"):
            greedy(ours, inputs, 2, prefill_chunk_size=8,
                   **with_cache(H2OCache(ours.config, **LATE[name])))  # fmt: skip
