"""The masks of the H2O paper's authors as whole tensors [n, n]. `h2o.evaluation` computes them in
blocks and is tested against this module.

A mask takes O(n^2) memory per head and O(n) calls of torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["simulation_mask"]


def simulation_mask(
    logits: Tensor,
    heavy: int | float,
    recent: int | float,
    variant: str = "h2o",
    prompt_length: int = 1,
    sinks: int = 0,
) -> Tensor:
    """Compute which keys each row sees when a whole text goes through a published form of H2O.

    Args:
        logits: [B, H, n, n], scaled q.k. The upper triangle is ignored. Each query head has its own
            keys (R = 1).
        heavy, recent: tokens, or fractions of n.
        variant: one of `h2o.evaluation.published_masks.MASKS`, or "h2o", the cache of this package:
            rows below `prompt_length` attend causally to everything. The budget is enforced after
            the last of them and after each further row.
        prompt_length: number of rows before the first eviction, at least 1. "h2o" and "flexgen"
            only.
        sinks: number of first positions that are never evicted. "h2o" only.

    Returns:
        [B, H, n, n] bool, true where row i sees key j.
    """
    n = logits.shape[-1]
    heavy, recent = (int(x * n) if isinstance(x, float) else x for x in (heavy, recent))
    logits = logits.double().masked_fill(~_causal(logits), -torch.inf)
    if variant in ("h2o", "flexgen"):
        return _cache_mask(logits, heavy, recent, prompt_length, sinks, variant == "flexgen")
    if variant == "local":
        return _local_mask(logits, heavy) | _band(logits, recent)
    if variant == "global":
        received = logits.softmax(-1).sum(-2)
        best = _best(received, torch.ones_like(received, dtype=torch.bool), heavy)
        return best[..., None, :] & _causal(logits) | _band(logits, recent)
    raise ValueError(variant)


def _cache_mask(
    logits: Tensor, heavy: int, recent: int, prompt_length: int, sinks: int, flexgen: bool
) -> Tensor:
    """Go row by row: attend to the keys held and the row's own, add the probabilities to the
    scores, evict."""
    n = logits.shape[-1]
    position = torch.arange(n, device=logits.device)
    seen = torch.zeros_like(logits, dtype=torch.bool)
    held = torch.zeros_like(seen[..., 0, :])
    score = torch.zeros_like(logits[..., 0, :])
    for i in range(n):
        held[..., i] = True
        seen[..., i, :] = held
        p = logits[..., i, :].masked_fill(~held, -torch.inf).softmax(-1)
        score += p.masked_fill(~held, 0.0)  # a NaN logit makes all of p NaN
        if i + 1 < prompt_length or i + 1 <= sinks + heavy + recent:
            continue
        reserved = (position < sinks) | (position > i - recent)
        if flexgen and i + 1 > prompt_length and heavy > 0:
            reserved = reserved | (position == i - recent)
            stay = _best(score, held & ~reserved, heavy - 1)
        else:
            stay = _best(score, held & ~reserved, heavy)
        held = held & reserved | stay
    return seen


def _local_mask(logits: Tensor, heavy: int) -> Tensor:
    """The mask of the heavy keys in variant "local"."""
    p = logits.softmax(-1)
    seen = torch.zeros_like(logits, dtype=torch.bool)
    seen[..., :heavy, :] = _causal(logits)[:heavy]
    score = p[..., :heavy, :].sum(-2)
    kept = torch.zeros_like(seen[..., 0, :])
    kept[..., :heavy] = True
    for i in range(heavy, logits.shape[-1] if heavy else 0):
        kept = _best(score, kept, heavy - 1)
        kept[..., i] = True
        seen[..., i, :] = kept
        score = (score + p[..., i, :]) * kept
    return seen


def _best(score: Tensor, candidates: Tensor, count: int) -> Tensor:
    """The `count` candidates with the highest scores, [..., n] bool. Of equal scores the lower
    position is chosen first, NaN last.

    Sums of probabilities are never negative, so -1 can stand for NaN and -2 for no candidate.
    """
    rank = score.masked_fill(score.isnan(), -1.0).masked_fill(~candidates, -2.0)
    order = rank.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return torch.zeros_like(candidates).scatter(-1, order, True) & candidates


def _causal(logits: Tensor) -> Tensor:
    n = logits.shape[-1]
    return torch.ones(n, n, dtype=torch.bool, device=logits.device).tril()


def _band(logits: Tensor, recent: int) -> Tensor:
    """The mask [n, n] in which row i sees the recent + 1 keys from i - recent to i."""
    return _causal(logits).triu(-recent)
