"""`TaggedTensor`: keys marked with the layer of the cache that they come from.

If the model computes with a key before it attends (it expands a latent, or moves the key to another
device), the mark has to pass to the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from h2o.compat import as_plain_tensors


class TaggedTensor(Tensor):
    """A tensor whose attributes pass to every tensor that is computed from it."""

    @staticmethod
    def of(tensor: Tensor, /, **attributes: Any) -> Tensor:
        """A view of a tensor with these attributes."""
        return _tag(tensor[:], attributes)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        attributes = next(_find_attributes(args), {})
        made = function(*_plain(args), **(kwargs or {}))  # may dispatch to a weight's class
        if isinstance(made, Tensor):
            return _tag(made, attributes)
        if type(made) in (tuple, list):
            return type(made)(_tag(x, attributes) if isinstance(x, Tensor) else x for x in made)
        return made


def _find_attributes(args: Any) -> Iterator[dict[str, Any]]:
    for x in args:
        if isinstance(x, TaggedTensor):
            yield vars(x)
        elif isinstance(x, tuple | list):
            yield from _find_attributes(x)


def _plain(x: Any) -> Any:
    if isinstance(x, TaggedTensor):
        return plain(x)
    return type(x)(map(_plain, x)) if type(x) in (tuple, list) else x


def _tag(tensor: Tensor, attributes: dict[str, Any]) -> Tensor:
    traced = tensor if isinstance(tensor, TaggedTensor) else tensor.as_subclass(TaggedTensor)
    vars(traced).update(attributes)
    return traced


def plain(tensor: Tensor) -> Tensor:
    """The tensor without its attributes."""
    with as_plain_tensors():
        return tensor.as_subclass(Tensor)
