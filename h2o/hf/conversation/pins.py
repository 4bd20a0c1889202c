"""Pinned keys: spans of a text that are never evicted.

A pinned key has the score infinity, which attention never produces and which eviction never removes
(`csrc/policy.h`). A pin therefore follows its key wherever scores are copied. `Pins` is what the
user gave, and `PinnedRows` says which tokens get this score when they arrive.

Shape letters as in `h2o.hf`, and K columns of a mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o.spans import PINNED, GivenPins, Row, check_pinned, count, runs

LEAST_DECAY = 1e-30
"""For a smaller decay, infinity times the decay may not be infinity in float32."""


class Pins(GivenPins):
    """The pins that a cache was given. Which tokens they are is known once the prompt is. The spans
    of a single row apply to all rows."""

    __slots__ = ()

    @classmethod
    def of(cls, pinned: Any, decay: float = 1.0) -> Pins:
        """Parse the `pinned` argument of `h2o.H2OCache`.

        Raises:
            TypeError: `pinned` has none of the accepted forms.
            ValueError: a span is empty or begins before the text, or `decay` is too small to keep
                the score infinity.
        """
        given = check_pinned(pinned)
        if pinned is not None and decay < LEAST_DECAY:
            raise ValueError(
                f"decay={decay} erases scores, but pinned keys are marked by their score. Use "
                f"decay={LEAST_DECAY} or more, or leave out pinned"
            )
        return cls(*given)

    def __bool__(self) -> bool:
        """Whether the user pinned anything."""
        return any(self.spans)

    @property
    def needs_prompt_length(self) -> bool:
        """Whether the whole prompt is pinned, so that its length must be known."""
        return self.spans == "prompt"

    @property
    def last(self) -> int:
        """End of the last span that was given; 0 if it depends on the prompt."""
        if isinstance(self.spans, str):
            return 0
        return max((span[1] for row in self.spans for span in row), default=0)

    def resolve(self, lengths: list[int], mask: Tensor | None, columns: int) -> PinnedRows:
        """The pinned positions of each row, once the prompt is known.

        Args:
            lengths: number of tokens in each row's prompt.
            mask: [B, columns] bool of the first forward pass, False at padding; None: no padding.
            columns: number of columns of the first forward pass, including padding.

        Raises:
            ValueError: the pins have another number of rows; a mask pins columns after the pass, or
                leaves some of the pass out.
        """
        B = len(lengths)
        if not self:
            return NOTHING_PINNED
        if isinstance(self.spans, str):
            return PinnedRows(tuple([(0, length)] for length in lengths))
        if B % len(self.spans):
            raise ValueError(
                f"pinned has spans for {len(self.spans)} rows, but the batch has {B}. Pass a list "
                "of spans for each row, or one list for all rows"
            )
        times = B // len(self.spans)  # beams per row, or B if one list is for all rows
        rows = [row for row in self.spans for _ in range(times)]
        if self.are_columns:
            if self.last > columns:
                raise ValueError(
                    f"pinned is a mask that pins column {self.last - 1}, but the first forward "
                    f"pass has {columns} columns. For a prompt in chunks pass spans (start, stop) "
                    "of tokens"
                )
            if 0 < self.columns < columns:
                raise ValueError(
                    f"pinned is a mask with {self.columns} columns, but the prompt has {columns} "
                    "with its padding. Pass a bool for each column"
                )
            rows = as_positions(rows, mask)
        return PinnedRows(tuple(rows))

    def change_rows(self, change: Callable[[Sequence[Row]], list[Row]]) -> Pins:
        """Select or repeat batch rows before the prompt."""
        if isinstance(self.spans, str) or len(self.spans) < 2:
            return self
        return self._replace(spans=change(self.spans))


NO_PINS = Pins([])


class PinnedRows(NamedTuple):
    """The pinned positions of each batch row."""

    rows: tuple[Row, ...]
    """Spans of each row, or of a single one for all rows; empty if nothing is pinned"""

    def __bool__(self) -> bool:
        return bool(self.rows)

    def counts(self, rows: int, sinks: int) -> list[int]:
        """Number of pinned keys in each of `rows` rows, not counting the sinks."""
        if not self.rows:
            return [0] * rows
        return [count(row, sinks) for row in self.each(rows)]

    def each(self, rows: int) -> Sequence[Row]:
        """Spans of each of `rows` rows; empty if nothing is pinned."""
        return self.rows * rows if len(self.rows) == 1 else self.rows

    def has_pending(self, lengths: Sequence[int]) -> bool:
        """Whether pinned tokens are yet to arrive in rows that have seen these numbers of
        tokens."""
        if not self.rows:
            return False
        ends = [row[-1][1] if row else 0 for row in self.each(len(lengths))]
        return any(n < end for n, end in zip(lengths, ends, strict=True))

    def score(self, scores: Tensor, positions: Tensor) -> Tensor:
        """Set scores [B, G, Q] to infinity where positions [B, 1, Q] (-1 at padding) are pinned."""
        if not self.rows:
            return scores
        edges = [list(itertools.chain(*row)) for row in self.each(len(scores))]
        longest = max(map(len, edges))
        filled = [row + [torch.iinfo(torch.int64).max] * (longest - len(row)) for row in edges]
        table = torch.tensor(filled, dtype=torch.int64, device=positions.device)[:, None]
        before = torch.searchsorted(table, positions.contiguous(), right=True)
        return scores.masked_fill(before % 2 == 1, PINNED)


NOTHING_PINNED = PinnedRows(())


def as_positions(rows: list[Row], mask: Tensor | None) -> list[Row]:
    """Convert spans of columns to spans of positions. Padding in them is left out."""
    if mask is None:
        return rows
    order = (mask.long().cumsum(1) - 1).masked_fill(~mask.bool(), -1).tolist()
    return [
        runs(i for start, stop in row for i in columns[start:stop] if i >= 0)
        for row, columns in zip(rows, order, strict=True)
    ]
