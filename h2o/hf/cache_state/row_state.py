"""`RowState`: what a cache knows about the text of one row, besides the keys in its layers.

Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4V and similar models keep one of these facts outside the cache:
`rope_deltas`, the difference between the next position and the number of tokens. They hold only the
value of the text that they processed last, also if that was in another thread. A cache derives the
value of its own text from the positions that the model gives to its attention, and puts it into the
model whenever the model asks how much the cache has seen, which it does before it uses the value.

Shape letters as in `h2o.hf`, and Q columns of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from h2o import compat_calls
from h2o.hf.model_traits.wrappers import input_device
from h2o.hf.modes import COUNTS_PADDING, Mode


@dataclass(frozen=True)
class RowState:
    """Facts about one row of a text. Forks, files, selected rows and crops carry them along."""

    offset: int | None = 0
    """Difference between the next token's position and the row's number of tokens. 0 if positions
    count tokens. The number of padding columns if they count columns. Usually negative after an
    image, whose tokens share positions. None if unknown, because another cache saw the text."""
    counts_columns: bool = True
    """Whether the last token has the number of its column as position."""
    ends_in_padding: bool = False
    """Whether the last column was padding. Tracked for models whose sliding windows or states count
    padding after a token as text."""


@dataclass(frozen=True)
class NewColumns:
    """The columns of a forward pass: which are tokens, and where."""

    Q: int
    mask: Tensor | None
    """[B, Q], 0 at padding; None if there is no padding."""
    positions: Tensor | None
    """[dims, B or 1, Q]; multimodal models have several per token. None if the model numbers
    columns or has no positions."""

    def cut(self, Q: int) -> NewColumns:
        """The first Q of these columns, as copies."""
        mask, positions = (
            None if x is None else x[..., :Q].clone() for x in (self.mask, self.positions)
        )
        return NewColumns(Q, mask, positions)

    def advance(
        self, states: Sequence[RowState], tokens: Sequence[int] | None, seen: int
    ) -> list[RowState]:
        """The states of the rows after these columns, except for `ends_in_padding`.

        Args:
            states, tokens: state and number of tokens of each row before the pass, or a single one
                for all rows. `tokens` is None if unknown.
            seen: number of columns before the pass.
        """
        if tokens is None:
            return [RowState(None)]
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
        return _merge(
            [
                RowState(end + 1 - before - n, end == column) if n else state
                for state, before, n, column, end in broadcast(states, tokens, new, last, ends)
            ]
        )


@dataclass(frozen=True)
class LastPass:
    """The last forward pass of a cache that records passes."""

    states: list[RowState]
    """States before the pass."""
    tokens: list[int] | None
    """Tokens of each row before the pass; None if unknown."""
    mask: Tensor | None
    """Padding mask [B, n] over all columns, if sliding windows or states count padding."""
    seen: int
    """Number of columns before the pass."""
    columns: NewColumns

    def crop(self, left: int) -> list[RowState]:
        """The states after the first columns of the pass, up to `left` in all."""
        if left == self.seen:
            return self.states
        states = self.columns.cut(left - self.seen).advance(self.states, self.tokens, self.seen)
        return with_padding(states, None if self.mask is None else self.mask[:, :left])


def with_padding(states: list[RowState], mask: Tensor | None) -> list[RowState]:
    """The states with `ends_in_padding` by a mask [B, n]; None if no row has padding.

    Raises:
        ValueError: a row has padding between tokens.
    """
    ends = [False] if mask is None else padded_at_end(mask)
    return _merge([replace(x, ends_in_padding=end) for x, end in broadcast(states, ends)])


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
    """One tuple for each row. A list of a single entry applies to all rows. Lists of different
    lengths, as in a pass with another batch size, are cut to the shortest."""
    rows = max(map(len, lists))
    return list(zip(*[[*x] * rows if len(x) == 1 else x for x in lists], strict=False))


def _merge(states: list[RowState]) -> list[RowState]:
    """A single state instead of equal ones."""
    return states[:1] if len(set(states)) == 1 else states


def put_rope_deltas(states: Sequence[RowState], *, is_empty: bool = False) -> None:
    """Put the value of a cache into the model whose call is under way; None if the cache is empty.

    A model that asks the cache for another reason, or that keeps no such value, is not changed. Nor
    is it changed by a cache converted from a DynamicCache, whose value only the model knows."""
    if torch.compiler.is_compiling():
        return
    module, rows = compat_calls.find_rope_deltas_module()
    if module is None:
        return
    if is_empty:
        module.rope_deltas = None
        return
    offsets = [state.offset for state in states]
    if None in offsets:
        return
    if rows and len(offsets) % rows == 0:
        # generate() asks before it repeats each prompt for beams or num_return_sequences.
        offsets = offsets[:: len(offsets) // rows]
    device = input_device(module)
    module.rope_deltas = torch.tensor(offsets, dtype=torch.long, device=device)[:, None]
