"""Cache-relative positions: a key's position is its rank among the keys held.

With `positions="cache_relative"` no position exceeds the budget, however long the text (Xiao et
al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024, section 3.2). The model
passes rotated keys and queries. Their rotation is undone before keys are stored, and every forward
pass rotates them again by rank.

Shape letters as in `h2o.hf`, and R = H / G, F rotary angles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o import ops
from h2o.compat import cache_in
from h2o.compat_calls import replace_positions
from h2o.errors import UnsupportedError
from h2o.hf.attention.attention_call import AttentionCall, NewTokens, step
from h2o.hf.cache_state import slot_layout
from h2o.hf.layers.plain_variant import PlainVariant
from h2o.hf.rotary.model_rotary import ModelRotary, rotate


class CacheRelativeVariant(PlainVariant):
    """Stores keys without rotation. Attention rotates them by rank."""

    smooths = False  # rotation mixes elements
    centers_on_gpus = False  # their kernels would rotate keys without their offsets

    def __init__(self, rotary: ModelRotary) -> None:
        self.rotary = rotary
        self._ranks: Tensor | None = None  # [B, G, S] int32; None: not computed yet

    def convert(self, layer: Any, tokens: NewTokens, call: AttentionCall) -> NewTokens:
        """The new tokens, with queries and keys as they were before the model rotated them."""
        if call.position_ids is None:
            raise UnsupportedError(
                'positions="cache_relative" needs a model that passes position_ids to its '
                'attention, and this one does not. Use H2OConfig(positions="original")'
            )
        query, key = self.rotary.halves(tokens.query), self.rotary.halves(tokens.key)
        inverse_angles = self.rotary.inverse_angles(call.position_ids, query.dtype, layer.layer_idx)
        if inverse_angles is not None:
            query, key = rotate(query, inverse_angles), rotate(key, inverse_angles)
        return tokens._replace(query=query, key=key)

    def attention(
        self, layer: Any, tokens: NewTokens, slots: ops.Slots | None
    ) -> tuple[Tensor, Tensor]:
        self._ranks = None  # invalid after the eviction that follows
        most = None
        if tokens.mask is None:
            most = min(layer.guard.state.longest, max(layer.capacity.widest))
            most += tokens.query.shape[2]
        return attend(
            tokens.query, tokens.key, tokens.value, slots, layer.capacity.sizes,
            rotary=self.rotary, most=most, policy=layer.policy, **tokens.options,
        )  # fmt: skip

    def step(self, layer: Any, tokens: NewTokens, slots: ops.Slots) -> Tensor:
        if self._ranks is None:
            self._ranks = ranks(slots, layer.capacity.sizes)
        longest = min(layer.guard.state.longest, max(layer.capacity.widest)) + 1
        table = self.rotary.table(longest, slots.keys.device)
        return step(tokens, slots, layer.policy, ops.Rotary(table, self._ranks))

    def slots_changed(self, layer: Any) -> None:
        self._ranks = None


def zero_positions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Set all positions to 0 in the keyword arguments of a model's forward.

    The model then leaves queries and keys unrotated, so there is no rotation to undo, and positions
    do not grow.
    """
    cache = cache_in(kwargs)
    layers = getattr(cache, "layers", ())
    variants = (getattr(layer, "variant", None) for layer in layers)
    if len(args) > 1 or not any(isinstance(x, CacheRelativeVariant) for x in variants):
        return kwargs
    inputs = (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    tokens = next((x for x in inputs if x is not None), None)
    if tokens is None:
        return kwargs  # the model raises its own error
    return {**kwargs, "position_ids": replace_positions(tokens, kwargs.get("position_ids"))}


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slots: ops.Slots | None,
    sizes: list[int],
    *,
    rotary: ModelRotary,
    mask: Tensor | None = None,
    most: int | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, new and stored, by rank, and call `h2o.ops.attend`.

    `sizes`: `Capacity.sizes` of the slots. `most`: upper bound of the number of keys that a query
    sees. None computes it from the tensors, which waits for their device.
    """
    H, Q = query.shape[1:3]
    G = key.shape[1]
    if mask is None:
        order = torch.arange(Q, device=key.device)[None]
    else:
        order = (mask.cumsum(1) - 1).clamp(min=0)  # the rank of padding is irrelevant
    order = order[:, None]  # [B or 1, 1 or G, Q] ranks of the new tokens
    if slots is not None:
        by_head = slot_layout.heads(slots.positions, slots, sizes)
        held = torch.stack([(x >= 0).sum(-1) for x in by_head], dim=1)
        order = order + held[..., None]
    table = rotary.table(int(order.max()) + 1 if most is None else most, key.device)
    angles = table[order]  # [B or 1, 1 or G, Q, 2, F]
    query = rotate(query.unflatten(1, (G, H // G)), angles[:, :, None]).flatten(1, 2)
    if slots is not None:
        at = ranks(slots, sizes).clamp(min=0).long()
        D, dtype = key.shape[-1], key.dtype
        keys, values = (x.to(dtype) for x in slot_layout.keys_and_values(slots, sizes, D))
        keys = rotate(keys, table[at])
        slots = slots._replace(keys=keys, values=values, offsets=None, smoothing=None)
    return ops.attend(query, rotate(key, angles), value, slots, mask=mask, **more)


def ranks(slots: ops.Slots, sizes: list[int]) -> Tensor:
    """Rank of each key by position among the keys of its head, int32 [B, G, S]; -1 if empty."""
    out = torch.empty_like(slots.positions)
    empty_last = slots.positions.masked_fill(slots.positions < 0, torch.iinfo(torch.int32).max)
    by_head = (slot_layout.heads(x, slots, sizes) for x in (out, empty_last))
    for ranked, positions in zip(*by_head, strict=True):
        count = torch.arange(positions.shape[-1], dtype=out.dtype, device=out.device)
        ranked.scatter_(-1, positions.argsort(dim=-1), count.expand_as(positions))
    return out.masked_fill_(slots.positions < 0, -1)
