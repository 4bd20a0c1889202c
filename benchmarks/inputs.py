"""Queries, keys and values that behave like those of a text, and slots filled with them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import h2o.ops

TOPICS = 8


def text(
    B: int, H: int, G: int, n: int, D: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Make (query [B,H,n,D], keys [B,G,n,D], values [B,G,n,D]) of a text whose subject changes.

    Each key belongs to one of a few topics, and some keys have much more weight than others. The
    queries turn from topic to topic. Some keys are therefore heavy hitters, and these change as the
    text goes on. (With independent Gaussian vectors the heavy set would soon stop changing.)
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    topics = normal(B, G, TOPICS, D)
    topic = torch.randint(TOPICS, (B, G, n), generator=generator)
    weight = torch.rand(B, G, n, 1, generator=generator) ** 3
    at = topic[..., None].expand(-1, -1, -1, D)
    keys = 0.6 * normal(B, G, n, D) + 1.5 * weight * topics.gather(2, at)
    values = normal(B, G, n, D)
    turn = torch.linspace(0, 3, n)[:, None] + torch.arange(TOPICS) / TOPICS
    interest = (2 * math.pi * turn).cos().clamp(min=0)  # [n, TOPICS]
    toward = (interest @ topics).repeat_interleave(H // G, dim=1)
    query = 0.6 * normal(B, H, n, D) + 1.2 * toward
    return query.to(dtype), keys.to(dtype), values.to(dtype)


def filled_slots(keys: Tensor, values: Tensor, query: Tensor, heavy: int, recent: int) -> Any:
    """Make slots that hold a prompt, ready for `h2o.ops.step`."""
    slots = h2o.ops.new_slots(keys, heavy + recent + 1, heavy, recent)
    _, scores = h2o.ops.attend(query, keys, values)
    h2o.ops.evict(keys, values, scores, slots)
    return slots


def copy_slots(slots: Any) -> Any:
    return type(slots)(*(None if x is None else x.clone() for x in slots))
