"""A tokenizer's chat template, as h2o calls it everywhere, and the tokens of parts of its text.

Arguments of a template, such as `tools=`, `documents=` or `enable_thinking=`, change what the
template writes into the system turn and around answers. Whoever renders a chat passes them on.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from h2o.arguments.plain_values import is_list, wrong

_NOT_FOR_TEMPLATES = {
    "continue_final_message", "conversation", "ids", "max_length", "messages", "padding",
    "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens",
    "tokenize", "tokenizer", "tokenizer_kwargs", "truncation",
}  # fmt: skip
"""Arguments of `apply_chat_template`, and of the functions here, that are not for the template"""


_OF_EVERY_TEMPLATE = ("tools", "documents", "add_generation_prompt", "chat_template")
"""Arguments that `apply_chat_template` has itself"""


class Misspelt(TypeError):
    """The name of an argument that the chat template does not read."""


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is a list of messages."""
    is_messages = is_list(prompt) and all(isinstance(message, Mapping) for message in prompt)
    return is_messages and len(prompt) > 0


def check_template_arguments(arguments: Any) -> None:
    """Raise TypeError unless these are arguments for a chat template, by name."""
    if not isinstance(arguments, Mapping):
        expected = 'the arguments of the chat template by name, such as {"enable_thinking": False}'
        raise TypeError(wrong("chat_template_kwargs", arguments, expected))
    if others := sorted(_NOT_FOR_TEMPLATES & set(arguments)):
        raise TypeError(
            f"{', '.join(others)}: not for the chat template. Leave it out, and pass only what the "
            "template reads, such as tools=, documents= or enable_thinking="
        )


def arguments_of(
    prompt: Any, own: Mapping[str, Any] | None, shared: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Arguments of the chat template for one prompt: its own, or those that all prompts share.

    Raises: as `check_template_arguments`. ValueError if a prompt that is no chat has arguments of
    its own.
    """
    if own is None:
        return shared
    check_template_arguments(own)
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
        _check_spelling(tokenizer, arguments)
        return tokenizer.apply_chat_template(messages, **how)
    except Misspelt:
        raise
    except Exception as error:  # an error of Jinja, or of anything that a template calls
        raise ValueError(f"the chat template cannot render this chat: {error}") from error


def _check_spelling(tokenizer: Any, arguments: Mapping[str, Any]) -> None:
    """Raise TypeError for a name that the template does not read, and that looks like one that it
    reads or that every template has: the template would do without it. A name that looks like none
    of them is left to the template, which may be one of several for which the arguments are."""
    given, tools = arguments.get("chat_template"), arguments.get("tools")
    template = given or getattr(tokenizer, "chat_template", None)
    if hasattr(tokenizer, "get_chat_template"):  # knows which of several templates is meant
        template = tokenizer.get_chat_template(given, tools)
    names = (*_OF_EVERY_TEMPLATE, *_names_read(template)) if isinstance(template, str) else ()
    for name in arguments.keys() - {*names}:
        if close := difflib.get_close_matches(name, names, 1, cutoff=0.8):
            raise Misspelt(f"{name}: the chat template does not read it. Did you mean {close[0]}?")


@functools.lru_cache(maxsize=8)
def _names_read(template: str) -> frozenset[str]:
    """The variables that a template takes from its caller; none if it cannot be parsed."""
    import jinja2
    from jinja2 import meta

    plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)  # transformers' own tag
    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except jinja2.TemplateSyntaxError:  # which rendering reports
        return frozenset()
    return frozenset(meta.find_undeclared_variables(tree))
