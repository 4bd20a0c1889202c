"""`h2o.packed_weights(model)`: faster decode steps on the CPU, with weights in oneDNN's layout.

A decode step of SmolLM2-135M in bfloat16 with 1, 8 and 32 rows took 39.0, 46.9 and 72.2 ms, and
34.1, 34.2 and 59.8 ms with weights in that layout (AMD Zen 4, two threads). The layout is opaque,
so the weights are copied. Within the block only the `forward` of each linear module changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from h2o import compat
from h2o.arguments.plain_values import wrong
from h2o.compat_wrappers import layers_by_base, merged_state
from h2o.hf.model_traits.weight_sums import weight_sum
from h2o.utils.with_block import with_block

FEW = 64
"""Largest number of tokens in a forward pass for which the layout is used."""


@with_block
def packed_weights(model: nn.Module) -> Iterator[int]:
    """Speed up forward passes of up to 64 tokens, counted over all rows, on the CPU.

    Within the block each bfloat16 `nn.Linear` on the CPU keeps a second copy of its weight in
    oneDNN's layout. Answers are the same up to rounding. Nothing changes for longer prompts, for
    training and `torch.compile`, for linear modules that are quantized, offloaded or sharded over
    processes, and on a CPU without instructions for bfloat16. A weight that is modified, or that
    PEFT merges an adapter into, is copied again at its next use. Writes through a weight's `.data`,
    such as those of `hotswap_adapter`, are noticed when the next text begins: in a forward pass
    whose cache is empty, or that has no cache. Each such pass reads all weights once, which takes
    as long as a decode step of one row or less.

    Yields:
        The bytes of the copies, which are freed after the block.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(wrong("model", model, "a model of torch or transformers"))
    forwards, hooks = [], []
    try:
        if compat.has_packed_linear():
            wrappers = layers_by_base(model)
            for module in model.modules():
                if type(module) is nn.Linear and "forward" not in vars(module):
                    forward = _Forward(module, wrappers.get(module))
                    if forward.can_pack(module.weight):
                        forward.get_packed(module.weight)
                        module.forward = forward  # type: ignore[method-assign, assignment]
                        forwards.append(forward)
        for part, own in _by_model(model, forwards).items():
            hooks.append(part.register_forward_pre_hook(_Watch(own), with_kwargs=True))
        yield sum(forward.module.weight.nbytes for forward in forwards)
    finally:
        for hook in hooks:
            hook.remove()
        for forward in forwards:
            if vars(forward.module).get("forward") is forward:
                del forward.module.forward


def _by_model(model: nn.Module, forwards: list[_Forward]) -> dict[nn.Module, list[_Forward]]:
    """The forwards by the innermost model of transformers around them, because that one is called
    even if another part generates. Without any it is `model`."""
    inner = (x for x in model.modules() if isinstance(x, PreTrainedModel))
    owners = {part: owner for owner in (model, *inner) for part in owner.modules()}
    groups: dict[nn.Module, list[_Forward]] = {}
    for forward in forwards:
        groups.setdefault(owners[forward.module], []).append(forward)
    return groups


def _begins_text(arguments: Iterable[Any]) -> bool:
    """Whether a model that is called with these arguments has no earlier tokens in a cache."""
    cache = next((x for x in arguments if isinstance(x, Cache)), None)
    if cache is None:
        return True
    try:
        return cache.get_seq_length() == 0
    except ValueError:  # a cache of recurrent layers only counts no tokens
        return not cache.has_previous_state()


class _Watch:
    """A hook of a model that drops outdated copies of its weights when a text begins."""

    def __init__(self, forwards: list[_Forward]) -> None:
        self.forwards = forwards

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling() and _begins_text((*args, *kwargs.values())):
            for forward in self.forwards:
                forward.drop_outdated()


class _Forward:
    """The forward of a linear module, with its weight in oneDNN's layout. `wrapper`: PEFT's layer
    around the module, if any."""

    def __init__(self, module: nn.Linear, wrapper: Any = None) -> None:
        self.module, self.wrapper = module, wrapper
        self._packed_from: tuple[Any, ...] | None = None
        self._packed: Tensor | None = None
        self._sum = 0
        self._original = module.weight

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.module.weight, self.module.bias
        few = x.dtype == torch.bfloat16 and x.numel() <= FEW * x.shape[-1]
        wants_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        if not few or wants_gradient or torch.compiler.is_compiling() or not self.can_pack(weight):
            return nn.functional.linear(x, weight, bias)
        return compat.packed_linear(x, self.get_packed(weight), bias)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_packed_from": None, "_packed": None}

    @staticmethod
    def can_pack(weight: Tensor) -> bool:
        """Whether a weight is a plain bfloat16 parameter on the CPU that counts its changes."""
        plain = type(weight) is nn.Parameter and not weight.is_inference()
        return plain and weight.dtype == torch.bfloat16 and weight.is_cpu

    def get_packed(self, weight: Tensor) -> Tensor:
        """The weight in oneDNN's layout, as it is now."""
        of: tuple[Any, ...] = id(weight), weight.data_ptr(), compat.tensor_version(weight)
        if self.wrapper is not None:
            of += merged_state(self.wrapper)
        packed = self._packed  # another thread may drop it
        if packed is None or self._packed_from != of:
            with torch.no_grad():
                packed = compat.pack_linear_weight(weight.detach())
            self._sum = weight_sum(weight)
            self._packed_from = of
            self._original = weight  # kept alive, so that its id is not reused
            self._packed = packed
        return packed

    def drop_outdated(self) -> None:
        """Drop the copy if a write that torch does not count has changed the weight."""
        if self._packed is not None and self._sum != weight_sum(self._original):
            self._packed = None
