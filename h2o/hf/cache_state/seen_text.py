"""`SeenText`: a digest of the token ids that a cache has seen.

`generate()` gets a whole conversation and drops as many ids as the cache has seen, without looking
at them. A cache does not store ids. Their digest shows whether the dropped ids are the ones that
the cache has seen. It takes two numbers per row, however long the text is.

Shape letters as in `h2o.hf`, and Q columns of a pass, n columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PENDING = 64
"""Number of forward passes whose ids are collected before they are added to the digest."""

_A, _B, _C = 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D, 0x369DEA0F31A53F85


class SeenText:
    """Digest of the token ids of each row, without padding.

    The digest becomes unknown after a pass of embeddings, a pass in a captured graph, or a
    conversion from a DynamicCache. Then nothing is compared until the cache is emptied.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the text."""
        self._totals: Tensor | None = None
        """[2, B] int64: digest and number of tokens of each row, without the pending passes"""
        self._columns = 0
        """Number of columns seen, including the pending passes"""
        self._pending: list[tuple[Tensor, Tensor | None]] = []
        """Ids of each pending pass, and a mask that is False at padding (None: no padding)"""
        self._is_known = True

    def mark_unknown(self) -> None:
        """Mark the digest as unknown until the cache is emptied."""
        self._is_known, self._pending = False, []

    def record_ids(self, ids: Tensor | None, mask: Tensor | None, seen: int) -> None:
        """Record the ids of a forward pass before it begins.

        Args:
            ids: [B, Q]; None if unknown.
            mask: [B, n] over all columns including the new ones, 0 at padding; None: no padding.
            seen: number of columns before the pass, without those of a pass that failed.
        """
        if seen == 0:
            self.reset()
        self.drop_failed_pass(seen)
        if ids is None or ids.ndim != 2 or (mask is not None and mask.shape[1] < ids.shape[1]):
            self.mark_unknown()
            return
        if not self._is_known:
            return
        Q = ids.shape[1]
        real = None if mask is None else (mask[:, mask.shape[1] - Q :] != 0).to(ids.device)
        self._pending.append((ids.clone(), real))
        self._columns = seen + Q
        if len(self._pending) > PENDING:
            self._fold(self._pending[:-1])  # the last pass may yet fail

    def differing_rows(self, ids: Tensor, mask: Tensor | None) -> list[int]:
        """Numbers of the rows in which `ids` [B, n] differ from the text that the cache has seen.

        Empty if the digest is unknown. `mask`: [B, n or more], 0 at padding."""
        n = ids.shape[1]
        self.drop_failed_pass(n)
        if not self._is_known:
            return []
        self._fold(self._pending)
        if self._totals is None or self._totals.shape[1] != len(ids):
            return []
        real = torch.ones_like(ids) if mask is None else mask[:, :n]
        found = _digest(ids, (real != 0).to(ids.device), 0)[0]
        return (found != self._totals[0].to(found.device)).nonzero()[:, 0].tolist()

    def counts(self, seen: int) -> list[int] | None:
        """Number of tokens in each row [B], of the `seen` columns that the cache has really seen;
        None if unknown."""
        self.drop_failed_pass(seen)
        self._fold(self._pending)
        known = self._is_known and self._totals is not None
        return self._totals[1].tolist() if known else None

    def drop_failed_pass(self, seen: int) -> None:
        """Drop what the last pass added to the `seen` columns that the cache has really seen,
        because it failed or `H2OCache.crop` removed tokens. The text is unknown from now on if
        `seen` does not lie in the last pass. Needed before a method that adds the pending ids to
        the digest."""
        if seen == self._columns:
            return
        before = self._columns - (self._pending[-1][0].shape[1] if self._pending else 0)
        if not before <= seen < self._columns:
            self.mark_unknown()
            return
        ids, real = self._pending.pop()
        if left := seen - before:
            self._pending.append((ids[:, :left], None if real is None else real[:, :left]))
        self._columns = seen

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Select or repeat the rows, as `change` does with the first axis of a tensor."""
        self._fold(self._pending)
        if self._totals is not None:
            self._totals = change(self._totals.T).T

    def as_dict(self) -> dict[str, Any] | None:
        """Convert the digest for JSON; None if it is unknown."""
        self._fold(self._pending)
        if not self._is_known or self._totals is None:
            return None
        digest, tokens = self._totals.tolist()
        return {"columns": self._columns, "digest": digest, "counts": tokens}

    def restore(self, saved: dict[str, Any] | None) -> None:
        """Restore from the output of `as_dict`."""
        self.reset()
        if saved is None:
            self.mark_unknown()
            return
        self._columns = saved["columns"]
        totals = [saved["digest"], saved["counts"]]
        self._totals = torch.tensor(totals, dtype=torch.long, device="cpu")

    def _fold(self, passes: list[tuple[Tensor, Tensor | None]]) -> None:
        """Add the first pending passes to the digest in one computation."""
        if not passes:
            return
        self._pending = self._pending[len(passes) :]
        ids = torch.cat([x for x, _ in passes], dim=1)
        real = torch.cat([x == x if mask is None else mask for x, mask in passes], dim=1)
        if self._totals is None:
            self._totals = _digest(ids, real, 0)
        else:
            before = self._totals.to(ids.device)
            self._totals = before + _digest(ids, real, before[1, :, None])


def _digest(ids: Tensor, real: Tensor, before: Tensor | int) -> Tensor:
    """Per row, the sum of a hash of each token and its position, and the token count: [2, B].

    Args:
        ids: [B, n].
        real: [B, n] bool, False at padding.
        before: number of earlier tokens in the row, [B, 1] or one number.
    """
    rank = real.long().cumsum(1) + before
    x = ids.long() * _A + rank * _B
    x = (x ^ (x >> 31)) * _C
    x = (x ^ (x >> 29)) * _A
    return torch.stack([torch.where(real, x ^ (x >> 32), 0).sum(1), real.long().sum(1)])
