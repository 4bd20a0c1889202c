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
ROWS = 2048
"""Queries of each head in one call of the core"""
BOUND_KEYS = 32
"""First keys of a row, whose part of a softmax denominator is its lower bound"""
FEWEST_BOUNDED = 512
"""Fewest tokens of a row whose queries are bounded first"""
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
    is_bounded = by_core and keys.is_cpu and n >= FEWEST_BOUNDED
    log_sums = (_NeededLogSums if is_bounded else _AllLogSums)(keys, how)
    grouped = query.unflatten(0, (G, H // G))
    for first in range(0, n, rows):
        asked = grouped[:, :, first : first + rows]
        near = how.capped(_nearest(asked, keys[:, first : first + rows + BEFORE], how.scale))
        best = _highest_by_key(near - log_sums.compute(asked, near))[:, : n - first]
        part = logs[:, first : first + best.shape[1]]
        torch.maximum(part, best, out=part)
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

    def sinks(self, asked: Tensor) -> Tensor | None:
        """Logits of the sinks of queries [G, R, m, D], [G, R * m]."""
        G, R, m, _ = asked.shape
        if self.sink_logits is None:
            return None
        return self.sink_logits.view(G, R, 1).expand(G, R, m).flatten(1)


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


def _highest_by_key(of_queries: Tensor) -> Tensor:
    """Largest value that any query has for each key, [G, m + BEFORE].

    `of_queries`: [BEFORE + 1, G, R, m], of each query's own key and the `BEFORE` next ones.
    """
    offsets, G, _, m = of_queries.shape
    best = of_queries.new_full((G, m + BEFORE), -math.inf)
    for offset in range(offsets):
        part = best[:, offset : offset + m]
        torch.maximum(part, of_queries[offset].amax(1), out=part)
    return best


class _HeldKeys:
    """Keys of some heads, for queries that see all of them."""

    def __init__(self, keys: Tensor, how: _Logits) -> None:
        """`keys`: [G, n, D]."""
        self.first, self.how, n = keys[None, :, :1], how, keys.shape[1] - 1
        self.held = None
        if n > 0:
            self.held = ops.new_slots(keys[None], n, shared=True)
            self.held.keys[0] = keys[:, 1:]
            self.held.positions[:] = torch.arange(n, dtype=torch.int32, device=keys.device)
            self.held.seen_tokens[:] = n

    def log_sums(self, queries: Tensor, sinks: Tensor | None) -> Tensor:
        """Logs of the softmax denominators of queries [G, N, D] over all keys, [G, N].

        Each query is passed as a head of its own, so that it sees all keys. A call needs a new
        key: the first one, which is not among the slots. `sinks`: logits of sinks, [G, N].
        """
        G, N, D = queries.shape
        return ops.log_sums(
            queries.reshape(1, -1, 1, D), self.first, self.held, scale=self.how.scale,
            softcap=self.how.softcap, sink_logits=None if sinks is None else sinks.flatten(),
        ).view(G, N)  # fmt: skip


class _AllLogSums:
    """Logs of the softmax denominators of a row's queries."""

    def __init__(self, keys: Tensor, how: _Logits) -> None:
        """`keys`: [G, n, D]."""
        self.keys, self.how = _HeldKeys(keys, how), how

    def compute(self, asked: Tensor, near: Tensor) -> Tensor:
        """Log sums of queries [G, R, m, D], [G, R, m]; `near` is not needed."""
        return self.keys.log_sums(asked.flatten(1, 2), self.how.sinks(asked)).view(asked.shape[:3])


class _NeededLogSums:
    """Log sums of the queries that a key's score may depend on; infinite for the others.

    The denominator over a few keys is a lower bound of a query's own, and its weights by that are
    upper bounds. For each key the query with the highest bound is evaluated first, then those
    whose bound is above the weight that was found: about half of the queries.
    """

    def __init__(self, keys: Tensor, how: _Logits) -> None:
        """`keys`: [G, n, D]."""
        self.how, self.few = how, _HeldKeys(keys[:, :BOUND_KEYS], how)
        self.heads = [_HeldKeys(keys[g : g + 1], how) for g in range(len(keys))]

    def compute(self, asked: Tensor, near: Tensor) -> Tensor:
        """See `_AllLogSums.compute`. `near`: logits as `_nearest` returns them."""
        queries, sinks = asked.flatten(1, 2), self.how.sinks(asked)
        bounds = near - self.few.log_sums(queries, sinks).view(asked.shape[:3])
        sums = bounds.new_full(queries.shape[:2], math.inf)
        of_heads = sums.view(asked.shape[:3])
        highest = bounds
        for _ in range(2):
            needed = _reach(bounds, _highest_by_key(highest)) & of_heads.isinf()
            self._fill(sums, queries, sinks, needed.flatten(1))
            highest = near - of_heads
        return of_heads

    def _fill(self, sums: Tensor, queries: Tensor, sinks: Tensor | None, needed: Tensor) -> None:
        """Evaluate the needed of queries [G, N, D] into `sums` [G, N]."""
        for g, keys in enumerate(self.heads):
            chosen = needed[g].nonzero()[:, 0]
            if len(chosen):
                of_head = None if sinks is None else sinks[g : g + 1, chosen]
                sums[g, chosen] = keys.log_sums(queries[g : g + 1, chosen], of_head)[0]


def _reach(bounds: Tensor, highest: Tensor) -> Tensor:
    """Queries with a bound [BEFORE + 1, G, R, m] not below the highest of its key, [G, R, m].

    `highest`: [G, m + BEFORE].
    """
    m = bounds.shape[-1]
    reached = [bound >= highest[:, None, o : o + m] for o, bound in enumerate(bounds)]
    return torch.stack(reached).any(0)
