"""Prompts and prefixes that are prefilled once: answers must be those without sharing."""

from __future__ import annotations

import random

import pytest
import torch

from h2o import H2OCache, H2OConfig
from h2o.compat import with_cache
from h2o.hf.prompt import echo_scorer
from tests.vllm.engines import (
    NEW,
    SamplingParams,
    after_prefix,
    alone,
    engine,
    prompts,
    served,
)

SMALL = {"heavy": 8, "recent": 8}
ENTRIES = {
    "tokens": SMALL,
    "divided": {"budget": 24},
    "stored in bytes": {"heavy": 0.2, "recent": 0.1, "min_tokens": 0, "kv_dtype": "int8"},
    "heads": {"heavy": [[4, 12], [9, 3]], "recent": 4, "score_by": "mean-echo"},
}


def worker_prompts(llm):
    """The worker's records of stored prompts."""
    (found,) = llm.apply_model(
        lambda model: next(
            x.impl.engine.worker_prompts for x in model.modules() if hasattr(x, "impl")
        )
    )
    return found


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("chunk", [256, 32])
def test_a_prompt_that_comes_again_is_not_read_again(name, chunk, llama, monkeypatch):
    """Equal prompts that come together share too. A prompt of one token is prefilled each time."""
    monkeypatch.setattr(echo_scorer, "FEWEST_HEADS", 1)
    folder, model = llama
    requests = prompts() + prompts((50,)) * 3
    wanted = alone(model, requests, H2OConfig(**ENTRIES[name]))
    with engine(folder, ENTRIES[name], max_num_batched_tokens=chunk) as llm:
        for again in range(3):
            assert served(llm, requests) == wanted
            assert worker_prompts(llm).requests == 2 + again * 12
        assert worker_prompts(llm).tokens == 2 * 49 + 2 * (sum(map(len, requests)) - 1 - 12)
        pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert llm.reset_prefix_cache()
        assert served(llm, requests) == wanted
        assert worker_prompts(llm).requests == 28


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("chunk", [256, 32])
def test_a_prefix_is_read_once(name, chunk, llama, monkeypatch):
    """After the cut the state must be that of an H2OCache that has prefilled the prefix. The rest
    comes in chunks that do not depend on other requests."""
    monkeypatch.setattr(echo_scorer, "FEWEST_HEADS", 1)
    folder, model = llama
    (beginning,), config = prompts((60,), 5), H2OConfig(**ENTRIES[name])
    requests = [beginning + rest for rest in prompts((5, 100, 1, 40, 26, 24), 6)]
    arguments = {"extra_args": {"h2o_prefix": 60}}
    wanted = after_prefix(model, requests, 60, config, chunk - 8)
    assert wanted != alone(model, requests, config)
    with engine(folder, ENTRIES[name], max_num_batched_tokens=chunk) as llm:
        assert served(llm, requests, **arguments) == wanted
        assert (worker_prompts(llm).requests, worker_prompts(llm).tokens) == (5, 300)
        assert served(llm, requests, **arguments) == wanted
        assert served(llm, requests) == alone(model, requests, config)
        before = worker_prompts(llm).requests
        assert served(llm, [beginning], **arguments) == alone(model, [beginning], config)
        assert worker_prompts(llm).requests == before + 1


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("chunk", [256, 32])
def test_a_request_forgets_a_part_of_its_prefix(name, chunk, llama, monkeypatch):
    """It answers as an H2OCache that has removed these tokens. Requests that share the prefix, at
    the same time and later, still have them."""
    monkeypatch.setattr(echo_scorer, "FEWEST_HEADS", 1)
    folder, model = llama
    (beginning,), config = prompts((60,), 5), H2OConfig(**ENTRIES[name])
    requests = [beginning + rest for rest in prompts((5, 100, 1, 24), 6)]
    whole = {"h2o_prefix": 60}
    forgets = whole | {"h2o_evict": [(5, 30), (40, 44)]}

    wanted = after_prefix(model, requests, 60, config, chunk - 8)
    shorter = after_prefix(model, requests, 60, config, chunk - 8, forgets=forgets["h2o_evict"])
    assert shorter != wanted
    with engine(folder, ENTRIES[name], max_num_batched_tokens=chunk) as llm:
        for _ in range(2):  # the second time the whole prompts are stored
            assert served(llm, requests, extra_args=forgets) == shorter
            assert served(llm, requests, extra_args=whole) == wanted
        assert served(llm, [beginning], extra_args=whole) == alone(model, [beginning], config)


