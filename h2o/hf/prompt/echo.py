"""Echo: what a second reading of a text would look for, from its first.

A model that meets a token again looks for what followed it before: it finds a key with the query of
a token shortly before that key (Olsson et al., "In-context Learning and Induction Heads", 2022,
arXiv:2209.11895). So the text's own queries are asked once more as if they stood behind it,
each by as many positions later as its row is long, over all keys of the row without a causal mask.
A key's score is the largest attention that it gets from the queries of its own token and of the
`BEFORE` tokens before it. With rotary positions such a query is the first one, rotated on.

Shape letters: H query heads, G key/value heads, R = H / G, n tokens of a row, m of them, D head
dimension, F rotary angles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from h2o import backends, ops
from h2o.hf.rotary.model_rotary import rotate
from h2o.hf.store import slot_layout
from h2o.policy import BEFORE

__all__ = ["largest"]

ENTRIES = 1 << 21
"""Attention entries that exist at one time, where torch makes them."""
ROWS = 1024
"""Queries of each head that the kernels are asked at a time."""
TILE = 32
"""Queries whose nearest keys come from one product of matrices."""


def largest(
    query: Tensor, keys: Tensor, angles: Tensor | None, *, scale: float | None = None,
    softcap: float = 0.0, sink_logits: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The score of each key of a row, [G, n] float32; no matrix of n x n entries is made.

    Args:
        query: [H, n, D]; keys: [G, n, D], both rotated and in `Rotary.halves`.
        angles: [2, F] by which the queries are rotated on; None: they have no rotation.
        scale, softcap, sink_logits: as in `h2o.ops.attend`.
    """
    H, n, D = query.shape
    G = len(keys)
    grouped, keys = query.unflatten(0, (G, H // G)), keys.to(query.dtype)
    how = _Logits(D**-0.5 if scale is None else scale, softcap, sink_logits)
    scores = torch.zeros(G, n, dtype=torch.float32, device=keys.device)
    if n == 0:
        return scores
    by_core = backends.HAS_CORE and backends.serving(keys) is backends.core
    rows = ROWS if by_core else max(1, ENTRIES // max(1, H * n))
    held = slot_layout.fill_slots(keys[None], None, None, value_weighted=False)
    for first in range(0, n, rows):
        asked = grouped[:, :, first : first + rows]
        asked = asked if angles is None else rotate(asked, angles)
        near = _nearest(asked, keys[:, first : first + rows + BEFORE], how.scale)
        total = _totals(asked, held, keys[:, :1], how)
        weights = (how.capped(near) - total[..., None]).exp().amax(1)  # [G, rows, BEFORE + 1]
        for offset in range(BEFORE + 1):
            part = scores[:, first + offset : first + offset + rows]
            torch.maximum(part, weights[:, : part.shape[1], offset], out=part)
    return scores


class _Logits(NamedTuple):
    """How a product of query and key becomes a logit, and what else is in the softmax."""

    scale: float
    softcap: float
    sink_logits: Tensor | None

    def capped(self, logits: Tensor) -> Tensor:
        """In place."""
        if self.softcap:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


def _nearest(asked: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Products, scaled, of queries [G, R, m, D] with the key of their own token and of the `BEFORE`
    tokens behind it, [G, R, m, BEFORE + 1] float32; of the keys [G, m to m + BEFORE, D], which
    begin with the first query's. Behind the last of them stands nothing that counts.

    Of tiles of queries by keys the diagonals are taken: one product of matrices for all.
    """
    _, R, m, _ = asked.shape
    tiles = -(-m // TILE)
    whole = asked if m == tiles * TILE else pad(asked, (0, 0, 0, tiles * TILE - m))
    queries = whole.unflatten(2, (tiles, TILE)).transpose(1, 2).flatten(2, 3).float()
    behind = pad(keys.float() * scale, (0, 0, 0, tiles * TILE + BEFORE - keys.shape[1]))
    windows = behind.unfold(1, TILE + BEFORE, TILE)  # [G, tiles, D, TILE + BEFORE]
    products = (queries @ windows).unflatten(2, (R, TILE))
    diagonals = [products.diagonal(offset, -2, -1) for offset in range(BEFORE + 1)]
    return torch.stack(diagonals, -1).transpose(1, 2).flatten(2, 3)[:, :, :m]


def _totals(asked: Tensor, held: ops.Slots, first: Tensor, how: _Logits) -> Tensor:
    """The log of the sum of the exponentials of queries [G, R, m, D] with all keys that are held,
    [G, R, m].

    Each query comes as a head of its own: that is how all of them see all keys. It sees one key a
    second time, the first one, [G, 1, D], since a call has new keys; that is taken away again. It
    is at most half of the sum.
    """
    G, R, m, D = asked.shape
    sinks = how.sink_logits
    twice = ops.log_sums(
        asked.reshape(1, -1, 1, D), first[None], held, scale=how.scale, softcap=how.softcap,
        sink_logits=None if sinks is None else sinks.repeat_interleave(m),
    ).view(G, R, m)  # fmt: skip
    logit = how.capped((asked.float() * how.scale * first.float()[:, None]).sum(-1))
    return twice + torch.log1p(-(logit - twice).exp())
