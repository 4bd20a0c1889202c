"""Everything that h2o borrows from inside transformers and torch.

Private names, signatures of other people's functions and differences between versions stand in
this module and in `h2o.compat_wrappers` only, each with what it is and what happens in a version
that lacks it. `packages.py` knows which versions of transformers are supported and which ones were
tested. A name that an `import` statement below needs and that a later version has moved is an
ImportError, which `h2o` reports where it is first used.
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
"""Name of the argument, and of the field of outputs. "cache" since 5.24, which accepts the former
name with a FutureWarning until 6.0."""

CACHE_NAMES = ("cache", "past_key_values")
"""Names under which a caller may give a cache, in any version."""


def with_cache(cache: Any) -> dict[str, Any]:
    """The keyword argument that gives `forward()` or `generate()` a cache."""
    return {CACHE: cache}


def cache_in(kwargs: dict[str, Any]) -> Any:
    """The cache among keyword arguments; None without one."""
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)


def without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that are no cache."""
    return {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}


def cache_position(model: nn.Module) -> int:
    """Index of the cache among the positional arguments of the model's `forward()`; one past the
    last where it can be given by name only."""
    names = parameters_of(model.forward)
    return next((i for i, name in enumerate(names) if name in CACHE_NAMES), len(names))


# ---- generate() ----------------------------------------------------------------------------------

PREPARE_CACHE = "_prepare_cache_for_generation"
"""Method of GenerationMixin that makes the cache of a `generate()`. Called by all versions from 5.4
to 5.24 with (generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)."""

PREPARE_PROCESSORS = "_get_logits_processor"
"""Method of GenerationMixin that makes the logits processors of a `generate()`."""


def known_prompt_length(generation_config: Any, model_kwargs: dict[str, Any]) -> Any:
    """Tokens of each row's whole prompt, before `generate()` cuts it into chunks; None: not known.

    transformers drops a mask of ones since 5.17 or so and remembers its columns.
    """
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.ndim == 2:
        return [max(1, n) for n in mask.sum(1).tolist()]  # a row may be nothing but padding
    return getattr(generation_config, "_mask_length", None)


def columns_in_chunks() -> int:
    """Columns of the prompt that `generate(prefill_chunk_size=...)` feeds to the model now; 0 where
    no such call is under way.

    A cache sees a first chunk as it sees a prompt, and is told of neither. So the local variables
    of `GenerationMixin._prefill`, which cuts the chunks in all versions from 5.4 to 5.24, are read.
    """
    frame = None if torch.compiler.is_compiling() else inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_prefill":
        frame = frame.f_back
    found = {} if frame is None else frame.f_locals
    if getattr(found.get("generation_config"), "prefill_chunk_size", None) is None:
        return 0
    return int(found["input_ids"].shape[1])


def compile_everywhere(compile_config: Any) -> None:
    """Have `generate()` compile on CPUs too. A version without the attribute ignores it."""
    compile_config._compile_all_devices = True


CROPS_TO_LENGTH = accepts(DynamicCache.crop, "max_length")
"""Whether `Cache.crop` takes the length to keep, as it did before 5.16, unless it is negative."""


class NewText(NamedTuple):
    """Mask and positions that the caller of a forward pass gives for its tokens."""

    mask: Tensor | None
    """[B, n], 0 at a pad; None: no pads"""
    positions: Tensor | None
    """[B or 1, Q], the first of each token's where it has several; None where the model numbers
    them itself"""
    is_injected: bool
    """Whether a decode step of `generate()` was given embeddings that are not its own"""
    ids: Tensor | None
    """[B, Q]; None where the caller gives embeddings"""
    dropped: Tensor | None
    """[B, n], what `generate()` drops at the beginning of its input_ids, since the cache has it"""
    is_assisted: bool
    """Whether the pass is one of assisted decoding"""


