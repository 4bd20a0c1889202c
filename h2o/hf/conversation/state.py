"""`CacheState`: all that a cache knows of a conversation, besides the keys in its layers.

A state is immutable. A forward pass computes the state after it before any layer runs
(`NewColumns.advance`), and the last layer puts it in place (`h2o.hf.conversation.pass_guard`).
Forks share the state. Files, selected rows and crops go over its fields, so that a new field is
entered here and nowhere else.

Shape letters as in `h2o.hf`, and Q columns of a pass, n columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o.budgets import UNLIMITED, count_text, next_growth
from h2o.hf.conversation.pins import NOTHING_PINNED, PinnedRows
from h2o.hf.conversation.text_digest import digest
from h2o.hf.modes import COUNTS_PADDING, Mode
from h2o.spans import Row


class RowState(NamedTuple):
    """Facts about one row of a text."""

    offset: int | None = 0
    """Difference between the next token's position and the row's number of tokens. 0 if positions
    count tokens. The number of padding columns if they count columns. Usually negative after an
    image, whose tokens share positions. None if unknown, because another cache saw the text."""
    counts_columns: bool = True
    """Whether the last token has the number of its column as position."""
    ends_in_padding: bool = False
    """Whether the last column was padding. Tracked for models whose sliding windows or states count
    padding after a token as text."""
    prompt: int | None = None
    """Number of tokens in the row's whole prompt. None before the prompt, if the user did not say
    how long it will be."""
    pinned: Row | None = None
    """Spans of pinned positions. None before the prompt, and if nothing is pinned."""
    padding: int = 0
    """Number of padding columns, or fewer. Decode steps do not count theirs until a budget grows
    (`CacheState.grown`)."""
    counted: int = 0
    """Number of tokens that a fractional budget is a fraction of now. 0 before the prompt."""
    removed: int = 0
    """Number of tokens that `H2OCache.evict` has removed. Nothing else counts them."""
    moved_back: int = 0
    """By how many positions `H2OCache.evict` has moved the next token back. Stored keys keep their
    rotation, so new queries and keys are rotated forward by as many positions."""


PENDING = 64
"""Number of forward passes whose ids are collected before they are added to the digest."""


class SeenText(NamedTuple):
    """Digest of the token ids of each row, without padding. Immutable, as are its tensors.

    The digest becomes unknown after a pass of embeddings, a pass in a captured graph, or a
    conversion from a DynamicCache. Then nothing is compared until the cache is emptied.
    """

    totals: Tensor | None = None
    """[2, B] int64: digest and number of tokens of each row, without the pending passes"""
    pending: tuple[tuple[Tensor, Tensor | None], ...] = ()
    """Ids of each pending pass, and a mask that is False at padding (None: no padding)"""
    is_known: bool = True

    def __deepcopy__(self, memo: Any) -> SeenText:
        return self

    def add(self, ids: Tensor | None, mask: Tensor | None) -> SeenText:
        """The text followed by the ids of a forward pass.

        Args:
            ids: [B, Q], copied; None if unknown.
            mask: [B, Q or more] over the last columns, 0 at padding; None: no padding.
        """
        if not self.is_known:
            return UNKNOWN_TEXT
        if ids is None or ids.ndim != 2 or (mask is not None and mask.shape[1] < ids.shape[1]):
            return UNKNOWN_TEXT
        real = None if mask is None else (mask[:, mask.shape[1] - ids.shape[1] :] != 0)
        new = ids.clone(), None if real is None else real.to(ids.device)
        if len(self.pending) < PENDING:
            return SeenText(self.totals, (*self.pending, new))
        return SeenText(self._fold(), (new,))

    def differing_rows(self, ids: Tensor, mask: Tensor | None) -> list[int]:
        """Numbers of the rows in which `ids` [B, n] differ from the text.

        Empty if the digest is unknown. `mask`: [B, n or more], 0 at padding."""
        totals = self._fold()
        if totals is None or totals.shape[1] != len(ids):
            return []
        real = torch.ones_like(ids) if mask is None else mask[:, : ids.shape[1]]
        found = digest(ids, (real != 0).to(ids.device), 0)[0]
        return (found != totals[0].to(found.device)).nonzero()[:, 0].tolist()

    def counts(self) -> list[int] | None:
        """Number of tokens in each row [B]; None if unknown."""
        totals = self._fold()
        return None if totals is None else totals[1].tolist()

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> SeenText:
        """Select or repeat the rows, as `change` does with the first axis of a tensor."""
        totals = self._fold()
        return self if totals is None else SeenText(change(totals.T).T)

    def as_dict(self) -> dict[str, Any] | None:
        """Convert the digest for JSON; None if it is unknown."""
        totals = self._fold()
        if totals is None:
            return None
        digest, counts = totals.tolist()
        return {"digest": digest, "counts": counts}

    @classmethod
    def from_dict(cls, saved: dict[str, Any] | None) -> SeenText:
        """Restore from the output of `as_dict`."""
        if saved is None:
            return UNKNOWN_TEXT
        totals = [saved["digest"], saved["counts"]]
        return cls(torch.tensor(totals, dtype=torch.long, device="cpu"))

    def _fold(self) -> Tensor | None:
        """`totals` with the pending passes. None if unknown or before the text."""
        if not self.pending:
            return self.totals
        ids = torch.cat([x for x, _ in self.pending], dim=1)
        real = torch.cat([x == x if mask is None else mask for x, mask in self.pending], dim=1)
        if self.totals is None:
            return digest(ids, real, 0)
        before = self.totals.to(ids.device)
        return before + digest(ids, real, before[1, :, None])


NO_TEXT = SeenText()
UNKNOWN_TEXT = SeenText(is_known=False)


class CacheState(NamedTuple):
    """Facts about the conversation of a cache."""

    columns: int = 0
    """Number of columns seen, with padding. Keys that were evicted count too."""
    longest: int = 0
    """Upper bound of the number of tokens in any row"""
    prompt_columns: int = 0
    """Number of columns after the first pass; 0 before it"""
    unscored: bool = False
    """Whether all keys came from a DynamicCache and have no scores yet"""
    waits_for_pins: bool = False
    """Whether some pinned tokens have not arrived yet"""
    grows_at: int = UNLIMITED
    """Number of columns before which no row's budget grows"""
    rows: tuple[RowState, ...] = (RowState(),)
    """The state of each row, or a single one for all rows"""
    text: SeenText = NO_TEXT
    last_pass: LastPass | None = None
    """The last forward pass, if passes are recorded, so that `H2OCache.crop` can take back its
    columns. Neither saved nor kept for other rows"""

    def __deepcopy__(self, memo: Any) -> CacheState:
        return self

    def row(self, row: int) -> RowState:
        """The state of one row."""
        return self.rows[row if len(self.rows) > 1 else 0]

    @property
    def ends_in_padding(self) -> bool:
        """Whether the last column was padding in some row."""
        return any(row.ends_in_padding for row in self.rows)

    @property
    def moved_back(self) -> list[int]:
        """`RowState.moved_back` of each row, or a single one for all; empty if all are 0."""
        moved = [row.moved_back for row in self.rows]
        return moved if any(moved) else []

    @property
    def prompts(self) -> list[int] | None:
        """Number of tokens in the prompt of each row, or a single one for all; None if unknown."""
        lengths = [row.prompt for row in self.rows]
        return None if None in lengths else lengths  # type: ignore[return-value]

    @property
    def pinned(self) -> PinnedRows:
        """The pinned positions of each row, once the prompt is known."""
        rows = tuple(row.pinned for row in self.rows if row.pinned is not None)
        return PinnedRows(rows) if rows else NOTHING_PINNED

    def grown(self, tokens: Sequence[int], new: Sequence[int]) -> CacheState:
        """This state, with budgets for rows of `tokens` tokens now and `new` more.

        Either has a number for each row, or a single one for all rows. The rows' padding becomes
        exact, which decode steps do not count.
        """
        return self.with_rows(
            row._replace(padding=self.columns - n, counted=count_text(row.counted, n + more))
            for row, n, more in broadcast(self.rows, tokens, new)
        )

    def with_rows(self, rows: Iterable[RowState]) -> CacheState:
        """This state with other rows, and `grows_at` of them if budgets grow."""
        rows, grows = merge(rows), self.grows_at < UNLIMITED
        return self._replace(rows=rows, grows_at=grows_at(rows) if grows else UNLIMITED)

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> CacheState:
        """Select or repeat rows, even before the prompt. `change` does so with the first axis of a
        tensor."""
        rows, text = self.rows, self.text.change_rows(change)
        if len(rows) > 1:
            rows = tuple(change_list(change, rows))
        return self._replace(rows=rows, text=text, last_pass=None)

    def as_dict(self) -> dict[str, Any]:
        """Convert for JSON."""
        fields = self._asdict()
        del fields["last_pass"]
        return fields | {"rows": [row._asdict() for row in self.rows], "text": self.text.as_dict()}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> CacheState:
        """Restore from the output of `as_dict`."""
        rows = tuple(RowState(**row) for row in fields["rows"])
        rows = tuple(row._replace(pinned=as_spans(row.pinned)) for row in rows)
        return cls(**fields | {"rows": rows, "text": SeenText.from_dict(fields["text"])})


