"""Where the question of a request begins: what stands before it is a document."""

from __future__ import annotations

import bisect
import re
from typing import Any

QUESTION = re.compile(r"^[ \t]*(?:Question|Q)\b.*", re.MULTILINE)


def question_start(text: str) -> int:
    """The index in a request at which its question begins: the last line that begins with
    "Question" or "Q", or else the last line of all. 0 where that is the only line."""
    starts = [match.start() for match in QUESTION.finditer(text)]
    return starts[-1] if starts else text.rstrip().rfind("\n") + 1


def question_tokens(tokens: list[int], tokenizer: Any) -> int:
    """Number of tokens of the question at the end of a request, from `question_start` on.

    In a request of a single line the question is the last token.

    Args:
        tokens: the tokens of the request, at least two.

    Returns:
        A number from 1 to one less than there are tokens.

    Raises:
        ValueError: fewer tokens.
    """
    if len(tokens) < 2:
        raise ValueError(
            "protocol=read cuts before the question, and a request of one token has nothing before "
            "it: use protocol=drop"
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
