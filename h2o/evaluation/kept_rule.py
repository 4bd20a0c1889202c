"""Whether a model still follows a rule from the beginning of a chat, several turns later.

The first message says that a question mark alone must be answered by a code word. Other messages
bring parts of a text. The last one is the question mark. Keys are evicted in every turn, when
nobody has asked for the rule yet.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from h2o.config import H2OConfig
from h2o.evaluation import protocols
from h2o.evaluation.facts import WORDS
from h2o.hf.cache.cache import H2OCache
from h2o.hf.chat.chat_template import common_beginning, render

TURNS = 4
"""Number of messages that bring a part of the text"""


class Chat(NamedTuple):
    """A chat whose last message asks for the code word."""

    ids: torch.Tensor
    """Token ids [1, n], up to where the answer begins"""
    ends: list[int]
    """Number of ids up to the end of each user's message, with the header of the answer"""
    answer: list[int]
    """Token ids of the code word"""


def make_chat(tokenizer: Any, parts: Sequence[str], draw: random.Random) -> Chat | None:
    """A chat with these parts of a text. None if the tokenizer has no chat template, or one that
    changes earlier messages."""
    word = draw.choice(WORDS).capitalize()
    rule = (
        f"Follow one rule in this conversation. Whenever a message is only a question mark, answer "
        f"with the single word {word} and nothing else. Do not use that word otherwise."
    )
    messages = [{"role": "user", "content": rule}, {"role": "assistant", "content": "Understood."}]
    for part in parts:
        said = f"Here is a part of a text.\n\n{part.strip()}"
        messages += [
            {"role": "user", "content": said},
            {"role": "assistant", "content": "I have read it."},
        ]
    messages.append({"role": "user", "content": "?"})
    try:
        rounds = range(1, len(messages) + 1, 2)
        texts = [render(tokenizer, messages[:n], add_generation_prompt=True) for n in rounds]
    except ValueError:
        return None
    if any(common_beginning(x, texts[-1]) != x for x in texts):
        return None
    pieces = [tokenizer(x, add_special_tokens=False)["input_ids"] for x in texts]
    ids = pieces[-1]
    if any(common_beginning(x, ids) != x for x in pieces):
        return None
    answer = tokenizer(word, add_special_tokens=False)["input_ids"]
    columns = torch.tensor([ids], dtype=torch.long, device="cpu")
    return Chat(columns, [len(x) for x in pieces], answer)


def is_followed(reader: Any, chat: Chat) -> bool:
    """Whether greedy decoding answers with the code word, after a cache has read turn by turn.

    Args:
        reader: an `h2o.evaluation.recommendation.Reader` of a setting that is a cache.
    """
    model, mask, config = reader.model, torch.ones_like(chat.ids), reader.setting.config
    if config.budget is not None:  # as users write it: it follows the text and has a floor
        config = H2OConfig(budget=config.budget)
    with reader.begin_forward():
        cache = H2OCache(model.config, config.for_model(model))
        for end in chat.ends[:-1]:
            protocols.by_cache(model, (chat.ids[:, :end], mask[:, :end]), [chat.answer[:1]], cache)
        (logits,) = protocols.by_cache(model, (chat.ids, mask), [chat.answer], cache)
    return logits.argmax(-1).tolist() == chat.answer
