"""Softmax with learned attention sinks (`sink_logits` of `h2o.ops.attend`), in torch.

Each query head has one logit that is added to the denominator of its softmax and has no value
(OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, arXiv:2508.10925). These logits are
parameters of the model. The `sinks` of a policy are something else: the first tokens, which it
keeps.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 1e30
"""Replaces an infinite sink, which then takes all attention instead of making it NaN."""


def softmax(logits: Tensor, sinks: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax of logits [..., keys] over the keys and a sink [..., 1], whose share is dropped.

    Args:
        sinks: logits of the sinks, broadcast over the rows. None: an ordinary softmax.
        dtype: dtype of the result, that of the logits by default.
    """
    if sinks is None:
        return logits.softmax(-1, dtype=dtype)
    dtype = dtype or logits.dtype
    column = sinks.to(dtype).clamp(max=min(LARGEST, torch.finfo(dtype).max))
    column = column.expand(*logits.shape[:-1], 1)
    return torch.cat([logits.to(dtype), column], -1).softmax(-1)[..., :-1]
