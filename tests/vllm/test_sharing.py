"""Prompts and prefixes that are read once: answers are those without sharing."""

from __future__ import annotations

import pytest
import torch

from h2o import H2OCache, H2OConfig
from h2o.borrowed import with_cache
from h2o.hf.prompt import prompt_echo
from tests.vllm.engines import (
    NEW,
    MiB,
    SamplingParams,
    alone,
    engine,
    prompts,
    served,
    tiny,
)

SMALL = {"heavy": 8, "recent": 8}
ENTRIES = {
    "tokens": SMALL,
    "dealt": {"budget": 24},
    "stored in bytes": {"heavy": 0.2, "recent": 0.1, "min_tokens": 0, "kv_dtype": "int8"},
    "heads": {"heavy": [[4, 12], [9, 3]], "recent": 4, "score_by": "mean-echo"},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return folder, tiny("llama", folder, head_dim=32)


def forks(llm):
    """What the worker knows of stored prompts."""
    (found,) = llm.apply_model(
        lambda model: [x.impl.engine.forks for x in model.modules() if hasattr(x, "impl")][0]
    )
    return found


def after_prefix(model, requests, prefix: int, config, piece: int = 1 << 20, pinned=None):
    """The tokens of `generate()` with an H2OCache that has read the prefix, then the rest in
    pieces."""
    model.set_attn_implementation("h2o")
    answers = []
    for request in requests:
        ids, cache = torch.tensor([request]), H2OCache(model.config, config, pinned=pinned)
        end = prefix if prefix < len(request) else 0
        with torch.no_grad():
            if end:
                model(ids[:, :end], **with_cache(cache))
            while len(request) - end > piece:
                model(ids[:, end : end + piece], **with_cache(cache))
                end += piece
        out = model.generate(ids, **with_cache(cache), max_new_tokens=NEW, do_sample=False)
        answers.append(out[0, len(request) :].tolist())
    return answers


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("chunk", [256, 32])
def test_a_prompt_that_comes_again_is_not_read_again(name, chunk, llama, monkeypatch):
    """Also the same that come together. A prompt of one token is read each time."""
    monkeypatch.setattr(prompt_echo, "FEWEST_HEADS", 1)
    folder, model = llama
    requests = prompts() + prompts((50,)) * 3
    wanted = alone(model, requests, H2OConfig(**ENTRIES[name]))
    with engine(folder, ENTRIES[name], max_num_batched_tokens=chunk) as llm:
        for again in range(3):
            assert served(llm, requests) == wanted
            assert forks(llm).requests == 2 + again * 12
        assert forks(llm).tokens == 2 * 49 + 2 * (sum(map(len, requests)) - 1 - 12)
        pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert llm.reset_prefix_cache()
        assert served(llm, requests) == wanted
        assert forks(llm).requests == 28


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("chunk", [256, 32])
def test_a_prefix_is_read_once(name, chunk, llama, monkeypatch):
    """Its state after the cut is that of an H2OCache which has read it. What follows it comes in
    pieces that other requests have no say in."""
    monkeypatch.setattr(prompt_echo, "FEWEST_HEADS", 1)
    folder, model = llama
    (beginning,), config = prompts((60,), 5), H2OConfig(**ENTRIES[name])
    requests = [beginning + rest for rest in prompts((5, 100, 1, 40, 26, 24), 6)]
    arguments = {"extra_args": {"h2o_prefix": 60}}
    wanted = after_prefix(model, requests, 60, config, chunk - 8)
    assert wanted != alone(model, requests, config)
    with engine(folder, ENTRIES[name], max_num_batched_tokens=chunk) as llm:
        assert served(llm, requests, **arguments) == wanted
        assert (forks(llm).requests, forks(llm).tokens) == (5, 300)
        assert served(llm, requests, **arguments) == wanted
        assert served(llm, requests) == alone(model, requests, config)
        before = forks(llm).requests
        assert served(llm, [beginning], **arguments) == alone(model, [beginning], config)
        assert forks(llm).requests == before + 1
