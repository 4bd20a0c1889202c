"""`CachePlan`: the layers of an `H2OCache`, derived from a model's config and an `H2OConfig`.

A full-attention layer becomes an `H2OLayer` with the variant, scorer and runner that the model and
the settings require. All others stay transformers' own. A server creates a cache for every request,
so the most recent plans are remembered. They are looked up by the content of both configs, so that
a config that was modified gets a new plan.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from h2o.arguments.plain_values import check_flag
from h2o.budgets import layer_amount
from h2o.config import H2OConfig
from h2o.config.layer_plan import LayerPlan
from h2o.config.profile import Profile
from h2o.hf.conversation.pass_guard import PassGuard
from h2o.hf.layers.cache_relative_variant import CacheRelativeVariant
from h2o.hf.layers.latent_variant import LatentVariant
from h2o.hf.layers.layer import H2OLayer, H2OLayerWithStates
from h2o.hf.layers.named_eviction import Rotaries
from h2o.hf.layers.pass_runners import CapturedRunner, EagerRunner
from h2o.hf.layers.plain_variant import PlainVariant
from h2o.hf.layers.shared_variant import SharedVariant
from h2o.hf.model_traits.layer_kinds import has_states, layers_of
from h2o.hf.modes import Mode, check_modes, config_modes
from h2o.hf.prompt.cross_head_budget import CrossHeadBudget
from h2o.hf.prompt.echo_scorer import PromptEcho, adapt_config
from h2o.hf.rotary.model_rotary import ModelRotary, rotary_of
from h2o.hf.support import Traits, check_settings, drops_cache_after, transformers_layers
from h2o.model_identity import describe, settings_of


class CachePlan:
    """What all caches for one model config and one `H2OConfig` share. Immutable."""

    def __init__(self, config: Any, h2o_config: H2OConfig) -> None:
        """
        Args:
            config: the model's config, which must not be modified later.
            h2o_config: settings for this model (`H2OConfig.for_model`).

        Raises:
            UnsupportedError: h2o does not support the model, or not with these settings.
        """
        self._config, self._empty = config, transformers_layers(config)
        self.h2o_config, self._echo, self.echo_replacement = adapt_config(config, h2o_config)
        self._traits = Traits.of(config)
        check_settings(self._traits, self.h2o_config)
        self.model_shape = describe(config)
        self.model_settings = json.dumps(settings_of(config))
        """JSON of the config's settings, for files. A text, because forks copy what a cache has"""
        self.drops_cache_after = drops_cache_after(config)
        """See `h2o.hf.support.drops_cache_after`"""
        self.rotaries = Rotaries(config)
        """Rotates new tokens as stored keys are, after tokens were removed"""
        self.kinds = self._traits.kinds
        self.number_of_states = {
            index: layer.number_of_states
            for index, layer in enumerate(self._empty)
            if has_states(layer)
        }
        """Number of states of each kind, for the layers that have states"""
        self.h2o_config = _with_lists(self.h2o_config, self.kinds)
        self.modes = self._traits.modes | config_modes(self.h2o_config)
        """The modes of the model and of the settings"""
        self.plans = {
            index: LayerPlan.of(self.h2o_config, index, len(self.kinds))
            for index, kind in enumerate(self.kinds)
            if kind == "h2o"
        }
        """The budgets of each H2O layer"""
        self.last = max((later[-1] for later in self._traits.reused_by.values()), default=0)
        """The last layer that attends to an earlier layer's keys; 0 if none does"""
        is_relative = self.h2o_config.positions == "cache_relative"
        self._angles = rotary_of(config) if is_relative else None
        self.makes_pool = None
        """Makes the `CrossHeadBudget` that layers share for one prompt; None: they share none"""
        if self.h2o_config.shares_by_echo:
            alike = _alike(config, list(self.plans))
            self.makes_pool = functools.partial(CrossHeadBudget, self.plans, alike=alike)

    def layers(
        self, guard: PassGuard, modes: frozenset[Mode], *, trace: bool, compileable: bool
    ) -> list[CacheLayerMixin]:
        """Create the empty layers of a cache. `modes`: those that only the model shows.

        Raises:
            UnsupportedError: the settings cannot be combined.
            TypeError: one of them is not a bool.
        """
        trace, compileable = check_flag("trace", trace), check_flag("compileable", compileable)
        asked = {Mode.TRACE: trace, Mode.COMPILED: compileable}
        check_modes({*self.modes, *modes, *(mode for mode in asked if asked[mode])})
        angles, echo = copy.copy(self._angles), copy.copy(self._echo)
        if compileable:
            guard.count_in(torch.tensor(0, dtype=torch.int64, device="cpu"))
        own = self._empty
        if len(self.plans) < len(own):  # layers of transformers' own must not be shared by caches
            own = layers_of(self._config.get_text_config(decoder=True))
        layers = []
        for index, empty in enumerate(own):
            if index not in self.plans:
                layers.append(empty)
                continue
            layer_class: Any = H2OLayer
            more: dict[str, Any] = {}
            if index in self.number_of_states:
                layer_class = H2OLayerWithStates
                more["number_of_states"] = self.number_of_states[index]
            layers.append(
                layer_class(
                    self.plans[index],
                    guard,
                    variant=self._variant(index, angles),
                    scorer=self._scorer(index, echo),
                    runner=CapturedRunner() if compileable else EagerRunner(),
                    rotaries=self.rotaries,
                    trace=trace,
                    **more,
                )
            )
        return layers

    def _variant(self, layer: int, angles: ModelRotary | None) -> PlainVariant:
        if angles is not None and layer in angles.rotated_layers:
            return CacheRelativeVariant(angles)
        if self._traits.latent:
            return LatentVariant(self._traits.latent)
        reused_by = self._traits.reused_by.get(layer)
        return SharedVariant(reused_by) if reused_by else PlainVariant()

    def _scorer(self, layer: int, echo: ModelRotary | None) -> PromptEcho | None:
        return None if echo is None else PromptEcho(echo, layer, self.plans[layer].policy)


