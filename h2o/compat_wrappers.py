"""Everything that h2o uses from the internals of PEFT, accelerate, bitsandbytes, torch.ao and
torch.compile, which wrap models, layers and tensors. `h2o.compat` has the names of transformers and
torch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def inner_model(model: Any) -> Any:
    """The model inside one wrapper of torch.compile or PEFT, or None if there is no wrapper.

    A PeftModel and a PeftMixedModel wrap a tuner, such as a LoraModel, which wraps the model. With
    prompt tuning there is no tuner. All of them pass on attributes that they lack, so this function
    looks at their own modules only."""
    if (compiled := _inside_compile(model)) is not None:
        return compiled
    if not _is_from(type(model), "peft."):
        return None
    own = _children(model)
    return own.get("base_model", own.get("model"))


def _inside_compile(model: Any) -> Any:
    """The model that torch.compile wrapped, or None."""
    return _children(model).get("_orig_mod")


def _children(model: Any) -> dict[str, nn.Module]:
    """Modules that a model itself holds, by attribute."""
    return dict(model.named_children()) if isinstance(model, nn.Module) else {}


def without_compile(model: Any) -> Any:
    """The model inside the outer wrappers of torch.compile. Wrappers of PEFT stay."""
    while (compiled := _inside_compile(model)) is not None:
        model = compiled
    return model


def innermost_model(model: Any) -> Any:
    """The model inside all wrappers."""
    while (inner := inner_model(model)) is not None:
        model = inner
    return model


ADAPTED = ("base_layer", "original_module", "token_adapter")
"""Attributes in which PEFT's layers hold the layer that they replaced."""