def test_a_prefix_that_ends_with_a_chunk_of_one_token(llama):
    """With "cut": "chunk" such a prefix must be stored, and its last token pinned."""
    folder, model = llama
    model.set_attn_implementation("h2o")
    (beginning,), config = prompts((33,), 5), H2OConfig(heavy=20, recent=8)
    requests = [beginning + rest for rest in prompts((20, 12), 6)]

    def read(pinned):
        answers = []
        for ids in requests:
            cache = H2OCache(model.config, config, pinned=pinned)
            with torch.no_grad():
                for part in (ids[:32], ids[32:33]):
                    model(torch.tensor([part]), **with_cache(cache))
            known = {"max_new_tokens": NEW, "do_sample": False}
            out = model.generate(torch.tensor([ids]), **with_cache(cache), **known)
            answers.append(out[0, len(ids) :].tolist())
        return answers

    wanted = read([(28, 33)])
    assert wanted != read([(28, 32)])
    pins = {"h2o_prefix": 33, "h2o_pinned": "28:33"}
    entry = {"heavy": 20, "recent": 8, "cut": "chunk"}
    with engine(folder, entry, max_num_batched_tokens=32) as llm:
        for _ in range(2):
            assert [served(llm, [ids], extra_args=pins)[0] for ids in requests] == wanted
        assert worker_prompts(llm).requests == 3


def test_samples_of_one_prompt_and_pins(llama):
    """Pins are settings, so requests share a prefix only if their pins agree. The pins are within
    it."""
    folder, model = llama
    (beginning,), config = prompts((60,), 5), H2OConfig(heavy=20, recent=8)
    requests = [beginning + rest for rest in prompts((5, 40), 6)]
    pins = {"h2o_prefix": 60, "h2o_pinned": "3:9"}
    wanted = after_prefix(model, requests, 60, config, pinned=[(3, 9)])
    unpinned = after_prefix(model, requests, 60, config)
    assert wanted != unpinned
    with engine(folder, {"heavy": 20, "recent": 8}) as llm:
        for arguments, answers in ((pins, wanted), ({"h2o_prefix": 60}, unpinned)):
            assert served(llm, requests, extra_args=arguments) == answers
        assert worker_prompts(llm).requests == 2
        sampling = SamplingParams(max_tokens=8, n=4, seed=1, ignore_eos=True, detokenize=False)
        many = [
            [list(one.token_ids) for one in out.outputs]
            for out in llm.generate([{"prompt_token_ids": x} for x in requests], sampling)
        ]
        assert worker_prompts(llm).requests == 8
        assert all(len({*map(tuple, of_prompt)}) == 4 for of_prompt in many)


def test_who_leaves_in_the_middle_of_a_prompt_leaves_nothing_behind(llama):
    """A request that gets the page next, and begins with a stored prompt, must not be affected."""
    folder, model = llama
    (beginning, long), config = prompts((60, 100), 5), H2OConfig(**SMALL)
    requests = [beginning + rest for rest in prompts((5, 20), 6)]
    arguments = {"extra_args": {"h2o_prefix": 60}}
    with engine(folder, SMALL, max_num_batched_tokens=32) as llm:
        served(llm, requests[:1], **arguments)
        llm.llm_engine.add_request("0", {"prompt_token_ids": long}, SamplingParams(max_tokens=8))
        llm.llm_engine.step()
        llm.llm_engine.abort_request(["0"])
        answers = served(llm, requests[1:], **arguments)
        assert worker_prompts(llm).requests == 1
    assert answers == after_prefix(model, requests[1:], 60, config, 24)


def test_who_begins_anew_in_the_middle_of_a_prompt_leaves_nothing_behind(llama):
    """After a change of weights, vLLM preempts all requests and admits them again at once."""
    folder, model = llama
    (long, other), config = prompts((100, 90), 5), H2OConfig(**SMALL)
    wanted = alone(model, [long, other], config)
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    with engine(folder, SMALL, max_num_batched_tokens=32) as llm:
        core = llm.llm_engine.engine_core.engine_core
        llm.llm_engine.add_request("0", {"prompt_token_ids": long}, sampling)
        answers = []
        for step in range(100):
            answers += [list(x.outputs[0].token_ids) for x in llm.llm_engine.step() if x.finished]
            if step == 1:
                assert llm.reset_prefix_cache(reset_running_requests=True)
            if step == 2:
                assert len(core.scheduler.connector.prompts.prefilling) == 1
            if answers:
                break
        assert answers == wanted[:1]
        assert not core.scheduler.connector.prompts.prefilling
        assert served(llm, [long, other]) == wanted
        assert worker_prompts(llm).requests == 1


def test_prompts_with_embeddings_among_their_tokens_share_nothing(llama):
    """vLLM gives such prompts placeholder tokens where they have embeddings."""
    folder, model = llama
    (beginning,) = prompts((30,), 5)
    requests = [beginning + rest for rest in prompts((30, 30), 6)]
    wanted = alone(model, requests, H2OConfig(**SMALL))
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    with engine(folder, SMALL, enable_prompt_embeds=True) as llm:
        for ids, answer in zip(requests, wanted, strict=True):
            with torch.no_grad():
                embeds = model.get_input_embeddings()(torch.tensor(ids))
            prompt = {
                "prompt_embeds": embeds,
                "prompt_token_ids": beginning + [0] * 30,
                "prompt_is_token_ids": [True] * 30 + [False] * 30,
            }
            (out,) = llm.generate([prompt], sampling, use_tqdm=False)
            assert list(out.outputs[0].token_ids) == answer


