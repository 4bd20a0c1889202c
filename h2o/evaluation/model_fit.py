"""Check that a model supports some settings, before anything slow is started."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from h2o.config import H2OConfig
from h2o.errors import UnsupportedError, UserError
from h2o.evaluation.setting import Setting
from h2o.kv_dtype import stored_bytes
from h2o.model_identity import config_of, describe, latent_row


def check_fit(
    settings: Sequence[Setting], model: Any, *, full_cache: bool = False, simulates: bool = False
) -> None:
    """Check that a model supports the settings. `model` may be the model's own config.

    Args:
        full_cache: whether "full" is an `H2OCache` too, instead of transformers' own cache.
        simulates: whether random eviction is simulated, instead of raising an error.

    Raises: UserError with the name of the first setting that the model does not support.
    """
    for setting in settings:
        if full_cache or setting.variant != "full":
            try:
                check_supported(model, setting.config, simulates=simulates)
            except (TypeError, ValueError) as error:
                raise UserError(f"{setting.name}: {error}") from error


def check_supported(model: Any, h2o_config: H2OConfig, *, simulates: bool = False) -> None:
    """Check that a model, or a model with this config, supports a cache with a config of h2o.
    `simulates` is as for `check_fit`.

    Raises: `UnsupportedError` for a model that h2o does not support, at all or with this config;
    ValueError for a profile of another model, or a `kv_dtype` that does not fit the model's head
    dimension; TypeError for a model in float64.
    """
    from h2o import compat
    from h2o.hf.cache.cache import H2OCache
    from h2o.hf.support import supports

    config = config_of(model)
    if model is config:
        if not (support := supports(config)):
            raise UnsupportedError(f"h2o does not support {support.model_type}: {support.reason}")
    elif str(model.dtype) == "torch.float64":
        raise TypeError("h2o computes in float32, float16 and bfloat16, not in float64")
    elif not compat.can_set_attention(model):
        raise UnsupportedError(
            f"h2o does not support {config.model_type}: it has attention code of its own instead "
            "of AttentionInterface"
        )
    fitted = h2o_config.for_model(model)
    if simulates and fitted.score_by == "random":  # its budgets are those of any cache
        fitted = dataclasses.replace(fitted, score_by="sum")
    H2OCache(config, fitted)
    head = latent_row(config) or describe(config).get("head_dim")
    if head and fitted.kv_dtype is not None:
        stored_bytes(fitted.kv_dtype, head)
