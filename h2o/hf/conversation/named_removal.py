"""`Removal`: the named tokens that leave a conversation, and the state of a cache without them.

The later text was written with the removed tokens before it. What stays therefore keeps its
distance to later tokens, while the cache counts columns and positions as in the text without the
spans: the next token moves back, and its rotation in `H2OCache` layers does not.

Shape letters as in `h2o.hf`, and n columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from h2o.hf.conversation.pins import as_positions
from h2o.hf.conversation.state import (
    NO_TEXT,
    UNKNOWN_TEXT,
    CacheState,
    RowState,
    SeenText,
    broadcast,
)
from h2o.spans import GivenPins, Row, overlap, size, without


class Removal(NamedTuple):
    """The tokens to remove from a conversation, one entry for each row."""

    rows: list[Row]
    """Spans of token positions, not counting padding"""
    columns: int
    """Number of columns that the text loses. A row that loses more tokens gets padding on its
    left"""
    shifts: list[int]
    """By how many positions the next token moves back"""

    @classmethod
    def of(
        cls, given: GivenPins, state: CacheState, tokens: list[int], mask: Tensor | None
    ) -> Removal:
        """Check spans against the conversation of a cache.

        Args:
            given: the spans; not empty.
            tokens: number of tokens in each row, or a single one for all rows.
            mask: [B, columns] bool, False at padding; None: not given.

        Raises:
            ValueError: the spans have another number of rows, end beyond the text, cover pinned
                tokens, or leave nothing of a row. Or a mask does not fit the columns.
        """
        rows = _of_each_row(given, state, tokens, mask)
        counts = [size(row) for row in rows]
        pinned = state.pinned.each(len(rows)) or [[]] * len(rows)
        for number, (row, seen, kept) in enumerate(zip(rows, tokens, pinned, strict=True)):
            if row and row[-1][1] > seen:
                raise ValueError(
                    f"evict: a span ends at {row[-1][1]}, but the cache has seen {seen} tokens of "
                    f"row {number}. generate() returns one token that the cache has not seen yet. "
                    f"End the span at {seen} or before"
                )
            if shared := overlap(row, kept):
                raise ValueError(
                    f"evict: the tokens {shared[0][0]} to {shared[0][1] - 1} of row {number} are "
                    f"pinned (pinned={kept}), so they cannot be removed. Leave them out of the "
                    "spans"
                )
            if size(row) == seen:
                raise ValueError(
                    f"evict: the spans leave nothing of row {number}. To start another text call "
                    "cache.reset()"
                )
        columns = min(counts)
        shifts = [
            _shift(number, row, n, columns, seen == state.columns)
            for number, (row, n, seen) in enumerate(broadcast(state.rows, counts, tokens))
        ]
        return cls(rows, columns, shifts)

    def without(self, state: CacheState, tokens: list[int], text: SeenText) -> CacheState:
        """The state of a conversation without these tokens, of which `text` remains."""
        left = state.columns - self.columns
        rows = []
        for row, removed, shift, seen in broadcast(state.rows, self.rows, self.shifts, tokens):
            n = size(removed)
            offset = None if row.offset is None else row.offset + n - shift
            at_column = offset is not None and seen - n + offset == left
            rows.append(
                row._replace(
                    offset=offset,
                    counts_columns=row.counts_columns and at_column,
                    pinned=None if row.pinned is None else without(row.pinned, removed),
                    padding=row.padding + n - self.columns,
                    removed=row.removed + n,
                    moved_back=row.moved_back + shift,
                )
            )
        return state._replace(
            columns=left,
            longest=state.longest - self.columns,
            prompt_columns=min(state.prompt_columns, left),
            text=text,
            last_pass=None,
        ).with_rows(rows)

    def remaining_text(
        self, state: CacheState, tokens: list[int], ids: Tensor, mask: Tensor | None
    ) -> SeenText:
        """The digest of the text without these tokens.

        Args:
            ids: [B, n or more], those of the n columns that the cache has seen, and others.
            mask: [B, n] bool, False at padding.

        Raises:
            ValueError: the ids are not the text that the cache has seen.
        """
        if len(ids) != len(tokens) or ids.shape[1] < state.columns:
            raise ValueError(
                f"evict: ids has shape {list(ids.shape)}, but the cache has seen {len(tokens)} "
                f"rows of {state.columns} columns. Pass the ids of everything it has seen, such "
                "as generate()'s result"
            )
        ids = ids[:, : state.columns]
        if rows := state.text.differing_rows(ids, mask):
            raise ValueError(
                f"evict: ids of row {rows[0]} are not those that the cache has seen, so the spans "
                "may name other tokens. Spans and ids are those of the text without what earlier "
                "calls of evict() removed"
            )
        if not state.text.is_known:
            return UNKNOWN_TEXT
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(ids.device)
        order = real.long().cumsum(1) - 1
        stays = real.clone()
        for row, spans in enumerate(self.rows):
            for start, stop in spans:
                stays[row] &= (order[row] < start) | (order[row] >= stop)
        moved = stays.long().argsort(dim=1, stable=True)  # padding first, then what stays
        return NO_TEXT.add(ids.gather(1, moved), stays.gather(1, moved))


def _of_each_row(
    given: GivenPins, state: CacheState, tokens: list[int], mask: Tensor | None
) -> list[Row]:
    """The spans of positions of each row."""
    rows: list[Row] = [row for row in given.spans if not isinstance(row, str)]
    if len(rows) not in (1, len(tokens)):
        raise ValueError(
            f"evict: spans for {len(rows)} rows, but the cache holds {len(tokens)}. Pass a list of "
            "spans for each row, or one list for all rows"
        )
    rows = rows * (len(tokens) // len(rows))
    if not given.are_columns:
        return rows
    last = max((row[-1][1] for row in rows if row), default=0)
    if not last <= state.columns <= given.columns:
        raise ValueError(
            f"evict: the mask has {given.columns} columns and its last True in column {last - 1}, "
            f"but the cache has seen {state.columns} columns. Pass a bool for each of them"
        )
    if mask is None and any(seen != state.columns for seen in tokens):
        raise ValueError(
            "evict: the rows are padded, and a mask of spans counts padding. Pass attention_mask "
            "as well, or spans (start, stop) of tokens"
        )
    return as_positions(rows, mask)


def _shift(number: int, row: RowState, n: int, columns: int, is_unpadded: bool) -> int:
    """By how many positions the next token of a row moves back that loses n tokens, if the text
    loses `columns` columns.

    Raises: ValueError if it is unknown whether the row's positions count padding.
    """
    if n == columns:
        return n
    if row.offset is None and not is_unpadded:
        raise ValueError(
            f"evict: another cache has seen the text, so the positions of row {number}, which is "
            "padded, are unknown. Remove the same number of tokens from each row"
        )
    return columns if row.counts_columns and row.offset else n
