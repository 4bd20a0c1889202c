"""Subclasses of vLLM's scheduler, since a KV connector cannot choose where a prompt is divided.

A prefix that is cut separately is prefilled in passes of its own. The number of prompts that are
prefilled in chunks at the same time is limited to the number that can be kept whole.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from h2o.vllm.config_entry import whole_prompts_of
from h2o.vllm.paged_request import (
    BUDGET,
    EVICT,
    arguments_of,
    arguments_of_turn,
    prefix_of,
    reads_by_token,
)
from h2o.vllm.validation import entry_of, logger


class PrefixScheduler(Scheduler):
    """vLLM's scheduler with five changes. A prompt that does not fit in one pass waits until it
    can be kept whole. The prefix that a request names is prefilled up to its end, and then the rest
    in chunks of a size that does not depend on other requests, since each chunk is cut separately.
    A preempted request prefills its prompt only, and decodes the tokens of its answer again. A
    session, which may get another turn, has only one decode step planned at a time. What its
    turns pin and forget holds for all later turns."""

    room_is_awaited = False
    """Whether a waiting request could not begin in this pass for lack of room"""

    @functools.cached_property
    def buffers(self) -> int:
        """Number of prompts that can be kept whole at a time, 0 if none is kept whole."""
        return whole_prompts_of(entry_of(self.vllm_config))

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.room_is_awaited = False
        self.buffered = {
            one.request_id for one in self.running if 0 < one.num_computed_tokens < _first(one)
        }
        return super().schedule(*args, **kwargs)

    def _reserve_prefill_lookahead(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        new: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        is_waiting = request.status != RequestStatus.RUNNING
        if is_waiting and self.room_is_awaited:
            return 0  # vLLM 0.33 would let it overtake the other, which could then wait forever
        new = self._tokens(request, num_computed_tokens, new)
        self.room_is_awaited |= is_waiting and not new
        return new

    def _update_request_as_session(self, session: Any, update: Any) -> None:
        before, prompt = arguments_of(session), session.num_prompt_tokens
        super()._update_request_as_session(session, update)
        if session.sampling_params is None:
            return
        prompts = prompt, session.num_prompt_tokens
        tokens = prompts[1] - len(update.prompt_token_ids or ())
        now = arguments_of(session)
        if any(name in now and now[name] != before.get(name) for name in BUDGET):
            logger.warning("h2o: a session keeps the budget of its first turn")
        try:
            arguments = arguments_of_turn(before, prompts, now, tokens)
        except (TypeError, ValueError) as error:
            logger.warning("h2o: a session keeps the tokens that it asks to forget: %s", error)
            rest = {name: x for name, x in now.items() if name != EVICT}
            arguments = arguments_of_turn(before, prompts, rest, tokens)
        session.sampling_params = session.sampling_params.clone()  # turns may share the object
        session.sampling_params.extra_args = arguments

    def _tokens(self, request: Any, computed: int, room: int) -> int:
        """Number of tokens of a request in this pass, at most `room`. 0 if the request waits."""
        prefix, prompt, first = prefix_of(request), request.num_prompt_tokens, _first(request)
        if computed < first:
            new = min(room, first - computed)
            if computed + new < first:
                return new if self._gets_buffer(request) else 0
            self.buffered.discard(request.request_id)  # makes room for another in this pass
            return new
        if prefix and computed < prompt:
            most = 1 if reads_by_token(arguments_of(request)) else self._largest_chunk()
            chunk = min(most, prompt - computed)
            return chunk if chunk <= room else 0
        if request.resumable and request.num_output_placeholders:
            return 0  # if that token ends the turn, a further step would have stored its key
        return min(room, 1)  # more than one token of the answer is left only after a preemption

    def _gets_buffer(self, request: Any) -> bool:
        """Whether a prompt that is prefilled in part can be kept whole. Reserves room for it."""
        if len(self.buffered) < self.buffers:
            self.buffered.add(request.request_id)
        return self.buffers == 0 or request.request_id in self.buffered

    def _largest_chunk(self) -> int:
        """Largest chunk that fits in a pass together with a decode step of all other requests."""
        most: int = self.max_num_scheduled_tokens - self.scheduler_config.max_num_seqs
        threshold: int = self.scheduler_config.long_prefill_token_threshold
        return max(1, min(most, threshold) if threshold > 0 else most)


def _first(request: Any) -> int:
    """Number of tokens of a request that are prefilled first and then cut: its prefix, or its whole
    prompt."""
    return prefix_of(request) or int(request.num_prompt_tokens)


class PrefixAsyncScheduler(PrefixScheduler, AsyncScheduler):
    """`PrefixScheduler` that plans a pass while the previous one runs."""
