"""vLLM's V2 model runner. The other tests in this folder use V1, the CPU build's default."""

from __future__ import annotations

import os
import re

import pytest

from h2o import H2OConfig
from h2o.hf.prompt import echo_scorer
from tests.launch import launch
from tests.vllm.engines import alone, engine, prompts, served, tiny

pytest.importorskip("triton")

ENGINES = "tests/vllm/test_engine.py"
SHARING = "tests/vllm/test_sharing.py"
PREEMPTION = "tests/vllm/test_preemption.py"
HERE = "tests/vllm/test_runners.py"
ON_V2 = (
    "test_budgets_that_are_divided_across_layers[32]",
    "test_pins_of_requests[16]",
    "test_full_attention_beside_sliding_windows[entry0-gemma2]",
    "test_requests_that_come_while_others_are_answered",
    "test_requests_have_budgets_of_their_own",
    "test_all_keys_are_dense_attention_and_without_the_entry_nothing_is_ours",
    "test_log_likelihoods_of_a_prompt_are_those_of_all_keys",
    "test_requests_that_begin_alike_share_nothing_unasked",
)


SHARING_ON_V2 = (
    "test_a_prompt_that_comes_again_is_not_read_again[32-divided]",
    "test_a_prefix_is_read_once[32-divided]",
    "test_who_leaves_in_the_middle_of_a_prompt_leaves_nothing_behind",
)


@pytest.mark.skipif(
    os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1", reason="the test below runs it on V2"
)
@pytest.mark.parametrize("entry", [{"heavy": 8, "recent": 8}, {"budget": 24}])
def test_the_warm_up_of_a_gpu_changes_no_answer(entry, tmp_path, monkeypatch):
    """vLLM runs made-up requests before the first real one, and a batch of an idle rank."""
    from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup

    monkeypatch.setattr(echo_scorer, "FEWEST_HEADS", 1)
    model, requests = tiny("llama", tmp_path, head_dim=32), prompts((5, 100, 40, 1, 17))
    with engine(tmp_path, entry, max_num_batched_tokens=32, kv_cache_memory_bytes=100_000) as llm:
        worker = llm.llm_engine.model_executor.driver_worker.worker
        run = worker.model_runner, worker.execute_model, worker.sample_tokens
        assert run_mixed_prefill_decode_warmup(*run, num_tokens=20)
        worker.execute_dummy_batch()
        assert served(llm, requests) == alone(model, requests, H2OConfig(**entry))


def test_engines_on_the_v2_model_runner():
    """vLLM decides once per process whether Triton exists, so this runs in a process of its own."""
    options = ["-q", "-p", "tests.vllm.on_v2_runner", "-p", "no:cacheprovider", "-W", "default"]
    tests = [f"{ENGINES}::{name}" for name in ON_V2]
    tests += [f"{SHARING}::{name}" for name in SHARING_ON_V2]
    tests.append(f"{PREEMPTION}::test_all_requests_begin_anew[None-32]")
    tests.append(f"{HERE}::test_the_warm_up_of_a_gpu_changes_no_answer")
    out, _ = launch([*options, *tests], launcher=["pytest"])
    assert re.search(rf"^{len(tests) + 1} passed", out, re.M), out[-4000:]
