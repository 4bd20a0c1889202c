"""`SeenText`: a digest of the token ids that a cache has read.

`generate()` is given a whole conversation and drops as many ids as the cache has seen, without a
look at them. A cache does not store ids. Their digest tells whether the dropped ids are the ones
that were read, and takes two numbers for each row however long the text is.

Shape letters: B batch rows, Q columns of one forward pass, n columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PENDING = 64
"""Forward passes whose ids are held until they are added to the digest together."""

_A, _B, _C = 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D, 0x369DEA0F31A53F85


class SeenText:
    """The digest of the ids of each row, pads left out.

    It is unknown after passes of embeddings, by a graph, over keys of a DynamicCache, or where the
    cache took back a part of a pass. Then nothing is compared until the cache is emptied.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the text."""
        self._totals: Tensor | None = None
        """[2, B] int64: digest and number of tokens of each row, without the pending passes"""
        self._columns = 0
        """Columns read, the pending ones among them"""
        self._before = 0
        """Columns before the last pass"""
        self._pending: list[tuple[Tensor, Tensor | None]] = []
        """Ids of a pass, and which of them are no pads; None: all"""
        self._is_known = True

    def lose(self) -> None:
        """Compare nothing until the cache is emptied."""
        self._is_known, self._pending = False, []

    def read(self, ids: Tensor | None, mask: Tensor | None, seen: int) -> None:
        """Note the ids of a forward pass before it begins.

        Args:
            ids: [B, Q]; None: not known.
            mask: [B, n] of the columns seen and the new ones, 0 at a pad; None: no pads.
            seen: columns before the pass. Those of a pass that failed are not among them.
        """
        if seen == 0:
            self.reset()
        elif seen != self._columns:
            self._step_back(seen)
        if ids is None or ids.ndim != 2 or (mask is not None and mask.shape[1] < ids.shape[1]):
            self.lose()
            return
        if not self._is_known:
            return
        Q = ids.shape[1]
        real = None if mask is None else (mask[:, mask.shape[1] - Q :] != 0).to(ids.device)
        self._pending.append((ids.clone(), real))
        self._before, self._columns = seen, seen + Q
        if len(self._pending) > PENDING:
            self._add(self._pending[:-1])
            del self._pending[:-1]  # the last pass may yet fail

    def other_rows(self, ids: Tensor, mask: Tensor | None) -> list[int]:
        """Numbers of the rows that have other tokens in `ids` [B, n] than the cache has read; empty
        where that is not known. `mask`: [B, n or more], 0 at a pad."""
        n = ids.shape[1]
        if n != self._columns:
            self._step_back(n)
        if not self._is_known:
            return []
        self._fold()
        if self._totals is None or self._totals.shape[1] != len(ids):
            return []
        real = torch.ones_like(ids) if mask is None else mask[:, :n]
        found = _digest(ids, (real != 0).to(ids.device), 0)[0]
        return (found != self._totals[0].to(found.device)).nonzero()[:, 0].tolist()

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Follow the rows of the cache: `change` takes and returns numbers of rows on the last
        axis."""
        self._fold()
        if self._totals is not None:
            self._totals = change(self._totals)

    def as_dict(self) -> dict[str, Any] | None:
        """The digest for JSON; None where it is unknown."""
        self._fold()
        if not self._is_known or self._totals is None:
            return None
        digest, tokens = self._totals.tolist()
        return {"columns": self._columns, "digest": digest, "counts": tokens}

    def restore(self, saved: dict[str, Any] | None) -> None:
        """Become what `as_dict` was made of."""
        self.reset()
        if saved is None:
            self.lose()
            return
        self._columns = saved["columns"]
        totals = [saved["digest"], saved["counts"]]
        self._totals = torch.tensor(totals, dtype=torch.long, device="cpu")

    def _step_back(self, seen: int) -> None:
        """Leave the last pass out if it failed, so that `seen` columns were read; else the text is
        unknown from now on."""
        if self._pending and seen == self._before:
            self._pending.pop()
            self._columns = seen
        else:
            self.lose()

    def _fold(self) -> None:
        self._add(self._pending)
        self._pending = []

    def _add(self, passes: list[tuple[Tensor, Tensor | None]]) -> None:
        """Add passes to the digest, all at once."""
        if not passes:
            return
        ids = torch.cat([x for x, _ in passes], dim=1)
        real = torch.cat([x == x if mask is None else mask for x, mask in passes], dim=1)
        if self._totals is None:
            self._totals = _digest(ids, real, 0)
        else:
            before = self._totals.to(ids.device)
            self._totals = before + _digest(ids, real, before[1, :, None])


def _digest(ids: Tensor, real: Tensor, before: Tensor | int) -> Tensor:
    """Sums of a hash of each token and its number in the row, and the tokens of each row, [2, B].

    Args:
        ids: [B, n]; real: [B, n] bool, False at a pad.
        before: tokens before these in the row, [B, 1] or one number.
    """
    rank = real.long().cumsum(1) + before
    x = ids.long() * _A + rank * _B
    x = (x ^ (x >> 31)) * _C
    x = (x ^ (x >> 29)) * _A
    return torch.stack([torch.where(real, x ^ (x >> 32), 0).sum(1), real.long().sum(1)])
