"""A layer of an `H2OCache` whose keys later layers of the model attend to in the same pass.

It scores and evicts by its own queries, as any layer. Later layers attend to what it attended to in
that pass: the keys held before it, and the new ones. So the eviction, which comes first, must not
take anything from them. A prompt meets an empty cache; a decode step overwrites nothing but the
free slot, by the new key, so that the state of the slots before it is enough. Only a chunk
overwrites keys: of these the layer keeps a copy until the last layer has attended.

Scores of later layers do not count: while a prompt is read, models may leave out all queries of
these layers but the last.

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
from h2o.hf.call.attention_call import (
    CACHE_HAS_NO_GRADIENT,
    AttentionCall,
    NewTokens,
    Undifferentiable,
    as_autocast,
    as_operand,
)
from h2o.hf.call.traced_tensor import TracedTensor, plain
from h2o.hf.families import tensor_parallel
from h2o.hf.layers.layer import H2OLayer
from h2o.slots import KINDS

__all__ = ["SharedKeysLayer"]

_ROWS = ("keys", "values")


class _Attended(NamedTuple):
    """What the layer's queries attended to in the pass that is under way."""

    tokens: NewTokens
    slots: ops.Slots | None
    """As before the pass; in a step with keys that are the layer's own"""
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


class SharedKeysLayer(H2OLayer):
    """An `H2OLayer` with keys that the layers `reused_by` attend to."""

    _attended: _Attended | None

    def __init__(self, *args: Any, reused_by: Sequence[int], **kwargs: Any) -> None:
        self.reused_by = tuple(reused_by)
        super().__init__(*args, **kwargs)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See `H2OLayer.update`. Keys that are plain tensors carry this layer to other devices."""
        key, value = super().update(key_states, value_states, *args, **kwargs)
        self._attended = None
        return TracedTensor.of(key, h2o_layer=self) if type(key) is Tensor else key, value

    def attend(self, call: AttentionCall) -> Tensor:
        """As `H2OLayer.attend`, for this layer; for one that reuses its keys attention alone,
        [B, P, H, D], to which nothing is added here."""
        if call.module.layer_idx not in self.reused_by:
            return super().attend(call)
        call.refuse()
        call.refuse_training()
        if self._attended is None:
            raise RuntimeError(
                f"layer {call.module.layer_idx} attends to keys of layer {self.layer_idx} whose "
                "forward pass is over: an H2OCache cannot be used where passes are repeated "
                "(gradient checkpointing)"
            )
        with torch.no_grad():
            out = self._attend_later(call, self._attended.to(call.query.device))
        if call.module.layer_idx == self.reused_by[-1]:
            self._attended = None
            self.pass_state.attended(self.reused_by[-1])
        if call.wants_gradients():
            return Undifferentiable.apply(
                CACHE_HAS_NO_GRADIENT, out, call.query, call.key, call.value, call.sink_logits
            )
        return out

    def crop(self, tokens: int) -> None:
        """See `H2OCache.crop`."""
        super().crop(tokens)
        self._attended = None  # of the pass that was run again

    def reset(self) -> None:
        """Empties the layer and frees its memory."""
        super().reset()
        self._attended = None

    def _attend_later(self, call: AttentionCall, attended: _Attended) -> Tensor:
        """A later layer's attention, [B, P, H, D]."""
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
            out = super()._step(tokens, slots, None)
        else:
            out, _ = super()._attention(tokens, slots)
        return out[:, Q - P :].to(dtype)

    def _in_form_of_store(
        self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> NewTokens:
        if tensor_parallel.part(call.module) != tensor_parallel.WHOLE:
            raise UnsupportedError(
                "h2o does not serve layers that attend to the keys of others, cut over processes"
            )
        return super()._in_form_of_store(query, plain(key), value, call)

    def _step(
        self, tokens: NewTokens, slots: ops.Slots, out: Tensor | None, **rotary: ops.Rotary
    ) -> Tensor:
        before = _copy(slots, rows=False)
        self._attended = _Attended(tokens, before, in_step=True)
        return super()._step(tokens, slots, out, **rotary)

    def _attention(self, tokens: NewTokens, slots: ops.Slots | None) -> tuple[Tensor, Tensor]:
        overwrites = self.holds_new and not self.unscored
        before = None if slots is None else _copy(slots, rows=overwrites)
        self._attended = _Attended(tokens, before, in_step=False)
        return super()._attention(tokens, slots)


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
