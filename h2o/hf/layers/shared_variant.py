"""`SharedVariant`: a layer whose keys and values later layers of the model reuse (Gemma 3n and 4).

The layer scores and evicts by its own queries. Later layers must attend to the same keys as this
layer in the same forward pass: the keys stored before the pass, and the new ones. But this layer
evicts before they attend. A prompt meets an empty cache, and a decode step overwrites only the free
slot. A chunk overwrites stored keys, so the layer keeps copies until the last layer has attended.

The attention of later layers adds nothing to the scores, because models may skip all of their
queries except the last during prefill.

Shape letters as in `h2o.hf`, and P queries of a later layer (the last P of the Q).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from h2o import ops
from h2o.hf.attention.attention_call import (
    AttentionCall,
    NewTokens,
    as_autocast,
    as_operand,
    attention,
    step,
)
from h2o.hf.layers.named_eviction import move_forward
from h2o.hf.layers.plain_variant import PlainVariant
from h2o.hf.model_traits import tensor_parallel
from h2o.hf.model_traits.tagged_tensor import TaggedTensor, plain
from h2o.hf.modes import Mode, check_modes
from h2o.slots import KINDS

_ROWS = ("keys", "values")


class _Attended(NamedTuple):
    """Keys that the layer's queries attended to in the forward pass under way."""

    tokens: NewTokens
    slots: ops.Slots | None
    """Slots before the pass. After a decode step keys and values are not copies"""
    in_step: bool
    """Whether a step ran, where the new token attends to its own key as it is stored"""

    def to(self, device: torch.device) -> _Attended:
        """Move to the device of a later layer, with copies of all tensors that attention writes."""
        slots = None if self.slots is None else _copy(self.slots, rows=False)
        if device == self.tokens.key.device:
            return self._replace(slots=slots)
        if slots is not None:
            slots = ops.Slots(*(None if x is None else x.to(device) for x in slots))
        fields: Any = (x.to(device) if isinstance(x, Tensor) else x for x in self.tokens)
        return self._replace(tokens=NewTokens(*fields), slots=slots)


class SharedVariant(PlainVariant):
    """Stores keys and values that the layers in `reused_by` attend to as well."""

    def __init__(self, reused_by: Sequence[int]) -> None:
        self.reused_by = tuple(reused_by)
        self.attended: _Attended | None = None

    def carry(self, layer: Any, keys: Tensor) -> Tensor:
        """Keys that later layers may move to other devices."""
        self.attended = None
        return TaggedTensor.of(keys, h2o_layer=layer) if type(keys) is Tensor else keys

    def convert(self, layer: Any, tokens: NewTokens, call: AttentionCall) -> NewTokens:
        if tensor_parallel.part(call.module) != tensor_parallel.WHOLE:
            check_modes({Mode.TENSOR_PARALLEL, Mode.SHARED_KEYS})
        return tokens._replace(key=plain(tokens.key))

    def attention(
        self, layer: Any, tokens: NewTokens, slots: ops.Slots | None
    ) -> tuple[Tensor, Tensor]:
        overwrites = not (layer.guard.only_scores or layer.guard.state.unscored)
        before = None if slots is None else _copy(slots, rows=overwrites)
        self.attended = _Attended(tokens, before, in_step=False)
        return attention(tokens, slots, layer.policy)

    def step(self, layer: Any, tokens: NewTokens, slots: ops.Slots) -> Tensor:
        before = _copy(slots, rows=False)
        self.attended = _Attended(tokens, before, in_step=True)
        return step(tokens, slots, layer.policy)

    def attend_later(self, layer: Any, call: AttentionCall) -> Tensor:
        """Output [B, P, H, D] of a later layer. Neither keys nor scores change."""
        later = call.module.layer_idx
        if call.unsupported is not None:
            raise call.unsupported
        if self.attended is None:
            raise RuntimeError(
                f"layer {later} attends to keys of layer {layer.layer_idx} whose "
                "forward pass is over. An H2OCache does not support repeated forward passes: "
                "switch gradient checkpointing off"
            )
        with torch.no_grad():
            out = self._attend_later(layer, call, self.attended.to(call.query.device))
        if later == self.reused_by[-1]:
            self.attended = None
            layer.guard.layer_done(later)
        return call.without_backward(out) if call.requires_grad else out

    def _attend_later(self, layer: Any, call: AttentionCall, attended: _Attended) -> Tensor:
        new, slots, in_step = attended
        query, *_ = as_autocast(call.query, plain(call.key), call.value)
        P, Q, dtype = query.shape[2], new.key.shape[2], query.dtype
        query = move_forward(layer, query.detach()).to(new.key.dtype)
        sinks = as_operand(call.sink_logits)
        if slots is None and P < Q and not call.softcap and sinks is None:
            return _last_queries(query, new, call).to(dtype)
        if P < Q:  # the operations need one query per new token
            query = torch.nn.functional.pad(query, (0, 0, Q - P, 0))
        tokens = new._replace(
            query=query, scale=call.scale, softcap=call.softcap, sink_logits=sinks
        )
        if in_step:
            assert slots is not None
            out = step(tokens, slots, layer.policy)
        else:
            out, _ = attention(tokens, slots, layer.policy)
        return out[:, Q - P :].to(dtype)

    def forget(self) -> None:
        self.attended = None


def _copy(slots: ops.Slots, *, rows: bool) -> ops.Slots:
    """Copy the tensors that operations write to. Keys and values are copied only if `rows`."""
    copied = {
        name: x.clone()
        for name, x in slots._asdict().items()
        if x is not None and KINDS[name].written and (rows or name not in _ROWS)
    }
    return slots._replace(**copied)


def _last_queries(query: Tensor, new: NewTokens, call: AttentionCall) -> Tensor:
    """Output [B, P, H, D] of the last queries [B, H, P, D] of a prompt."""
    B, _, P, _ = query.shape
    Q = new.key.shape[2]
    more: dict[str, Any] = {"attention_mask": None}
    if P > 1 or new.mask is not None:
        more["attention_mask"] = sdpa_mask(
            batch_size=B, q_length=P, kv_length=Q, q_offset=Q - P,
            attention_mask=new.mask, device=query.device,
        )  # fmt: skip
    out: Tensor
    out, _ = sdpa_attention_forward(
        call.module, query, new.key, new.value, scaling=call.scale, is_causal=False, **more
    )
    return out