def new_text() -> NewText | None:
    """The text of the forward pass whose mask is being made, which transformers does not hand to a
    cache: "attention_mask" of the mask function, "position_ids" of the outermost forward(). None
    where no call has a mask, also in a version that names it otherwise."""
    masks, positions, embedded, calls = [], [], False, set()
    ids = dropped = None
    for name, here in _calls_under_way():
        calls.add(name)
        masks += [here["attention_mask"]] if "attention_mask" in here else []
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
    if isinstance(numbers, Tensor) and numbers.ndim == 3:  # of a model that reads images too
        numbers = numbers[0]
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        mask = None
    if not isinstance(numbers, Tensor) or numbers.ndim != 2:
        numbers = None
    is_injected = embedded and numbers is None and "generate" in calls and "_prefill" not in calls
    return NewText(mask, numbers, is_injected, ids, dropped, "_assisted_decoding" in calls)


def keeper_of_rope_deltas() -> Any:
    """The module with the attribute `rope_deltas` that has called a cache; None without one."""
    for _, here in _calls_under_way():
        module = here.get("self")
        for one in (module, getattr(module, "model", None)):
            if isinstance(one, nn.Module) and "rope_deltas" in vars(one):
                return one
    return None


def _calls_under_way() -> list[tuple[str, dict[str, Any]]]:
    """Name and local variables of each call of transformers that has led here, the latest first."""
    calls = []
    frame = sys._getframe(1)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package.startswith("transformers"):  # transformers_modules: a model's own code
            calls.append((frame.f_code.co_name, frame.f_locals))  # others would keep tensors alive
        elif package not in ("h2o", "torch"):
            break
        frame = frame.f_back
    return calls


# ---- Attention functions -------------------------------------------------------------------------


def register_attention(name: str, function: Any, mask_function: Any = None) -> None:
    """Make an attention function and its mask function known to transformers under a name. None: no
    model runs it, only a module that is given its mask."""
    # Not at the top: importing this registers h2o's attention, by the hook in h2o/__init__.py.
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(name, function)
    if mask_function is not None:
        AttentionMaskInterface.register(name, mask_function)


def adds_to_causal(mask_function: Callable[..., bool]) -> bool:
    """Whether a mask function is one of `or_masks`, which lets tokens see more than causal ones, as
    those of images do. Under another name a mask that adds nothing is not taken for a causal one.
    """
    return mask_function.__qualname__.startswith("or_masks.")


def unregister_attention(name: str) -> None:
    """Remove a name. transformers has a public way in but none out."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface._global_mapping.pop(name, None)
    AttentionMaskInterface._global_mapping.pop(name, None)


def attention_name(config: Any) -> str:
    """Name of the attention implementation that a config selects."""
    name: str = config._attn_implementation
    return name


def has_attention_name(config: Any) -> bool:
    """Whether a config selects an attention implementation."""
    return hasattr(config, "_attn_implementation")


def put_attention_name(config: Any, name: str) -> None:
    """Select an attention implementation for a config alone, without that of its sub-configs, which
    the public setter changes too."""
    config._attn_implementation_internal = name


def can_set_attention(model: Any) -> bool:
    """Whether a model, or a class of models, runs attention by transformers' AttentionInterface.

    For others `set_attn_implementation` only logs a warning.
    """
    able: bool = model._can_set_attn_implementation()
    return able


def wants_attention_weights() -> bool:
    """Whether the model call under way has `output_attentions=True`, which not every model hands on
    to its attention function."""
    return "attentions" in (_active_collector.get() or ())


# ---- Classes of models and of cache layers ------------------------------------------------------


def model_class(auto: Any, config: Any) -> Any:
    """The class that one of transformers' Auto classes has for a config; None if it has none."""
    try:
        classes = auto._model_mapping[type(config)]
    except (KeyError, ValueError):  # ValueError: named there, but not to be imported
        return None
    return classes[0] if isinstance(classes, tuple) else classes


