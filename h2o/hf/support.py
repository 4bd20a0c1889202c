"""Which models h2o supports, with which layers and settings, and why it does not support others.

Users call `supports(config)`. The answer depends on the model's config, on the layers of
transformers' own cache for that config, and on the model's class, but not on weights.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any, NamedTuple

import transformers
from torch import nn
from transformers.cache_utils import CacheLayerMixin

from h2o import compat
from h2o.config import H2OConfig
from h2o.errors import UnsupportedError
from h2o.hf.attention.attention import BIDIRECTIONAL_IMAGES, has_bidirectional_images
from h2o.hf.model_traits import latent_attention, shared_keys, tensor_parallel
from h2o.hf.model_traits.layer_kinds import has_states, kind_of, layers_of, type_refusal
from h2o.hf.model_traits.shared_keys import shared_key_layers
from h2o.hf.modes import Mode, check_modes, config_modes, why_not
from h2o.hf.prompt import echo_scorer
from h2o.hf.rotary import model_rotary
from h2o.model_identity import config_of, latent_row

_PATTERN = "it gives its own attention pattern as a 4-D mask"

_BIAS = "it adds a bias to the attention logits that depends on positions"

_IMAGE_KEYS = "some of its layers cache the keys of images (cross attention): use DynamicCache"

_LOOPS = "it runs its layers several times for each token, with a separate cache for each run"

_UNSUPPORTED_TYPES = {
    "diffusion_gemma": "its attention is bidirectional within a block (block diffusion)",
    "diffllama": "it attends twice to the same keys (differential attention)",
    "doge": _PATTERN,
    "dory": _LOOPS,
    "gemma4_unified": _PATTERN,
    "git": "it has attention code of its own instead of AttentionInterface",
    "hrm_text": _LOOPS,
    "inkling2_loop_text": _LOOPS,
    "inkling2_text": _BIAS,
    "inkling_text": _BIAS,
    "jetmoe": "it repeats all KV heads between cache and attention",
    "kosmos-2": _PATTERN,
    "mllama": _IMAGE_KEYS,
    "mllama_text_model": _IMAGE_KEYS,
    "minimax": "it accepts only its own class of cache",
    "paligemma": "its attention is bidirectional within the prompt (a prefix language model)",
    "xlstm": "it has a state instead of keys",
}
"""Model types that are not supported, for reasons that their configs do not show."""


@dataclasses.dataclass(frozen=True)
class Support:
    """Whether and how a model is supported."""

    model_type: str
    supported: bool
    reason: str
    """Why the model is not supported; empty if it is."""
    layers: tuple[str, ...]
    """Kind of each layer (`h2o.hf.model_traits.layer_kinds`): "h2o", "sliding", "states" or
    "none"; empty if the model is not supported."""
    not_cache_relative: str = ""
    """Why positions="cache_relative" is not supported, if the rest is; empty otherwise."""
    not_images: str = ""
    """Why the model's images are not supported, and what to do instead; empty otherwise."""
    not_echo: str = ""
    """What replaces the policy of `budget=` (`H2OConfig.echo`) for the model, and why; empty if the
    model can use echo."""

    def __bool__(self) -> bool:
        return self.supported

    def __str__(self) -> str:
        if not self.supported:
            return f"{self.model_type}: not supported: {self.reason}"
        full = self.layers.count("h2o")
        parts = [f"{self.model_type}: supported, {full} of {len(self.layers)} layers by h2o"]
        parts += [
            f", {self.layers.count(kind)} {what}"
            for kind, what in _REST.items()
            if kind in self.layers
        ]
        parts += [] if full else [", so that nothing is evicted"]
        reasons = {
            'positions="cache_relative" is not supported: ': self.not_cache_relative,
            "images are not supported: ": self.not_images,
            "with budget=...: ": self.not_echo,
        }
        return "".join(parts + [f"; {what}{why}" for what, why in reasons.items() if why])


_REST = {
    "sliding": "keep their own sliding window",
    "states": "have states instead of keys",
    "none": "store nothing",
}


