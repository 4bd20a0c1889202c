"""The form in which a layer of an `H2OCache` holds tokens: keys and values as the model makes them.

A form decides what slots hold for each token, and computes attention over them. Other forms
override what differs: latents (`latent_form`), keys that later layers attend to (`shared_form`),
keys without their rotation (`cache_relative`). `h2o.hf.cache.cache_plan` chooses the form.

Shape letters: B batch rows, H query heads, G key/value heads, Q new tokens, S slots, D head
dimension.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from h2o import ops
from h2o.errors import UnsupportedError
from h2o.hf.attention.attention_call import AttentionCall, NewTokens, as_operand, attention


class PlainForm:
    """Holds a key and a value of each token and head. One object for each layer."""

    has_values = True
    """Whether slots have values; if not, the keys are the values too"""
    reused_by: tuple[int, ...] = ()
    """Later layers of the model that attend to the layer's keys in the same pass"""

    # ---- In a forward pass, in this order ----------------------------------------------------

    def rows(self, layer: Any, keys: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The rows that slots hold, [B, G, Q, D], of a model's keys and values [B, G, Q, D].

        Raises:
            UnsupportedError: keys and values of different shapes.
        """
        if values is not None and keys.shape != values.shape:
            raise UnsupportedError(
                f"layer {layer.layer_idx} has keys of shape {tuple(keys.shape)} and values of "
                f"{tuple(values.shape)}: h2o needs one head dimension for both"
            )
        return keys, values

    def hand_over(self, layer: Any, keys: Tensor, rows: Tensor) -> Tensor:
        """The new keys as a view that brings the layer to the attention function."""
        # A detached view is the cheapest one; where gradients are wanted the
        # graph must stay, so that attention can refuse them.
        view = keys[:] if keys.requires_grad else keys.detach()
        view.h2o_layer = layer
        return view

    def tokens(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> NewTokens:
        """The new tokens as they are stored; `call` has what else is known of them.

        Raises:
            UnsupportedError: the layer cannot serve the call.
        """
        sinks = call.sink_logits
        if sinks is not None:
            sinks = as_operand(sinks)
        return NewTokens(query, key, value, call.mask, call.scale, call.softcap, sinks)

    def attention(
        self, layer: Any, tokens: NewTokens, slots: ops.Slots | None
    ) -> tuple[Tensor, Tensor]:
        """Output [B, Q, H, D], and the attention [B, G, Q] that the new keys have received."""
        return attention(tokens, slots, layer.policy)

    def step(
        self, layer: Any, tokens: NewTokens, slots: ops.Slots, out: Tensor | None, **rotary: Any
    ) -> Tensor:
        """Output [B, 1, H, D] of one token, which is stored; written to `out` if possible."""
        q, k, v, mask, scale, softcap, sinks = tokens
        step: Tensor = ops.step(
            q, k, v, slots, mask=mask, scale=scale, softcap=softcap, sink_logits=sinks,
            out=out, policy=layer.policy, **rotary,
        )  # fmt: skip
        return step

    def attend_later(self, layer: Any, call: AttentionCall) -> Tensor:
        """Attention of a layer of `reused_by`, [B, Q, H, D]."""
        raise NotImplementedError

    # ---- Between passes ----------------------------------------------------------------------

    def end_call(self) -> None:
        """Forgets what belongs to one call of attention."""

    def forget(self) -> None:
        """Forgets what belongs to the forward pass under way."""

    def slots_changed(self) -> None:
        """Notices that the layer has other slots."""

    def read(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The model's keys and values of rows [B, G, S, D] out of slots."""
        return keys, values