class NewColumns(NamedTuple):
    """The columns of a forward pass: which are tokens, and where."""

    Q: int
    mask: Tensor | None = None
    """[B, Q], 0 at padding; None if there is no padding."""
    positions: Tensor | None = None
    """[dims, B or 1, Q]; multimodal models have several per token. None if the model numbers
    columns or has no positions."""
    ids: Tensor | None = None
    """[B, Q] token ids; None if unknown."""
    whole_mask: Tensor | None = None
    """[B, n], 0 at padding, over all columns from the first to the last of these. Given if sliding
    windows or states count padding."""

    def cut(self, Q: int) -> NewColumns:
        """The first Q of these columns, as copies."""
        mask, positions, ids = (
            None if x is None else x[..., :Q].clone() for x in (self.mask, self.positions, self.ids)
        )
        whole = self.whole_mask
        whole = None if whole is None else whole[:, : whole.shape[1] - self.Q + Q]
        return NewColumns(Q, mask, positions, ids, whole)

    def advance(
        self,
        before: CacheState,
        tokens: list[int] | None,
        records: bool = False,
        is_step: bool = False,
    ) -> CacheState:
        """The state after these columns. `h2o.hf.prompt.prompt_budget` adds what the first layer of
        a prompt finds out: its length and its pins.

        Args:
            before: the state before them.
            tokens: number of tokens in each row before them, or a single one for all rows. None if
                unknown.
            records: whether the state after them gets their record, so that they can be taken back.
            is_step: whether the rows get tokens at their next positions. This changes no offset.
        """
        if is_step:
            rows = before.rows
        elif tokens is None:
            pads = [0] if self.mask is None else (self.mask == 0).sum(-1).tolist()
            rows = merge(
                row._replace(offset=None, padding=row.padding + more)
                for row, more in broadcast(before.rows, pads)
            )
        else:
            rows = self._advance_rows(before, tokens)
        rows = with_padding(rows, self.whole_mask) if self.whole_mask is not None else rows
        last = None
        if records:
            start = before._replace(last_pass=None)  # else each record would hold all earlier ones
            last = LastPass(start, tokens, self.cut(self.Q))
        return before._replace(
            columns=before.columns + self.Q, longest=before.longest + self.Q, rows=rows,
            text=before.text.add(self.ids, self.mask), last_pass=last,
        )  # fmt: skip

    def _advance_rows(self, before: CacheState, tokens: Sequence[int]) -> tuple[RowState, ...]:
        seen = before.columns
        new, last = [self.Q], [seen + self.Q - 1]  # number of tokens, column of the last one
        if self.mask is not None:
            is_token = self.mask != 0
            order = torch.arange(seen, seen + self.Q, device=is_token.device)
            new, last = is_token.sum(-1).tolist(), (order * is_token).amax(-1).tolist()
        ends = last
        if self.positions is not None:
            positions = self.positions.amax(0)
            if self.mask is not None:
                positions = positions.masked_fill(~is_token.to(positions.device), -1)
            ends = positions.amax(-1).tolist()
        rows = []
        for row, earlier, n, column, end in broadcast(before.rows, tokens, new, last, ends):
            row = row._replace(padding=row.padding + self.Q - n)
            if n:
                row = row._replace(offset=end + 1 - earlier - n, counts_columns=end == column)
            rows.append(row)
        return merge(rows)


