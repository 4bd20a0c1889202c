"""What a model's config and an `H2OConfig` say of a cache: found once, and shared by all caches.

A server makes a cache for every request. What a model's layers are, which budgets they have, and
how the model rotates its keys depend on the two configs alone, so the plans of the last few pairs
are remembered. A plan is found by what a model's config says, not by which object it is: a config
that was changed is another one.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig

from h2o.config import H2OConfig
from h2o.hf.layers.layer_plan import LayerPlans
from h2o.hf.prompt.prompt_echo import served_as
from h2o.hf.support import rereads_after, transformers_layers
from h2o.model_identity import describe
from h2o.profile import Profile

__all__ = ["CachePlan", "plan_of"]

REMEMBERED = 8
"""Plans that are remembered."""


class CachePlan:
    """What all caches of a model's config and an `H2OConfig` have in common; never changed."""

    def __init__(self, config: Any, h2o_config: H2OConfig) -> None:
        """
        Args:
            config: the model's.
            h2o_config: for this model (`H2OConfig.for_model`).

        Raises:
            UnsupportedError: a model that h2o cannot serve, or not with these settings.
        """
        layers = transformers_layers(config)
        self.h2o_config, rotary, self.not_dealt = served_as(config, h2o_config)
        self.layers = LayerPlans(config, layers, self.h2o_config, rotary)
        self.rereads_after = rereads_after(config)
        """See `h2o.hf.support.rereads_after`"""
        self.model_shape = describe(config)


_recent: list[tuple[Any, Any, CachePlan]] = []
"""Plans with the model's and h2o's config that they were made for, the newest first. Replaced as a
whole, since several threads may make caches."""


def plan_of(model: Any, config: Any, h2o_config: H2OConfig) -> CachePlan:
    """The plan for a model, which is given itself or by its config, and for the model's config.

    Raises: as `CachePlan`, and as `H2OConfig.for_model`.
    """
    global _recent
    if h2o_config.shares == "shipped" or isinstance(h2o_config.shares, Profile):
        h2o_config = h2o_config.for_model(model)  # which compares weights
    amounts = h2o_config.budget, h2o_config.heavy, h2o_config.recent
    wanted = h2o_config, repr(amounts)  # 1 token is not 1.0 of a prompt, though 1 == 1.0
    for known, known_wanted, plan in _recent:
        if known_wanted == wanted and _are_alike(known, config):
            return plan
    with torch.inference_mode(False), torch.device("cpu"):  # whichever the caller is in
        plan = CachePlan(config, h2o_config.for_model(config))
    if not any(map(callable, amounts)):  # which may compute other amounts the next time
        _recent = [(copy.deepcopy(config), wanted, plan), *_recent[: REMEMBERED - 1]]
    return plan


def _are_alike(a: Any, b: Any) -> bool:
    """Whether two configs, or parts of them, say the same. Configs are compared here since their
    own == may overlook attributes that are no fields of the class."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, PreTrainedConfig):
        a, b = vars(a), vars(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_are_alike(x, b[name]) for name, x in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_are_alike, a, b))
    return bool(a == b)
