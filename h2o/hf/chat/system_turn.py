"""The position of a chat's system turn among the tokens of the prompt, for pins.

A chat template renders all turns as one text. The system turn is what the template renders for the
system message alone, including tools or documents that the template puts there. If the template
needs a user message too, or puts the system message into the user's turn, the system turn is
everything before the user's first word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from h2o.arguments.plain_values import is_list, wrong
from h2o.arguments.torch_values import check_ids
from h2o.hf.chat.chat_template import (
    common_beginning,
    contains_message,
    encode,
    is_chat,
    render,
)

SYSTEM_ROLES = ("system", "developer")


def system_span(
    tokenizer: Any, messages: Sequence[Any], ids: Any = None, **template_kwargs: Any
) -> tuple[int, int]:
    """(0, stop): the span of a chat's prompt from its first token to the end of the system turn.

    ```python
    pins = [h2o.system_span(tokenizer, messages, tools=tools)]
    cache = h2o.H2OCache(model, budget=0.2, pinned=pins)
    ```

    Args:
        tokenizer: a tokenizer with a chat template.
        messages: the chat as for `apply_chat_template`. Its first message is the system message.
        ids: token ids of the prompt that the template made of `messages`, as a list or a tensor [n]
            or [1, n]. With them an error is raised if they begin with another system turn, for
            example one with tools. By default they are not checked.
        template_kwargs: all other arguments with which the template made the prompt, such as
            `tools`, `documents`, `enable_thinking` or `chat_template`. Tools often stand in the
            system turn, which is longer with them.

    Raises:
        TypeError: `messages` is not a list of messages, or an argument is not for the template.
        ValueError: the chat has no system message. Or its template puts no system turn at the
            beginning of the prompt, or `ids` begin with other tokens.
    """
    if not is_list(messages) or (messages and not is_chat(messages)):
        expected = 'a chat, as a list of messages such as [{"role": "system", "content": ...}]'
        raise TypeError(wrong("messages", messages, expected))
    if not messages or messages[0].get("role") not in SYSTEM_ROLES:
        raise ValueError(
            "the chat has no system message to pin. Begin the chat with "
            '{"role": "system", "content": ...}, or leave out pinned'
        )
    given = None if ids is None else check_ids("ids", ids, one_row=True)
    template_kwargs.pop("add_generation_prompt", None)  # it is for the end of the prompt
    text = render(tokenizer, messages, **template_kwargs)
    turn = _system_turn(tokenizer, messages, text, template_kwargs)
    whole, starts = encode(tokenizer, text)
    if starts is None:
        beginning = encode(tokenizer, turn)[0]
    else:  # the last token may extend beyond the turn
        beginning = whole[: sum(start < len(turn) for start in starts)]
    if given is not None:
        whole = given[0].tolist()
    if whole[: len(beginning)] != beginning:
        raise ValueError(
            "the prompt does not begin with the tokens of its system turn. Pass the arguments with "
            "which the chat template made the prompt, such as tools= or enable_thinking=, or give "
            "pinned as spans [(start, stop)] in tokens"
        )
    return 0, len(beginning)


def _system_turn(tokenizer: Any, messages: Sequence[Any], text: str, how: dict[str, Any]) -> str:
    """The beginning of a chat's text, up to the end of its system turn."""
    system = messages[0]
    turn = _rendered_or_empty(tokenizer, [system], how)
    if not (turn and contains_message(turn, system) and text.startswith(turn)):
        chats = ([system, *_with_first_word(messages[1:], word)] for word in ("a", "b"))
        one, other = (_rendered_or_empty(tokenizer, chat, how) for chat in chats)
        turn = common_beginning(one, other)
    if not (turn and contains_message(turn, system) and text.startswith(turn)):
        raise ValueError(
            "the chat template of this tokenizer has no system turn at the beginning of the "
            "prompt. Give pinned as spans [(start, stop)] in tokens"
        )
    return turn


def _with_first_word(messages: Sequence[Any], word: str) -> list[Any]:
    """The messages after the system message, of which the first one says only `word`."""
    if not messages:
        return [{"role": "user", "content": word}]
    is_text = isinstance(messages[0].get("content"), str | None)
    content = word if is_text else [{"type": "text", "text": word}]
    return [{**messages[0], "content": content}, *messages[1:]]


def _rendered_or_empty(tokenizer: Any, messages: Sequence[Any], how: dict[str, Any]) -> str:
    """Render messages, or return an empty text if the template raises."""
    try:
        return render(tokenizer, messages, **how)
    except ValueError:
        return ""
