"""Which layer an `H2OCache` has in each place where transformers' own cache has a layer.

A full-attention layer becomes an `H2OLayer` with the form, scorer and stepper that the model and
the settings ask for. All others stay as they are, as do the states of a layer that has these too.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers.cache_utils import CacheLayerMixin

from h2o.config import H2OConfig
from h2o.errors import UnsupportedError
from h2o.hf.families.layer_kinds import has_states, kind_of
from h2o.hf.families.shared_keys import reusing
from h2o.hf.forms.cache_relative import CacheRelativeForm
from h2o.hf.forms.latent_form import LatentForm
from h2o.hf.forms.plain_form import PlainForm
from h2o.hf.forms.shared_form import SharedForm
from h2o.hf.layers.captured import CapturedStepper
from h2o.hf.layers.layer import H2OLayer
from h2o.hf.layers.layer_with_states import H2OLayerWithStates
from h2o.hf.layers.steppers import EagerStepper
from h2o.hf.prompt.one_budget import OneBudget
from h2o.hf.prompt.prompt_echo import EchoScorer, PromptEcho
from h2o.hf.prompt.scorers import AttentionScorer, RandomScorer
from h2o.hf.rotary import model_rotary
from h2o.hf.rotary.model_rotary import Rotary
from h2o.hf.store.pass_state import PassState
from h2o.kv_dtype import stored_bytes
from h2o.model_identity import latent_row

__all__ = ["LayerPlan", "LayerPlans"]


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """What is known of one layer before any text is."""

    index: int
    kind: str
    """See `h2o.hf.families.layer_kinds`"""
    own: CacheLayerMixin
    """transformers' own layer, empty"""
    config: H2OConfig | None
    """The layer's amounts; None for a layer that stays transformers' own"""
    latent: int
    """Elements of a latent; 0: the layer has keys"""
    reused_by: tuple[int, ...]
    """Later layers that attend to the layer's keys"""
    is_turned: bool
    """Whether the layer's rotation is to be undone"""


class LayerPlans:
    """What is known of the layers of a cache by the model's config and an `H2OConfig`."""

    def __init__(
        self,
        config: Any,
        layers: Sequence[CacheLayerMixin],
        h2o_config: H2OConfig,
        echo: Rotary | None,
    ) -> None:
        """
        Args:
            config: the model's.
            layers: transformers' own for it; those without full attention stay.
            h2o_config: for this model (`H2OConfig.for_model`).
            echo: the model's rotary embedding, where prompts are ranked by echo.

        Raises:
            UnsupportedError: settings that do not go with the model.
        """
        self.kinds = [str(kind_of(layer)) for layer in layers]
        self.has_states = any(map(has_states, layers))
        self._h2o_config, self._echo, self._angles = h2o_config, echo, None
        latent = latent_row(config) and config.get_text_config(decoder=True).kv_lora_rank
        self._has_latents = bool(latent)
        if latent:
            _refuse_latents(h2o_config)
        if h2o_config.positions == "cache_relative":
            if reason := model_rotary.refusal(config, windows="sliding" in self.kinds):
                raise UnsupportedError(
                    f'positions="cache_relative" cannot serve {config.model_type}: {reason}'
                )
            self._angles = Rotary(config)
        self._shared = reusing(config)
        self.last = max((later[-1] for later in self._shared.values()), default=0)
        """The last layer that attends to keys of an earlier one, if any does"""
        self._layers = [
            LayerPlan(
                index,
                kind,
                layer,
                h2o_config.for_layer(index, len(layers)) if kind == "h2o" else None,
                latent or 0,
                self._shared.get(index, ()),
                self._angles is not None and self._angles.turns(index),
            )
            for index, (kind, layer) in enumerate(zip(self.kinds, layers, strict=True))
        ]
        self.configs = {x.index: x.config for x in self._layers if x.config is not None}
        """Settings of each H2O layer"""
        self._alike = h2o_config.shares_by_echo and _alike(config, list(self.configs))

    def layers(
        self, pass_state: PassState, *, trace: bool, compileable: bool
    ) -> list[CacheLayerMixin]:
        """Empty layers for a cache.

        Raises:
            UnsupportedError: a setting that does not go with `compileable`.
        """
        if compileable:
            _refuse("compileable=True", self._not_compileable(trace))
        if self._h2o_config.score_by == "random":
            reasons = self._not_random() | {"compileable=True": compileable}
            _refuse('score_by="random", a baseline,', reasons)
        made = _Made(
            pass_state,
            trace,
            compileable,
            copy.copy(self._echo),
            copy.copy(self._angles),
            OneBudget(self.configs, alike=self._alike) if self._h2o_config.shares_by_echo else None,
        )
        return [
            copy.deepcopy(plan.own) if plan.config is None else made.layer(plan, plan.config)
            for plan in self._layers
        ]

    def _not_compileable(self, trace: bool) -> dict[str, bool]:
        """What changes its shape from step to step."""
        return {
            "layers with a sliding window, which grow as they go": "sliding" in self.kinds,
            "layers for images, whose keys are transformers' own": "cross" in self.kinds,
            'positions="cache_relative", whose angles are looked up anew': (
                self._h2o_config.positions != "original"
            ),
            "trace=True, whose record grows": trace,
            "multi-head latent attention": self._has_latents,
            "layers that attend to others' keys": bool(self._shared),
        }

    def _not_random(self) -> dict[str, bool]:
        """Forms of keys for which a baseline is not worth its tests."""
        return {
            "multi-head latent attention": self._has_latents,
            "layers that attend to others' keys": bool(self._shared),
            'positions="cache_relative"': self._angles is not None,
        }


