"""Where the system turn of a chat stands among the tokens of its prompt, for pins.

A chat template puts all turns into one text. The system turn is what the template makes of the
system message alone. Where the template needs a user too, or puts the system message into the
user's turn, it is what stands before the user's first word.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

SYSTEM_ROLES = ("system", "developer")


def system_span(
    tokenizer: Any, messages: Sequence[Any], ids: Sequence[int] | None = None
) -> tuple[int, int]:
    """(0, stop): the tokens of a chat's prompt from its first one to the end of its system turn.

    ```python
    pins = [h2o.system_span(tokenizer, messages)]
    cache = h2o.H2OCache(model, budget=0.2, pinned=pins)
    ```

    Args:
        tokenizer: with a chat template.
        messages: the chat, as `apply_chat_template` takes it; its first message is the system's.
        ids: the prompt that the template has made of `messages`; by default the one that it makes
            with a generation prompt.

    Raises:
        ValueError: a chat without a system message, or a template without a system turn at the
            beginning of the prompt.
    """
    if not messages or messages[0].get("role") not in SYSTEM_ROLES:
        raise ValueError(
            'pinned="system": the chat has no system message. Begin it with '
            '{"role": "system", "content": ...}, or leave out pinned'
        )
    try:
        text = _render(tokenizer, messages, add_generation_prompt=True)
    except Exception as error:  # Jinja's, or whatever a template calls
        raise ValueError(
            f'pinned="system": the chat template refuses this chat: {error}'
        ) from error
    turn = _system_turn(tokenizer, messages[0], text)
    if ids is None:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return 0, _tokens_of(tokenizer, text, len(turn), list(ids))


def _system_turn(tokenizer: Any, message: Any, text: str) -> str:
    """The beginning of a chat's text, up to the end of its system turn."""
    turn = _rendered_or_none(tokenizer, [message])
    if turn is None or not _holds(turn, message) or not text.startswith(turn):
        users = [{"role": "user", "content": word} for word in ("a", "b")]
        one, other = (_rendered_or_none(tokenizer, [message, user]) or "" for user in users)
        alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
        turn = one[: len(list(alike))]
    if not _holds(turn, message) or not text.startswith(turn):
        raise ValueError(
            'pinned="system": the chat template of this tokenizer has no system turn at the '
            "beginning of the prompt. Give pinned as spans [(start, stop)] in tokens"
        )
    return turn


def _holds(turn: str, message: Any) -> bool:
    """Whether all words of a message stand in a text."""
    content = message["content"]
    parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return all(part.strip() in turn for part in parts)


def _render(tokenizer: Any, messages: Sequence[Any], **how: Any) -> str:
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, **how)
    return text


def _rendered_or_none(tokenizer: Any, messages: Sequence[Any]) -> str | None:
    """None where the template raises."""
    try:
        return _render(tokenizer, messages)
    except Exception:
        return None


def _tokens_of(tokenizer: Any, text: str, characters: int, ids: list[int]) -> int:
    """How many tokens the first characters of a text take, the last one perhaps in part."""
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
