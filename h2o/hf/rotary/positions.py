"""Positions of new tokens, for what calls a model directly, as `generate()` makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o.compat import accepts
from h2o.hf.families.wrappers import unwrap

__all__ = ["positions_after"]


def positions_after(model: Any, seen: int, ids: Tensor) -> dict[str, Tensor]:
    """The keyword argument that numbers ids [1, Q] which follow `seen` tokens; {} for a model that
    takes none. Some models (Bamba) would count from 0 in each forward pass."""
    if not accepts(unwrap(model).forward, "position_ids"):
        return {}
    numbers = torch.arange(seen, seen + ids.shape[1], device=ids.device)
    return {"position_ids": numbers[None]}
