"""A request: the length of its prompt, and the arguments for h2o in its `vllm_xargs`.

The front end checks these arguments before it accepts a request. Workers and the scheduler parse
them again.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from h2o.arguments.plain_values import check_count, wrong
from h2o.budgets import check_amount
from h2o.config import H2OConfig
from h2o.spans import Row, check_spans, merge_spans, overlap, parse_spans, size, subtract, without

PINS = "h2o_pinned"
"""Argument in `vllm_xargs`: spans as text, 0:40,100:120, or as pairs of numbers; or "prompt" """

PREFIX = "h2o_prefix"
"""Argument in `vllm_xargs`: number of tokens of a prefix that is prefilled and cut separately, and
shared with other requests that have the same prefix and argument"""

CONTEXT = "h2o_context"
"""Argument in `vllm_xargs`: number of tokens after which the prompt is cut and continued one token
at a time, so that its log-likelihoods are those with the kept keys"""

EVICT = "h2o_evict"
"""Argument in `vllm_xargs`: spans, like those of `PINS`, of tokens of the prefix that the request
forgets before it goes on with the rest of the prompt. A later turn of a session forgets tokens of
the turns before it, all of which its prefix must then have"""

BUDGET = ("h2o_heavy", "h2o_recent")
"""Arguments in `vllm_xargs`: the budget of a request, or of all turns of a session"""

OF_REQUESTS = (*BUDGET, PINS, PREFIX, CONTEXT, EVICT)


class PagedRequest(NamedTuple):
    """A request without its tokens."""

    prompt: int
    """Number of tokens of the prompt"""
    config: H2OConfig | None = None
    """The request's own config, if it has one"""
    pinned: Row = []  # noqa: RUF012 - never changed
    """Pinned spans, within the `first` tokens"""
    prefix: int = 0
    """Number of tokens of a prefix that is cut before the rest of the prompt, 0 if there is none"""
    evicted: Row = []  # noqa: RUF012 - never changed
    """Spans that are removed after the `first` tokens"""
    removed: Row = []  # noqa: RUF012 - never changed
    """Spans among these that are no longer in the request's page"""

    @property
    def first(self) -> int:
        """Number of tokens that are prefilled first and then cut to the budget. A budget that is a
        fraction is a fraction of these."""
        return self.prefix or self.prompt

    @property
    def due(self) -> Row:
        """Spans to remove after the `first` tokens, in the text without those that are gone."""
        return without(subtract(self.evicted, self.removed), self.removed)


def with_budget(config: H2OConfig, arguments: dict[str, Any]) -> H2OConfig | None:
    """The config with the budget in a request's `vllm_xargs`, or None if they have none. If a part
    of it is a number of tokens, fractions are of the prompt's keys.

    Raises: TypeError, ValueError that name a wrong budget or an unknown argument.
    """
    wanted = {name: x for name, x in arguments.items() if name.startswith("h2o_")}
    if unknown := sorted({*wanted} - {*OF_REQUESTS}):
        raise ValueError(f"{unknown[0]}: unknown; a request can have {', '.join(OF_REQUESTS)}")
    for name in (PINS, PREFIX, CONTEXT, EVICT):
        wanted.pop(name, None)
    if not wanted:
        return None
    amounts = {name.removeprefix("h2o_"): check_amount(name, x) for name, x in wanted.items()}
    of_bytes = {"heavy": config.heavy, "recent": config.recent, **amounts}
    if not all(isinstance(x, float) for x in of_bytes.values()):
        amounts["budget_unit"] = "keys"
    return dataclasses.replace(config, budget=None, **amounts)


def prefix_tokens(arguments: Mapping[str, Any], prompt: int) -> int:
    """Number of tokens of a prompt's prefix: `h2o_prefix` or `h2o_context` in a request's
    `vllm_xargs`. 0 if there is neither, or if the whole prompt of `prompt` tokens is not longer.

    Raises: TypeError, ValueError for a value that is not a number of tokens, and if both are given.
    """
    said = {name: arguments[name] for name in (PREFIX, CONTEXT) if arguments.get(name) is not None}
    if len(said) > 1:
        raise ValueError(f"{PREFIX} and {CONTEXT} both say where a prompt is cut: pass only one")
    for name, value in said.items():
        prefix = check_count(name, value)
        return prefix if prefix < prompt else 0
    return 0


def arguments_of(request: Any) -> dict[str, Any]:
    """The `vllm_xargs` of a request in vLLM's scheduler."""
    params = request.sampling_params
    return (params and params.extra_args) or {}


def prefix_of(request: Any) -> int:
    """Number of tokens of the prefix that a request in vLLM's scheduler asks to cut separately."""
    return prefix_tokens(arguments_of(request), request.num_prompt_tokens)


def reads_by_token(arguments: Mapping[str, Any]) -> bool:
    """Whether the prompt continues one token at a time after its prefix."""
    return arguments.get(CONTEXT) is not None


