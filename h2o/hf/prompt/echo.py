"""Echo: what a second reading of a text would look for, from its first.

A model that meets a token again looks for what followed it before: it finds a key with the query of
a token shortly before that key (Olsson et al., "In-context Learning and Induction Heads", 2022,
arXiv:2209.11895). So the text's own queries are asked once more as if they stood behind it,
each by as many positions later as its row is long, over all keys of the row without a causal mask.
A key's score is the largest attention that it gets from the queries of its own token and of the
`BEFORE` tokens before it. With rotary positions such a query is the first one, rotated on; a query
rotated on gives a key what the query gives the key rotated back, and there are fewer keys.

Shape letters: H query heads, G key/value heads, R = H / G, n tokens of a row, m of them, D head
dimension, F rotary angles.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from h2o import backends, ops
from h2o.hf.rotary.model_rotary import rotate
from h2o.policy import BEFORE

__all__ = ["largest"]

ENTRIES = 1 << 21
"""Attention entries that exist at one time, where torch makes them."""
ROWS = 1024
"""Queries of each head that the kernels are asked at a time."""
TILE = 16
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
    how = _Logits(D**-0.5 if scale is None else scale, softcap, sink_logits)
    logs = torch.full((G, n), -math.inf, dtype=torch.float32, device=keys.device)
    if n == 0:
        return logs
    keys = keys.to(query.dtype)
    if angles is not None:
        keys = rotate(keys, torch.stack([angles[0], -angles[1]]))
    by_core = backends.HAS_CORE and backends.serving(keys) is backends.core
    rows = ROWS if by_core else max(1, ENTRIES // max(1, H * n))
    held, grouped = _hold(keys[:, 1:]), query.unflatten(0, (G, H // G))
    for first in range(0, n, rows):
        asked = grouped[:, :, first : first + rows]
        near = how.capped(_nearest(asked, keys[:, first : first + rows + BEFORE], how.scale))
        best = near.sub_(_totals(asked, held, keys[:, :1], how)).amax(2)
        for offset in range(BEFORE + 1):
            part = logs[:, first + offset : first + offset + rows]
            torch.maximum(part, best[offset, :, : part.shape[1]], out=part)
    return logs.exp_()


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
    tokens behind it, [BEFORE + 1, G, R, m] float32; of the keys [G, m to m + BEFORE, D], which
    begin with the first query's. Behind the last of them stands nothing that counts.

    Of tiles of queries by keys the diagonals are taken: one product of matrices for all.
    """
    G, R, m, D = asked.shape
    tiles = -(-m // TILE)
    queries = asked.new_zeros(G, tiles * TILE, R, D, dtype=torch.float32)
    queries[:, :m] = asked.transpose(1, 2)
    behind = asked.new_zeros(G, tiles * TILE + BEFORE, D, dtype=torch.float32)
    behind[:, : keys.shape[1]] = keys
    windows = behind.mul_(scale).unfold(1, TILE + BEFORE, TILE)  # [G, tiles, D, TILE + BEFORE]
    products = queries.view(G, tiles, TILE * R, D) @ windows
    of_group, of_tile, of_row, _ = products.stride()
    diagonals = products.as_strided(
        (BEFORE + 1, G, R, tiles, TILE), (1, of_group, of_row, of_tile, R * of_row + 1)
    )
    return diagonals.flatten(3)[..., :m]


def _hold(keys: Tensor) -> ops.Slots | None:
    """Slots with keys [G, n, D]; None for none."""
    n = keys.shape[1]
    if n == 0:
        return None
    slots = ops.new_slots(keys[None], n, shared=True)
    slots.keys[0] = keys
    slots.positions[:] = torch.arange(n, dtype=torch.int32, device=keys.device)
    slots.seen_tokens[:] = n
    return slots


def _totals(asked: Tensor, held: ops.Slots | None, first: Tensor, how: _Logits) -> Tensor:
    """The log of the sum of the exponentials of queries [G, R, m, D] with all keys, [G, R, m].

    Each query comes as a head of its own: that is how all of them see all keys. A call has new
    keys, so the first one, [G, 1, D], is not among those that are held.
    """
    G, R, m, D = asked.shape
    sinks = how.sink_logits
    return ops.log_sums(
        asked.reshape(1, -1, 1, D), first[None], held, scale=how.scale, softcap=how.softcap,
        sink_logits=None if sinks is None else sinks.repeat_interleave(m),
    ).view(G, R, m)  # fmt: skip
