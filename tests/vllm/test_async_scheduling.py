"""Answers where vLLM plans a pass while the previous one runs, as it does on GPUs.

vLLM turns this off on CPUs. Here it stays on, with streams and events that do nothing.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

from h2o import H2OCache, H2OConfig
from h2o.compat import with_cache
from tests.vllm.engines import NEW, SamplingParams, after_prefix, alone, engine, prompts, served
from tests.vllm.test_sessions import in_session, later, on_cache

SMALL = {"heavy": 8, "recent": 8}
GREEDY = {"temperature": 0, "ignore_eos": True, "detokenize": False}


class Nothing:
    """An event or a stream."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_: None


@pytest.fixture(autouse=True)
def async_on_cpus(monkeypatch):
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config

    def update_except_async(vllm_config):
        wanted = vllm_config.scheduler_config.async_scheduling
        update(vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(update_except_async))
    for name in ("Event", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Nothing)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())


def core_of(llm):
    core = llm.llm_engine.engine_core.engine_core
    assert type(core.scheduler).__name__ == "PrefixAsyncScheduler"
    assert core.batch_queue is not None
    return core


@pytest.mark.parametrize("chunk", [256, 32])
def test_prompts_and_prefixes(chunk, llama):
    """Twice, so that the second time all prompts are stored, with requests that begin anew."""
    folder, model = llama
    (beginning,), config = prompts((60,), 5), H2OConfig(**SMALL)
    requests = [beginning + rest for rest in prompts((5, 100, 40), 6)]
    prefix = {"extra_args": {"h2o_prefix": 60}}
    options = {"async_scheduling": True, "max_num_batched_tokens": chunk}
    with engine(folder, SMALL, **options) as llm:
        core, step = core_of(llm), llm.llm_engine.step
        passes = iter(range(1000))

        def interrupted():
            if next(passes) in (7, 40):
                assert llm.reset_prefix_cache(reset_running_requests=True)
            return step()

        llm.llm_engine.step = interrupted
        for _ in range(2):
            assert served(llm, requests) == alone(model, requests, config)
            wanted = after_prefix(model, requests, 60, config, chunk - 8)
            assert served(llm, requests, **prefix) == wanted
        pool = core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_the_next_turn_of_a_session(llama):
    """The token that ends a turn is not part of the next one, so no step may store its key."""
    folder, model = llama
    first, second = prompts((40, 20), 3)
    (answer,) = alone(model, [first], H2OConfig(**SMALL), 12)
    end = answer[5]
    told = answer[: answer.index(end)]
    cache = H2OCache(model.config, H2OConfig(**SMALL))
    with torch.no_grad():
        for part in (first, *([token] for token in told)):
            model(torch.tensor([part]), **with_cache(cache))
    ids = torch.tensor([first + told + second])
    out = model.generate(ids, **with_cache(cache), max_new_tokens=NEW, do_sample=False)
    wanted = out[0, ids.shape[1] :].tolist()
    with engine(folder, SMALL, async_scheduling=True) as llm:
        core, make = core_of(llm), llm.llm_engine.input_processor.process_inputs
        answers = []
        for turn, stop in ((first, [end]), (second, [])):
            sampling = SamplingParams(max_tokens=NEW, stop_token_ids=stop, **GREEDY)
            known = {"supported_tasks": llm.llm_engine.get_supported_tasks(), "resumable": True}
            made = make("session", {"prompt_token_ids": turn}, sampling, **known)
            core.add_request(core.preprocess_add_request(made)[0])
            tokens, reason = [], None
            while reason is None:
                outs, _ = core.step_fn()
                for one in outs[0].outputs if outs else ():
                    tokens += one.new_token_ids
                    reason = one.finish_reason
            answers.append(tokens)
    assert answers == [[*told, end], wanted]


def test_a_session_that_forgets(llama):
    folder, model = llama
    first, second, third = prompts((40, 30, 20), 5)
    turns = [(second, [(5, 20)]), (third, [(22, 31)])]
    wanted = on_cache(model, [(first, []), *turns], H2OConfig(**SMALL))
    with engine(folder, SMALL, async_scheduling=True, max_num_batched_tokens=32) as llm:
        core_of(llm)
        assert in_session(llm, later(first, turns)) == wanted
