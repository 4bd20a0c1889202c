"""Requests with a seed, whose prompts vLLM's CPU build cannot prefill in several passes.

In each pass vLLM samples a token for every request, and discards those of unfinished prompts. It
then sets the generator of such a request back by an offset, but torch's generators for CPUs have
none, and the engine ends. h2o divides prompts (`h2o_prefix`), so it hides these generators from
that pass.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def discard_without_seeds() -> None:
    """Make vLLM's model runner for CPUs draw the tokens that it discards without the generators of
    their requests."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    sample = CPUModelRunner.sample_tokens

    @functools.wraps(sample)
    def sample_tokens(runner: Any, *args: Any, **kwargs: Any) -> Any:
        rows = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0].tolist()
        generators = runner.input_batch.generators
        hidden = {row: generators.pop(row) for row in rows if row in generators}
        try:
            return sample(runner, *args, **kwargs)
        finally:
            generators.update(hidden)

    CPUModelRunner.sample_tokens = sample_tokens