class _Made(NamedTuple):
    """What the layers of one cache have in common."""

    pass_state: PassState
    trace: bool
    compileable: bool
    echo: Rotary | None
    """By which prompts are ranked"""
    angles: Rotary | None
    """By which keys are rotated again"""
    one_budget: OneBudget | None

    def layer(self, plan: LayerPlan, config: H2OConfig) -> H2OLayer:
        """The layer of a plan, empty."""
        strategies: dict[str, Any] = {
            "form": self._form(plan),
            "scorer": self._scorer(plan, config),
            "stepper": CapturedStepper() if self.compileable else EagerStepper(),
        }
        layer_class: Any = H2OLayer
        if has_states(plan.own):
            layer_class = H2OLayerWithStates
            strategies["number_of_states"] = plan.own.number_of_states
        layer: H2OLayer = layer_class(
            config, plan.index, self.pass_state, trace=self.trace, **strategies
        )
        return layer

    def _form(self, plan: LayerPlan) -> PlainForm:
        if plan.is_turned:
            assert self.angles is not None
            return CacheRelativeForm(self.angles)
        if plan.latent:
            return LatentForm(plan.latent)
        return SharedForm(plan.reused_by) if plan.reused_by else PlainForm()

    def _scorer(self, plan: LayerPlan, config: H2OConfig) -> AttentionScorer:
        if config.score_by == "random":
            return RandomScorer()
        if self.echo is None:
            return AttentionScorer()
        return EchoScorer(PromptEcho(self.echo, plan.index, config.policy), self.one_budget)


def _alike(config: Any, layers: list[int]) -> bool:
    """Whether these layers have as many heads of as many elements, as far as a config tells."""
    text = config.get_text_config(decoder=True)
    differ = getattr(text, "is_heterogeneous", False)
    each = [text.per_layer_config[layer] for layer in layers] if differ else [text]
    heads = [{name: x for name, x in vars(one).items() if "head" in name} for one in each]
    by_layer = any(isinstance(x, list | tuple) for one in heads for x in one.values())
    return not by_layer and all(one == heads[0] for one in heads)


def _refuse_latents(h2o_config: H2OConfig) -> None:
    """Raises `UnsupportedError` for what does not go with rows that are key and value at once."""
    reasons = {
        f'kv_dtype="{h2o_config.kv_dtype}": keys and values are one row there; use "int8"': (
            len(set(stored_bytes(h2o_config.kv_dtype, 32) or ())) > 1
        ),
        'positions="cache_relative": only a part of a row is rotated': (
            h2o_config.positions != "original"
        ),
    }
    _refuse("multi-head latent attention", reasons)


def _refuse(what: str, reasons: dict[str, bool]) -> None:
    """Raises `UnsupportedError` by the first reason that holds."""
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedError(f"{what} does not go with {reason}")
