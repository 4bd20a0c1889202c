"""Spans of token positions: pins as users give them, and their plain form, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from h2o.arguments.plain_values import is_integer, is_list, nested, refuse_meta, wrong

PINNED = math.inf
"""The score of a pinned key."""

Row = list[tuple[int, int]]
"""Spans (start, stop) of one row, ascending and disjoint."""


_EXPECTED = (
    "spans [(start, stop), ...] in tokens, a list of such spans for each row, {}, or a bool mask "
    "[rows, columns]"
)
_SPANS = _EXPECTED.replace(" {},", "")


class GivenPins(NamedTuple):
    """Pins that are well-formed. They may still not fit the prompt."""

    spans: list[Row] | str
    """The name of a part of the prompt, or the spans of each row. No spans: nothing is pinned"""
    are_columns: bool = False
    """Whether the spans are columns of the padded prompt, from a mask, instead of positions"""
    columns: int = 0
    """The number of columns that each row of the mask has at least; 0 without a mask"""


def merge_spans(spans: Iterable[Sequence[int]], name: str = "pinned") -> Row:
    """Sort spans and merge those that touch or overlap. `name`: the argument, for errors.

    Raises: ValueError for a span that is empty or has a negative start.
    """
    row: Row = []
    for start, stop in sorted((int(start), int(stop)) for start, stop in spans):
        if not 0 <= start < stop < 2**63:
            raise ValueError(
                f"{name} has the span ({start}, {stop}); expected 0 <= start < stop < 2**63, "
                "counted in tokens from the first of the row, without padding"
            )
        if row and start <= row[-1][1]:
            row[-1] = row[-1][0], max(stop, row[-1][1])
        else:
            row.append((start, stop))
    return row


def runs(numbers: Iterable[int]) -> Row:
    """Group ascending numbers into spans."""
    return merge_spans((i, i + 1) for i in numbers)


def size(row: Row) -> int:
    """Number of positions in the spans."""
    return count(row, 0)


def overlap(row: Row, other: Row) -> Row:
    """The positions that both rows of spans have."""
    return [
        (max(a, start), min(b, stop))
        for a, b in row
        for start, stop in other
        if max(a, start) < min(b, stop)
    ]


def subtract(row: Row, other: Row) -> Row:
    """The positions of `row` that `other` lacks."""
    left = []
    for start, stop in row:
        for a, b in overlap(other, [(start, stop)]):
            left.append((start, a))
            start = b
        left.append((start, stop))
    return [(start, stop) for start, stop in left if start < stop]


def without(row: Row, removed: Row) -> Row:
    """The spans of `row`, none of which overlaps those of `removed`, in the text without the
    latter."""
    before = [size(overlap(removed, [(0, start)])) if start else 0 for start, _ in row]
    return [(start - n, stop - n) for (start, stop), n in zip(row, before, strict=True)]


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


def check_pinned(pinned: Any, names: Sequence[str] = ("prompt",)) -> GivenPins:
    """Check the argument `pinned`. None pins nothing.

    Raises:
        TypeError: it has none of the accepted forms. A generator has not, because several caches
            may read it. Nor has a mask of integers, which could be spans.
        ValueError: a span is empty or begins before the text, or a text is none of the `names`.
    """
    if pinned is None:
        return GivenPins([])
    expected = _EXPECTED.format(" or ".join(f'"{name}"' for name in names))
    if isinstance(pinned, str):
        if pinned not in names:
            raise ValueError(wrong("pinned", pinned, expected))
        return GivenPins(pinned)
    return check_rows_of_spans("pinned", pinned, expected)


def check_rows_of_spans(name: str, value: Any, expected: str = "") -> GivenPins:
    """Check spans of all rows, spans of each row, or a mask. `expected`: for errors.

    Raises: as `check_pinned`.
    """
    refuse_meta(name, value)
    values = _nested_lists(value)
    if is_list(values):
        are_bools = [is_list(row) and set(map(type, row)) == {bool} for row in values]
        if values and all(are_bools):
            spans = [runs(i for i, x in enumerate(row) if x) for row in values]
            return GivenPins(spans, are_columns=True, columns=min(map(len, values)))
        if all(map(_is_span, values)):
            return GivenPins([merge_spans(values, name)] if values else [])
        if all(is_list(row) and all(map(_is_span, row)) for row in values):
            return GivenPins([merge_spans(row, name) for row in values])
    raise TypeError(wrong(name, value, expected or _SPANS))


def check_spans(name: str, value: Any) -> Row:
    """Check spans of a single row, [(start, stop), ...]. Raises: as `check_pinned`."""
    refuse_meta(name, value)
    values = _nested_lists(value)
    if not is_list(values) or not all(map(_is_span, values)):
        raise TypeError(wrong(name, value, "spans [(start, stop), ...] in tokens"))
    return merge_spans(values, name)


def _nested_lists(value: Any) -> Any:
    """Nested lists of Python's numbers for nested lists, arrays or tensors."""
    value = nested(value)
    return [_nested_lists(x) for x in value] if is_list(value) else value


def _is_span(x: Any) -> bool:
    return is_list(x) and len(x) == 2 and all(map(is_integer, x))
