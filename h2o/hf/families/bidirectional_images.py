"""Models in which the tokens of an image look both ways among themselves."""

from __future__ import annotations

from typing import Any

__all__ = ["BOTH_WAYS", "looks_both_ways_at_images"]

_TYPES = ("gemma3", "gemma3_text", "molmo2", "molmo2_text")
"""Types of such models, and of their language models. Gemma 4 says so in its config."""

BOTH_WAYS = (
    "the tokens of an image look both ways among themselves. Read text and images into a "
    "DynamicCache, make an H2OCache of it, H2OCache.from_dynamic_cache(full, model.config, ...), "
    "and go on without images, token_type_ids and mm_token_type_ids"
)
"""Why an `H2OCache` cannot read images, and what to do."""


def looks_both_ways_at_images(config: Any) -> bool:
    """Whether an image's tokens look both ways among themselves, in a model with this config, or a
    language model with this config that is the part of one."""
    text = config.get_text_config(decoder=True)
    says_so = getattr(text, "use_bidirectional_attention", None) == "vision"
    return says_so or config.model_type in _TYPES
