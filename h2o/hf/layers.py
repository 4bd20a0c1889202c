"""Which layer of an `H2OCache` stands where transformers' own cache has a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from h2o.config import H2OConfig
from h2o.hf import compiled
from h2o.hf.conversation import Conversation
from h2o.hf.layer import H2OLayer
from h2o.hf.rolled import RolledLayer
from h2o.hf.rotary import Rotary, has_rotary

__all__ = ["layers_of"]


def layers_of(
    config: Any,
    layers: Sequence[CacheLayerMixin],
    h2o_config: H2OConfig,
    conversation: Conversation,
    *,
    trace: bool,
    compileable: bool,
) -> list[CacheLayerMixin]:
    """An `H2OLayer` of the kind that is asked for in the place of each full-attention layer.

    Args:
        config: the model's.
        layers: transformers' own for it; those with a sliding window stay.
        h2o_config: for this model (`H2OConfig.for_model`).

    Errors: `Unsupported` for what does not go with `compileable`, or cannot be rolled.
    """
    windows = [layer.is_sliding for layer in layers]
    if compileable:
        compiled.refuse(windows, h2o_config.positions, trace)
    rotary = None
    if h2o_config.positions == "rolled":
        rotary = Rotary(config, windows=any(windows))
    found = list(layers)
    for index, layer in enumerate(layers):
        if type(layer) is not DynamicLayer:
            continue
        own = h2o_config.for_layer(index, len(layers))
        if rotary is not None and has_rotary(config, index):
            found[index] = RolledLayer(own, index, conversation, rotary, trace=trace)
        else:
            kind = compiled.CompileableLayer if compileable else H2OLayer
            found[index] = kind(own, index, conversation, trace=trace)
    return found
