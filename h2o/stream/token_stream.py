"""Token ids of a text that need not end, read piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TextIO

__all__ = ["chunks", "pieces", "tokens"]

BLOCK = 1 << 14
"""Characters that are encoded together: no more of a text is held."""


def pieces(file: TextIO, *, repeat: bool = False, block: int = BLOCK) -> Iterator[str]:
    """A text in pieces that end between words; a line of a pipe or a terminal as soon as it is
    there, the white space at its end with the next one, as tokenizers would have it.

    With `repeat` it begins anew whenever it ends. Ctrl-C, while a pipe has nothing, is its end.
    Raises: ValueError for an empty text.
    """
    rest, some = "", False
    live = not file.seekable()
    while True:
        try:
            new = file.readline(block)
        except KeyboardInterrupt:
            if not live:
                raise
            new = ""
        if not new:
            if rest:
                yield rest
            if not some:
                raise ValueError("the text is empty")
            if not repeat:
                return
            rest = ""
            file.seek(0)
            continue
        some = some or bool(new.strip())
        rest += new
        if live and rest.endswith("\n") and (line := rest.rstrip()):
            yield line
            rest = rest[len(line) :]
        elif len(rest) >= block:
            end = max(rest.rfind(" "), rest.rfind("\n"))
            end = len(rest) if end <= 0 or rest.endswith("\n") else end
            yield rest[:end]
            rest = rest[end:]


def tokens(texts: Iterable[str], tokenizer: Any, limit: int | None = None) -> Iterator[int]:
    """Ids of a text given in pieces, `limit` of them at most; begins as the tokenizer begins."""
    count, first = 0, True
    for text in texts:
        for token in tokenizer(text, add_special_tokens=first, verbose=False)["input_ids"]:
            if count == limit:
                return
            count += 1
            yield token
        first = False


def chunks(ids: Iterable[int], size: int) -> Iterator[list[int]]:
    """Lists of `size` ids, the last one of what is left."""
    chunk: list[int] = []
    for token in ids:
        chunk.append(token)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