def supports(model: Any) -> Support:
    """Whether and how h2o supports the causal language model that a config describes.

    The answer depends on the config and the model's class and needs no weights. A problem that only
    a forward pass can reveal (the model alters keys after the cache) raises an error in that pass.
    For a model that also reads images or sound, `layers` are those of its language model.

    Args:
        model: a model of transformers, or its config.

    Raises: TypeError for anything else.
    """
    config = config_of(model)
    model_type = config.model_type
    if reason := _config_reason(config) or _layers_reason(config):
        return Support(model_type, False, reason, ())
    classes = _model_classes(config)
    if not classes:
        return Support(model_type, False, "transformers has no causal language model for it", ())
    if not compat.can_set_attention(classes[-1]):  # the language model, also if it is a part
        return Support(
            model_type, False, "it has attention code of its own instead of AttentionInterface", ()
        )
    traits = Traits.of(config)
    kinds = traits.kinds
    reads_images = config.get_text_config(decoder=True) is not config
    not_images = BIDIRECTIONAL_IMAGES if reads_images and has_bidirectional_images(config) else ""
    not_echo = echo_scorer.echo_replacement(config) if "h2o" in kinds else ""
    return Support(model_type, True, "", kinds, traits.not_cache_relative, not_images, not_echo)


class Traits(NamedTuple):
    """Properties of a supported model that may exclude settings of a cache."""

    model_type: str
    kinds: tuple[str, ...]
    """Kinds of the layers"""
    latent: int
    """Elements of a latent; 0 if the model caches keys and values"""
    reused_by: dict[int, tuple[int, ...]]
    """Later layers that attend to a layer's keys (`h2o.hf.model_traits.shared_keys`)"""
    not_cache_relative: str
    """Why keys cannot have cache-relative positions; empty if they can"""
    modes: frozenset[Mode]
    """The modes that the config shows"""

    @classmethod
    def of(cls, config: Any) -> Traits:
        """The traits of a model with this config."""
        text = config.get_text_config(decoder=True)
        layers = layers_of(text)
        kinds = tuple(str(kind_of(layer)) for layer in layers)
        latent = text.kv_lora_rank if latent_row(config) else 0
        reused_by = shared_key_layers(config)
        held = {
            Mode.HYBRID: any(map(has_states, layers)),
            Mode.WINDOWS: "sliding" in kinds,
            Mode.LATENT: latent,
            Mode.SHARED_KEYS: reused_by,
        }
        modes = frozenset(mode for mode, holds in held.items() if holds)
        return cls(
            config.model_type,
            kinds,
            latent,
            reused_by,
            why_not(Mode.CACHE_RELATIVE, modes) or model_rotary.rotary_refusal(config) or "",
            modes,
        )


def model_modes(model: Any) -> frozenset[Mode]:
    """The modes that a model, or its config, stands for. Only a model shows whether it is cut over
    several processes.

    Raises: as `transformers_layers`.
    """
    transformers_layers(model)
    return Traits.of(config_of(model)).modes | split_modes(model)


def split_modes(model: Any) -> frozenset[Mode]:
    """`Mode.TENSOR_PARALLEL` if this process has only a part of a model's heads. Nothing for a
    config, which does not show it."""
    if not tensor_parallel.is_distributed() or not isinstance(model, nn.Module):
        return frozenset()
    is_cut = tensor_parallel.part_of_heads(model) != tensor_parallel.WHOLE
    return frozenset({Mode.TENSOR_PARALLEL} if is_cut else ())


def check_settings(traits: Traits, h2o_config: H2OConfig) -> None:
    """Raise UnsupportedError if the settings of an `H2OCache` do not suit the model or each
    other."""
    if h2o_config.score_by == "random":
        raise UnsupportedError(
            f"{Mode.RANDOM} is a baseline that no cache has: measure it with "
            'h2o.simulated(model, score_by="random") or h2o eval --compare full,random:0.2'
        )
    check_modes({*traits.modes, *config_modes(h2o_config)})
    if h2o_config.positions == "cache_relative" and traits.not_cache_relative:
        raise UnsupportedError(
            f"{Mode.CACHE_RELATIVE} does not support {traits.model_type}: "
            f"{traits.not_cache_relative}"
        )


def _model_classes(config: Any) -> list[Any]:
    """The class of transformers that generates with this config, and the class of its language
    model if that is a part of it. Empty if no class generates with this config."""
    autos = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText,
             transformers.AutoModelForMultimodalLM)  # fmt: skip
    generating = _first_class(config, *autos)
    if generating is None:
        return []
    text = config.get_text_config(decoder=True)
    language = None if text is config else _first_class(text, transformers.AutoModel, *autos)
    return [generating] if language is None else [generating, language]


def _first_class(config: Any, *autos: Any) -> Any:
    """The model class of the first Auto class that knows this config; None if none does."""
    return next(filter(None, (compat.model_class(auto, config) for auto in autos)), None)


