"""Conversion from DynamicCache: copies keys, values and states to a new `H2OCache`.

Shape letters as in `h2o.hf`, and n columns of the other cache.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from h2o.arguments.torch_values import check_mask
from h2o.errors import UnsupportedError
from h2o.hf.cache_state import recurrent_states
from h2o.hf.conversation.pass_guard import PassGuard
from h2o.hf.conversation.state import UNKNOWN_TEXT, CacheState, RowState, with_padding
from h2o.hf.layers.layer import H2OLayer
from h2o.hf.model_traits.layer_kinds import has_states, kind_of
from h2o.hf.prompt.prompt_budget import prompt_lengths

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def import_dynamic_cache(
    cache: Any, layers: list[CacheLayerMixin], guard: PassGuard, attention_mask: Any = None
) -> None:
    """Copy the contents of a DynamicCache of n columns into the empty layers of an H2OCache.

    Args:
        guard: the guard of the H2OCache.
        attention_mask: [B, n], 0 at padding; None if there is no padding.

    Raises: as `H2OCache.from_dynamic_cache`. Also UnsupportedError if a layer is neither full nor
    sliding-window attention.
    """
    if not isinstance(cache, DynamicCache):
        hint = ". To copy an H2OCache call its fork()" if hasattr(cache, "guard") else ""
        raise TypeError(f"expected a filled DynamicCache, not {type(cache).__name__}{hint}")
    if guard.pins.are_columns:
        raise ValueError(
            "pinned is a mask, but a DynamicCache does not record the columns of its keys. Pass "
            "spans (start, stop) of tokens"
        )
    B, n = _sizes(cache, layers)
    mask = None
    if attention_mask is not None:
        columns = "a column for each token that the DynamicCache has seen, including padding"
        mask = check_mask("attention_mask", attention_mask, (B, n), columns)
    rows = [RowState(None)]
    if guard.state.prompts is not None:
        lengths = prompt_lengths(guard.state.prompts, [n] * B)
        rows = [RowState(None, prompt=length) for length in lengths]
    rows = with_padding(rows, mask if guard.counts_padding else None)
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
                f"layer {index} of the DynamicCache is a {type(source).__name__}, but the config "
                "describes another kind of layer. Pass the config of the model that filled it"
            )
        if has_states(source):
            held = {
                name: x.detach().clone() for name, x in recurrent_states.tensors_of(source).items()
            }
            recurrent_states.put(layer, held, recurrent_states.numbers_of(source))
        if kind_of(layer) in ("states", "none"):
            continue
        needed = n if isinstance(layer, H2OLayer) else min(n, layer.sliding_window - 1)
        if source.keys.shape[2] < needed:
            raise ValueError(
                f"layer {index} of the DynamicCache holds {source.keys.shape[2]} of {n} keys, but "
                f"the config says that it attends to {needed}. Pass the config of the model that "
                "filled it"
            )
        keys, values = source.keys.detach(), source.values.detach()
        if not isinstance(layer, H2OLayer):
            layer.update(keys, values)
            layer.cumulative_length = n
            continue
        if keys.dtype not in _DTYPES:
            raise TypeError(
                f"layer {index} of the DynamicCache has dtype {keys.dtype}. h2o supports float32, "
                "float16 and bfloat16"
            )
        # Autocast leaves rotated keys in float32. Attention casts them like the values.
        dtype = min(keys.dtype, values.dtype, key=lambda x: x.itemsize)
        real = None if mask is None else mask.to(keys.device)
        layer.import_keys(keys.to(dtype), values.to(dtype), real)
    guard.put(CacheState(n, n, unscored=True, rows=rows, text=UNKNOWN_TEXT))


def _sizes(cache: DynamicCache, layers: list[CacheLayerMixin]) -> tuple[int, int]:
    """Return (B, n), which must agree in all layers."""
    sizes = [
        (x.get_seq_length(), len(x.keys) if x.is_initialized else 0)
        for x in cache.layers
        if isinstance(x, CacheLayerMixin)
    ]
    if not any(columns for columns, _ in sizes):
        raise ValueError(
            "the DynamicCache is empty. Run a forward pass with it first, or use H2OCache(config)"
        )
    if len(cache.layers) != len(layers):
        raise ValueError(
            f"the DynamicCache has {len(cache.layers)} layers, but the config has {len(layers)}. "
            "Pass the config of the model that filled the cache"
        )
    if len(set(sizes)) != 1:
        raise ValueError(
            "the layers of the DynamicCache hold different numbers of (tokens, rows): "
            f"{sizes}. A forward pass was interrupted, or another model filled the cache. Process "
            "the text again"
        )
    n, B = sizes[0]
    return B, n
