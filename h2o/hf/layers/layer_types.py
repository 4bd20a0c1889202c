"""Which type of layer an `H2OCache` has in each place where transformers' own cache has a layer.

A full-attention layer becomes an `H2OLayer`, of the type that the settings ask for: with
cache-relative positions, or for torch.compile. All others stay as they are, as do the states
of a layer that has these too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from transformers.cache_utils import CacheLayerMixin

from h2o.config import H2OConfig
from h2o.errors import UnsupportedError
from h2o.hf.families.layer_kinds import has_states, kind_of
from h2o.hf.families.shared_keys import reusing
from h2o.hf.layers.cache_relative import CacheRelativeLayer
from h2o.hf.layers.compiled import CompileableLayer
from h2o.hf.layers.latent_layer import LatentLayer
from h2o.hf.layers.layer import H2OLayer
from h2o.hf.layers.layer_with_states import with_states
from h2o.hf.layers.random_layer import RandomLayer
from h2o.hf.layers.shared_keys_layer import SharedKeysLayer
from h2o.hf.prompt.one_budget import OneBudget
from h2o.hf.prompt.prompt_echo import PromptEcho
from h2o.hf.rotary import model_rotary
from h2o.hf.rotary.model_rotary import Rotary
from h2o.hf.store.pass_state import PassState
from h2o.kv_dtype import stored_bytes
from h2o.model_identity import latent_row

__all__ = ["layers_of"]


def layers_of(
    config: Any,
    layers: Sequence[CacheLayerMixin],
    h2o_config: H2OConfig,
    pass_state: PassState,
    *,
    echo: Rotary | None,
    trace: bool,
    compileable: bool,
) -> list[CacheLayerMixin]:
    """An `H2OLayer` of the kind that is asked for in the place of each full-attention layer.

    Args:
        config: the model's.
        layers: transformers' own for it; those without full attention stay.
        h2o_config: for this model (`H2OConfig.for_model`).
        echo: the model's rotary embedding, where prompts are ranked by echo.

    Raises:
        UnsupportedError: a setting that does not go with `compileable`, or a model whose positions
            cannot be made cache-relative.
    """
    kinds = {str(kind_of(layer)) for layer in layers}
    if compileable:
        _refuse_compiling(kinds, h2o_config, trace)
    latent = latent_row(config) and config.get_text_config(decoder=True).kv_lora_rank
    if latent:
        _refuse_latents(h2o_config, compileable)
    shared = reusing(config)
    if shared and compileable:
        raise UnsupportedError(
            "compileable=True does not go with layers that attend to others' keys"
        )
    rotary = None
    if h2o_config.positions == "cache_relative":
        if reason := model_rotary.refusal(config, windows="sliding" in kinds):
            raise UnsupportedError(
                f'positions="cache_relative" cannot serve {config.model_type}: {reason}'
            )
        rotary = Rotary(config)
    placed = list(layers)
    for index, layer in enumerate(layers):
        if kind_of(layer) != "h2o":
            continue
        arguments = [h2o_config.for_layer(index, len(layers)), index, pass_state]
        layer_class: Any = CompileableLayer if compileable else H2OLayer
        if rotary is not None and rotary.turns(index):
            layer_class = CacheRelativeLayer
            arguments.append(rotary)
        elif latent:
            layer_class = functools.partial(LatentLayer, latent=latent)
        elif index in shared:
            layer_class = functools.partial(SharedKeysLayer, reused_by=shared[index])
        if h2o_config.score_by == "random":
            if layer_class is not H2OLayer:
                raise UnsupportedError(
                    f'score_by="random", a baseline, does not go with {_named(layer_class)}: '
                    "choose another ranking"
                )
            layer_class = RandomLayer
        if has_states(layer):
            layer_class = with_states(layer_class, layer.number_of_states)
        placed[index] = layer_class(*arguments, trace=trace)
    h2o_layers = [x for x in placed if isinstance(x, H2OLayer)]
    if h2o_config.shares_by_echo:
        _share_by_echo(h2o_layers, config)
    if echo is not None:
        for x in h2o_layers:
            x.prompt_scores = PromptEcho(echo, x.layer_idx, x.policy).scores
    return placed


def _named(layer_class: Any) -> str:
    """The name of a class of layers, which may be a partial one."""
    name: str = getattr(layer_class, "func", layer_class).__name__
    return name


def _share_by_echo(layers: list[H2OLayer], config: Any) -> None:
    """Gives layers the one budget that they share."""
    alike = _alike(config, [layer.layer_idx for layer in layers])
    configs = {layer.layer_idx: layer.config for layer in layers}
    one_budget = OneBudget(configs, alike=alike)
    for layer in layers:
        layer.one_budget = one_budget


def _alike(config: Any, layers: list[int]) -> bool:
    """Whether these layers have as many heads of as many elements, as far as a config tells."""
    text = config.get_text_config(decoder=True)
    differ = getattr(text, "is_heterogeneous", False)
    each = [text.per_layer_config[layer] for layer in layers] if differ else [text]
    heads = [{name: x for name, x in vars(one).items() if "head" in name} for one in each]
    by_layer = any(isinstance(x, list | tuple) for one in heads for x in one.values())
    return not by_layer and all(one == heads[0] for one in heads)


def _refuse_latents(h2o_config: H2OConfig, compileable: bool) -> None:
    """Raises `UnsupportedError` for what does not go with rows that are key and value at once."""
    reasons = {
        f'kv_dtype="{h2o_config.kv_dtype}": keys and values are one row there; use "int8"': (
            len(set(stored_bytes(h2o_config.kv_dtype, 32) or ())) > 1
        ),
        'positions="cache_relative": only a part of a row is rotated': (
            h2o_config.positions != "original"
        ),
        "compileable=True": compileable,
    }
    _refuse("multi-head latent attention", reasons)


def _refuse_compiling(kinds: set[str], h2o_config: H2OConfig, trace: bool) -> None:
    """Raises `UnsupportedError` for what changes its shape from step to step. `kinds`: of the
    layers."""
    reasons = {
        "layers with a sliding window, which grow as they go": "sliding" in kinds,
        "layers for images, whose keys are transformers' own": "cross" in kinds,
        'positions="cache_relative", whose angles are looked up anew': (
            h2o_config.positions != "original"
        ),
        "trace=True, whose record grows": trace,
    }
    _refuse("compileable=True", reasons)


def _refuse(what: str, reasons: dict[str, bool]) -> None:
    """Raises `UnsupportedError` by the first reason that holds."""
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedError(f"{what} does not go with {reason}")
