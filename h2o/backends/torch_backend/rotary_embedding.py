"""Rotary position embedding with given angles, in plain torch, for the torch backend and the tests'
reference. `h2o.hf.rotary.model_rotary` gets the angles from a model.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_by(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate x [..., D] by angles [..., 2, F], given as cosines and sines.

    Elements i < F and F + i are rotated by angle i. Elements from 2 F on are unchanged.
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, section 3.
    """
    F = angles.shape[-1]
    cos, sin = angles.unbind(-2)
    a, b, rest = x[..., :F], x[..., F : 2 * F], x[..., 2 * F :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
