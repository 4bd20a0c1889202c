"""A request: the length of its prompt, and what its `vllm_xargs` ask of h2o.

The front end checks the arguments of each request before it accepts it; workers and the scheduler
read them again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from operator import index
from typing import Any, NamedTuple

from h2o.budgets import check_amount
from h2o.config import H2OConfig
from h2o.spans import Row, merge_spans, parse_spans

PINS = "h2o_pinned"
"""Argument in `vllm_xargs`: spans as text, 0:40,100:120, or as pairs of numbers; or "prompt" """

PREFIX = "h2o_prefix"
"""Argument in `vllm_xargs`: tokens of a prefix that is read and cut by itself, and held
in common with other requests that say so"""

CONTEXT = "h2o_context"
"""Argument in `vllm_xargs`: tokens of a context, after which the prompt is read token by token, so
that its log-likelihoods are those of the kept keys"""

OF_REQUESTS = ("h2o_heavy", "h2o_recent", PINS, PREFIX, CONTEXT)


class Request(NamedTuple):
    """A request without its tokens."""

    prompt: int
    """tokens of the prompt"""
    config: H2OConfig | None = None
    """its own, where the request says one"""
    pinned: Row = []  # noqa: RUF012 - never changed
    """within what is read first"""
    prefix: int = 0
    """tokens of a prefix that is cut before the rest of the prompt is read; 0: there is none"""

    @property
    def first(self) -> int:
        """Tokens of what is read first, then cut to its budget, which may be a fraction of it."""
        return self.prefix or self.prompt


def with_budget(config: H2OConfig, arguments: dict[str, Any]) -> H2OConfig | None:
    """A config with the budget that a request's `vllm_xargs` say; None: they say none.

    Raises: TypeError, ValueError for a wrong one, which name what is wrong.
    """
    wanted = {name: x for name, x in arguments.items() if name.startswith("h2o_")}
    if unknown := sorted({*wanted} - {*OF_REQUESTS}):
        raise ValueError(f"{unknown[0]}: a request has {', '.join(OF_REQUESTS)}")
    for name in (PINS, PREFIX, CONTEXT):
        wanted.pop(name, None)
    if not wanted:
        return None
    amounts = {name.removeprefix("h2o_"): check_amount(name, x) for name, x in wanted.items()}
    return dataclasses.replace(config, **amounts)


def prefix_tokens(arguments: Mapping[str, Any], prompt: int) -> int:
    """The tokens of a prompt's prefix, `h2o_prefix` or `h2o_context` of a request's `vllm_xargs`; 0
    where none is said, and where it is all of a prompt of so many tokens.

    Raises: ValueError for what is no number of tokens, and for both.
    """
    said = {name: arguments[name] for name in (PREFIX, CONTEXT) if arguments.get(name) is not None}
    if len(said) > 1:
        raise ValueError(f"{PREFIX} and {CONTEXT} both say where a prompt is cut: give one")
    for name, prefix in said.items():
        if isinstance(prefix, bool) or not isinstance(prefix, int) or prefix < 1:
            raise ValueError(
                f"{name} must be a number of tokens from 1, such as 40, not {prefix!r}"
            )
        return prefix if prefix < prompt else 0
    return 0


def arguments_of(request: Any) -> dict[str, Any]:
    """The `vllm_xargs` of a request of vLLM's scheduler."""
    params = request.sampling_params
    return (params and params.extra_args) or {}


def asked_prefix(request: Any) -> int:
    """Tokens of the prefix that a request of vLLM's scheduler wants to be cut by itself."""
    return prefix_tokens(arguments_of(request), request.num_prompt_tokens)


def reads_by_token(arguments: Mapping[str, Any]) -> bool:
    """Whether what follows the prefix is read token by token."""
    return arguments.get(CONTEXT) is not None


def with_pins(config: H2OConfig, arguments: dict[str, Any], prompt: int | None = None) -> Row:
    """The spans that a request's `vllm_xargs` pin, `h2o_pinned`, of a prompt of so many tokens, if
    that is known, or of its prefix.

    Raises: TypeError, ValueError for a wrong one, which name what is wrong.
    """
    pinned = arguments.get(PINS)
    if pinned is None:
        return []
    if config.decay < 1:
        raise ValueError(f"{PINS}: of the server's scores nothing may fade, give decay=1")
    pinned = parse_spans(pinned) if isinstance(pinned, str) else _merge_pairs(pinned)
    if pinned == "system":
        raise ValueError(
            f"{PINS}: this process does not see chats, so give the system turn as a span, such as "
            "0:40, which h2o.system_span(tokenizer, messages) finds"
        )
    if pinned == "prompt":
        return [(0, prompt)] if prompt else []
    if pinned and prompt is not None and pinned[-1][1] > prompt:
        part = "prefix" if prefix_tokens(arguments, prompt + 1) else "prompt"
        raise ValueError(f"{PINS} ends at token {pinned[-1][1]}, and the {part} has {prompt}")
    return pinned


def _merge_pairs(pinned: Any) -> Row:
    """The spans that pairs of numbers say. Raises ValueError for anything else."""
    try:
        pairs = [(index(start), index(stop)) for start, stop in pinned]
        if any(isinstance(x, bool) for pair in pinned for x in pair):
            raise TypeError
    except (TypeError, ValueError):
        raise ValueError(
            f'{PINS} must be spans of tokens as text, such as "0:40,100:120", not {pinned!r}'
        ) from None
    return merge_spans(pairs)
