"""Tokens as readable pieces of their text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["pieces"]

LOST = "\N{REPLACEMENT CHARACTER}"
LONGEST = 8
"""Tokens that one character may be spread over; byte tokens need four at most."""


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token, blanks kept, so that joined together they are the text again.

    Where a character is spread over several tokens, the first has it and the others are "".
    """
    ids = [int(i) for i in ids]
    found: list[str] = []
    while len(found) < len(ids):
        start = len(found)
        for stop in range(start + 1, min(start + LONGEST, len(ids)) + 1):
            text = _decode(tokenizer, ids[start:stop])
            if LOST not in text:
                break
        else:
            text, stop = _decode(tokenizer, ids[start : start + 1]), start + 1
        found += [text, *[""] * (stop - start - 1)]
    return found


def _decode(tokenizer: Any, ids: list[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if not text.startswith(" ") and hasattr(tokenizer, "convert_ids_to_tokens"):
        # SentencePiece drops the blank that a word begins with where nothing stands before it.
        first = tokenizer.convert_ids_to_tokens(ids[:1])[0]
        if isinstance(first, str) and first.startswith("\N{LOWER ONE EIGHTH BLOCK}"):
            return " " + text
    return text
