"""Drives an H2OCache the way a model does: mask, update, attention, layer by layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from h2o import H2OCache
from h2o.hf.attention.attention import h2o_attention_forward, h2o_mask
from tests.inputs import Text


class Attention(nn.Module):
    """The attributes of a model's attention module that the attention function reads."""

    is_causal = True
    num_key_value_groups = 2

    def __init__(self, layer_idx: int = 0) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.eval()


def new_cache(layers: int = 1, **parameters: Any) -> H2OCache:
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=32, num_attention_heads=4, num_key_value_heads=2
    )
    return H2OCache(config, **parameters)


def tensors(text: Text) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.from_numpy(x.copy()) for x in text)


def forward(cache: H2OCache, text: Text, mask: Any = None, layer: int = 0, **kwargs: Any) -> Tensor:
    """Run one layer of a forward pass; `mask` is [B, all columns]. Returns [B, Q, H, D]."""
    query, key, value = tensors(text)
    Q = query.shape[2]
    seen = cache.get_seq_length(layer)
    kv_length, kv_offset = cache.get_mask_sizes(Q, layer)
    attention_mask = h2o_mask(
        batch_size=query.shape[0],
        q_length=Q,
        kv_length=kv_length,
        q_offset=seen,
        kv_offset=kv_offset,
        attention_mask=None if mask is None else torch.as_tensor(mask)[:, : seen + Q],
    )
    key, value = cache.update(key, value, layer)
    kwargs.setdefault("scaling", query.shape[-1] ** -0.5)
    out, weights = h2o_attention_forward(
        Attention(layer), query, key, value, attention_mask, **kwargs
    )
    assert weights is None
    return out


def feed(cache: H2OCache, text: Text, calls: list[int], mask: Any = None, **kwargs: Any) -> Tensor:
    """Feed a text to a cache of one layer in chunks of `calls` columns. Returns [B, N, H, D]."""
    out, stop = [], 0
    for columns in calls:
        start, stop = stop, stop + columns
        out.append(forward(cache, text.cut(start, stop), mask, **kwargs))
    return torch.cat(out, dim=1)
