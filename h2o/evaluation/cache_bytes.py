"""Bytes of caches, from a model's config alone: a setting's share of a full cache, and the bytes of
one request."""

from __future__ import annotations

from typing import Any

from h2o.errors import UserError
from h2o.evaluation.setting import Setting
from h2o.hf.support import supports
from h2o.kv_dtype import FIXED, bytes_per_token
from h2o.model_identity import config_of, describe, key_size, latent_row


def bytes_share(setting: Setting, model: Any, kept: int, seen: int, texts: int = 1) -> float | None:
    """Percentage of a full cache's bytes that a setting needs, including scores and free slots.

    Args:
        kept, seen: numbers of keys, summed over `texts` texts, each with its own cache.

    Returns:
        The percentage, or None if the model's config does not say how large a key is.
    """
    if setting.variant == "full" or not seen:
        return 100.0
    try:
        full, cut = _head_bytes(setting, model, kept, seen, texts)
    except ValueError:
        return None
    return 100 * cut / full


def request_bytes(model_config: Any, setting: Setting, prompt: int, tokens: int) -> int:
    """Bytes of one request's keys and values, including h2o's bookkeeping, after `tokens` tokens of
    which the first `prompt` are the prompt. States of hybrid models are not counted.

    Raises: UserError for a model that h2o does not support, or whose config has no head dimension.
    """
    support = supports(model_config)
    if not support:
        raise UserError(str(support))
    try:
        kept = setting.answering_config.for_model(model_config).count_held(tokens, prompt)
        full, cut = _head_bytes(setting, model_config, kept, tokens)
    except ValueError as error:
        raise UserError(str(error)) from error
    if setting.variant == "full":
        cut = full
    text = model_config.get_text_config(decoder=True)
    window = full // tokens * min(tokens, getattr(text, "sliding_window", None) or 0)
    heads = 1 if latent_row(model_config) else describe(model_config)["num_key_value_heads"]
    return heads * (support.layers.count("h2o") * cut + support.layers.count("sliding") * window)


def _head_bytes(
    setting: Setting, model: Any, kept: int, seen: int, texts: int = 1
) -> tuple[int, int]:
    """(bytes of a full cache, bytes of the setting's cache) of one key/value head.

    Raises: ValueError if the model's config does not say how large a key is.
    """
    config = setting.answering_config.for_model(model)
    size = key_size(config_of(model))
    full, slot = bytes_per_token(*size, config.kv_dtype, config.value_weighted)
    return seen * full, FIXED * texts + (kept + texts) * slot
