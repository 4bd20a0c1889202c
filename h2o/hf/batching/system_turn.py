"""The position of a chat's system turn among the tokens of the prompt, for pins.

A chat template renders all turns as one text. The system turn is what the template renders for the
system message alone. If the template needs a user message too, or puts the system message into the
user's turn, the system turn is everything before the user's first word.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

SYSTEM_ROLES = ("system", "developer")


def system_span(
    tokenizer: Any, messages: Sequence[Any], ids: Sequence[int] | None = None
) -> tuple[int, int]:
    """(0, stop): the span of a chat's prompt from its first token to the end of the system turn.

    ```python
    pins = [h2o.system_span(tokenizer, messages)]
    cache = h2o.H2OCache(model, budget=0.2, pinned=pins)
    ```

    Args:
        tokenizer: a tokenizer with a chat template.
        messages: the chat as for `apply_chat_template`. Its first message is the system message.
        ids: token ids of the prompt that the template makes of `messages`. By default they are made
            here, with a generation prompt.

    Raises:
        TypeError: `messages` is not a list of messages.
        ValueError: the chat has no system message, or its template puts no system turn at the
            beginning of the prompt.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(
            "messages must be a chat, as a list of messages such as "
            f'[{{"role": "system", "content": ...}}], not a {type(messages).__name__}'
        )
    if not messages or messages[0].get("role") not in SYSTEM_ROLES:
        raise ValueError(
            'pinned="system": the chat has no system message. Begin it with '
            '{"role": "system", "content": ...}, or leave out pinned'
        )
    try:
        text = _render(tokenizer, messages, add_generation_prompt=True)
    except Exception as error:  # an error of Jinja, or of anything that a template calls
        raise ValueError(
            f'pinned="system": the chat template cannot render this chat: {error}'
        ) from error
    turn = _system_turn(tokenizer, messages[0], text)
    if ids is None:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return 0, _tokens_of(tokenizer, text, len(turn), list(ids))


def _system_turn(tokenizer: Any, message: Any, text: str) -> str:
    """The beginning of a chat's text, up to the end of its system turn."""
    turn = _rendered_or_none(tokenizer, [message])
    if turn is None or not _contains_message(turn, message) or not text.startswith(turn):
        users = [{"role": "user", "content": word} for word in ("a", "b")]
        one, other = (_rendered_or_none(tokenizer, [message, user]) or "" for user in users)
        alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
        turn = one[: len(list(alike))]
    if not _contains_message(turn, message) or not text.startswith(turn):
        raise ValueError(
            'pinned="system": the chat template of this tokenizer has no system turn at the '
            "beginning of the prompt. Give pinned as spans [(start, stop)] in tokens"
        )
    return turn


def _contains_message(turn: str, message: Any) -> bool:
    """Whether a text contains the whole content of a message."""
    content = message["content"]
    parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return all(part.strip() in turn for part in parts)


def _render(tokenizer: Any, messages: Sequence[Any], **how: Any) -> str:
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, **how)
    return text


def _rendered_or_none(tokenizer: Any, messages: Sequence[Any]) -> str | None:
    """Render messages, or return None if the template raises."""
    try:
        return _render(tokenizer, messages)
    except Exception:
        return None


def _tokens_of(tokenizer: Any, text: str, characters: int, ids: list[int]) -> int:
    """Number of tokens that the first characters of a text take; the last one may extend beyond."""
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        if list(encoded["input_ids"]) == ids:
            return sum(start < characters for start, _ in encoded["offset_mapping"])
    whole = tokenizer(text[:characters], add_special_tokens=False)["input_ids"]
    if list(whole) == ids[: len(whole)]:
        return len(whole)
    raise ValueError(
        'pinned="system": the prompt does not begin with the tokens of its system turn. Give '
        "pinned as spans [(start, stop)] in tokens"
    )
