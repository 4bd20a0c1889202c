"""Bytes of one request's KV cache, from a model's config alone."""

from __future__ import annotations

from typing import Any

from h2o.errors import UserError
from h2o.evaluation.setting import Setting
from h2o.hf.support import supports
from h2o.kv_dtype import FIXED, per_token
from h2o.model_identity import describe, key_size, latent_row

__all__ = ["request_bytes"]


def request_bytes(model_config: Any, setting: Setting, prompt: int, tokens: int) -> int:
    """Bytes of the keys and values of a request, and of what h2o notes of them, when it has seen
    `tokens` tokens after a prompt of `prompt` was cut. States of hybrid models are not counted.

    Raises: UserError for a model that h2o does not support, or that tells no head dimension.
    """
    support = supports(model_config)
    if not support:
        raise UserError(str(support))
    try:
        config = setting.holding.for_model(model_config)
        key, stored = per_token(*key_size(model_config), config.kv_dtype, config.value_weighted)
    except ValueError as error:
        raise UserError(str(error)) from error
    full = tokens * key
    cut = full
    if setting.variant != "full":
        cut = FIXED + (config.held(tokens, prompt) + 1) * stored
    text = model_config.get_text_config(decoder=True)
    window = min(tokens, getattr(text, "sliding_window", None) or 0) * key
    heads = 1 if latent_row(model_config) else describe(model_config)["num_key_value_heads"]
    return heads * (support.layers.count("h2o") * cut + support.layers.count("sliding") * window)
