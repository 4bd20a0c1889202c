"""Which models h2o can serve, and why not the others.

Speaks about configs only; needs neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["Support", "refusal"]

_SERVED = ("full_attention", "sliding_attention", "chunked_attention")

_SINKS = "its attention sinks are learned parameters, which change the softmax itself"
_OWN_WAY = "it has an attention pattern of its own, given as a 4-D mask"

_ALTERED = {
    "diffllama": "it attends twice to the same keys (differential attention)",
    "doge": _OWN_WAY,
    "flint": _SINKS,
    "gemma4_unified": _OWN_WAY,
    "git": "it has attention code of its own instead of AttentionInterface",
    "granite_swa": _SINKS,
    "granitemoe_swa": _SINKS,
    "hrm_text": "it runs its layers several times for each token, with a cache for each time",
    "jetmoe": "it repeats the keys between cache and attention",
    "mllama": "its cross-attention layers keep the keys of images in the cache",
    "paligemma": "its attention looks both ways within the prompt (a prefix language model)",
    "xlstm": "it has a state instead of keys",
    "gpt_oss": _SINKS,
}
"""Models whose configs do not tell what stands in the way."""


@dataclasses.dataclass(frozen=True)
class Support:
    """Whether and how a model is served."""

    model_type: str
    supported: bool
    reason: str
    """Why not; empty if it is."""
    layers: tuple[str, ...]
    """Of each layer "h2o" or "sliding"; empty if not supported."""
    not_rolled: str = ""
    """Why not with positions="rolled", if it is supported otherwise; empty if so too."""

    def __bool__(self) -> bool:
        return self.supported

    def __str__(self) -> str:
        if not self.supported:
            return f"{self.model_type}: not supported: {self.reason}"
        own = self.layers.count("h2o")
        rest = len(self.layers) - own
        windows = f", {rest} keep their own sliding window" if rest else ""
        rolled = f'; positions="rolled": not, {self.not_rolled}' if self.not_rolled else ""
        served = f"{own} of {len(self.layers)} layers by h2o{windows}"
        return f"{self.model_type}: supported, {served}{rolled}"


def refusal(config: Any) -> str | None:
    """Why a model with this config cannot be served, as far as the config tells; or None."""
    text = config.get_text_config(decoder=True)
    if not isinstance(getattr(text, "num_hidden_layers", None), int):
        return "its config has no num_hidden_layers: it is no stack of decoder layers"
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder models attend to a second text; h2o is for decoders alone"
    if getattr(text, "is_causal", True) is False:
        return "its attention is not causal"
    if getattr(text, "is_decoder", True) is False and hasattr(text, "add_cross_attention"):
        return (
            "it is an encoder, whose attention looks both ways: as a causal language model it "
            "needs config.is_decoder=True"
        )
    for part in (text, config):
        if part.model_type in _ALTERED:
            return _ALTERED[part.model_type]
    if _own(text, "kv_lora_rank") is not None:
        return "multi-head latent attention caches a latent, not the keys that attention sees"
    if getattr(text, "num_kv_shared_layers", None):
        return "some layers attend to the keys of others (num_kv_shared_layers)"
    for index, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if kind not in _SERVED:
            return f"layer {index} is {kind}, which is neither full nor sliding-window attention"
    return None


def _own(config: Any, name: str) -> Any:
    """An attribute of a config, None if it has none, its name where it is one of single layers."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers: layers differ in it, so some have it
        return name
