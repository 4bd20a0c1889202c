"""Which kinds of layers transformers caches, and what becomes of each in an `H2OCache`.

Layers with full attention become h2o's. All others stay transformers' own: sliding windows, the
keys of images, and the convolution and recurrent states of linear attention and state space models.
A layer may have both states and keys; then its states stay transformers' own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from h2o.compat import (
    HYBRIDS,
    LAYER_TYPES,
    Absent,
    EmptyLayer,
    StatesAndKeysLayer,
    StatesAndWindowLayer,
    StatesLayer,
)


class CrossAttentionLayer(DynamicLayer):
    """transformers' own layer in the place of one whose queries attend to keys of images.

    These come in a forward pass that brings an image, and stay. A text without has none.
    """

    kind = "cross"


def cross_attention_layers(config: Any) -> tuple[int, ...]:
    """Which layers of a model with this text config attend to keys of images (Mllama)."""
    return tuple(getattr(config, "cross_attention_layers", None) or ())


_KINDS = {
    StatesLayer: "states",
    StatesAndKeysLayer: "h2o",
    StatesAndWindowLayer: "sliding",
    EmptyLayer: "none",
    Absent: None,
    DynamicLayer: "h2o",
    DynamicSlidingWindowLayer: "sliding",
}
"""Kind of each class of layers in an `H2OCache`: "h2o", "sliding" (transformers' own, with a
window), "states" (transformers' own, without keys) or "none" (nothing is stored, as for a layer of
experts alone); "cross" of a `CrossAttentionLayer`."""

_WITHOUT = ("moe", "mlp")
"""Names in configs of layers that cache nothing."""

_SPARSE = "sparse attention: an indexer of its own chooses what each query sees"
_REASONS = {
    "indexed_attention": _SPARSE,
    "minimax_m3_sparse": _SPARSE,
    "heavily_compressed_attention": "compressed attention: it caches sums of keys",
    "compressed_sparse_attention": "compressed attention: it caches sums of keys",
    "reference_sliding_attention": "a sliding window of its own over the text behind an image",
}


def kind_of(layer: Any) -> str | None:
    """Kind of a layer of transformers' own cache or of an `H2OCache`; None: h2o cannot serve it."""
    kind: str | None = getattr(layer, "kind", None) or _KINDS.get(type(layer))
    return kind


def layers_of(text: Any) -> list[Any]:
    """The layers that transformers' own cache has for a language model with this text config."""
    layers = DynamicCache(config=text).layers
    for index in cross_attention_layers(text):
        layers[index] = CrossAttentionLayer()
    return layers


def full_layers(text: Any) -> list[int]:
    """Which of them are h2o's."""
    return [index for index, layer in enumerate(layers_of(text)) if kind_of(layer) == "h2o"]


def warn_of_windows(config: Any, *, stacklevel: int) -> None:
    """Warn that a model with this config has nothing to evict."""
    warnings.warn(
        f"nothing is evicted: every layer of {config.model_type} has a sliding window and keeps "
        "transformers' own cache",
        stacklevel=stacklevel,
    )


def has_states(layer: Any) -> bool:
    """Whether a layer has convolution or recurrent states, with keys or without."""
    return isinstance(layer, StatesLayer)


def counts_padding(layers: Iterable[Any]) -> bool:
    """Whether some layers take padding that follows a token for text, as sliding windows and
    states do."""
    return any(kind_of(layer) == "sliding" or has_states(layer) for layer in layers)


def type_refusal(layer_type: str) -> str | None:
    """Why a layer cannot be served that configs call so (`layer_types`); or None."""
    if layer_type in _WITHOUT and HYBRIDS:
        return None
    if layer_type in _REASONS:
        return _REASONS[layer_type]
    if _KINDS.get(LAYER_TYPES.get(layer_type)) is not None:
        return None
    if not HYBRIDS:
        return "neither full nor sliding-window attention, for which transformers 5.21 is needed"
    return "neither full nor sliding-window attention, nor has it states that transformers caches"
