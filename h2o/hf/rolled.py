"""A layer whose positions are rolled: a key's position is its rank among the keys held.

So no position ever exceeds the budget, however long the text (Xiao et al., "Efficient Streaming
Language Models with Attention Sinks", ICLR 2024, section 3.2). The model hands over keys and
queries rotated at the positions that it counts; the rotation is taken off before anything is
stored, and put on again by rank in every forward pass.

Shape letters: B batch rows, H query heads, G key/value heads, R = H / G, Q new tokens, S slots, D
head dimension, F rotary angles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o import ops
from h2o.config import H2OConfig
from h2o.errors import Unsupported
from h2o.hf import slots as store
from h2o.hf.conversation import Conversation
from h2o.hf.layer import H2OLayer
from h2o.hf.rotary import Rotary, turned
from h2o.quantisation import dequantised

__all__ = ["RolledLayer", "at_zero", "attend", "ranks"]


class RolledLayer(H2OLayer):
    """An `H2OLayer` of a cache with `positions="rolled"`; its slots hold keys without rotation."""

    def __init__(
        self,
        config: H2OConfig,
        layer_idx: int,
        conversation: Conversation,
        rotary: Rotary,
        *,
        trace: bool = False,
    ) -> None:
        self.rotary = rotary
        super().__init__(config, layer_idx, conversation, trace=trace)

    def unrotated(
        self, query: Tensor, key: Tensor, position_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Query [B, H, Q, D] and key [B, G, Q, D] as they were before the model rotated them."""
        if position_ids is None:
            self.forget_update()
            raise Unsupported(
                'positions="rolled" needs a model that tells its attention position_ids, and '
                'this one does not: use H2OConfig(positions="original")'
            )
        try:
            off = self.rotary.off(position_ids, query.dtype, self.layer_idx)
        except Exception:
            self.forget_update()
            raise
        halves = self.rotary.halves
        if off is None:
            return halves(query), halves(key)
        return turned(halves(query), off), turned(halves(key), off)

    def _step(self, *tensors: Any, **more: Any) -> Any:
        slots = tensors[3]
        if self._ranks is None:
            self._ranks = ranks(slots)
        table = self.rotary.table(min(self.longest, max(self.room.widest)) + 1, slots.keys.device)
        return super()._step(*tensors, rotary=ops.Rotary(table, self._ranks), **more)

    def _attention(self, *tensors: Any, **more: Any) -> Any:
        self._ranks = None  # what follows is an eviction
        if more["mask"] is None:
            held = min(self.longest, max(self.room.widest))
            more["most"] = held + tensors[0].shape[2]
        return attend(*tensors, rotary=self.rotary, **more)

    def _hold(self, slots: ops.Slots | None, widest: list[int] | None = None) -> None:
        super()._hold(slots, widest)
        self._ranks: Tensor | None = None  # [B, G, S] int32, where known


def at_zero(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a model's forward with which it leaves queries and keys unrotated.

    Ranks decide where they are, so the model may take every token for the first of its text. Then
    nothing has to be taken off, and no position grows with the text.
    """
    cache = kwargs.get("past_key_values")
    layers = getattr(cache, "layers", ())
    if len(args) > 1 or not any(isinstance(layer, RolledLayer) for layer in layers):
        return kwargs
    ids = kwargs.get("input_ids", kwargs.get("inputs_embeds", args[0] if args else None))
    zeros = torch.zeros(ids.shape[:2], dtype=torch.long, device=ids.device)
    return {**kwargs, "position_ids": zeros}


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slots: ops.Slots | None,
    *,
    rotary: Rotary,
    mask: Tensor | None = None,
    most: int | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """`h2o.ops.attend` of queries and keys, new and stored, that are rotated by rank before it.

    `most`: how many keys any query sees; None: whoever is told reads it off the tensors.
    """
    H, Q = query.shape[1:3]
    G = key.shape[1]
    if mask is None:
        order = torch.arange(Q, device=key.device)[None]
    else:
        order = (mask.cumsum(1) - 1).clamp(min=0)  # of a pad: any, nobody sees it
    order = order[:, None]  # [B or 1, G or 1, Q] ranks of the new tokens
    if slots is not None:
        held = torch.stack([(x >= 0).sum(-1) for x in store.heads(slots.positions, slots)], dim=1)
        held = held[:, :1] if slots.budget.ndim == 2 else held  # the same for all heads
        order = order + held[..., None]
    table = rotary.table(int(order.max()) + 1 if most is None else most, key.device)
    angles = table[order]  # [B or 1, G or 1, Q, 2, F]
    query = turned(query.unflatten(1, (G, H // G)), angles[:, :, None]).flatten(1, 2)
    if slots is not None:
        at = ranks(slots).clamp(min=0).long()
        D, dtype = key.shape[-1], key.dtype
        keys, values = (dequantised(x, D).to(dtype) for x in (slots.keys, slots.values))
        slots = slots._replace(keys=turned(keys, table[at]), values=values)
    return ops.attend(query, turned(key, angles), value, slots, mask=mask, **more)


def ranks(slots: ops.Slots) -> Tensor:
    """How many keys of a lower position lie beside each, int32 like positions; -1: empty slot."""
    found = torch.empty_like(slots.positions)
    last = slots.positions.masked_fill(slots.positions < 0, torch.iinfo(torch.int32).max)
    for part, own in zip(store.heads(found, slots), store.heads(last, slots), strict=True):
        count = torch.arange(own.shape[-1], dtype=own.dtype, device=own.device)
        part.scatter_(-1, own.argsort(dim=-1), count.expand_as(own))
    return found.masked_fill_(slots.positions < 0, -1)
