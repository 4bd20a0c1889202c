"""Pinned keys: spans of a text that no budget evicts.

A pinned key has the score infinity, which attention never makes and eviction spares
(`csrc/policy.h`). So a pin travels with its key wherever scores go. `Pins` says which tokens get
that score when they come.

Shape letters: B batch rows, G key/value heads, Q new tokens, K columns of a mask.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from h2o.spans import PINNED, Row, count, merge_spans, runs

LEAST_DECAY = 1e-30
"""Below it, in float32, infinity times the decay may not be infinity."""

_WANTED = (
    "pinned must be spans [(start, stop), ...] in tokens, a list of such spans for each row, "
    '"prompt", or a bool mask [rows, columns]'
)


@dataclasses.dataclass
class Pins:
    """The pins that a cache was given, and their positions in the rows of its batch."""

    given: list[Row] | str = dataclasses.field(default_factory=list)
    """"prompt", or spans of each row; those of a single row are for all"""
    are_columns: bool = False
    """Whether `given` counts columns of the padded prompt, as a mask does, instead of positions"""
    rows: list[Row] | None = None
    """Positions in each row of the batch; None before the prompt, and where nothing is pinned"""

    @classmethod
    def of(cls, pinned: Any, decay: float = 1.0) -> Pins:
        """The pins that a user wrote: see `h2o.H2OCache`.

        Raises:
            TypeError: none of what may be given.
            ValueError: a span that is empty or begins before the text; scores of which nothing
                remains after one more token (`decay=0`).
        """
        if pinned is None:
            return cls()
        if decay < LEAST_DECAY:
            raise ValueError(
                f"decay={decay} leaves nothing of a score, by which pinned keys are known: give "
                f"decay={LEAST_DECAY} or more, or leave out pinned"
            )
        if isinstance(pinned, str):
            if pinned != "prompt":
                raise ValueError(f"{_WANTED}, not {pinned!r}")
            return cls(pinned)
        values = pinned.tolist() if hasattr(pinned, "tolist") else pinned
        if not _is_list(values):
            raise TypeError(f"{_WANTED}, not {pinned!r:.80}")
        if values and all(_is_list(row) and row and _all_bools(row) for row in values):
            return cls([runs(i for i, x in enumerate(row) if x) for row in values], True)
        if all(map(_is_span, values)):
            return cls([merge_spans(values)] if values else [])
        if all(_is_list(row) and all(map(_is_span, row)) for row in values):
            return cls([merge_spans(row) for row in values])
        raise TypeError(f"{_WANTED}, not {pinned!r:.80}")

    def __bool__(self) -> bool:
        """Whether anything is to be pinned."""
        return any(self.given)

    @property
    def needs_prompt_length(self) -> bool:
        """Whether all of the prompt is pinned, so that it must be known where it ends."""
        return self.given == "prompt"

    @property
    def last(self) -> int:
        """Where the last span that was given ends; 0 where that depends on the prompt."""
        if isinstance(self.given, str):
            return 0
        return max((span[1] for row in self.given for span in row), default=0)

    def begin(self, lengths: list[int], mask: Tensor | None, columns: int) -> None:
        """Set the positions of each row, once a prompt is known.

        Args:
            lengths: tokens of each row's prompt.
            mask: [B, columns] bool of the first forward pass, False at a pad; None: no pads.
            columns: of the first forward pass, from the first token or pad on.

        Raises:
            ValueError: spans, or a mask, of another number of rows; a mask of more columns.
        """
        B = len(lengths)
        if not self:
            return
        if isinstance(self.given, str):
            self.rows = [[(0, length)] for length in lengths]
            return
        if B % len(self.given):
            raise ValueError(
                f"pinned has spans for {len(self.given)} rows, and the batch has {B}: give spans "
                "for each row, or one list of spans for all"
            )
        times = B // len(self.given)  # of beams, or one for all
        rows = [row for row in self.given for _ in range(times)]
        if self.are_columns:
            if self.last > columns:
                raise ValueError(
                    f"pinned is a mask with {self.last} columns, and the first forward pass has "
                    f"{columns}: where a prompt comes in chunks give spans (start, stop) of tokens"
                )
            rows = _as_positions(rows, mask)
        self.rows = rows

    def counts(self, rows: int, sinks: int) -> list[int]:
        """Pinned keys of each of so many rows beyond the sinks."""
        if self.rows is None:
            return [0] * rows
        return [count(row, sinks) for row in self.rows]

    def wait(self, lengths: Tensor) -> bool:
        """Whether pinned tokens are still to come in rows that have seen so many, [B]."""
        ends = [row[-1][1] if row else 0 for row in self.rows or ()]
        return any(n < end for n, end in zip(lengths.tolist(), ends, strict=bool(ends)))

    def score(self, scores: Tensor, positions: Tensor) -> Tensor:
        """Scores [B, G, Q] of tokens at positions [B, 1, Q], -1 at a pad, with those of pins."""
        if self.rows is None:
            return scores
        edges = [list(itertools.chain(*row)) for row in self.rows]
        longest = max(map(len, edges))
        filled = [row + [torch.iinfo(torch.int64).max] * (longest - len(row)) for row in edges]
        table = torch.tensor(filled, dtype=torch.int64, device=positions.device)[:, None]
        before = torch.searchsorted(table, positions.contiguous(), right=True)
        return scores.masked_fill(before % 2 == 1, PINNED)

    def each_row(self, change: Callable[[list[Row]], list[Row]]) -> None:
        """Batch rows were selected or repeated."""
        if self.rows is not None:
            self.rows = change(self.rows)
        elif self and not isinstance(self.given, str) and len(self.given) > 1:
            self.given = change(self.given)

    def reset(self) -> None:
        """Forget the prompt, but not what was given."""
        self.rows = None

    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, as JSON takes them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Pins:
        """Restore from the output of `as_dict`."""
        given, rows = fields["given"], fields["rows"]
        return cls(
            given if isinstance(given, str) else [merge_spans(row) for row in given],
            fields["are_columns"],
            None if rows is None else [merge_spans(row) for row in rows],
        )


def _is_list(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str)


def _all_bools(row: Sequence[Any]) -> bool:
    return all(isinstance(x, bool) for x in row)


def _is_span(x: Any) -> bool:
    return (
        _is_list(x)
        and len(x) == 2
        and all(isinstance(i, Integral) and not isinstance(i, bool) for i in x)
    )


def _as_positions(rows: list[Row], mask: Tensor | None) -> list[Row]:
    """Spans of columns as spans of positions; pads among them are left out."""
    if mask is None:
        return rows
    order = (mask.long().cumsum(1) - 1).masked_fill(~mask.bool(), -1).tolist()
    return [
        runs(i for start, stop in row for i in columns[start:stop] if i >= 0)
        for row, columns in zip(rows, order, strict=True)
    ]
