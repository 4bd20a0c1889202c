"""Spans of token positions, by which keys are pinned: plain numbers, no torch here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

PINNED = math.inf
"""The score of a pinned key"""

Row = list[tuple[int, int]]
"""Spans (start, stop) of one row, ascending and apart"""


def merge_spans(spans: Iterable[Sequence[int]]) -> Row:
    """Spans in order, with those that touch made one.

    Raises: ValueError for one that is empty or begins before the text.
    """
    row: Row = []
    for start, stop in sorted((int(start), int(stop)) for start, stop in spans):
        if start < 0 or stop <= start:
            raise ValueError(
                f"pinned has the span ({start}, {stop}): wanted 0 <= start < stop, in tokens of a "
                "row from its first one on, pads not counted"
            )
        if row and start <= row[-1][1]:
            row[-1] = row[-1][0], max(stop, row[-1][1])
        else:
            row.append((start, stop))
    return row


def runs(numbers: Iterable[int]) -> Row:
    """Spans of ascending numbers."""
    return merge_spans((i, i + 1) for i in numbers)


def count(row: Row, sinks: int) -> int:
    """Positions in the spans beyond the sinks."""
    return sum(max(0, stop - max(start, sinks)) for start, stop in row)


def parse_spans(text: str) -> str | Row:
    """0:40,100:120 is [(0, 40), (100, 120)]; "system" and "prompt" stay what they are.

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
