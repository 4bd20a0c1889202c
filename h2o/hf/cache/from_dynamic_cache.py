"""Conversion from DynamicCache: its keys, values and states are copied to a new `H2OCache`.

Shape letters: B batch rows, G key/value heads, n columns, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from h2o.errors import UnsupportedError
from h2o.hf.cache.padding import note_padding
from h2o.hf.families.layer_kinds import has_states, kind_of
from h2o.hf.layers.cache_relative import CacheRelativeForm
from h2o.hf.layers.layer import H2OLayer
from h2o.hf.store import states
from h2o.hf.store.pass_guard import PassGuard

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def take_over(
    cache: Any, layers: list[CacheLayerMixin], guard: PassGuard, attention_mask: Any = None
) -> None:
    """Copy what a DynamicCache of n columns holds into the empty layers of an H2OCache.

    Args:
        guard: of the H2OCache.
        attention_mask: [B, n], 0 at a pad; None: no pads.

    Raises:
        TypeError: another cache, dtype or mask.
        ValueError: a cache that is empty, of another model, or in the midst of a forward pass; a
            mask of another shape, or with padding that windows or states count as text.
        UnsupportedError: layers that are neither full nor sliding-window attention, and
            cache-relative positions.
    """
    if not isinstance(cache, DynamicCache):
        hint = "; it is one already, fork() it" if hasattr(cache, "guard") else ""
        raise TypeError(f"expected a filled DynamicCache, not {type(cache).__name__}{hint}")
    if any(isinstance(getattr(x, "form", None), CacheRelativeForm) for x in layers):
        raise UnsupportedError(
            'positions="cache_relative" cannot continue from a DynamicCache, which does not record '
            "the positions at which its keys are rotated: read the text with an H2OCache instead"
        )
    if any(isinstance(layer, H2OLayer) and layer.guard.pins.are_columns for layer in layers):
        raise ValueError(
            "pinned is a mask, and a DynamicCache does not record the columns of its keys: give "
            "spans (start, stop) of tokens"
        )
    B, n = _sizes(cache, layers)
    mask = _mask(attention_mask, B, n)
    if mask is not None and guard.counts_padding:
        note_padding(guard, mask)
    for index, (source, layer) in enumerate(zip(cache.layers, layers, strict=True)):
        if kind_of(source) is None:
            raise UnsupportedError(
                f"layer {index} of the DynamicCache is a {type(source).__name__}, which is neither "
                "full nor sliding-window attention"
            )
        if has_states(source) != has_states(layer) or hasattr(source, "keys") != hasattr(
            layer, "keys"
        ):
            raise ValueError(
                f"layer {index} of the DynamicCache is a {type(source).__name__}, and the config "
                "describes another kind of layer: give the config of the model that filled it"
            )
        if has_states(source):
            held = {name: x.detach().clone() for name, x in states.tensors_of(source).items()}
            states.put(layer, held, states.numbers_of(source))
        if kind_of(layer) in ("states", "none"):
            continue
        if kind_of(layer) == "cross":
            if source.is_initialized:
                layer.update(source.keys.detach(), source.values.detach())
            continue
        needed = n if isinstance(layer, H2OLayer) else min(n, layer.sliding_window - 1)
        if source.keys.shape[2] < needed:
            raise ValueError(
                f"layer {index} of the DynamicCache holds {source.keys.shape[2]} of {n} keys, and "
                f"by the config it attends to {needed}: give the config of the model that filled it"
            )
        keys, values = source.keys.detach(), source.values.detach()
        if not isinstance(layer, H2OLayer):
            layer.update(keys, values)
            layer.cumulative_length = n
            continue
        if keys.dtype not in _DTYPES:
            raise TypeError(
                f"layer {index} of the DynamicCache is in {keys.dtype}: h2o computes in float32, "
                "float16 and bfloat16"
            )
        layer.take_over(keys, values, None if mask is None else mask.to(keys.device))


def _sizes(cache: DynamicCache, layers: list[CacheLayerMixin]) -> tuple[int, int]:
    """B and n, the same for all layers but those for images."""
    of_images = {index for index, layer in enumerate(layers) if kind_of(layer) == "cross"}
    with_keys = [
        x
        for index, x in enumerate(cache.layers)
        if isinstance(x, CacheLayerMixin) and index not in of_images
    ]
    sizes = [(x.get_seq_length(), len(x.keys) if x.is_initialized else 0) for x in with_keys]
    if not any(columns for columns, _ in sizes):
        raise ValueError(
            "the DynamicCache is empty: read the text with it first, or make an H2OCache(config)"
        )
    if len(cache.layers) != len(layers):
        raise ValueError(
            f"the DynamicCache has {len(cache.layers)} layers, and the config {len(layers)}: give "
            "the config of the model that filled the cache"
        )
    if len(set(sizes)) != 1:
        raise ValueError(
            "the layers of the DynamicCache hold different numbers of (tokens, rows): "
            f"{sizes}. A forward pass was interrupted, or another model filled the cache: read the "
            "text again"
        )
    n, B = sizes[0]
    return B, n


def _mask(attention_mask: Any, B: int, n: int) -> Tensor | None:
    """[B, n] bool, or None."""
    if attention_mask is None:
        return None
    mask = attention_mask
    if not isinstance(mask, Tensor):
        mask = torch.as_tensor(mask, device="cpu")
    if mask.shape != (B, n):
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}, wanted [{B}, {n}]: a row for each of "
            "the DynamicCache's, a column for each token and pad that it has seen"
        )
    if mask.is_floating_point():
        raise TypeError(f"attention_mask is {mask.dtype}, wanted bool or integers, 0 at a pad")
    return mask.bool()
