"""Which models h2o can serve, and why not the others.

Speaks about configs only; needs neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["Support", "Unsupported", "refusal"]

_SERVED = ("full_attention", "sliding_attention", "chunked_attention")

_ALTERED = {
    "jetmoe": "it repeats the keys between cache and attention",
    "gpt_oss": "its attention sinks are learned parameters, which change the softmax itself",
}
"""Models whose configs do not tell what stands in the way."""


class Unsupported(ValueError):
    """A model asks for something that h2o cannot do; the message names it and a remedy."""


@dataclasses.dataclass(frozen=True)
class Support:
    """Whether and how a model is served."""

    model_type: str
    supported: bool
    reason: str
    """Why not; empty if it is."""
    layers: tuple[str, ...]
    """Of each layer "h2o" or "sliding"; empty if not supported."""

    def __bool__(self) -> bool:
        return self.supported

    def __str__(self) -> str:
        if not self.supported:
            return f"{self.model_type}: not supported: {self.reason}"
        own = self.layers.count("h2o")
        rest = len(self.layers) - own
        windows = f", {rest} keep their own sliding window" if rest else ""
        return f"{self.model_type}: supported, {own} of {len(self.layers)} layers by h2o{windows}"


def refusal(config: Any) -> str | None:
    """Why a model with this config cannot be served, as far as the config tells; or None."""
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder models attend to a second text; h2o is for decoders alone"
    if getattr(text, "is_causal", True) is False:
        return "its attention is not causal"
    if text.model_type in _ALTERED:
        return _ALTERED[text.model_type]
    if getattr(text, "kv_lora_rank", None) is not None:
        return "multi-head latent attention caches a latent, not the keys that attention sees"
    if getattr(text, "num_kv_shared_layers", None):
        return "some layers attend to the keys of others (num_kv_shared_layers)"
    for index, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if kind not in _SERVED:
            return f"layer {index} is {kind}, which is neither full nor sliding-window attention"
    return None
