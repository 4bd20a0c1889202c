"""Caches that are copied, that grow, or whose last forward pass was interrupted, on a tiny
model."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache

from h2o import H2OCache, H2OConfig
from h2o.compat import with_cache
from tests.hf.tiny import greedy, model, prompts

COPIED = {
    "fork": lambda cache, path: cache.fork(),
    "deepcopy": lambda cache, path: copy.deepcopy(cache),
    "pickle": lambda cache, path: pickle.loads(pickle.dumps(cache)),
    "load": lambda cache, path: cache.save(path) or H2OCache.load(path, model("llama")),
}


@pytest.mark.parametrize("way", COPIED)
def test_a_copy_of_an_empty_cache_is_no_prompt(way, tmp_path):
    """A copy of an empty cache must count as empty. Otherwise it would take the first chunk of a
    prompt for a turn of a chat."""
    ours = model("llama")
    cache = COPIED[way](
        H2OCache(ours.config, heavy=0.25, recent=0.25, min_tokens=0), tmp_path / "cache"
    )
    greedy(ours, {"input_ids": prompts(60)[0]}, 2, **with_cache(cache), prefill_chunk_size=16)
    assert cache.report().layers[0].budget == [30]


def test_a_copy_goes_on_with_what_it_is_asked():
    ours = model("llama")
    cache = H2OCache(ours.config, heavy=0.25, recent=0.25, min_tokens=0)
    ours(prompts(40)[0], **with_cache(cache))
    for fork in (cache.fork(), copy.copy(cache)):
        ours(prompts(9)[0], **with_cache(fork))
        assert (fork.get_seq_length(), cache.get_seq_length()) == (49, 40)
    for rows, error in ((0, ValueError), (True, TypeError), (1.5, TypeError)):
        with pytest.raises(error, match=f"rows is {rows}; expected an integer of at least 1"):
            cache.fork(rows=rows)


@pytest.mark.filterwarnings("ignore:nothing is evicted")
@pytest.mark.parametrize("name", ["mistral-window", "gemma2", "falcon_h1"])
def test_a_copy_of_a_pass_that_recorded_gradients(name, gradients):
    """Layers of transformers' own hold tensors with gradients then, which torch does not copy. A
    copy has none, so that the next pass may write to it."""
    ours, (ids, more) = model(name), prompts(20, 3)
    cache = H2OCache(ours.config, heavy=60, recent=60)
    ours(ids, **with_cache(cache))
    with torch.no_grad():
        expected = ours(torch.cat([ids, more], 1), use_cache=False).logits[:, -3:]
    copies = (
        *(cache.fork(), copy.copy(cache), copy.deepcopy(cache)),
        pickle.loads(pickle.dumps(cache)),
    )
    for copied in copies:
        got = ours(more, **with_cache(copied)).logits
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-3)
    assert ours(more, **with_cache(cache)).logits.requires_grad


def test_a_cache_of_all_keys_grows_by_little():
    """The slots of a full cache must grow in small steps. Growth by a factor of 1.5 would take half
    as much memory again for a single token."""
    ours = model("llama")
    cache = H2OCache(ours.config, H2OConfig.full())
    ours(prompts(600)[0], **with_cache(cache))
    for _ in range(3):
        ours(prompts(1)[0], **with_cache(cache))
    total = cache.report().total
    assert total.bytes_full < total.bytes_held < 1.1 * total.bytes_full


def test_lengths_of_prompts_are_repeated_with_their_rows():
    """`fork(rows=2)` must repeat `prompt_length` too, both in a cache whose converted keys have no
    scores yet and in an empty one."""
    ours = model("llama")
    ids = torch.cat(prompts(30, 30))
    full = DynamicCache(config=ours.config)
    ours(ids, **with_cache(full))
    config = {"heavy": 0.2, "recent": 0.2, "min_tokens": 0, "prompt_length": [30, 20]}
    config |= {"ratio_of": "prompt"}
    forks = [
        H2OCache.from_dynamic_cache(full, ours.config, **config).fork(rows=2),
        H2OCache(ours.config, **config).fork(rows=2),
    ]
    for fork in forks:
        ours(prompts(6)[0].repeat(4, 1), **with_cache(fork))
        assert fork.report().layers[0].budget == [12, 12, 8, 8]


def test_a_trace_that_lacks_a_pass(monkeypatch):
    """When recording the trace fails, the keys are already stored. The cache must refuse to
    continue, because its trace would name other keys as evicted."""
    ours = model("llama")
    cache = H2OCache(ours.config, heavy=6, recent=6, trace=True)
    ours(prompts(40)[0], **with_cache(cache))
    wanted = cache.evicted_at(1).tolist()

    def no_memory(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(cache.layers[1].trace, "record", no_memory, raising=True)
        with pytest.raises(MemoryError):
            ours(prompts(1)[0], **with_cache(cache))
    with pytest.raises(RuntimeError, match=r"interrupted, call cache\.reset"):
        ours(prompts(1)[0], **with_cache(cache))
    cache.reset()
    ours(prompts(40)[0], **with_cache(cache))
    assert cache.evicted_at(1).tolist() == wanted


@pytest.mark.parametrize("then", ["fork", "reorder", "save"])
def test_after_a_batch_that_was_rejected(then, tmp_path):
    """The ids of a rejected pass are not part of the text. Forking is what its error advises."""
    ours, (ids, new) = model("llama"), prompts(20, 3)
    cache = H2OCache(ours.config, heavy=6, recent=6)
    ours(ids, **with_cache(cache))
    with pytest.raises(ValueError, match=r"use cache.fork\(rows=2\)"):
        ours(new.repeat(2, 1), **with_cache(cache))
    if then == "fork":
        cache = cache.fork(rows=2)
    elif then == "reorder":
        cache.reorder_cache(torch.tensor([0, 0], device=ids.device))
    else:
        cache.save(tmp_path / "cache", ours)
        cache = H2OCache.load(tmp_path / "cache", ours)
    rows = 1 if then == "save" else 2
    text = torch.cat([ids, new], 1).repeat(rows, 1)
    with pytest.raises(ValueError, match="are not the ones that the cache has seen"):
        greedy(ours, {"input_ids": text.flip(1)}, 2, **with_cache(cache.fork()))
    greedy(ours, {"input_ids": text}, 2, **with_cache(cache))
