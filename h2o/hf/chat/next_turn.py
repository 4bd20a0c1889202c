"""`h2o.next_turn`: the ids of a chat's next turn, after the ids that its cache has seen.

A cache continues ids, not texts. The ids of a longer chat cannot be made by rendering the whole
chat again: a template may drop the thoughts of earlier turns, and an answer that is decoded and
tokenized again may have other tokens. The new turn is therefore rendered after a stand-in for the
answer, and what follows the stand-in is appended to the ids.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from h2o.arguments.plain_values import check_count, is_list, nested
from h2o.arguments.torch_values import check_ids
from h2o.hf.chat.chat_template import (
    common_beginning,
    contains_message,
    encode,
    is_chat,
    render,
)


def next_turn(
    tokenizer: Any,
    ids: Any,
    message: Any,
    *,
    eos_token_id: int | Sequence[int] | None = None,
    **template_kwargs: Any,
) -> Tensor:
    """Append the next turn of a chat to the ids that `generate()` returned.

    ```python
    out = model.generate(**inputs, cache=cache, max_new_tokens=200)
    ids = h2o.next_turn(tokenizer, out, "And who built it?")
    out = model.generate(ids, cache=cache, max_new_tokens=200)
    ```

    An answer that `max_new_tokens` or a stopping criterion has cut is closed with the template's
    end of turn. An answer that ended by itself already has that end. If it ended with an end token
    that the template does not write there, the template's end of turn replaces that token, which
    the cache has not seen.

    Args:
        tokenizer: a tokenizer with a chat template.
        ids: int [1, n], prompt and answer as `generate()` returned them for one chat; also [n] or a
            list.
        message: what the user says, as text. Or a message such as
            `{"role": "tool", "content": ...}`, or a list of messages. Only what is new, without the
            earlier turns.
        eos_token_id: end tokens other than the tokenizer's, such as
            `model.generation_config.eos_token_id`.
        template_kwargs: arguments of the chat template, such as `tools` or `enable_thinking`, as
            they were for the earlier turns. `add_generation_prompt` is True by default.

    Returns:
        int64 [1, n + m] on the device of `ids`, for `generate()` with the same cache. Where the
        template only appends to earlier turns, these are the ids of the whole chat.

    Raises:
        TypeError: `ids` are not token ids, `message` is no message, or an argument is not for the
            template.
        ValueError: `ids` has several rows or no tokens, or `message` repeats an answer. The
            tokenizer has no chat template, or the template raises an error or leaves out the answer
            or the user's message.
    """
    hint = (
        "pass what generate() returns for one chat without padding: out, or out.sequences with "
        "return_dict_in_generate=True"
    )
    held = check_ids("ids", ids, one_row=True, hint=hint)
    stops = _end_tokens(tokenizer, eos_token_id)
    messages = _as_messages(message)
    answer = uuid.uuid4().hex  # occurs nowhere else
    chat = [_like(messages[0], "user", "x"), _like(messages[0], "assistant", answer)]
    how = {"add_generation_prompt": True, **template_kwargs}
    text = render(tokenizer, [*chat, *messages], **how)
    if text.count(answer) != 1:
        raise ValueError(
            "the chat template does not write an earlier answer as it is. If it expects content as "
            'a list, pass message={"role": "user", "content": [{"type": "text", "text": ...}]}. '
            "Otherwise append the ids of the turn yourself: torch.cat([ids, turn], dim=1)"
        )
    begin = text.index(answer) + len(answer)
    said = [x for x in messages if x.get("role") == "user"]
    if lost := [x for x in said if not contains_message(text[begin:], x)]:
        raise ValueError(f"the chat template leaves out the message {lost[0]['content']!r}")
    ends = _ends_of_turn(tokenizer, text[begin:], _end_of_chat(tokenizer, chat, answer, how))
    written = _characters_written(tokenizer, held, ends)
    new = _tokens_from(tokenizer, text, begin + written)
    stops |= {*new[:1]} & {*tokenizer.all_special_ids}  # a model may end its turn with a header
    if not written and int(held[0, -1]) in stops:
        held = held[:, :-1]
        if written := _characters_written(tokenizer, held, ends):
            new = _tokens_from(tokenizer, text, begin + written)
    return torch.cat([held, held.new_tensor([new])], dim=1)


def _like(message: Mapping[str, Any], role: str, text: str) -> dict[str, Any]:
    """A message with a text, as a list of parts if the content of `message` is one."""
    is_text = isinstance(message.get("content"), str | None)
    return {"role": role, "content": text if is_text else [{"type": "text", "text": text}]}


def _end_of_chat(tokenizer: Any, chat: list[Any], answer: str, how: dict[str, Any]) -> str:
    """What the template writes after an answer that ends the chat; empty if it raises."""
    try:
        text = render(tokenizer, chat, **{**how, "add_generation_prompt": False})
    except ValueError:
        return ""
    return text.partition(answer)[2]


def _ends_of_turn(tokenizer: Any, next_turn: str, end_of_chat: str) -> list[str]:
    """Texts that close an answer, longest first: what the template writes after an answer whatever
    follows, with all, some or none of the spaces at its end."""
    common = common_beginning(next_turn, end_of_chat)
    tokens, starts = encode(tokenizer, next_turn)
    alike = len(common_beginning(tokens, encode(tokenizer, end_of_chat)[0]))
    # Characters may be common to two markers that are not, such as <| of <|user|> and <|end|>.
    whole = common if starts is None else next_turn[: [*starts, len(next_turn)][alike]]
    least = len(whole.rstrip()) or 1
    return [common[:n] for n in range(len(common), least - 1, -1)] if whole else []


def _characters_written(tokenizer: Any, held: Tensor, ends: list[str]) -> int:
    """How many characters of the end of a turn stand at the end of ids [1, n]."""
    most = 4 * len(ends[0]) + 1 if ends else 1  # a character has up to four tokens
    tail = tokenizer.decode(
        held[0, -most:].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return next((len(end) for end in ends if tail.endswith(end)), 0)


def _tokens_from(tokenizer: Any, text: str, begin: int) -> list[int]:
    """Tokens of the text from a character on, as they are after what comes before."""
    tokens, starts = encode(tokenizer, text)
    if starts is not None and begin in starts:
        return tokens[starts.index(begin) :]
    return encode(tokenizer, text[begin:])[0]


def _end_tokens(tokenizer: Any, more: Any) -> set[int | None]:
    """The end tokens of a tokenizer, and `more`: None, a token id, or a list of them."""
    given = [] if more is None else nested(more)
    given = given if is_list(given) else [given]
    own = [check_count("eos_token_id", x, 0) for x in given if x is not None]
    return {tokenizer.eos_token_id, *own} - {None}


def _as_messages(message: Any) -> list[Any]:
    if isinstance(message, str):
        return [{"role": "user", "content": message}]
    messages = [message] if isinstance(message, Mapping) else message
    if not is_chat(messages) or not all(isinstance(x, Mapping) for x in messages):
        raise TypeError(
            "message must be a text, a message such as "
            f'{{"role": "user", "content": ...}}, or a list of messages, not {message!r}'
        )
    if any(x.get("role") == "assistant" for x in messages):
        raise ValueError(
            "message has a turn of the assistant, but ids already hold all earlier turns: pass "
            'only what is new, such as {"role": "user", "content": ...}'
        )
    return list(messages)
