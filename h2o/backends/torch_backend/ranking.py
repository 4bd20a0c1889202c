"""Choice of the keys to keep: `csrc/policy.h` in torch, for all rows and heads at once.

Ranks are compared as order-preserving integers, never as floats, so that the order is total: NaN
is below every number, -0 equals +0, and keys that must not be evicted are above all others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from h2o.policy import Policy

_HIGHEST = 2**31 - 1
_LOWEST = -(2**31)


class Budget(NamedTuple):
    """Budgets of rows and heads, [B, 1 or G, 1] each."""

    recent: Tensor
    """int32"""
    k: Tensor
    """int64, sinks + heavy + recent, because each part may be `UNLIMITED`"""


def split_budget(budget: Tensor, sinks: int) -> Budget:
    """Split budgets [B, 2] or [B, G, 2] int32 (heavy, recent) into recent and k."""
    if budget.ndim == 2:
        budget = budget[:, None]
    k = budget.sum(-1, keepdim=True)
    return Budget(budget[..., 1:], k + sinks if sinks else k)


def rank_keys(
    policy: Policy,
    scores: Tensor,
    positions: Tensor,
    norms: Tensor | None,
    lengths: Tensor,
    budget: Budget,
) -> Tensor:
    """int32 [B, G, C] in the order of ranks. Keys that are kept for their position or pinned by an
    infinite score have the highest value, and so do entries that are not keys (position -1).

    Args:
        scores, positions, norms: [B, G, C]. No score is -0. norms None: they do not count.
        lengths: [B, 1, 1] int32 or int64, tokens that the rows have seen, including the newest.
    """
    rank = scores
    if policy.score_by == "mean":
        rank = rank / policy.queries_of(positions, lengths)
    if norms is not None:
        rank = rank * norms
    if rank is not scores:
        rank = rank + 0.0  # -0 is 0
    bits = rank.view(torch.int32)
    keys = (bits >> 31).bitwise_and_(_HIGHEST).bitwise_xor_(bits)
    keys.masked_fill_(rank != rank, _LOWEST)
    # The same dtype, so that positions are not converted for the comparison.
    recent = positions >= (lengths - budget.recent).to(positions.dtype)
    protected = recent.logical_or_(positions < policy.sinks).logical_or_(scores == torch.inf)
    return keys.masked_fill_(protected, _HIGHEST)


def lowest(keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The key to evict first: the one with the lowest rank, and among equal ranks the one at the
    highest position. Returns the position and the index on the last axis, [B, G, 1] each."""
    others = keys != keys.amin(-1, keepdim=True)
    position, index = positions.masked_fill(others, -1).max(-1, keepdim=True)
    return position, index


def highest(ranks: Tensor, positions: Tensor, k: Tensor) -> Tensor:
    """[B, G, C] bool: the k [B, 1 or G, 1] keys of highest rank, among equal ranks those at the
    lowest positions.

    `ranks` come from `rank_keys`. Entries with position -1 are not keys.
    """
    best = (ranks.long() << 32) + (_HIGHEST - positions)
    best = best.masked_fill(positions < 0, torch.iinfo(torch.int64).min)
    last = (k - 1).clamp(max=best.shape[-1] - 1).expand(*best.shape[:2], 1)
    least = best.sort(-1, descending=True).values.gather(-1, last)
    return (best >= least) & (positions >= 0)
