"""A subclass of vLLM's scheduler, since a KV connector has no say in where a prompt is parted: a
prefix that is cut by itself is read in passes of its own."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from h2o.vllm.paged_request import arguments_of, asked_prefix, reads_by_token


class Prefixes(Scheduler):
    """vLLM's scheduler, but where a request says how long its prefix is: that is read up to its
    end, then the rest in chunks of a size that does not depend on other requests, since each is
    cut by itself."""

    room_is_awaited = False
    """Whether a waiting request has not begun in this pass, since its chunk did not fit"""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.room_is_awaited = False
        return super().schedule(*args, **kwargs)

    def _reserve_prefill_lookahead(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        new: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        prefix, prompt = asked_prefix(request), request.num_prompt_tokens
        is_waiting = request.status != RequestStatus.RUNNING
        if is_waiting and self.room_is_awaited:
            return 0  # vLLM 0.33 lets it pass the other, which would wait for ever
        if num_computed_tokens < prefix:
            return min(new, prefix - num_computed_tokens)
        if prefix and num_computed_tokens < prompt:
            most = 1 if reads_by_token(arguments_of(request)) else self._largest_chunk()
            chunk = min(most, prompt - num_computed_tokens)
            if chunk <= new:
                return chunk
            self.room_is_awaited |= is_waiting
            return 0  # until there is room for so many
        return new

    def _largest_chunk(self) -> int:
        """Tokens for which there is room in a pass beside a step of all other requests."""
        scheduling = self.scheduler_config
        most = scheduling.max_num_batched_tokens - scheduling.max_num_seqs
        threshold: int = scheduling.long_prefill_token_threshold
        return max(1, min(most, threshold) if threshold > 0 else most)


class PrefixScheduler(Prefixes):
    """Plans a pass when the one before has ended."""


class PrefixAsyncScheduler(Prefixes, AsyncScheduler):
    """Plans a pass while the one before runs."""
