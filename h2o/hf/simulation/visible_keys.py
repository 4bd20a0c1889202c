"""Attention over a whole text to the keys that a cache would have held at each of its tokens.

`ops.simulate` finds these keys with the queries of the layer that stores them. In some models
(h2o.hf.model_traits.shared_keys) later layers attend to the same keys with their own queries.

Shape letters as in `h2o.hf`, and P queries (of the last P columns).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from h2o.attention_blocks import retained_mass
from h2o.hf.attention.attention import softmax_attention
from h2o.hf.attention.attention_call import AttentionCall, NewTokens
from h2o.kv_dtype import stored_bytes
from h2o.quantization import round_to_bytes

ROWS = 512
"""Number of queries whose logits are computed at a time."""


class VisibleKeys(NamedTuple):
    """The keys that each token of a text sees, given by when each key is evicted."""

    evicted_at: Tensor
    """[B, G, N] int32, the first column that no longer sees the key"""
    prompts: Sequence[int]
    """Prompt length of each row. A prompt's tokens see keys as computed, not as stored"""
    kv_dtype: str | None

    def attend(self, call: AttentionCall | NewTokens) -> Tensor:
        """A layer's attention [B, P, H, D] to the visible keys."""
        P, N = call.query.shape[2], call.key.shape[2]
        key, value = call.key.detach().float(), call.value.detach().float()
        stored = None
        if sizes := stored_bytes(self.kv_dtype, key.shape[-1]):
            stored = round_to_bytes(key, sizes[0]), round_to_bytes(value, sizes[1])
            in_prompt = self._in_prompt(call, N)
        parts = []
        for first in range(0, P, ROWS):
            rows = slice(first, min(first + ROWS, P))
            columns = torch.arange(N - P + rows.start, N - P + rows.stop, device=key.device)
            part = call._replace(query=call.query[:, :, rows])
            out = self._rows(part, key, value, columns)
            if stored is not None:
                later = self._rows(part, *stored, columns)
                out = torch.where(in_prompt[:, columns, None, None], out, later)
            parts.append(out)
        return torch.cat(parts, dim=1).to(call.query.dtype)

    def _rows(
        self, call: AttentionCall | NewTokens, key: Tensor, value: Tensor, columns: Tensor
    ) -> Tensor:
        """Attention of the queries in some columns."""
        seen = torch.arange(key.shape[2], device=key.device) <= columns[:, None]  # [n, N]
        seen = seen & (columns[:, None] < self.evicted_at[:, :, None])  # [B, G, n, N]
        query, sinks = call.query.detach().float(), call.sink_logits
        sinks = None if sinks is None else sinks.detach()
        return softmax_attention(query, key, value, seen, call.scale, call.softcap, sinks)

    def _in_prompt(self, call: AttentionCall | NewTokens, N: int) -> Tensor:
        """[B, N] bool, whether each column's token is in its row's prompt."""
        device = call.key.device
        prompts = torch.tensor(self.prompts, dtype=torch.long, device=device).clamp(min=1)[:, None]
        order = torch.arange(N, device=device)[None]
        return (order if call.mask is None else call.mask.cumsum(1) - 1) < prompts


def retained_by_token(text: NewTokens, evicted_at: Tensor) -> Tensor:
    """[B, H, N]: the share of a full cache's attention that each token retains, NaN for padding."""
    query, key = text.query, text.key
    B, H, N, _ = query.shape
    mass = torch.full((B, H, N), torch.nan, dtype=torch.float32, device=query.device)
    for b, real in enumerate(columns(text.mask, B, N, query.device)):
        left = torch.searchsorted(real, evicted_at[b, :, real].long())
        mass[b, :, real] = retained_mass(
            query[b, :, real], key[b, :, real], left, scale=text.scale, softcap=text.softcap
        )
    return mass


def columns(mask: Tensor | None, B: int, N: int, device: torch.device) -> list[Tensor]:
    """The columns of each row that are not padding."""
    if mask is None:
        return [torch.arange(N, device=device)] * B
    return [row.nonzero()[:, 0] for row in mask]
