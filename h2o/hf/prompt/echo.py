"""Echo scores: the attention that keys would receive if the text were read a second time.

Induction heads look for what followed a token when it occurred before: the query of a token finds
keys of the tokens shortly after its earlier occurrence (Olsson et al., "In-context Learning and
Induction Heads", 2022, arXiv:2209.11895). Echo imitates a second occurrence of the whole text. Each
query of a row of n tokens is evaluated again n positions later, over all keys of the row and
without a causal mask. The score of a key is the largest attention that it receives from the queries
of its own token and of the `BEFORE` tokens before.

With rotary positions the query of the second occurrence is the first one, rotated by n positions.
Rotating the keys back by n positions gives the same products, and there are fewer keys than
queries.

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

ENTRIES = 1 << 21
"""Most attention entries in memory at a time, where torch computes them"""
ROWS = 1024
"""Queries of each head in one call of the core"""
TILE = 8
"""Queries of one matrix product in `_nearest`"""


def largest(
    query: Tensor, keys: Tensor, angles: Tensor | None, *, scale: float | None = None,
    softcap: float = 0.0, sink_logits: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute the echo scores of the keys of a row, [G, n] float32, without an [n, n] matrix.

    Args:
        query: [H, n, D], with rotary positions applied and in the order of `Rotary.halves`.
        keys: [G, n, D], likewise.
        angles: [2, F] cosines and sines that rotate a query by n positions; None: no rotation.
        scale, softcap, sink_logits: see `h2o.ops.attend`.
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
    """How a product of query and key becomes a logit, and the sinks of the softmax."""

    scale: float
    softcap: float
    sink_logits: Tensor | None

    def capped(self, logits: Tensor) -> Tensor:
        """Apply the softcap in place."""
        if self.softcap:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


def _nearest(asked: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Scaled products of queries with the keys of their own and the next `BEFORE` tokens.

    The products are diagonals of tiles of queries times keys, all in one matrix product.

    Args:
        asked: queries, [G, R, m, D].
        keys: [G, m to m + BEFORE, D], of which the first is the first query's.

    Returns:
        [BEFORE + 1, G, R, m] float32. Entries beyond the last key are 0 and mean nothing.
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
    """Slots that hold keys [G, n, D]; None if n is 0."""
    n = keys.shape[1]
    if n == 0:
        return None
    slots = ops.new_slots(keys[None], n, shared=True)
    slots.keys[0] = keys
    slots.positions[:] = torch.arange(n, dtype=torch.int32, device=keys.device)
    slots.seen_tokens[:] = n
    return slots


def _totals(asked: Tensor, held: ops.Slots | None, first: Tensor, how: _Logits) -> Tensor:
    """Log of the softmax denominators of queries [G, R, m, D] over all keys, [G, R, m].

    Each query is passed as a head of its own, so that it sees all keys. A call needs a new key:
    the first one, [G, 1, D], which is not among the slots.
    """
    G, R, m, D = asked.shape
    sinks = how.sink_logits
    return ops.log_sums(
        asked.reshape(1, -1, 1, D), first[None], held, scale=how.scale, softcap=how.softcap,
        sink_logits=None if sinks is None else sinks.repeat_interleave(m),
    ).view(G, R, m)  # fmt: skip
