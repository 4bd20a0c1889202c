"""The matrix of a linear module, also of one that is quantised, offloaded or has an adapter.

Such a module is asked for it: what it makes of the unit vectors are its columns. That takes as long
as hundreds of tokens do, so the answer is remembered, beside all that it depends on: the tensors of
the module, each with the number of its last change, and everything else that its parts are told by
(an adapter's scale, which one is active). Where any of it has changed the module is asked again.
What is written in place through a parameter's `.data` is not seen, as autograd does not see it. The
answer takes the memory of a plain matrix.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from h2o.hf.traced_tensor import plain

__all__ = ["matrix_of"]


class _Asked(NamedTuple):
    state: list[Any]
    tensors: list[Tensor]
    """Of `state`, which knows them by their ids: as long as they live no other has one of these"""
    matrix: Tensor


_asked: weakref.WeakKeyDictionary[nn.Module, _Asked] = weakref.WeakKeyDictionary()


def matrix_of(module: nn.Module, width: int, like: Tensor) -> Tensor:
    """[outputs, width], without gradient, of the dtype and device of a tensor."""
    if type(module) is nn.Linear and module.weight.is_floating_point():
        weight = module.weight.detach()
        if type(weight) is Tensor and not weight.is_meta and weight.device == like.device:
            return weight.to(like.dtype)
    if torch.compiler.is_compiling() or hasattr(module, "_hf_hook"):  # whose weights do not stay
        return _ask(module, width, like)
    tensors: list[Tensor] = []
    try:
        state = [like.dtype, like.device, width, *_state(module, tensors)]
    except RuntimeError:  # tensors of inference mode do not count their changes
        return _ask(module, width, like)
    asked = _asked.get(module)
    if asked is None or asked.state != state:
        asked = _asked[module] = _Asked(state, tensors, _ask(module, width, like))
    return asked.matrix


def _ask(module: nn.Module, width: int, like: Tensor) -> Tensor:
    unit_vectors = torch.eye(width, dtype=like.dtype, device=like.device)
    return plain(module(unit_vectors)).detach().to(like.dtype).T.contiguous()


def _state(value: Any, tensors: list[Tensor], within: tuple[nn.Module, ...] = ()) -> Iterator[Any]:
    """What differs from that of any other state of a module, as far as its attributes say.

    `tensors` are added to; `within`: the modules that the value is a part of.
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
        yield id(value), value.data_ptr(), value._version
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
