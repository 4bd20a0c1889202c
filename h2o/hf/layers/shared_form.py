"""`SharedForm`: the keys and values of a layer that later layers of the model reuse (Gemma 3n and
4).

The layer scores and evicts by its own queries. Later layers attend to what the layer attended to in
the same forward pass: the keys stored before it, and the new ones. The eviction comes first, and
must not take anything from them. A prompt meets an empty cache, and a decode step overwrites only
the free slot. A chunk overwrites keys, so the layer keeps copies until the last layer has attended.

Scores of later layers do not count: during prefill models may leave out all their queries but the
last.

Shape letters: B batch rows, H query heads, G key/value heads, Q new tokens, P queries of a later
layer, which are the last ones of the Q, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from h2o import ops
from h2o.errors import UnsupportedError
from h2o.hf.attention.attention_call import (
    AttentionCall,
    NewTokens,
    as_autocast,
    as_operand,
)
from h2o.hf.families import tensor_parallel
from h2o.hf.families.tagged_tensor import TaggedTensor, plain
from h2o.hf.layers.plain_form import PlainForm
from h2o.slots import KINDS

_ROWS = ("keys", "values")


class _Attended(NamedTuple):
    """Keys that the layer's queries attended to in the pass that is under way."""

    tokens: NewTokens
    slots: ops.Slots | None
    """Slots before the pass; in a step with keys that are the layer's own"""
    in_step: bool
    """Whether by `ops.step`, whose token reads itself as it is stored"""

    def to(self, device: torch.device) -> _Attended:
        """For a later layer: its own copies of all that attention writes to."""
        slots = None if self.slots is None else _copy(self.slots, rows=False)
        if device == self.tokens.key.device:
            return self._replace(slots=slots)
        if slots is not None:
            slots = ops.Slots(*(None if x is None else x.to(device) for x in slots))
        fields: Any = (x.to(device) if isinstance(x, Tensor) else x for x in self.tokens)
        return self._replace(tokens=NewTokens(*fields), slots=slots)


class SharedForm(PlainForm):
    """Holds keys and values that the layers `reused_by` attend to as well."""

    def __init__(self, reused_by: Sequence[int]) -> None:
        self.reused_by = tuple(reused_by)
        self.attended: _Attended | None = None

    def hand_over(self, layer: Any, keys: Tensor, rows: Tensor) -> Tensor:
        """The new keys; plain tensors carry the layer to other devices."""
        self.attended = None
        view = super().hand_over(layer, keys, rows)
        return TaggedTensor.of(view, h2o_layer=layer) if type(view) is Tensor else view

    def tokens(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> NewTokens:
        if tensor_parallel.part(call.module) != tensor_parallel.WHOLE:
            raise UnsupportedError(
                "h2o does not serve layers that attend to the keys of others, cut over processes"
            )
        return super().tokens(layer, query, plain(key), value, call)

    def attention(
        self, layer: Any, tokens: NewTokens, slots: ops.Slots | None
    ) -> tuple[Tensor, Tensor]:
        overwrites = layer.stepper.stores and not layer.unscored
        before = None if slots is None else _copy(slots, rows=overwrites)
        self.attended = _Attended(tokens, before, in_step=False)
        return super().attention(layer, tokens, slots)

    def step(
        self, layer: Any, tokens: NewTokens, slots: ops.Slots, out: Tensor | None, **rotary: Any
    ) -> Tensor:
        before = _copy(slots, rows=False)
        self.attended = _Attended(tokens, before, in_step=True)
        return super().step(layer, tokens, slots, out, **rotary)

    def attend_later(self, layer: Any, call: AttentionCall) -> Tensor:
        """Attention of a later layer, [B, P, H, D], to which nothing is added here."""
        later = call.module.layer_idx
        call.check()
        if self.attended is None:
            raise RuntimeError(
                f"layer {later} attends to keys of layer {layer.layer_idx} whose "
                "forward pass is over: an H2OCache cannot be used where passes are repeated "
                "(gradient checkpointing)"
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
        query = query.detach().to(new.key.dtype)
        sinks = as_operand(call.sink_logits)
        if slots is None and P < Q and not call.softcap and sinks is None:
            return _last_queries(query, new, call).to(dtype)
        if P < Q:  # the operations want a query of each new token
            query = torch.nn.functional.pad(query, (0, 0, Q - P, 0))
        tokens = new._replace(
            query=query, scale=call.scale, softcap=call.softcap, sink_logits=sinks
        )
        if in_step:
            assert slots is not None
            out = super().step(layer, tokens, slots, None)
        else:
            out, _ = super().attention(layer, tokens, slots)
        return out[:, Q - P :].to(dtype)

    def forget(self) -> None:
        self.attended = None


def _copy(slots: ops.Slots, *, rows: bool) -> ops.Slots:
    """With copies of the tensors that operations write to, keys and values only with `rows`."""
    copied = {
        name: x.clone()
        for name, x in slots._asdict().items()
        if x is not None and KINDS[name].written and (rows or name not in _ROWS)
    }
    return slots._replace(**copied)


def _last_queries(query: Tensor, new: NewTokens, call: AttentionCall) -> Tensor:
    """Attention of the last queries [B, H, P, D] of a prompt, [B, P, H, D]."""
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
