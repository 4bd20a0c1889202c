"""The attention of each token of a padded text that falls on keys which are still held.

Shape letters: B batch rows, H query heads, N columns of the padded batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h2o.attention_blocks import retained_mass

__all__ = ["columns", "retained_by_token"]


def retained_by_token(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    evicted_at: Tensor,
    scale: float | None,
    softcap: float,
) -> Tensor:
    """[B, H, N]: what each token retains of a full cache's attention, NaN for pads."""
    B, H, N, _ = query.shape
    mass = torch.full((B, H, N), torch.nan, dtype=torch.float32, device=query.device)
    for b, real in enumerate(columns(mask, B, N, query.device)):
        left = torch.searchsorted(real, evicted_at[b, :, real].long())
        mass[b, :, real] = retained_mass(
            query[b, :, real], key[b, :, real], left, scale=scale, softcap=softcap
        )
    return mass


def columns(mask: Tensor | None, B: int, N: int, device: torch.device) -> list[Tensor]:
    """Columns of each row that are no pads."""
    if mask is None:
        return [torch.arange(N, device=device)] * B
    return [row.nonzero()[:, 0] for row in mask]
