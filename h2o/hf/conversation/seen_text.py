"""`SeenText`: a digest of the token ids that a cache has seen.

`generate()` gets a whole conversation and drops as many ids as the cache has seen, without looking
at them. A cache does not store ids. Their digest shows whether the dropped ids are the ones that
the cache has seen. It takes two numbers per row, however long the text is.

Shape letters as in `h2o.hf`, and Q columns of a pass, n columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

PENDING = 64
"""Number of forward passes whose ids are collected before they are added to the digest."""

_A, _B, _C = 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D, 0x369DEA0F31A53F85


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
        found = _digest(ids, (real != 0).to(ids.device), 0)[0]
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
            return _digest(ids, real, 0)
        before = self.totals.to(ids.device)
        return before + _digest(ids, real, before[1, :, None])


NO_TEXT = SeenText()
UNKNOWN_TEXT = SeenText(is_known=False)


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
