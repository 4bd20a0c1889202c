"""Bytes of caches, from a model's config alone: a setting's share of a full cache, the bytes of one
request, and those of its states."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from h2o.compat import with_cache
from h2o.errors import UserError
from h2o.evaluation.setting import Setting
from h2o.hf.cache_state import recurrent_states
from h2o.hf.model_traits.layer_kinds import has_states
from h2o.hf.support import supports
from h2o.kv_dtype import bytes_per_token
from h2o.model_identity import config_of, describe, dtype_of, key_size, latent_row


def bytes_share(setting: Setting, model: Any, kept: int, seen: int, texts: int = 1) -> float | None:
    """Percentage of a full cache's bytes that a setting needs, including scores and free slots.

    Args:
        kept, seen: numbers of keys, summed over `texts` texts, each with its own cache.

    Returns:
        The percentage, or None if the model's config does not say how large a key is.
    """
    if setting.variant == "full":
        return 100.0
    try:
        full, cut = _head_bytes(setting, model, kept, seen, texts)
    except ValueError:
        return None
    return 100 * cut / full


def request_bytes(model_config: Any, setting: Setting, prompt: int, tokens: int) -> int:
    """Bytes of one request's keys and values, including h2o's bookkeeping, after `tokens` tokens of
    which the first `prompt` are the prompt. `state_bytes` are not included.

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
    heads = 1 if latent_row(model_config) else describe(model_config)["num_key_value_heads"]
    windows = support.layers.count("sliding") * _window_bytes(model_config, tokens)
    return heads * support.layers.count("h2o") * cut + windows


def state_bytes(model_config: Any) -> int | None:
    """Bytes of one request's convolution and recurrent states, which no budget changes.

    A model without memory for its weights reads a token, and its states have the sizes of real
    ones. None if the model's code needs real weights.
    """
    text = model_config.get_text_config(decoder=True)
    cache = DynamicCache(config=text)
    with_states = [layer for layer in cache.layers if has_states(layer)]
    if not with_states:
        return 0
    try:
        with torch.device("meta"), torch.no_grad():
            model = AutoModelForCausalLM.from_config(text, dtype=dtype_of(model_config))
            model(torch.ones(1, 1, dtype=torch.long, device="meta"), **with_cache(cache))
    except Exception:  # whatever the code of a model family raises
        return None
    return sum(map(recurrent_states.bytes_of, with_states))


def _window_bytes(model_config: Any, tokens: int) -> int:
    """Bytes of the keys and values of one layer with a sliding window."""
    window = getattr(model_config.get_text_config(decoder=True), "sliding_window", None) or 0
    shape, (_, element, rows) = describe(model_config, "sliding_attention"), key_size(model_config)
    return shape["num_key_value_heads"] * min(tokens, window) * rows * shape["head_dim"] * element


def _head_bytes(
    setting: Setting, model: Any, kept: int, seen: int, texts: int = 1
) -> tuple[int, int]:
    """(bytes of a full cache, bytes of the setting's cache) of one key/value head.

    Raises: ValueError if the model's config does not say how large a key is.
    """
    config = setting.answering_config.for_model(model)
    size = key_size(config_of(model))
    full, slot, fixed = bytes_per_token(*size, config.kv_dtype, config.value_weighted)
    return seen * full, fixed * texts + (kept + texts) * slot
