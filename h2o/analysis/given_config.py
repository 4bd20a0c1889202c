"""What `min_tokens` makes of the config of an analysis."""

from __future__ import annotations

from typing import Any

from h2o.config import H2OConfig, resolve_config
from h2o.config.fields import ConfigFields
from h2o.config.layer_plan import LayerPlan
from h2o.hf.model_traits.layer_kinds import kind_of
from h2o.hf.support import transformers_layers
from h2o.utils.user_warning import warn_user


def resolve_for_text(
    h2o_config: H2OConfig | None, parameters: ConfigFields, function: Any, model: Any, tokens: int
) -> H2OConfig:
    """The config that a caller of `function` gave, for a model and a text of `tokens` tokens.

    Gives the warning of `warn_of_floor`. Raises: as `resolve_config` and `H2OConfig.for_model`.
    """
    config = resolve_config(h2o_config, parameters, function).for_model(model)
    if h2o_config is None:
        warn_of_floor(model, config, parameters, tokens)
    return config


def warn_of_floor(model: Any, config: H2OConfig, parameters: ConfigFields, tokens: int) -> None:
    """Give a UserWarning if the lower limit of 128 keys, and not the config's fractions, decides
    for a text of `tokens` tokens, unless the keywords `parameters` of the config have a limit."""
    if "min_tokens" not in parameters and (text := explain_floor(model, config, tokens)):
        warn_user(text)


def explain_floor(model: Any, config: H2OConfig, tokens: int) -> str:
    """Explain how `min_tokens` raises the budget of some layer for a text of `tokens` tokens; empty
    if it does not. `config`: the result of `H2OConfig.for_model`."""
    layers = transformers_layers(model.config)
    plans = (
        LayerPlan.of(config, index, len(layers))
        for index, layer in enumerate(layers)
        if kind_of(layer) == "h2o"
    )
    return next(filter(None, (plan.explain_floor(tokens) for plan in plans)), "")
