"""A subclass of vLLM's scheduler, since a KV connector has no say in where a prompt is parted: a
prefix that is cut by itself is read in passes of its own, and only as many prompts are read in
chunks at once as are kept whole until their end."""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from h2o.vllm.entry import entry_places
from h2o.vllm.paged_request import arguments_of, asked_prefix, reads_by_token
from h2o.vllm.validation import entry_of


class Prefixes(Scheduler):
    """vLLM's scheduler, but a prompt waits until there is a place in which its chunks are kept. And
    where a request says how long its prefix is, that is read up to its end, then the rest in chunks
    of a size that does not depend on other requests, since each is cut by itself."""

    room_is_awaited = False
    """Whether a waiting request has not begun in this pass, since there was no room for it"""

    @functools.cached_property
    def places(self) -> int:
        """Prompts in chunks for which there is a place at once; 0: they need none."""
        return entry_places(entry_of(self.vllm_config))

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.room_is_awaited = False
        self.in_places = {
            one.request_id for one in self.running if 0 < one.num_computed_tokens < _first(one)
        }
        return super().schedule(*args, **kwargs)

    def _reserve_prefill_lookahead(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        new: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        is_waiting = request.status != RequestStatus.RUNNING
        if is_waiting and self.room_is_awaited:
            return 0  # vLLM 0.33 lets it pass the other, which would wait for ever
        new = self._tokens(request, num_computed_tokens, new)
        self.room_is_awaited |= is_waiting and not new
        return new

    def _tokens(self, request: Any, computed: int, room: int) -> int:
        """The tokens that are read of a request where there is room for so many; 0: it waits."""
        prefix, prompt, first = asked_prefix(request), request.num_prompt_tokens, _first(request)
        if computed < first:
            new = min(room, prefix - computed) if prefix else room
            if computed + new < first:
                return new if self._has_place(request) else 0
            self.in_places.discard(request.request_id)  # to be another's in this pass
            return new
        if prefix and computed < prompt:
            most = 1 if reads_by_token(arguments_of(request)) else self._largest_chunk()
            chunk = min(most, prompt - computed)
            return chunk if chunk <= room else 0
        return room

    def _has_place(self, request: Any) -> bool:
        """Whether a prompt of which a part is read has a place, or gets one."""
        if len(self.in_places) < self.places:
            self.in_places.add(request.request_id)
        return self.places == 0 or request.request_id in self.in_places

    def _largest_chunk(self) -> int:
        """Tokens for which there is room in a pass beside a step of all other requests."""
        scheduling = self.scheduler_config
        most = scheduling.max_num_batched_tokens - scheduling.max_num_seqs
        threshold: int = scheduling.long_prefill_token_threshold
        return max(1, min(most, threshold) if threshold > 0 else most)


def _first(request: Any) -> int:
    """Tokens of what is read first of a request, which is kept whole until its end."""
    return asked_prefix(request) or int(request.num_prompt_tokens)


class PrefixScheduler(Prefixes):
    """Plans a pass when the one before has ended."""


class PrefixAsyncScheduler(Prefixes, AsyncScheduler):
    """Plans a pass while the one before runs."""
