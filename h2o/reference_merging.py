"""Merging of evicted keys: the part of `h2o.reference` for policies with `merge`.

An evicted key is merged into the kept key with the highest cosine to it, if that is above the
threshold. The slot then stands for several keys, and its logits grow by the logarithm of their
number. (Compare Wan et al., "D2O: Dynamic Discriminative Operations for Efficient Generative
Inference of Large Language Models", 2024, and Zhang et al., "CaM: Cache Merging for
Memory-efficient LLMs Inference", ICML 2024.)

Shape letters: K keys kept, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o.policy import Policy
from h2o.quantisation import dequantised, stored_like

__all__ = ["merge_evicted", "most_similar"]

FLOOR = 1e-9
"""Added to a key's mean score, so that keys without attention have weights as well."""


def most_similar(keys: Tensor, candidates: Tensor, key: Tensor, threshold: float) -> int | None:
    """Index of the key [K, D] with the highest cosine above the threshold to `key` [D].

    Only where `candidates` [K] is True, and where both have a norm that is finite and not 0; of
    equal cosines the first.
    """
    cosine = (keys @ key) / (keys.norm(dim=-1) * key.norm())
    cosine = cosine.masked_fill(~candidates | ~cosine.isfinite(), -torch.inf)
    best = int(cosine.argmax())
    return best if cosine[best] > threshold else None


def merge_evicted(kept: Any, evicted: Any, policy: Policy, D: int) -> bool:
    """Merges an evicted key into one of those `kept`; False where none is near enough.

    Both have keys and values as stored, scores, positions, bias, norms (or None) and `queries`, how
    many have made up each score: [K, ...] by ascending position, and the same of one key.
    """
    assert policy.merge is not None
    key, value = (dequantised(x, D).double() for x in (evicted.keys, evicted.values))
    keys = dequantised(kept.keys, D).double()
    j = most_similar(keys, kept.positions >= policy.sinks, key, policy.merge)
    if j is None:
        return False
    kept_weight, evicted_weight = (
        score.double() / queries + FLOOR
        for score, queries in ((kept.scores[j], kept.queries[j]), (evicted.scores, evicted.queries))
    )
    total = kept_weight + evicted_weight
    a, b = kept_weight / total, evicted_weight / total
    if not (a + b).isfinite():
        return False
    merged = a * dequantised(kept.values[j], D).double() + b * value
    kept.keys[j] = stored_like(a * keys[j] + b * key, kept.keys)
    kept.values[j] = stored_like(merged, kept.values)
    if kept.norms is not None:
        kept.norms[j] = merged.norm()
    kept.bias[j] = torch.logaddexp(kept.bias[j].double(), evicted.bias.double())
    if policy.scores_largest:
        kept.scores[j] = torch.maximum(kept.scores[j], evicted.scores)
    else:
        kept.scores[j] += evicted.scores.double() * (kept.queries[j] / evicted.queries)
    return True
