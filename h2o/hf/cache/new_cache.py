"""Create an empty cache for a model: an H2OCache, or a DynamicCache, which keeps every key."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache

from h2o.config import H2OConfig
from h2o.config.fields import Pinned
from h2o.hf.cache.cache import H2OCache


def new_cache(
    model: Any,
    config: H2OConfig | None,
    prompt_tokens: int,
    compileable: bool = False,
    pinned: Pinned = None,
) -> DynamicCache | H2OCache:
    """Create an empty cache for a prompt of `prompt_tokens` tokens.

    Also switch the model to the attention implementation that the cache needs.

    Args:
        config: settings of an H2OCache; None makes a DynamicCache, which keeps every key.
        compileable, pinned: as for `H2OCache`.
    """
    cache: DynamicCache | H2OCache
    if config is None:
        cache = DynamicCache(config=model.config)
    else:
        cache = H2OCache(
            model.config,
            config.for_model(model),
            prompt_length=prompt_tokens,
            pinned=pinned,
            compileable=compileable,
        )
    model.set_attn_implementation("sdpa" if config is None else "h2o")
    return cache


def bytes_of_keys(cache: DynamicCache) -> int:
    """Bytes of the keys and values in transformers' own cache."""
    tensors = (getattr(x, name, None) for x in cache.layers for name in ("keys", "values"))
    return sum(x.nbytes for x in tensors if x is not None)
