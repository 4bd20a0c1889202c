"""How far a decode step over bytes may be from the truth where it multiplies them as they lie.

Levels with products of bytes (`csrc/cpu/step_bytes.inc`) round bfloat16 queries, and weights times
the scales of values, to whole numbers of 16 bits. All else of a step is as in `h2o.reference`.

Shape letters: R query heads of a group, m keys, D head dimension.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["logit_error", "output_error"]

QUERY_MOST, WEIGHT_MOST = 127 * 256, 65535
"""The whole numbers of a query's largest element, and of the largest weight times scale."""


def logit_error(query: Tensor, keys: Tensor, scale: float) -> Tensor:
    """[R, m]: the most that rounding queries [R, D] moves their logits for keys [m, D]."""
    unit = query.abs().amax(-1, keepdim=True) / QUERY_MOST
    return scale * unit / 2 * keys.abs().sum(-1)


def output_error(weights: Tensor, scales: Tensor, most: int) -> Tensor:
    """[R]: the most that rounding moves an element of the output. weights [R, m], scales of the
    values [m, any], of which `most` is the largest whole number: 127 or 15."""
    unit = weights.amax(-1) * scales.max() / WEIGHT_MOST
    return unit / 2 * most * weights.shape[-1]
