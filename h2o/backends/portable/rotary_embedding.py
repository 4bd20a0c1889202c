"""Rotary position embedding by a table of angles, in plain torch, for oracle and torch backend.

The angles that a model makes are the matter of `h2o.hf.rotary.model_rotary`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_by(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding of x [..., D] by angles [..., 2, F], cosines and sines.

    Element i < F and element F + i turn together by angle i; those from 2 F on stay as they are.
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, section 3.
    """
    F = angles.shape[-1]
    cos, sin = angles.unbind(-2)
    a, b, rest = x[..., :F], x[..., F : 2 * F], x[..., 2 * F :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