def _with_lists(config: H2OConfig, kinds: tuple[str, ...]) -> H2OConfig:
    """Replace functions in the config by lists, so that each function is called only once."""
    for name in ("heavy", "recent"):
        if callable(compute := getattr(config, name)):
            layers = [index for index, kind in enumerate(kinds) if kind == "h2o"] or [0]
            computed = {i: layer_amount(name, compute, i, len(kinds)) for i in layers}
            first = next(iter(computed.values()))  # a filler: other layers have no budget
            amounts = tuple(computed.get(index, first) for index in range(len(kinds)))
            config = dataclasses.replace(config, **{name: amounts})
    return config


def _alike(config: Any, layers: list[int]) -> bool:
    """Whether all these layers have the same number and size of heads, judging by the config."""
    text = config.get_text_config(decoder=True)
    differ = getattr(text, "is_heterogeneous", False)
    each = [text.per_layer_config[layer] for layer in layers] if differ else [text]
    heads = [{name: x for name, x in vars(one).items() if "head" in name} for one in each]
    by_layer = any(isinstance(x, list | tuple) for one in heads for x in one.values())
    return not by_layer and all(one == heads[0] for one in heads)


REMEMBERED = 8
"""Number of plans that are remembered."""

_PLAIN_SHARES = (str, tuple, Profile, type(None))

_recent: list[tuple[Any, Any, CachePlan]] = []
"""Plans with the model config and the settings that they were made for, the newest first. The list
is replaced and never modified, because several threads may create caches."""


def get_plan(model: Any, config: Any, h2o_config: H2OConfig) -> CachePlan:
    """Return the plan for a model. `model` is the model or its config, `config` its config.

    Raises: as `CachePlan` and `H2OConfig.for_model`.
    """
    global _recent
    shares = h2o_config.head_shares
    if isinstance(shares, Profile) or (isinstance(shares, str) and shares == "shipped"):
        h2o_config = h2o_config.for_model(model)  # compares weights, if it is a model
    # A user's function may return another amount the next time.
    is_plain = not (callable(h2o_config.heavy) or callable(h2o_config.recent))
    is_plain = is_plain and isinstance(shares, _PLAIN_SHARES)
    for known, made_for, plan in _recent if is_plain else ():
        is_alike = made_for == h2o_config and made_for.budget == h2o_config.budget
        if is_alike and _are_alike(known, config):
            return plan
    config = copy.deepcopy(config)  # the owner may modify the original
    with torch.inference_mode(False), torch.device("cpu"):  # independent of the caller's context
        plan = CachePlan(config, h2o_config.for_model(config))
    if is_plain:
        _recent = [(config, h2o_config, plan), *_recent[: REMEMBERED - 1]]
    return plan


def _are_alike(a: Any, b: Any) -> bool:
    """Whether two configs, or parts of them, have the same content. Their own == may overlook
    attributes that are not fields of the class."""
    if type(a) is not type(b):
        return False
    if isinstance(a, PreTrainedConfig):
        a, b = vars(a), vars(b)
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return False
        a, b = list(a.values()), [b[name] for name in a]
    if isinstance(a, list | tuple):
        differing = [(x, y) for x, y in zip(a, b, strict=False) if x is not y]
        return len(a) == len(b) and all(itertools.starmap(_are_alike, differing))
    return bool(a == b)
