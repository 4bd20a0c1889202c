"""`PlainVariant`: a layer of an `H2OCache` stores keys and values as the model computes them.

A variant of attention decides what slots hold for each token, and computes attention over them.
Other variants override parts of this one: latents (`latent_variant`), keys that later layers reuse
(`shared_variant`), keys without rotation (`cache_relative_variant`). `h2o.hf.cache.cache_plan`
chooses the variant.

Shape letters as in `h2o.hf`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from h2o import backends, ops
from h2o.errors import UnsupportedError
from h2o.hf.attention.attention_call import AttentionCall, NewTokens, attention
from h2o.slots import should_center
from h2o.tensors import check_memory, default_scale


class PlainVariant:
    """Stores a key and a value per token and head. Each layer has its own object."""

    has_values = True
    """Whether slots have values. If not, the keys are also the values"""
    reused_by: tuple[int, ...] = ()
    """Later layers of the model that attend to the layer's keys in the same pass"""
    end_call: Callable[[], None] | None = None
    """Discards the state of one attention call, if there is any"""
    slots_changed: Callable[[Any], None] | None = None
    """Called with the layer after its slots were replaced; None: there is nothing to do"""
    convert: Callable[[Any, NewTokens, AttentionCall], NewTokens] | None = None
    """Converts the layer's new tokens to what it stores; None: it stores them as they are"""

    # ---- In a forward pass, in this order ----------------------------------------------------

    def receive(
        self, layer: Any, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Receive a model's new keys and values [B, G, Q, D].

        Returns:
            The keys as a view that carries the layer to the attention function, and the rows
            [B, G, Q, D] of slots: keys and values, or rows that are both and None.

        Raises:
            UnsupportedError: keys and values of different shapes.
        """
        if keys.shape != values.shape:
            raise UnsupportedError(
                f"layer {layer.layer_idx} has keys of shape {tuple(keys.shape)} and values of "
                f"shape {tuple(values.shape)}. h2o needs the same head dimension for both"
            )
        # A detached view is the cheapest. If gradients are required, the view must
        # stay in the graph, so that a backward pass raises an error.
        view = keys[:] if keys.requires_grad else keys.detach()
        view.h2o_layer = layer
        return view, keys, values

    def attention(
        self, layer: Any, tokens: NewTokens, slots: ops.Slots | None
    ) -> tuple[Tensor, Tensor]:
        """Output [B, Q, H, D], and the attention [B, G, Q] that the new keys received."""
        return attention(tokens, slots, layer.policy)

    def centers_keys(self, tokens: NewTokens) -> bool:
        """Whether a prompt's quantized keys are stored with offsets."""
        return should_center(tokens.key, tokens.softcap, tokens.sink_logits)

    def step(
        self, layer: Any, tokens: NewTokens, slots: ops.Slots, rotary: ops.Rotary | None = None
    ) -> Tensor:
        """Store one token and return its output [B, 1, H, D], as `ops.step` does, with fewer calls,
        since this runs in every layer for every token."""
        query, key, value, mask, scale, softcap, sinks = tokens
        if torch.is_grad_enabled():
            check_memory(
                slots, rotary, query=query, key=key, value=value, mask=mask, sink_logits=sinks
            )
        B, H, Q, D = query.shape
        out = query.new_empty(B, Q, H, D)
        if scale is None:
            scale = default_scale(query, (B, H, Q, D))
        table, ranks = rotary or (None, None)
        backends.backend_if_open(query).step(
            query, key, value, mask, slots, out, scale, softcap, layer.policy, table, ranks, sinks
        )
        return out

    # ---- Between passes ----------------------------------------------------------------------

    def forget(self) -> None:
        """Discard the state of the forward pass under way."""

    def unpack_rows(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Convert rows [B, G, S, D] of slots back to the model's keys and values."""
        return keys, values
