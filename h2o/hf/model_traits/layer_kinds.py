"""The kinds of layers that transformers caches, and what an `H2OCache` does with each.

Layers with full attention become H2O layers. All others stay transformers' own: sliding windows,
keys of images, and the convolution and recurrent states of linear attention and state space models.
In a layer with both states and keys, the states stay transformers' own.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

from torch import Tensor
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

CROSS_ATTENTION = (
    "For cross attention in a decoder pass EncoderDecoderCache(H2OCache(...), DynamicCache()) of "
    "transformers.cache_utils, whose second cache holds the keys of the other text"
)
"""What an error about cross attention advises"""

_KINDS = {
    StatesLayer: "states",
    StatesAndKeysLayer: "h2o",
    StatesAndWindowLayer: "sliding",
    EmptyLayer: "none",
    Absent: None,
    DynamicLayer: "h2o",
    DynamicSlidingWindowLayer: "sliding",
}
"""The kind in an `H2OCache` of each class of transformers' cache layers: "h2o" (replaced by an
`H2OLayer`), "sliding" (transformers' own, with a window), "states" (transformers' own, without
keys) or "none" (stores nothing, as for a layer that has only experts)."""

_WITHOUT = ("moe", "mlp")
"""Names that configs give to layers that cache nothing."""

_SPARSE = "sparse attention: its own indexer chooses the keys that each query sees"
_REASONS = {
    "indexed_attention": _SPARSE,
    "minimax_m3_sparse": _SPARSE,
    "heavily_compressed_attention": "compressed attention: it caches sums of keys",
    "compressed_sparse_attention": "compressed attention: it caches sums of keys",
    "reference_sliding_attention": "a sliding window over the text that follows an image",
}


def kind_of(layer: Any) -> str | None:
    """Kind of a layer of transformers' own cache or of an `H2OCache`; None if h2o does not support
    it."""
    kind: str | None = getattr(layer, "kind", None) or _KINDS.get(type(layer))
    return kind


def layers_of(text: Any) -> list[Any]:
    """The layers of transformers' own cache for a language model with this text config."""
    layers: list[Any] = DynamicCache(config=text).layers
    return layers


def layers_of_kind(text: Any, kind: str) -> list[int]:
    """Indices of the layers of a kind of a language model with this text config."""
    return [index for index, layer in enumerate(layers_of(text)) if kind_of(layer) == kind]


def full_layers(text: Any) -> list[int]:
    """Indices of the full-attention layers of a language model with this text config."""
    return layers_of_kind(text, "h2o")


def warn_of_windows(config: Any, *, stacklevel: int) -> None:
    """Warn that a model with this config has no layer from which h2o could evict."""
    warnings.warn(
        f"nothing is evicted: every layer of {config.model_type} has a sliding window, for which "
        "h2o keeps transformers' own cache",
        stacklevel=stacklevel,
    )


def has_states(layer: Any) -> bool:
    """Whether a layer has convolution or recurrent states, with or without keys."""
    return isinstance(layer, StatesLayer)


def free_keys_before_window(layer: Any) -> None:
    """Free the keys that a layer with a sliding window no longer needs.

    transformers stores the keys of the window as a view of all keys that the pass attended to. The
    view would keep those of a whole prompt in memory until the next pass, and in every fork."""
    for name in ("keys", "values"):
        stored = getattr(layer, name)
        if stored.untyped_storage().nbytes() > 2 * stored.nbytes:
            setattr(layer, name, stored.clone())


def without_gradients(layer: Any) -> Any:
    """The layer, or a shallow copy whose tensors have no gradients if some have. Layers of h2o's
    own have none."""
    detached = {name: _detach(x) for name, x in vars(layer).items()}
    if all(x is y for x, y in zip(detached.values(), vars(layer).values(), strict=True)):
        return layer
    copied = copy.copy(layer)
    vars(copied).update(detached)
    return copied


def _detach(x: Any) -> Any:
    """A tensor without gradients, or a dict of them; the object itself if it has none."""
    if isinstance(x, dict):
        detached = {key: _detach(each) for key, each in x.items()}
        return detached if any(detached[key] is not x[key] for key in x) else x
    return x.detach() if isinstance(x, Tensor) and x.requires_grad else x


def counts_padding(layers: Iterable[Any]) -> bool:
    """Whether some layers count padding after a token as text, as sliding windows and states do."""
    return any(kind_of(layer) == "sliding" or has_states(layer) for layer in layers)


def type_refusal(layer_type: str) -> str | None:
    """Why h2o does not support a layer with this name in a config's `layer_types`, or None."""
    if layer_type in _WITHOUT and HYBRIDS:
        return None
    if layer_type in _REASONS:
        return _REASONS[layer_type]
    if _KINDS.get(LAYER_TYPES.get(layer_type)) is not None:
        return None
    if not HYBRIDS:
        return "neither full nor sliding-window attention, and needs transformers 5.21 or newer"
    return "neither full nor sliding-window attention, and has no states that transformers caches"