def test_a_prefix_where_a_pass_has_fewer_tokens_than_a_batch(llama):
    """The rest of the prompt must come in chunks that fit in a pass."""
    folder, model = llama
    requests, arguments = prompts((100, 200)), {"extra_args": {"h2o_prefix": 30}}
    wanted = after_prefix(model, requests, 30, H2OConfig(**SMALL), 24)
    with engine(folder, SMALL, max_num_scheduled_tokens=32) as llm:
        assert served(llm, requests, **arguments) == wanted


def test_nothing_is_stored_where_prefix_caching_is_off(llama):
    """A request that leaves in the middle of a prompt must still leave nothing behind."""
    folder, model = llama
    requests = prompts((100, 60)) * 2
    with engine(folder, SMALL, max_num_batched_tokens=32, enable_prefix_caching=False) as llm:
        llm.llm_engine.add_request("0", {"prompt_token_ids": requests[0]}, SamplingParams())
        llm.llm_engine.step()
        (chunks,) = worker_prompts(llm).partial
        assert len(chunks) == 1
        llm.llm_engine.abort_request(["0"])
        llm.llm_engine.step()
        assert not chunks
        assert served(llm, requests) == alone(model, requests, H2OConfig(**SMALL))
        assert not worker_prompts(llm).stored


@pytest.mark.parametrize("entry", [SMALL, {"budget": 24}])
def test_few_pages_and_requests_that_leave(entry, llama, monkeypatch):
    """Stored prompts must make room, the least recently used first. A request that leaves in the
    middle of a prompt must not affect the next one in its page."""
    monkeypatch.setattr(echo_scorer, "FEWEST_HEADS", 1)
    folder, model = llama
    config, dice = H2OConfig(**entry), random.Random(1)
    rests, requests = prompts((30, 70, 100), 6), []
    for beginning in prompts((60, 64), 5):
        ids, n = [beginning + rest for rest in rests], len(beginning)
        requests += zip(ids, [None] * 3, alone(model, ids, config), strict=True)
        after = after_prefix(model, ids, n, config, 24)
        requests += zip(ids, [{"h2o_prefix": n}] * 3, after, strict=True)
    greedy = {"temperature": 0, "max_tokens": NEW, "ignore_eos": True, "detokenize": False}
    asked, answers = {}, {}
    options = {"max_num_batched_tokens": 32, "num_gpu_blocks_override": 6}
    with engine(folder, entry, **options) as llm:
        pages = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
        assert pages == 6
        for step in range(800):
            here = sorted({*asked} - {*answers})
            if step < 700 and dice.random() < 0.6 - 0.2 * len(here):
                ids, arguments, asked[str(step)] = dice.choice(requests)
                sampling = SamplingParams(**greedy, extra_args=arguments)
                llm.llm_engine.add_request(str(step), {"prompt_token_ids": ids}, sampling)
            if step % 19 == 0 and here:
                gone = dice.choice(here)
                llm.llm_engine.abort_request([gone])
                del asked[gone]
            for out in llm.llm_engine.step():
                if out.finished:
                    answers[out.request_id] = list(out.outputs[0].token_ids)
        pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pages - 1
        assert worker_prompts(llm).requests > 20
        assert len(worker_prompts(llm).stored) < pages
    assert len(asked) > 40
    assert answers == asked


@pytest.mark.parametrize("entry", [SMALL, {"budget": 24}])
@pytest.mark.parametrize("chunk", [256, 32])
def test_log_likelihoods_after_a_context(entry, chunk, llama, monkeypatch):
    """Log-likelihoods after a context are those of `h2o eval --protocol drop`: the context is cut
    at its end, and the rest follows token by token."""
    monkeypatch.setattr(echo_scorer, "FEWEST_HEADS", 1)
    folder, model = llama
    model.set_attn_implementation("h2o")
    (ids,) = prompts((100,))
    wanted = {}
    for context in (60, 95, 99):
        cache, found = H2OCache(model.config, H2OConfig(**entry)), []
        for part in (ids[:context], *([token] for token in ids[context:-1])):
            with torch.no_grad():
                logits = model(torch.tensor([part]), **with_cache(cache)).logits[0, -1]
            found.append(logits.log_softmax(-1)[ids[context + len(found)]].item())
        wanted[context] = found
    with engine(folder, entry, max_num_batched_tokens=chunk) as llm:
        sampling = [
            SamplingParams(
                max_tokens=1, prompt_logprobs=0, detokenize=False, extra_args={"h2o_context": n}
            )
            for n in (*wanted, *wanted)
        ]
        outs = llm.generate([{"prompt_token_ids": ids}] * 6, sampling, use_tqdm=False)
    for context, out in zip((*wanted, *wanted), outs, strict=True):
        pairs = [*zip(out.prompt_logprobs, ids, strict=True)][context:]
        found = [x[token].logprob for x, token in pairs]
        assert found == pytest.approx(wanted[context], abs=1e-4)
    assert wanted[60][39 - 5 :] != pytest.approx(wanted[95], abs=1e-3)
