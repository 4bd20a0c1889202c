"""A tokenizer's chat template, as h2o calls it everywhere, and the tokens of parts of its text.

Arguments of a template, such as `tools=`, `documents=` or `enable_thinking=`, change what the
template writes into the system turn and around answers. Whoever renders a chat passes them on.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

_NOT_FOR_TEMPLATES = {
    "continue_final_message", "conversation", "ids", "max_length", "messages", "padding",
    "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens",
    "tokenize", "tokenizer", "tokenizer_kwargs", "truncation",
}  # fmt: skip
"""Arguments of `apply_chat_template`, and of the functions here, that are not for the template"""


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is a list of messages."""
    is_list = isinstance(prompt, Sequence) and len(prompt) > 0
    return is_list and isinstance(prompt[0], Mapping)


def check_template_arguments(arguments: Any) -> None:
    """Raise TypeError unless these are arguments for a chat template, by name."""
    if not isinstance(arguments, Mapping):
        raise TypeError(
            "the arguments of a chat template are a dict such as "
            f'{{"enable_thinking": False}}, not a {type(arguments).__name__}'
        )
    if wrong := sorted(_NOT_FOR_TEMPLATES & set(arguments)):
        raise TypeError(
            f"{', '.join(wrong)}: not for the chat template. Leave it out, and pass only what the "
            "template reads, such as tools=, documents= or enable_thinking="
        )


def arguments_of(
    prompt: Any, own: Mapping[str, Any] | None, shared: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Arguments of the chat template for one prompt: its own, or those that all prompts share.

    Raises: ValueError if a prompt that is no chat has arguments of its own.
    """
    if own is None:
        return shared
    if not is_chat(prompt):
        raise ValueError("chat_template_kwargs needs a chat: pass a list of messages")
    return own


def render(tokenizer: Any, messages: Sequence[Any], **arguments: Any) -> str:
    """The text that the chat template makes of messages.

    Raises:
        TypeError: one of the `arguments` is not for the template.
        ValueError: the tokenizer has no chat template, or the template raises an error.
    """
    text: str = _apply(tokenizer, messages, {"tokenize": False, **arguments}, arguments)
    return text


def prompt_ids(tokenizer: Any, messages: Sequence[Any], **arguments: Any) -> Any:
    """Token ids of a chat as a prompt. By default they end with the header of the answer.

    Raises: as `render`.
    """
    how = {"add_generation_prompt": True, "tokenize": True, "return_dict": False, **arguments}
    return _apply(tokenizer, messages, how, arguments)


def contains_message(text: str, message: Any) -> bool:
    """Whether a text contains the whole content of a message, without spaces at its ends."""
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return all(part.strip() in text for part in parts)


def common_beginning(one: Sequence[Any], other: Sequence[Any]) -> Any:
    """The longest text, or list of tokens, with which both begin."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return one[: sum(1 for _ in alike)]


def encode(tokenizer: Any, text: str) -> tuple[list[int], list[int] | None]:
    """Token ids of a text, and the character at which each token begins.

    The characters are None for a slow tokenizer, which does not know them.
    """
    if not getattr(tokenizer, "is_fast", False):
        return list(tokenizer(text, add_special_tokens=False)["input_ids"]), None
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return list(encoded["input_ids"]), [start for start, _ in encoded["offset_mapping"]]


def _apply(
    tokenizer: Any, messages: Sequence[Any], how: dict[str, Any], arguments: Mapping[str, Any]
) -> Any:
    """Call `apply_chat_template` with `how`, which includes the `arguments` of the template."""
    check_template_arguments(arguments)
    has_own = getattr(tokenizer, "chat_template", "") is not None
    if not has_own and arguments.get("chat_template") is None:
        raise ValueError(
            "this tokenizer has no chat template. Use the tokenizer of an instruct model, set "
            "tokenizer.chat_template, or pass chat_template="
        )
    try:
        return tokenizer.apply_chat_template(messages, **how)
    except Exception as error:  # an error of Jinja, or of anything that a template calls
        raise ValueError(f"the chat template cannot render this chat: {error}") from error
