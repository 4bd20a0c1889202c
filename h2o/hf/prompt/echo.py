"""Echo scores: the attention that keys would receive if the text were read a second time.

Induction heads look for what followed an earlier occurrence of a token: the token's query finds the
keys of the tokens shortly after that occurrence (Olsson et al., "In-context Learning and Induction
Heads", 2022, arXiv:2209.11895). Echo imitates a second occurrence of the whole text. Each query of
a row of n tokens is evaluated again n positions later, over all keys of the row and without a
causal mask. The score of a key is the largest attention that it receives from the queries of its
own token and of the `BEFORE` preceding tokens.

With rotary positions, the second occurrence of a query is the query rotated by n positions.
Rotating the keys back by n positions gives the same products, and there are fewer key heads than
query heads.

Shape letters as in `h2o.hf`, and R = H / G, n tokens of a row, m tokens of a part of the row, F
rotary angles.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from h2o import backends, ops
from h2o.hf.rotary.model_rotary import rotate
from h2o.policy import BEFORE
from h2o.slots import empty_slots

ENTRIES = 1 << 21
"""Maximum number of attention entries in memory at a time, if torch computes them"""
ROWS = 2048
"""Queries of each head in one call of the core"""
TOP_KEYS = 32
"""Number of keys that a lower bound of a softmax denominator takes one by one"""
BLOCK = 64
"""Number of keys that such a bound replaces by their mean"""
MARGIN = 1e-3
"""Amount by which bounds are raised, more than the rounding of float32"""
FEWEST_BOUNDED = 768
"""Minimum number of tokens in a row for which such bounds are computed. In shorter rows they take
as long as what they save."""
TILE = 8
"""Queries of each head in one tile of `_nearest`"""


def largest(
    query: Tensor, keys: Tensor, angles: Tensor | None, *, scale: float | None = None,
    softcap: float = 0.0, sink_logits: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute the echo scores of the keys of a row, [G, n] float32, without an [n, n] matrix.

    Args:
        query: [H, n, D], rotated by its positions and in the order of `ModelRotary.halves`.
        keys: [G, n, D], rotated and ordered likewise.
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
    by_core = backends.HAS_CORE and backends.backend_for(keys) is backends.core
    rows = ROWS if by_core else max(1, ENTRIES // max(1, H * n))
    is_bounded = by_core and keys.is_cpu and n >= FEWEST_BOUNDED
    grouped = query.unflatten(0, (G, H // G))
    log_sums = _NeededLogSums(grouped, keys, how) if is_bounded else _HeldKeys(keys, how)
    for first in range(0, n, rows):
        asked = grouped[:, :, first : first + rows]
        near = _nearest(asked, keys[:, first : first + rows + BEFORE], how)
        best = _highest_by_key(near - log_sums.compute(asked, near))[:, : n - first]
        part = logs[:, first : first + best.shape[1]]
        torch.maximum(part, best, out=part)
    return logs.exp_()


class _Logits(NamedTuple):
    """Parameters that turn a product of query and key into a logit, and learned sinks."""

    scale: float
    softcap: float
    sink_logits: Tensor | None

    def sinks(self, asked: Tensor) -> Tensor | None:
        """Sink logits [G, R * m] of queries [G, R, m, D]."""
        G, R, m, _ = asked.shape
        if self.sink_logits is None:
            return None
        return self.sink_logits.view(G, R, 1).expand(G, R, m).flatten(1)


def _nearest(asked: Tensor, keys: Tensor, how: _Logits) -> Tensor:
    """Logits of each query for the keys of its own token and of the next `BEFORE` tokens.

    One batched matrix product multiplies tiles of queries and keys. The products that are wanted
    are the diagonals of these tiles.

    Args:
        asked: queries, [G, R, m, D].
        keys: [G, m to m + BEFORE, D]. The first key is that of the first query's token.

    Returns:
        [BEFORE + 1, G, R, m] float32. Entries beyond the last key are 0 and have no meaning.
    """
    G, R, m, D = asked.shape
    tiles = -(-m // TILE)
    queries = asked.new_zeros(G, tiles * TILE, R, D, dtype=torch.float32)
    queries[:, :m] = asked.transpose(1, 2)
    behind = asked.new_zeros(G, tiles * TILE + BEFORE, D, dtype=torch.float32)
    behind[:, : keys.shape[1]] = keys
    windows = behind.mul_(how.scale).unfold(1, TILE + BEFORE, TILE)  # [G, tiles, D, TILE + BEFORE]
    products = queries.view(G, tiles, TILE * R, D) @ windows
    of_group, of_tile, of_row, _ = products.stride()
    diagonals = products.as_strided(
        (BEFORE + 1, G, R, tiles, TILE), (1, of_group, of_row, of_tile, R * of_row + 1)
    )
    logits = diagonals.flatten(3)[..., :m]
    if how.softcap:
        logits.div_(how.softcap).tanh_().mul_(how.softcap)
    return logits


def _highest_by_key(of_queries: Tensor) -> Tensor:
    """Largest value of any query for each key, [G, m + BEFORE].

    `of_queries`: [BEFORE + 1, G, R, m], values of each query for its own key and for the next
    `BEFORE` keys.
    """
    offsets, G, _, m = of_queries.shape
    best = of_queries.new_full((G, m + BEFORE), -math.inf)
    for offset in range(offsets):
        part = best[:, offset : offset + m]
        torch.maximum(part, of_queries[offset].amax(1), out=part)
    return best


class _HeldKeys:
    """Keys of some heads in slots, for queries that see all of them."""

    def __init__(self, keys: Tensor, how: _Logits) -> None:
        """`keys`: [G, n, D]."""
        self.first, self.how, n = keys[None, :, :1], how, keys.shape[1] - 1
        self.held = None
        if n > 0:
            self.held = empty_slots(keys[None], n, shared=True)
            self.held.keys[0] = keys[:, 1:]
            self.held.positions[:] = torch.arange(n, dtype=torch.int32, device=keys.device)
            self.held.seen_tokens[:] = n

    def log_sums(self, queries: Tensor, sinks: Tensor | None) -> Tensor:
        """Logarithms [G, N] of the softmax denominators of queries [G, N, D] over all keys.

        Each query is passed as a head of its own, so that it sees all keys. A call of the operation
        needs a new key. This is the first key, which is therefore not in the slots. `sinks`: logits
        of learned sinks, [G, N].
        """
        G, N, D = queries.shape
        return ops.log_sums(
            queries.reshape(1, -1, 1, D), self.first, self.held, scale=self.how.scale,
            softcap=self.how.softcap, sink_logits=None if sinks is None else sinks.flatten(),
        ).view(G, N)  # fmt: skip

    def compute(self, asked: Tensor, near: Tensor) -> Tensor:
        """Log sums [G, R, m] of queries [G, R, m, D]; `near` is not used."""
        return self.log_sums(asked.flatten(1, 2), self.how.sinks(asked)).view(asked.shape[:3])


class _LowerBounds:
    """Lower bounds of the log sums of queries, from few products for each query.

    Keys are sorted by the logit that the mean query gives them. The first `TOP_KEYS` often receive
    most of the attention, and are evaluated one by one. The others are divided into blocks. By
    Jensen's inequality the sum of exponentials over a block is at least the number of its keys
    times the exponential of the mean logit, which is that of the mean key. This is close where
    attention is even. A softcap is not linear, so that blocks do not count there.
    """

    def __init__(self, asked: Tensor, keys: Tensor, how: _Logits) -> None:
        """`asked`: all queries of a row, [G, R, n, D]; `keys`: [G, n, D]."""
        G, n, D = keys.shape
        mean_query = asked.mean(2, dtype=torch.float32).mean(1)
        logits = how.scale * (keys.float() @ mean_query[..., None])
        ordered = keys.gather(1, logits.argsort(1, descending=True).expand(G, n, D))
        self.top = _HeldKeys(ordered[:, :TOP_KEYS], how)
        blocks = max(0, n - TOP_KEYS) // BLOCK
        self.means = None
        if blocks and not how.softcap:
            members = ordered[:, TOP_KEYS : TOP_KEYS + blocks * BLOCK].unflatten(1, (blocks, BLOCK))
            self.means = _HeldKeys(members.mean(2, dtype=torch.float32), how)

    def compute(self, queries: Tensor, sinks: Tensor | None) -> Tensor:
        """Bounds [G, N]. See `_HeldKeys.log_sums` for the arguments."""
        of_top = self.top.log_sums(queries, sinks)
        if self.means is None:
            return of_top
        of_blocks = self.means.log_sums(queries.float(), None) + math.log(BLOCK)
        return torch.logaddexp(of_top, of_blocks)


class _NeededLogSums:
    """Log sums of those queries that a key's score may depend on; infinity for all others.

    Weights computed with a lower bound of the softmax denominator are upper bounds. For each key,
    the query with the highest bound is evaluated first. Then the queries are evaluated whose bound
    is not below the weight that was found. In all this is about a third of the queries.
    """

    def __init__(self, asked: Tensor, keys: Tensor, how: _Logits) -> None:
        """`asked`: all queries of a row, [G, R, n, D]; `keys`: [G, n, D]."""
        self.how, self.lower = how, _LowerBounds(asked, keys, how)
        self.heads = [_HeldKeys(keys[g : g + 1], how) for g in range(len(keys))]

    def compute(self, asked: Tensor, near: Tensor) -> Tensor:
        """See `_HeldKeys.compute`. `near`: logits in the shape that `_nearest` returns."""
        queries, sinks = asked.flatten(1, 2), self.how.sinks(asked)
        bounds = near - self.lower.compute(queries, sinks).view(asked.shape[:3]) + MARGIN
        sums = bounds.new_full(queries.shape[:2], math.inf)
        of_heads = sums.view(asked.shape[:3])
        highest = bounds
        for _ in range(2):
            needed = _reach(bounds, _highest_by_key(highest)) & of_heads.isinf()
            self._fill(sums, queries, sinks, needed.flatten(1))
            highest = near - of_heads
        return of_heads

    def _fill(self, sums: Tensor, queries: Tensor, sinks: Tensor | None, needed: Tensor) -> None:
        """Compute the log sums of the `needed` queries [G, N, D] into `sums` [G, N]."""
        for g, keys in enumerate(self.heads):
            chosen = needed[g].nonzero()[:, 0]
            if len(chosen):
                of_head = None if sinks is None else sinks[g : g + 1, chosen]
                sums[g, chosen] = keys.log_sums(queries[g : g + 1, chosen], of_head)[0]


def _reach(bounds: Tensor, highest: Tensor) -> Tensor:
    """Whether any of a query's bounds [BEFORE + 1, G, R, m] reaches its key's entry in `highest`
    [G, m + BEFORE], or is NaN; bool [G, R, m]."""
    m = bounds.shape[-1]
    below = [bound < highest[:, None, o : o + m] for o, bound in enumerate(bounds)]
    return ~torch.stack(below).all(0)