def text_config_of(model: Any) -> Any:
    """The config of a model, or the config that was given instead of a model.

    Warns if the model does not run h2o's attention, without which an `H2OCache` does not work.
    """
    config = config_of(model)
    if config is not model:
        name = compat.attention_name(config.get_text_config(decoder=True))
        if not str(name).startswith("h2o"):
            warnings.warn(
                f'an H2OCache needs attn_implementation="h2o", but this model runs {name!r}: call '
                'model.set_attn_implementation("h2o") before its next forward pass',
                stacklevel=3,
            )
    return config


def transformers_layers(config: Any) -> list[CacheLayerMixin]:
    """The layers of transformers' own cache for a model that h2o supports.

    Raises:
        TypeError: `config` is not a config of transformers.
        UnsupportedError: h2o does not support the model.
    """
    config = config_of(config)
    if reason := _config_reason(config) or _layers_reason(config):
        raise UnsupportedError(f"h2o does not support {config.model_type}: {reason}")
    return layers_of(config.get_text_config(decoder=True))


def drops_cache_after(config: Any) -> float | None:
    """Number of tokens after which `generate()` drops the cache and prefills the whole text again,
    because the rotary angles of all earlier tokens change (Phi-3 with longrope). Infinity if the
    angles do not change. None for a model that always keeps its cache."""
    classes = _model_classes(config)
    if not classes or not compat.drops_cache(classes[0]):
        return None
    text = config.get_text_config(decoder=True)
    is_longrope = (text.rope_parameters or {}).get("rope_type") == "longrope"
    return text.original_max_position_embeddings if is_longrope else math.inf


def _config_reason(config: Any) -> str | None:
    """Why h2o does not support a model, as far as its config shows, or None."""
    text = config.get_text_config(decoder=True)
    if not isinstance(getattr(text, "num_hidden_layers", None), int):
        return "its config has no num_hidden_layers: it is not a stack of decoder layers"
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder models attend to a second text; h2o is for decoder-only models"
    if getattr(text, "is_causal", True) is False:
        return "its attention is not causal"
    if getattr(text, "is_decoder", True) is False and hasattr(text, "add_cross_attention"):
        return (
            "it is an encoder with bidirectional attention: as a causal language model it "
            "needs config.is_decoder=True"
        )
    for part in (text, config):
        if part.model_type in _UNSUPPORTED_TYPES:
            return _UNSUPPORTED_TYPES[part.model_type]
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        return "its attention is bidirectional (use_bidirectional_attention)"
    if _attribute(text, "kv_lora_rank") is not None:
        if reason := _latent_refusal(config):
            return reason
    elif _attribute(text, "v_head_dim") not in (None, _attribute(text, "head_dim")):
        return "its keys and values differ in size"
    if getattr(text, "num_kv_shared_layers", None):
        if reason := shared_keys.shared_keys_refusal(text):
            return reason
    for index, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if reason := type_refusal(kind):
            return f"layer {index} is {kind}, which is {reason}"
    return None


def _layers_reason(config: Any) -> str | None:
    """Why h2o does not support a model, by the layers of transformers' own cache, or None."""
    layers = layers_of(config.get_text_config(decoder=True))
    kinds = [kind_of(layer) for layer in layers]
    if not layers:  # Gemma 4 without shared layers in transformers 5.10
        return "transformers caches none of its layers"
    if None in kinds:
        index = kinds.index(None)
        return (
            f"layer {index} is cached as {type(layers[index]).__name__}, which is neither full nor "
            "sliding-window attention"
        )
    if any(has_states(layer) and kind == "h2o" for layer, kind in zip(layers, kinds, strict=True)):
        if latent_row(config) is not None:
            return "one of its layers has both states and latents"
        if shared_key_layers(config):
            return "one of its layers has both states and keys that later layers reuse"
    if "states" in kinds and "h2o" not in kinds:
        return f"none of its {len(kinds)} layers has full attention, so there is nothing to evict"
    return None


def _latent_refusal(config: Any) -> str | None:
    """Why h2o does not support a model with multi-head latent attention, or None."""
    if not isinstance(_attribute(config.get_text_config(decoder=True), "kv_lora_rank"), int):
        return "its layers differ in their latent attention"
    if not any(map(latent_attention.expands_after_cache, _model_classes(config))):
        return "its multi-head latent attention does not cache latents; newer models do"
    return latent_attention.latent_refusal(config.get_text_config(decoder=True))


def _attribute(config: Any, name: str) -> Any:
    """An attribute of a config. None if there is none; its name if the layers' values differ."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers raises this if the layers' values differ
        return name
