"""Everything that h2o uses from the internals of transformers and torch.

Private names, signatures of their functions and differences between versions are confined to this
module, `h2o.compat_calls` and `h2o.compat_wrappers`. Each entry says what it is, and what happens
in a version that lacks it. `packages.py` lists the supported and the tested versions of
transformers. If a later version moves a name that is imported below, the import fails, and `h2o`
reports the ImportError on first use.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import cache_utils
from transformers.modeling_outputs import BaseModelOutputWithPast

# ---- Signatures ----------------------------------------------------------------------------------


def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a function's parameters, in order."""
    return tuple(inspect.signature(function).parameters)


def accepts(function: Callable[..., Any], *names: str) -> bool:
    """Whether a function has parameters with these names."""
    return set(names) <= set(parameters_of(function))


# ---- The cache as an argument of forward() and generate() ----------------------------------------

CACHE = "cache" if accepts(BaseModelOutputWithPast, "cache") else "past_key_values"
"""Name of the argument, and of the field of outputs. "cache" since 5.24; the old name gives a
FutureWarning until 6.0."""

CACHE_NAMES = ("cache", "past_key_values")
"""Names under which a caller may pass a cache, in any version."""


def with_cache(cache: Any) -> dict[str, Any]:
    """The keyword argument that passes a cache to `forward()` or `generate()`."""
    return {CACHE: cache}


def cache_in(kwargs: dict[str, Any]) -> Any:
    """The cache among keyword arguments, or None."""
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)


def without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments without the cache."""
    return {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}


def cache_position(model: nn.Module) -> int:
    """Index of the cache among the positional arguments of the model's `forward()`; one past the
    last if the cache is keyword-only."""
    names = parameters_of(model.forward)
    return next((i for i, name in enumerate(names) if name in CACHE_NAMES), len(names))


# ---- generate() ----------------------------------------------------------------------------------

PREPARE_CACHE = "_prepare_cache_for_generation"
"""Method of GenerationMixin that creates the cache for `generate()`. Its parameters up
to 5.24: (generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)."""

PREPARE_PROCESSORS = "_get_logits_processor"
"""Method of GenerationMixin that creates the logits processors for `generate()`."""


def known_prompt_length(generation_config: Any, model_kwargs: dict[str, Any]) -> Any:
    """Length of the prompt, before `generate()` appends a draft; None if unknown.

    transformers drops a mask of ones and stores its number of columns.
    """
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.ndim == 2:
        return [max(1, n) for n in mask.sum(1).tolist()]  # a row may be all padding
    return getattr(generation_config, "_mask_length", None)


def compile_everywhere(compile_config: Any) -> None:
    """Make `generate()` compile on CPUs too. A version without the attribute ignores it."""
    compile_config._compile_all_devices = True


# ---- Attention functions -------------------------------------------------------------------------


def register_attention(name: str, function: Any, mask_function: Any = None) -> None:
    """Register an attention function and its mask function with transformers. Without a mask
    function it is only for modules that are given a mask."""
    # Not at the top: importing this registers h2o's attention, by the hook in h2o/__init__.py.
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(name, function)
    if mask_function is not None:
        AttentionMaskInterface.register(name, mask_function)


def adds_to_causal(mask_function: Callable[..., bool]) -> bool:
    """Whether a mask function comes from `or_masks`, which lets tokens see more than a causal mask
    does, such as image tokens. If the name changes, a mask that adds nothing is not recognized as
    causal."""
    return mask_function.__qualname__.startswith("or_masks.")


def unregister_attention(name: str) -> None:
    """Unregister an attention. transformers has no public function for this."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface._global_mapping.pop(name, None)
    AttentionMaskInterface._global_mapping.pop(name, None)


def attention_name(config: Any) -> str:
    """Name of the attention implementation that a config selects."""
    return config._attn_implementation  # type: ignore[no-any-return]


def has_attention_name(config: Any) -> bool:
    """Whether a config selects an attention implementation."""
    return hasattr(config, "_attn_implementation")


def put_attention_name(config: Any, name: str) -> None:
    """Select an attention implementation for a config but not for its sub-configs, which the public
    setter changes too."""
    config._attn_implementation_internal = name


def can_set_attention(model: Any) -> bool:
    """Whether a model, or a model class, runs attention through transformers' AttentionInterface.

    If not, `set_attn_implementation` only logs a warning.
    """
    return model._can_set_attn_implementation()  # type: ignore[no-any-return]


# ---- Classes of models and of cache layers ------------------------------------------------------


def model_class(auto: Any, config: Any) -> Any:
    """The class that one of transformers' Auto classes uses for a config, or None."""
    try:
        classes = auto._model_mapping[type(config)]
    except (KeyError, ValueError):  # ValueError: it is listed but cannot be imported
        return None
    return classes[0] if isinstance(classes, tuple) else classes


HYBRIDS = hasattr(cache_utils.Cache, "get_conv_state")
"""Whether models call their cache before they use a layer's states (since 5.21). Before 5.21, which
vLLM needs, a pass interrupted between such layers would go unnoticed, so models with states are not
supported."""

SHARES_KEYS = hasattr(cache_utils, "KVSharingDict")
"""Whether keys are passed from layer to layer in a dict (since 5.23). Before 5.23 models with
shared keys are not supported."""


class Absent:
    """Stand-in for a class of cache layers that this version of transformers lacks."""


LAYER_TYPES: dict[str, Any] = cache_utils.DYNAMIC_LAYER_TYPE_MAPPING
"""Cache layer class for each entry of a config's `layer_types`."""


def _layer_class(name: str) -> Any:
    return getattr(cache_utils, name, Absent) if HYBRIDS else Absent


StatesLayer = _layer_class("LinearAttentionLayer")
StatesAndKeysLayer = _layer_class("LinearAttentionAndFullAttentionLayer")
StatesAndWindowLayer = _layer_class("LinearAttentionAndSlidingWindowAttentionLayer")
EmptyLayer = _layer_class("DummyLayer")


def window_of(layer: Any) -> Tensor | None:
    """The sliding window of transformers' own cache layer, as a DynamicCache yields it."""
    return getattr(layer, "_sliding_window_tensor", None)


def drops_cache(model_class: Any) -> bool:
    """Whether `generate()` of a model class discards a truthy cache and prefills everything again
    once the text exceeds `original_max_position_embeddings` (Phi-3)."""
    code = inspect.unwrap(model_class.prepare_inputs_for_generation).__code__
    return "original_max_position_embeddings" in (*code.co_consts, *code.co_names)


def rope_kinds(module: nn.Module) -> dict[str, str]:
    """Kinds of rotary embedding, such as "longrope", of a module that computes rotary angles, by
    attribute prefix, one for each type of layer; {} for any other module."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, dict):
        return {f"{layer_type}_": kind for layer_type, kind in kinds.items()}
    return {"": kinds} if isinstance(kinds, str) else {}


def original_length(module: nn.Module, prefix: str) -> int:
    """Text length in tokens beyond which a module changes its initial angles. `prefix` is as in
    `rope_kinds`."""
    parameters = module.config.rope_parameters
    parameters = parameters.get(prefix.removesuffix("_"), parameters)
    if rope_kinds(module)[prefix] == "longrope":
        return int(parameters["original_max_position_embeddings"])
    return int(module.original_max_seq_len)


def forget_longest(module: nn.Module, prefix: str) -> None:
    """Reset a rotary module of kind "dynamic", which remembers the longest text so far."""
    module.register_buffer(
        f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"), persistent=False
    )
    setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


# ---- torch ---------------------------------------------------------------------------------------


def tensor_version(tensor: Tensor) -> int:
    """A number that increases whenever a tensor is modified in place."""
    return tensor._version


def calls_a_module(thread: int) -> bool:
    """Whether a thread is inside the call of a module. False after an error has ended the call,
    even if the thread continues."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            return True
        frame = frame.f_back
    return False


as_plain_tensors = torch._C.DisableTorchFunctionSubclass
"""Context manager within which tensor subclasses are treated as plain tensors."""


def has_packed_linear() -> bool:
    """Whether oneDNN supports bfloat16 with packed weights on this machine."""
    able = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(able)


def pack_linear_weight(weight: Tensor) -> Tensor:
    """Convert a weight [out, in] to oneDNN's opaque layout, for `packed_linear`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, 1)  # type: ignore[no-any-return]


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`nn.functional.linear` with a weight from `pack_linear_weight`."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
