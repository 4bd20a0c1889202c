"""`PlainVariant`: a layer of an `H2OCache` stores keys and values as the model computes them.

A variant of attention decides what slots hold for each token, and computes attention over them.
Other variants override parts of this one: latents (`latent_variant`), keys that later layers reuse
(`shared_variant`), keys without rotation (`cache_relative_variant`). A part that is None here is
what `H2OLayer` does itself. `h2o.hf.cache.cache_plan` chooses the variant.

Shape letters as in `h2o.hf`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from h2o import ops
from h2o.hf.attention.attention_call import AttentionCall, NewTokens


class PlainVariant:
    """Stores a key and a value per token and head. Each layer has its own object."""

    has_values = True
    """Whether slots have values. If not, the keys are also the values"""
    reused_by: tuple[int, ...] = ()
    """Later layers of the model that attend to the layer's keys in the same pass"""

    # ---- In a forward pass, in this order ----------------------------------------------------

    join: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    """Joins new keys and values of the layer to rows [B, G, Q, D] that are both; None: slots store
    them apart"""
    carry: Callable[[Any, Tensor], Tensor] | None = None
    """Marks keys so that they carry their layer through what the model computes of them before it
    attends; None: it attends to the keys that it got"""
    convert: Callable[[Any, NewTokens, AttentionCall], NewTokens] | None = None
    """Converts the layer's new tokens to what it stores; None: it stores them as they are"""
    step: Callable[[Any, NewTokens, ops.Slots], Tensor] | None = None
    """Stores one token of the layer and returns its output [B, 1, H, D]; None: the backend's step
    does"""

    attention: Callable[[Any, NewTokens, ops.Slots | None], tuple[Tensor, Tensor]] | None = None
    """Computes the output [B, Q, H, D] of the layer's new tokens, and the attention [B, G, Q] that
    their keys received; None: `h2o.hf.attention.attention_call.attention` does"""
    centers_on_gpus = True
    """Whether a prompt's quantized keys may be stored with offsets on a GPU"""
    smooths = True
    """Whether four-bit keys get smoothing. It fits queries that multiply keys as they are stored"""
    end_call: Callable[[], None] | None = None
    """Discards the state of one attention call, if there is any"""

    # ---- Between passes ----------------------------------------------------------------------

    slots_changed: Callable[[Any], None] | None = None
    """Called with the layer after its slots were replaced; None: there is nothing to do"""

    def forget(self) -> None:
        """Discard the state of the forward pass under way."""

    def unpack_rows(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Convert rows [B, G, S, D] of slots back to the model's keys and values."""
        return keys, values