def grows_at(rows: Iterable[RowState]) -> int:
    """Number of columns at which the budget of one of these rows grows next."""
    return min(next_growth(row.counted) + row.padding for row in rows)


class LastPass(NamedTuple):
    """The last forward pass of a cache that records passes."""

    before: CacheState
    tokens: list[int] | None
    """Tokens of each row before the pass; None if unknown."""
    columns: NewColumns
    chunked_lengths: list[int] | None = None
    """Length of each row's prompt, if the pass was its first chunk"""


def with_padding(rows: Sequence[RowState], mask: Tensor | None) -> tuple[RowState, ...]:
    """The rows with `ends_in_padding` by a mask [B, n]; None if no row has padding.

    Raises:
        ValueError: a row has padding between tokens.
    """
    ends = [False] if mask is None else padded_at_end(mask)
    return merge(row._replace(ends_in_padding=end) for row, end in broadcast(rows, ends))


def padded_at_end(mask: Tensor) -> list[bool]:
    """Whether each row of a mask [B, n] over all columns ends in padding.

    Raises:
        ValueError: a row has padding between tokens.
    """
    is_token = mask.bool()
    ends = ~is_token & (is_token.cumsum(1) > 0)
    behind = is_token & (ends.cumsum(1) > 0)
    if bool(behind.any()):
        row = int(behind.any(1).nonzero()[0])
        raise ValueError(f"row {row} has {Mode.GAPS}, and {COUNTS_PADDING}")
    return (~is_token[:, -1]).tolist()


def broadcast(*lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """One tuple for each row. A list of a single entry applies to all rows, and one with fewer
    entries than rows to that many copies of each, such as beams. Lists of other lengths, as in a
    pass with another batch size, are cut to the shortest."""
    B = max(map(len, lists))
    if all(map(B.__eq__, map(len, lists))):
        return list(zip(*lists, strict=True))
    each = [x if len(x) == B else [y for y in x for _ in range(B // len(x))] for x in lists]
    return list(zip(*each, strict=False))


def merge(rows: Iterable[RowState]) -> tuple[RowState, ...]:
    """A single state instead of equal ones."""
    rows = tuple(rows)
    return rows[:1] if rows[:1] * len(rows) == rows else rows


def change_list(change: Callable[[Tensor], Tensor], rows: Sequence[Any]) -> list[Any]:
    """Select or repeat the entries of a list. `change` does so with the first axis of a tensor."""
    numbers = change(torch.arange(len(rows), device="cpu"))
    return [rows[row] for row in numbers.tolist()]


def as_spans(pinned: list[Any] | None) -> Row | None:
    """Spans from JSON, which has no tuples."""
    return None if pinned is None else [(start, stop) for start, stop in pinned]