def constructor_of(module_class: Any) -> Callable[..., None]:
    """`__init__` of a class of modules, not what transformers' decorator `use_kernelized_func` puts
    around it up to 5.15, whose parameters say nothing."""
    function = module_class.__init__
    while inspect.isfunction(function):
        inner = inspect.getclosurevars(function).nonlocals.get("orig_init")
        if inner is None:
            break
        function = inner
    return function


HYBRIDS = hasattr(cache_utils.Cache, "get_conv_state")
"""Whether models announce to their cache that they begin with a layer's states; since 5.21. Before
that a forward pass that is interrupted between such layers would go unnoticed, so models with
states are refused."""

SHARES_KEYS = hasattr(cache_utils, "KVSharingDict")
"""Whether keys are handed from layer to layer in a dict; since 5.23. Before that models with shared
keys are refused."""


class Absent:
    """Stands for a class of cache layers that this version of transformers does not have."""


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
"""Class of the cache layer for each entry of a config's `layer_types`; the fallback is 5.4's."""


def window_of(layer: Any) -> Tensor | None:
    """The sliding window of transformers' own cache layer, as iterating a DynamicCache gives it."""
    return getattr(layer, "_sliding_window_tensor", None)


def drops_cache(model_class: Any) -> bool:
    """Whether `generate()` of a class leaves out a cache that is true, once the text is longer than
    `original_max_position_embeddings`, and has the model read all of it anew (Phi-3)."""
    code = inspect.unwrap(model_class.prepare_inputs_for_generation).__code__
    return "original_max_position_embeddings" in (*code.co_consts, *code.co_names)


def rope_kinds(module: nn.Module) -> dict[str, str]:
    """Kind of rotary embedding, such as "longrope", of a module that makes rotary angles, by the
    prefix of its attributes, one for each type of layers; {} for any other module."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, dict):
        return {f"{layer_type}_": kind for layer_type, kind in kinds.items()}
    return {"": kinds} if isinstance(kinds, str) else {}


def original_length(module: nn.Module, prefix: str) -> int:
    """Tokens up to which a module's angles are those that it began with; `prefix` as in
    `rope_kinds`."""
    parameters = module.config.rope_parameters
    parameters = parameters.get(prefix.removesuffix("_"), parameters)
    if rope_kinds(module)[prefix] == "longrope":
        return int(parameters["original_max_position_embeddings"])
    return int(module.original_max_seq_len)


def forget_longest(module: nn.Module, prefix: str) -> None:
    """Undo what a module of the kind "dynamic" remembers of the longest text that it has seen."""
    module.register_buffer(
        f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"), persistent=False
    )
    setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


# ---- torch ---------------------------------------------------------------------------------------


def tensor_version(tensor: Tensor) -> int:
    """A number that rises whenever a tensor is written to in place."""
    return tensor._version


def calls_a_module(thread: int) -> bool:
    """Whether a thread is amid a call of a module, and not after an error that has ended that, be
    it that the thread goes on."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            return True
        frame = frame.f_back
    return False


def mark_static_address(tensor: Tensor) -> None:
    """Tell torch.compile that a tensor stays where it is, so that CUDA graphs need no copy."""
    torch._dynamo.mark_static_address(tensor)


def mark_dynamic(tensor: Tensor, axis: int) -> None:
    """Tell torch.compile that an axis has a new length in each call."""
    torch._dynamo.mark_dynamic(tensor, axis)


def compile_errors() -> type[Exception]:
    """Base class of torch.compile's errors; importing it takes a second."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


as_plain_tensors = torch._C.DisableTorchFunctionSubclass
"""Context manager within which tensor subclasses are treated as plain tensors."""


def has_packed_linear() -> bool:
    """Whether oneDNN multiplies bfloat16 here, by weights in a layout of its own."""
    able = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(able)


def pack_linear_weight(weight: Tensor) -> Tensor:
    """A weight [out, in] in oneDNN's layout, which is opaque, for `packed_linear`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, 1)  # type: ignore[no-any-return]


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`nn.functional.linear` with a weight that `pack_linear_weight` made."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