def adapter_layers(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Select the PEFT layers, which wrap other modules, from modules by name."""
    return {name: x for name, x in modules.items() if hasattr(type(x), "adapter_layer_names")}


def adapter_fields(layer: Any) -> set[str]:
    """Attributes of a PEFT layer that hold the weights of its adapters by adapter name."""
    names = (*layer.adapter_layer_names, *layer.other_param_names)
    return {name.partition(".")[0] for name in names}


def applied_adapters(layer: Any) -> tuple[str, ...]:
    """Names of the adapters that a PEFT layer applies on top of the wrapped layer: none that are
    disabled, and none at all once any were merged into the wrapped layer."""
    if layer.disable_adapters or layer.merged_adapters:
        return ()
    return tuple(layer.active_adapters)


def adapter_scale(layer: Any, adapter: str) -> float:
    """Scaling factor of an adapter in a PEFT layer, 1 for a method without one."""
    scales = getattr(layer, "scaling", None)
    return float(scales.get(adapter, 1.0)) if isinstance(scales, dict) else 1.0


def prompt_encoders(model: Any) -> tuple[nn.Module, ...]:
    """Modules that make the virtual tokens that PEFT puts before each text (prompt tuning and
    similar methods); none if they are disabled."""
    found: list[nn.Module] = []
    while model is not None:
        encoders: Any = _children(model).get("prompt_encoder", {})
        if not getattr(model, "_adapters_disabled", False):
            found += [encoders[x] for x in model_adapters(model) if x in encoders]
        model = inner_model(model)
    return tuple(found)


def model_adapters(model: Any) -> tuple[str, ...]:
    """Names of the active adapters of a PEFT model."""
    active = getattr(model, "active_adapter", ())
    if not hasattr(model, "get_base_model"):
        return ()
    return (active,) if isinstance(active, str) else tuple(active)


def own_tensors(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A module's own tensors by name, saved ones and packed ones.

    Saved ones are parameters and persistent buffers. Packed ones are those of a quantized module
    that are neither, and those to read instead of a parameter whose format changes.

    torch.ao's and bitsandbytes' modules are read with their accessors. A module is never asked for
    its state, because `_save_to_state_dict` of bitsandbytes changes the module.
    """
    saved = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    saved |= module.named_buffers(recurse=False, remove_duplicate=False)
    for name in module._non_persistent_buffers_set:
        saved.pop(name, None)
    if _is_from(type(module), "torch.ao.nn."):
        return saved, _torch_ao_tensors(module)
    weight = saved.get("weight")
    if weight is None or weight.is_meta or not _is_from(type(weight), "bitsandbytes."):
        return saved, {}
    return saved, _bitsandbytes_tensors(module, weight)


def _torch_ao_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Weight and bias of a module in which torch.ao has packed them. torch.ao's layers have such a
    module inside."""
    if any(module.children()):
        return {}
    if hasattr(module, "_weight_bias"):
        parts = zip(("weight", "bias"), module._weight_bias(), strict=False)
        return {name: part for name, part in parts if part is not None}
    return {"weight": module._weight()} if hasattr(module, "_weight") else {}


def _bitsandbytes_tensors(module: nn.Module, weight: Any) -> dict[str, Tensor]:
    """Numbers and scales of a weight that bitsandbytes has quantized to 8 or 4 bits."""
    scales = getattr(weight, "SCB", None)
    if scales is None:  # the first forward pass moves them
        scales = getattr(getattr(module, "state", None), "SCB", None)
    if scales is not None:
        return {"weight.SCB": scales}
    state = getattr(weight, "quant_state", None) or getattr(module, "quant_state", None)
    return {} if state is None else _four_bit_tensors(weight.detach(), state)


def _four_bit_tensors(weight: Tensor, state: Any) -> dict[str, Tensor]:
    """The parts of a 4-bit weight [N, K] of bitsandbytes, and of its QuantState, that are the same
    before and after the first forward pass. On a CPU this pass changes the layout and rounds the
    scales to bfloat16.

    Returns:
        `weight`: the numbers in evenly spaced groups of 32 outputs, two in a byte, [groups, 32,
        K / 2]. `weight.absmax`: the scales, [N * K / block] bfloat16. `weight.code`: the 16 numbers
        that 4 bits stand for.
    """
    N, K = state.shape
    packed = weight.view(torch.uint8).view(-1, K // 2)
    if getattr(state, "packing_format_for_cpu", False):
        groups = packed.view(N // 32, K // 2, 16, 2)[:: max(1, N // 256)]
        by_output = torch.cat([groups & 15, groups >> 4], dim=2).transpose(1, 2)
        numbers = by_output[..., 0] << 4 | by_output[..., 1]
        scales = state.absmax.T
    else:
        groups = packed[: max(32, N // 32 * 32)]
        numbers = groups.view(-1, min(N, 32), K // 2)[:: max(1, N // 256)]
        scales = state.absmax
        if state.nested:
            from bitsandbytes.functional import dequantize_blockwise

            scales = dequantize_blockwise(scales, state.state2) + state.offset
    return {
        "weight": numbers.contiguous(),
        "weight.absmax": scales.reshape(-1).bfloat16(),
        "weight.code": state.code,
    }


@functools.lru_cache(maxsize=1024)
def _is_from(kind: type, package: str) -> bool:
    """Whether a class, or one that it extends, is from a package "name."."""
    return any(f"{x.__module__}.".startswith(package) for x in kind.__mro__)


def peft_type(model: Any) -> str:
    """Method of the active adapter of a PEFT model, such as "LORA"; "" for any other model."""
    config = getattr(model, "active_peft_config", None)
    return str(getattr(config, "peft_type", "")).rpartition(".")[2]


def num_virtual_tokens(model: Any) -> int:
    """Number of embeddings that a prompt-tuned PEFT model puts before each text; 0 for any other
    model, and while adapters are disabled."""
    if getattr(model, "_adapters_disabled", False):
        return 0
    config = getattr(without_compile(model), "active_peft_config", None)
    return config.num_virtual_tokens if getattr(config, "is_prompt_learning", False) else 0


def activates_by_tokens(model: Any) -> bool:
    """Whether tokens of the prompt activate an adapter (aLoRA). PEFT looks for them in the input of
    each call."""
    configs = getattr(without_compile(model), "peft_config", {})
    return any(getattr(x, "alora_invocation_tokens", None) for x in configs.values())


def layers_by_base(model: nn.Module) -> dict[nn.Module, Any]:
    """PEFT's layers that can merge adapters, by the modules that they wrap."""
    return {x.get_base_layer(): x for x in model.modules() if hasattr(x, "merged_adapters")}


def merged_state(layer: Any) -> tuple[Any, ...]:
    """State of a PEFT layer that changes when an adapter is merged or unmerged. The version of the
    weight does not change, because PEFT writes through `.data`."""
    return *layer.merged_adapters, *getattr(layer, "scaling", {}).values()


def is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate may move a module's weights between devices."""
    return hasattr(module, "_hf_hook")


def accelerate_hooks(module: nn.Module) -> tuple[Any, ...]:
    """accelerate's hooks of a module. A SequentialHook is expanded to its parts."""
    hook = getattr(module, "_hf_hook", None)
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))


def mark_static_address(tensor: Tensor) -> None:
    """Tell torch.compile that a tensor's address does not change, so that CUDA graphs do not copy
    it."""
    torch._dynamo.mark_static_address(tensor)


def compile_errors() -> type[Exception]:
    """Base class of torch.compile's errors. Importing it takes a second."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException
