"""Everything that h2o uses from the internals of transformers and torch.

Private names, signatures of their functions and differences between versions are confined to this
module and `h2o.compat_wrappers`. Each entry says what it is, and what happens in a version that
lacks it. `packages.py` lists the supported and the tested versions of transformers. If a later
version moves a name that is imported below, the import fails, and `h2o` reports the ImportError on
first use.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.output_capturing import _active_collector

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
"""Method of GenerationMixin that creates the cache for `generate()`. Its parameters from 5.4 to
5.24: (generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)."""

PREPARE_PROCESSORS = "_get_logits_processor"
"""Method of GenerationMixin that creates the logits processors for `generate()`."""


def known_prompt_length(generation_config: Any, model_kwargs: dict[str, Any]) -> Any:
    """Length of the prompt, before `generate()` appends a draft; None if unknown.

    Since about 5.17 transformers drops a mask of ones and stores its number of columns.
    """
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.ndim == 2:
        return [max(1, n) for n in mask.sum(1).tolist()]  # a row may be all padding
    return getattr(generation_config, "_mask_length", None)


def chunks_of_prompt() -> tuple[Any, list[int], Tensor | None] | None:
    """The cache, the columns of each chunk and the whole attention mask, while
    `generate(prefill_chunk_size=...)` prefills several chunks; otherwise None.

    A cache cannot tell a first chunk from a prompt. So this function reads the local variables of
    `GenerationMixin._prefill`, which cuts the chunks in all versions from 5.4 to 5.24."""
    frame = None if torch.compiler.is_compiling() else inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_prefill":
        frame = frame.f_back
    found = {} if frame is None else frame.f_locals
    if getattr(found.get("generation_config"), "prefill_chunk_size", None) is None:
        return None
    chunks = [chunk.shape[1] for chunk in found["input_chunks"]]
    cache, mask = cache_in(found["model_kwargs"]), found["attention_mask"]
    return (cache, chunks, mask) if len(chunks) > 1 else None


def compile_everywhere(compile_config: Any) -> None:
    """Make `generate()` compile on CPUs too. A version without the attribute ignores it."""
    compile_config._compile_all_devices = True


CROPS_TO_LENGTH = accepts(DynamicCache.crop, "max_length")
"""Whether `Cache.crop` expects the length to keep, as before 5.16, unless it is negative."""


class NewText(NamedTuple):
    """Inputs that the caller of a forward pass gives for its tokens."""

    mask: Tensor | None
    """[B, n], 0 for padding. None: no padding."""
    positions: Tensor | None
    """[B or 1, Q]; the first one if a token has several. None if the model computes them."""
    is_injected: bool
    """Whether a wrapper of the model replaced the input of a decode step by embeddings."""
    ids: Tensor | None
    """[B, Q]. None if the caller gives embeddings."""
    dropped: Tensor | None
    """[B, n], the first input_ids, which `generate()` drops because the cache has them."""
    is_assisted: bool
    """Whether the pass belongs to assisted decoding."""
    config: Any
    """The config for which the mask is made, that of the language model. None if unknown."""


def new_text(cache: Any) -> NewText | None:
    """The inputs of the forward pass whose mask is being made for a cache. transformers does not
    pass them to a cache, so they are read from its calls: "attention_mask" of the mask function,
    "position_ids" of the outermost forward(). None if no call has a mask, or a version names it
    differently."""
    masks, positions, embedded, calls = [], [], False, set()
    ids = dropped = config = None
    for name, here in _calls_under_way(cache):
        calls.add(name)
        masks += [here["attention_mask"]] if "attention_mask" in here else []
        config = here.get("config") if config is None else config
        if "position_ids" in here and (name == "forward" or not positions):
            positions.append(here["position_ids"])
        if name == "forward":
            embedded = here.get("inputs_embeds") is not None
            ids = here.get("input_ids", ids)
        if name == "_prefill" and here.get("next_sequence_length"):
            dropped = here["input_ids"][:, : -here["next_sequence_length"]]
    if not masks:
        return None
    mask, numbers = masks[0], positions[-1] if positions else None
    if isinstance(numbers, Tensor) and numbers.ndim == 3:  # multimodal models: several per token
        numbers = numbers[0]
    mask, numbers = (x if isinstance(x, Tensor) and x.ndim == 2 else None for x in (mask, numbers))
    is_injected = embedded and numbers is None and "generate" in calls and "_prefill" not in calls
    return NewText(mask, numbers, is_injected, ids, dropped, "_assisted_decoding" in calls, config)


def find_rope_deltas_module() -> Any:
    """The module with the attribute `rope_deltas` that led to the call of a cache, or None."""
    for _, here in _calls_under_way():
        module = here.get("self")
        for one in (module, getattr(module, "model", None)):
            if isinstance(one, nn.Module) and "rope_deltas" in vars(one):
                return one
    return None


def _calls_under_way(cache: Any = None) -> list[tuple[str, dict[str, Any]]]:
    """Name and local variables of each transformers call on the stack, the innermost first.

    A function of another package ends the list. It may wrap the model's forward(), as accelerate's
    hooks do, so calls of `_OUTER` that have `cache` follow."""
    calls, is_wrapped = [], False
    frame = sys._getframe(1)
    while frame is not None:
        name, package = frame.f_code.co_name, frame.f_globals.get("__name__", "").partition(".")[0]
        if package.startswith("transformers"):  # or transformers_modules: a model's remote code
            # Locals of other calls may hold tensors.
            if not is_wrapped or (name in _OUTER and _has_cache(frame.f_locals, cache)):
                calls.append((name, frame.f_locals))
        elif package not in ("h2o", "torch"):
            is_wrapped = True
            if cache is None:
                break
        frame = frame.f_back
    return calls


_OUTER = ("forward", "generate", "_prefill", "_assisted_decoding")
"""Calls that a wrapper of forward() may hide"""


def _has_cache(here: dict[str, Any], cache: Any) -> bool:
    """Whether a call with these local variables passes on a cache."""
    passed = (here, here.get("model_kwargs"), here.get("kwargs"))
    return any(isinstance(x, dict) and cache_in(x) is cache for x in passed)


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


def wants_attention_weights() -> bool:
    """Whether the current model call has `output_attentions=True`, which not every model passes on
    to its attention function."""
    return "attentions" in (_active_collector.get() or ())


# ---- Classes of models and of cache layers ------------------------------------------------------


def model_class(auto: Any, config: Any) -> Any:
    """The class that one of transformers' Auto classes uses for a config, or None."""
    try:
        classes = auto._model_mapping[type(config)]
    except (KeyError, ValueError):  # ValueError: it is listed but cannot be imported
        return None
    return classes[0] if isinstance(classes, tuple) else classes


def constructor_of(module_class: Any) -> Callable[..., None]:
    """`__init__` of a module class. Up to 5.15 transformers' decorator `use_kernelized_func` hides
    its parameters; this function unwraps it."""
    function = module_class.__init__
    while inspect.isfunction(function):
        inner = inspect.getclosurevars(function).nonlocals.get("orig_init")
        if inner is None:
            break
        function = inner
    return function


HYBRIDS = hasattr(cache_utils.Cache, "get_conv_state")
"""Whether models call their cache before they use a layer's states (since 5.21). Before 5.21 a pass
interrupted between such layers would go unnoticed, so models with states are not supported."""

SHARES_KEYS = hasattr(cache_utils, "KVSharingDict")
"""Whether keys are passed from layer to layer in a dict (since 5.23). Before 5.23 models with
shared keys are not supported."""


class Absent:
    """Stand-in for a class of cache layers that this version of transformers lacks."""


def _layer_class(name: str) -> Any:
    return getattr(cache_utils, name, Absent) if HYBRIDS else Absent


StatesLayer = _layer_class("LinearAttentionLayer")
StatesAndKeysLayer = _layer_class("LinearAttentionAndFullAttentionLayer")
StatesAndWindowLayer = _layer_class("LinearAttentionAndSlidingWindowAttentionLayer")
EmptyLayer = _layer_class("DummyLayer")

LAYER_TYPES: dict[str, Any] = getattr(
    cache_utils,
    "DYNAMIC_LAYER_TYPE_MAPPING",
    {
        "full_attention": DynamicLayer,
        "sliding_attention": DynamicSlidingWindowLayer,
        "chunked_attention": DynamicSlidingWindowLayer,
    },
)
"""Cache layer class for each entry of a config's `layer_types`. The fallback is that of 5.4."""


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
