"""The effective weight of a linear module, even one that is quantized, offloaded or has an adapter.

It is computed by feeding the identity matrix through the module. This costs as much as a forward
pass over hundreds of tokens, so the result is cached together with everything that it depends on:
the tensors of the module with their version counters, and every other attribute, such as an
adapter's scale and the name of the active adapter. If any of these has changed, the weight is
computed again. Writes through a parameter's `.data` go unnoticed, except in a plain linear module
if the caller asks for a fresh result.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from h2o import compat
from h2o.compat_wrappers import is_offloaded
from h2o.hf.model_traits.tagged_tensor import plain

T = TypeVar("T")


class _CacheEntry(NamedTuple):
    state: list[Any]
    tensors: list[Tensor]
    """The tensors in `state`, kept alive so that no other object gets their ids"""
    result: Any


_cache: weakref.WeakKeyDictionary[nn.Module, _CacheEntry] = weakref.WeakKeyDictionary()


def apply_to_weight(
    module: nn.Module,
    width: int,
    like: Tensor,
    make: Callable[[Tensor, bool], T],
    *,
    fresh: bool = False,
) -> T:
    """Apply `make` to the weight [outputs, width] of a module, or return the cached result.

    Args:
        like: a tensor with the dtype and device that the weight gets. The weight has no gradient.
        make: called with the weight and with whether the result will be cached. It must be the
            same for every call with a module.
        fresh: for a plain linear module, do not use a cached result.
    """
    plain_weight = _weight(module, like)

    def matrix() -> Tensor:
        if plain_weight is None:
            return _compute_matrix(module, width, like)
        return plain_weight.to(like.dtype)

    if torch.compiler.is_compiling() or is_offloaded(module):  # offloaded weights keep moving
        return make(matrix(), False)
    tensors: list[Tensor] = []
    parts = module if plain_weight is None else module.weight
    try:
        state = [like.dtype, like.device, width, *_state(parts, tensors)]
    except RuntimeError:  # inference tensors have no version counter
        return make(matrix(), False)
    entry = _cache.get(module)
    if entry is None or entry.state != state or (fresh and plain_weight is not None):
        entry = _cache[module] = _CacheEntry(state, tensors, make(matrix(), True))
    result: T = entry.result
    return result


def _weight(module: nn.Module, like: Tensor) -> Tensor | None:
    """The weight of a plain linear module on the device of `like`, or None for any other module."""
    if type(module) is nn.Linear and module.weight.is_floating_point():
        weight = module.weight.detach()
        if type(weight) is Tensor and not weight.is_meta and weight.device == like.device:
            return weight
    return None


def _compute_matrix(module: nn.Module, width: int, like: Tensor) -> Tensor:
    unit_vectors = torch.eye(width, dtype=like.dtype, device=like.device)
    return plain(module(unit_vectors)).detach().to(like.dtype).T.contiguous()


def _state(value: Any, tensors: list[Tensor], within: tuple[nn.Module, ...] = ()) -> Iterator[Any]:
    """Yield a fingerprint of a module's state, as far as its attributes show it.

    Tensors on the way are appended to `tensors`. `within`: the modules that contain the value, so
    that cycles end.
    """
    if isinstance(value, nn.Module):
        yield id(value)
        if value not in within:
            yield from _state(vars(value), tensors, (*within, value))
    elif isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        yield id(value)
        tensors.append(value)
        names, _ = value.__tensor_flatten__()
        for name in names:
            yield from _state(getattr(value, name), tensors, within)
    elif isinstance(value, Tensor):
        tensors.append(value)
        yield id(value), value.data_ptr(), compat.tensor_version(value)
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield name
            yield from _state(part, tensors, within)
    elif isinstance(value, list | tuple | set | frozenset):
        yield len(value)
        for part in value:
            yield from _state(part, tensors, within)
    else:
        yield value if isinstance(value, bool | int | float | str) else id(value)
