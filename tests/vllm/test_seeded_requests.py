"""Requests with a seed draw the same tokens in however many passes their prompts are prefilled."""

from __future__ import annotations

from tests.vllm.engines import engine, prompts, served

SMALL = {"heavy": 8, "recent": 8}
SEEDED = {"temperature": 1.0, "seed": 5}


def test_prompts_in_chunks(llama):
    folder, _ = llama
    with engine(folder, SMALL) as llm:
        wanted = served(llm, prompts(), **SEEDED)
    with engine(folder, SMALL, max_num_batched_tokens=32) as llm:
        assert served(llm, prompts(), **SEEDED) == wanted


def test_prefixes(llama):
    """A prefix that is stored needs fewer passes."""
    folder, _ = llama
    with engine(folder, SMALL) as llm:
        first, again = (
            served(llm, prompts(), **SEEDED, extra_args={"h2o_prefix": 20}) for _ in range(2)
        )
    assert first == again


def test_requests_that_begin_anew(llama):
    """A preempted request continues with the draws that come after those of its first tokens."""
    folder, _ = llama
    with engine(folder, SMALL) as llm:
        wanted, steps = served(llm, prompts(), **SEEDED), iter(range(1000))
        step = llm.llm_engine.step

        def interrupted():
            if next(steps) in (5, 17):
                assert llm.reset_prefix_cache(reset_running_requests=True)
            return step()

        llm.llm_engine.step = interrupted
        assert served(llm, prompts(), **SEEDED) == wanted
