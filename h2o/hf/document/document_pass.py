"""A forward pass over a part of a document, for its cache alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o import compat

__all__ = ["forward"]


def forward(model: Any, cache: Any, ids: Tensor, mask: Tensor, before: Tensor) -> None:
    """Put columns ids [B, Q] with a mask [B, Q] into a cache, after columns of the mask `before`
    [B, n]. The model makes no logits."""
    model = model.base_model
    more = {}
    if compat.accepts(model.forward, "position_ids"):
        positions = before.sum(1, keepdim=True) + mask.cumsum(1) - 1
        more["position_ids"] = positions.clamp(min=0)
    model(
        ids,
        attention_mask=torch.cat([before, mask], 1),
        use_cache=True,
        **compat.with_cache(cache),
        **more,
    )
