"""A request that vLLM preempts in the middle of its answer gets the rest that it would have got."""

from __future__ import annotations

import pytest

from h2o import H2OConfig
from tests.vllm.engines import NEW, SamplingParams, alone, engine, prompts, tiny

SMALL = {"heavy": 8, "recent": 8}


@pytest.mark.parametrize("chunk", [256, 32])
@pytest.mark.parametrize("arguments", [None, {"h2o_prefix": 5}])
def test_all_requests_begin_anew(chunk, arguments, llama):
    """Tokens of the answer must be decoded again one by one, not prefilled with the prompt."""
    folder, model = llama
    requests = prompts((100, 40, 5, 33))
    params = {
        "temperature": 0, "ignore_eos": True, "detokenize": False, "extra_args": arguments,
    }  # fmt: skip

    def answers(llm, resets=()):
        for i, ids in enumerate(requests):
            sampling = SamplingParams(max_tokens=NEW, **params)
            llm.llm_engine.add_request(str(i), {"prompt_token_ids": ids}, sampling)
        found = {}
        for step in range(200):
            if step in resets:
                assert llm.reset_prefix_cache(reset_running_requests=True)
            for out in llm.llm_engine.step():
                if out.finished:
                    found[int(out.request_id)] = list(out.outputs[0].token_ids)
            if len(found) == len(requests):
                break
        return [found[i] for i in range(len(requests))]

    with engine(folder, SMALL, max_num_batched_tokens=chunk, enable_prefix_caching=False) as llm:
        wanted = answers(llm)
        if arguments is None:
            assert wanted == alone(model, requests, H2OConfig(**SMALL))
        assert answers(llm, resets=(5, 17)) == wanted


def test_blocks_of_windows_run_out(tmp_path):
    """Requests of a model with sliding windows need further blocks while they are answered."""
    tiny("gemma2", tmp_path, sliding_window=32, tie_word_embeddings=True, head_dim=32)
    requests = [{"prompt_token_ids": x} for x in prompts((100, 90, 64, 80, 70, 60, 33, 50))]
    sampling = SamplingParams(
        temperature=0, max_tokens=100, ignore_eos=True, detokenize=False, logprobs=0
    )

    def log_likelihoods(blocks):
        with engine(tmp_path, SMALL, num_gpu_blocks_override=blocks) as llm:
            scheduler, preempted = llm.llm_engine.engine_core.engine_core.scheduler, []
            preempt = scheduler._preempt_request

            def noted(request, *args, **kwargs):
                preempted.append(request.num_tokens - request.num_prompt_tokens)
                preempt(request, *args, **kwargs)

            scheduler._preempt_request = noted
            outs = llm.generate(requests, sampling, use_tqdm=False)
        of_tokens = [x for out in outs for x in out.outputs[0].logprobs]
        return [next(iter(x.values())).logprob for x in of_tokens], preempted

    (wanted, none), (found, preempted) = log_likelihoods(60), log_likelihoods(18)
    assert not none
    assert any(preempted)
    assert found == pytest.approx(wanted, abs=1e-4)
