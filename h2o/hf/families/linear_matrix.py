"""The matrix of a linear module, even one that is quantized, offloaded or has an adapter.

The matrix is recovered by feeding the identity through the module. This takes as long as hundreds
of tokens, so the result is remembered together with everything that it depends on: the tensors of
the module with their version counters, and every other attribute, such as an adapter's scale and
the name of the active adapter. If any of these has changed, the matrix is recovered again. Writes
through a parameter's `.data` go unnoticed, except in a plain linear module with `fresh`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from h2o import compat
from h2o.compat_wrappers import is_offloaded
from h2o.hf.families.tagged_tensor import plain

Made = TypeVar("Made")


class _Remembered(NamedTuple):
    state: list[Any]
    tensors: list[Tensor]
    """The tensors in `state`, kept alive so that no other object gets their ids"""
    result: Any


_remembered: weakref.WeakKeyDictionary[nn.Module, _Remembered] = weakref.WeakKeyDictionary()


def apply_to_matrix(
    module: nn.Module,
    width: int,
    like: Tensor,
    make: Callable[[Tensor, bool], Made],
    *,
    fresh: bool = False,
) -> Made:
    """Apply `make` to the matrix [outputs, width] of a module, or return the remembered result.

    Args:
        like: a tensor with the dtype and device that the matrix gets. The matrix has no gradient.
        make: called with the matrix and with whether the result will be remembered. It must be the
            same for every call with a module.
        fresh: for a plain linear module, do not use a remembered result.
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
    remembered = _remembered.get(module)
    if remembered is None or remembered.state != state or (fresh and plain_weight is not None):
        remembered = _remembered[module] = _Remembered(state, tensors, make(matrix(), True))
    result: Made = remembered.result
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
