"""Find the question at the end of a request. The text before it is the document."""

from __future__ import annotations

import bisect
import re
from typing import Any

QUESTION = re.compile(r"^[ \t]*(?:Question|Q)\b.*", re.MULTILINE)


def question_start(text: str) -> int:
    """The index at which the question of a request begins: the last line that begins with
    "Question" or "Q", or the last line if there is none. 0 if the request has only one line."""
    starts = [match.start() for match in QUESTION.finditer(text)]
    return starts[-1] if starts else text.rstrip().rfind("\n") + 1


def question_tokens(tokens: list[int], tokenizer: Any) -> int:
    """Number of tokens of the question at the end of a request, from `question_start` on.

    In a request of one line the question is the last token.

    Args:
        tokens: the tokens of the request, at least two.

    Returns:
        A number from 1 to `len(tokens) - 1`.

    Raises:
        ValueError: there are fewer than two tokens.
    """
    if len(tokens) < 2:
        raise ValueError(
            "protocol=read evicts before the question, but a request of one token has nothing "
            "before it: use protocol=drop, or for whole texts protocol=simulate"
        )

    def text(last: int) -> str:
        part = tokens[len(tokens) - last :]
        return tokenizer.decode(part, clean_up_tokenization_spaces=False)

    whole_text = text(len(tokens)).rstrip()
    begin = question_start(whole_text)
    if begin == 0:
        return 1
    question = whole_text[begin:].strip()
    counts = range(1, len(tokens) - 1)
    return 1 + bisect.bisect_left(counts, True, key=lambda n: question in text(n))