def with_pins(config: H2OConfig, arguments: dict[str, Any], prompt: int | None = None) -> Row:
    """The spans that a request pins by `h2o_pinned` in its `vllm_xargs`.

    Args:
        prompt: number of tokens of the prompt, or of its prefix, if known.

    Raises: TypeError, ValueError that say what is wrong with the spans.
    """
    if arguments.get(PINS) is None:
        return []
    if config.decay < 1:
        raise ValueError(f"{PINS}: the server's scores must not decay; start it with decay=1")
    pinned = _pinned(arguments)
    if pinned == "system":
        raise ValueError(
            f"{PINS}: this process does not see chats, so pass the system turn as a span such as "
            "0:40, which h2o.system_span(tokenizer, messages) returns (with tools= and all other "
            "arguments of the chat template)"
        )
    if pinned == "prompt":
        return [(0, prompt)] if prompt else []
    if pinned and prompt is not None and pinned[-1][1] > prompt:
        part = "prefix" if prefix_tokens(arguments, prompt + 1) else "prompt"
        raise ValueError(f"{PINS} ends at token {pinned[-1][1]}, but the {part} has {prompt}")
    return pinned


def evicted_spans(arguments: Mapping[str, Any], first: int | None = None) -> Row:
    """The spans of its prefix that a request forgets, by `h2o_evict` in its `vllm_xargs`.

    Args:
        first: number of tokens of the prefix, or of the prompt if that is shorter. None: only the
            request's arguments are known.

    Raises: TypeError, ValueError that say what is wrong with the spans.
    """
    given = arguments.get(EVICT)
    if given is None:
        return []
    prefix = prefix_tokens(arguments, sys.maxsize)
    if not prefix:
        raise ValueError(
            f"{EVICT} names tokens of a prefix: pass {PREFIX} too, the number of its tokens. "
            "Without a prefix leave the tokens out of the prompt. In a later turn of a session the "
            "prefix is everything before this turn"
        )
    spans = _parse(given) if isinstance(given, str) else check_spans(EVICT, given)
    pinned = _pinned(arguments)
    if shared := overlap(spans, [(0, prefix)] if isinstance(pinned, str) else pinned):
        raise ValueError(f"{EVICT} names token {shared[0][0]}, which {PINS} pins")
    n = prefix if first is None else min(prefix, first)
    if spans and spans[-1][1] > n:
        raise ValueError(f"{EVICT} ends at token {spans[-1][1]}, but the prefix has {n}")
    if size(spans) == n:
        raise ValueError(f"{EVICT} leaves nothing of the prefix: leave it out of the prompt")
    return spans


def arguments_of_turn(
    before: Mapping[str, Any], prompts: tuple[int, int], now: Mapping[str, Any], tokens: int
) -> dict[str, Any]:
    """The `vllm_xargs` of a session's turn, with what holds for all turns: the budget of the first
    one, and all pins and forgotten tokens so far. A session that begins anew after a preemption
    needs all of them.

    Args:
        before: the arguments of the turn before, as this function has returned them.
        prompts: number of tokens of the session at the end of the prompts of that turn and of this.
        now: the arguments that this turn has.
        tokens: number of tokens of the session before this turn.

    Raises: TypeError, ValueError for `h2o_evict` with other tokens than the session has.
    """
    gone, pinned = _held_before(before, prefix_tokens(before, prompts[0]) or prompts[0])
    asked, said = evicted_spans(now), prefix_tokens(now, sys.maxsize)
    how = CONTEXT if reads_by_token(now) else PREFIX
    new = subtract(asked, gone)
    if new and said != tokens:
        raise ValueError(
            f"{EVICT} names tokens of a session that has {tokens} tokens before this turn, but "
            f"{how} is {said}. vLLM leaves out the last token of each answer"
        )
    if shared := overlap(new, pinned):
        raise ValueError(f"{EVICT} names token {shared[0][0]}, which an earlier turn has pinned")
    arguments = {name: x for name, x in now.items() if name not in BUDGET}
    arguments |= {name: x for name, x in before.items() if name in BUDGET}
    prefix = max(said, tokens) if said or gone else 0
    if prefix:
        arguments[how] = prefix
    pins = _pinned(now)
    spans = [(0, prefix or prompts[1])] if isinstance(pins, str) else pins
    if spans := subtract(merge_spans([*pinned, *spans]), gone):
        arguments[PINS] = spans
    if spans := merge_spans([*gone, *new]):
        arguments[EVICT] = spans
        evicted_spans(arguments)
    return arguments


def _held_before(arguments: Mapping[str, Any], first: int) -> tuple[Row, Row]:
    """The tokens that a turn has forgotten and pinned among its `first` tokens. Those that it could
    not forget or pin are left out."""
    try:
        gone = evicted_spans(arguments, first)
    except (TypeError, ValueError):
        gone = []
    pinned = _pinned(arguments)
    if isinstance(pinned, str):
        return gone, [(0, first)]
    return gone, pinned if not pinned or pinned[-1][1] <= first else []


def _pinned(arguments: Mapping[str, Any]) -> Row | str:
    """The spans or the name of a part of the prompt in `h2o_pinned`; no spans if it is not given.

    Raises: TypeError, ValueError for anything else.
    """
    pinned = arguments.get(PINS)
    if pinned is None:
        return []
    return parse_spans(pinned) if isinstance(pinned, str) else check_spans(PINS, pinned)


def _parse(text: str) -> Row:
    """Spans from a text such as 0:40,100:120."""
    try:
        spans = parse_spans(text)
    except ValueError:
        spans = text
    if isinstance(spans, str):
        raise ValueError(wrong(EVICT, text, "spans of tokens, such as 0:40,100:120"))
    return spans
