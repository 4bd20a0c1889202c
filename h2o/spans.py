"""Spans of token positions, for pinned keys, as plain numbers without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

PINNED = math.inf
"""The score of a pinned key."""

Row = list[tuple[int, int]]
"""Spans (start, stop) of one row, ascending and disjoint."""


def merge_spans(spans: Iterable[Sequence[int]]) -> Row:
    """Sort spans and merge those that touch or overlap.

    Raises: ValueError for a span that is empty or has a negative start.
    """
    row: Row = []
    for start, stop in sorted((int(start), int(stop)) for start, stop in spans):
        if start < 0 or stop <= start:
            raise ValueError(
                f"pinned has the span ({start}, {stop}): wanted 0 <= start < stop, counted in "
                "tokens from the first of the row, without padding"
            )
        if row and start <= row[-1][1]:
            row[-1] = row[-1][0], max(stop, row[-1][1])
        else:
            row.append((start, stop))
    return row


def runs(numbers: Iterable[int]) -> Row:
    """Group ascending numbers into spans."""
    return merge_spans((i, i + 1) for i in numbers)


def count(row: Row, sinks: int) -> int:
    """Number of positions in the spans, not counting the sinks."""
    return sum(max(0, stop - max(start, sinks)) for start, stop in row)


def parse_spans(text: str) -> str | Row:
    """Parse 0:40,100:120 as [(0, 40), (100, 120)]. "system" and "prompt" are returned unchanged.

    Raises: ValueError for any other text.
    """
    if text in ("system", "prompt"):
        return text
    try:
        return merge_spans([tuple(map(int, part.split(":"))) for part in text.split(",")])
    except (TypeError, ValueError):
        raise ValueError(
            f"{text!r} is neither system nor prompt nor spans of tokens, such as 0:40,100:120"
        ) from None
