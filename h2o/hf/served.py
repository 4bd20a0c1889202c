"""The layers that transformers caches of a model, where h2o can serve it."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from h2o.errors import Unsupported
from h2o.hf.support import refusal

__all__ = ["transformers_layers"]


def transformers_layers(config: Any) -> list[CacheLayerMixin]:
    """The layers that transformers' own cache has for a model; checked that h2o can serve them.

    Errors: TypeError for a thing that is no config, `Unsupported`.
    """
    if not hasattr(config, "get_text_config"):
        hint = "its .config" if hasattr(config, "config") else "a model's config"
        raise TypeError(f"H2OCache needs {hint} as first argument, not {type(config).__name__}")
    text_config = config.get_text_config(decoder=True)
    if reason := refusal(config):
        raise Unsupported(f"h2o cannot serve {config.model_type}: {reason}")
    layers = DynamicCache(config=text_config).layers
    if not layers:  # Gemma 4 without shared layers in transformers 5.10
        raise Unsupported(
            f"h2o cannot serve {config.model_type}: transformers caches no layer of it"
        )
    for index, layer in enumerate(layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise Unsupported(
                f"h2o cannot serve {config.model_type}: layer {index} is cached as "
                f"{type(layer).__name__}, which is neither full nor sliding-window attention"
            )
    return layers
