"""The softmax with learned attention sinks (`sink_logits` of `h2o.ops.attend`), in torch.

Each query head has a logit that stands in the denominator of its softmax and has no value (OpenAI,
"gpt-oss-120b & gpt-oss-20b Model Card", 2025, arXiv:2508.10925). They are parameters of the model,
not the first tokens that a policy keeps, which are called `sinks`.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 1e30
"""Stands for an infinite sink, so that it takes all instead of making all NaN."""


def softmax(logits: Tensor, sinks: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax of logits [..., keys] over the keys and a sink [..., 1], whose share is left out.

    Args:
        sinks: to be broadcast over the rows; None: an ordinary softmax.
        dtype: of the result, that of the logits by default.
    """
    if sinks is None:
        return logits.softmax(-1, dtype=dtype)
    dtype = dtype or logits.dtype
    column = sinks.to(dtype).clamp(max=min(LARGEST, torch.finfo(dtype).max))
    column = column.expand(*logits.shape[:-1], 1)
    return torch.cat([logits.to(dtype), column], -1).softmax(-1)[..., :-1]
