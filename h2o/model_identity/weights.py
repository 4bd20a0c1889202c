"""The weights of a model that take part in a forward pass now, by the names that they have in a
model without wrappers and adapters.

PEFT and torch.compile wrap models, and PEFT also layers, which renames what they hold. A weight of
an adapter counts where the adapter is at work. One that is switched off does not count, nor does
one that was merged, which is in the weights of its layer then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER = "*"
"""Begins the segment of a weight's name that stands for the name of its adapter."""


class Weight(NamedTuple):
    """A parameter, or a buffer that is saved with the parameters."""

    name: str
    tensor: Any
    is_cut: bool
    """Whether this process has a part of it only and no tensor that could tell"""
    scale: float
    """Factor of an adapter, or 1"""


def weights_of(model: Any) -> Iterator[Weight]:
    """The weights of a model, or of one of its modules, by ascending name. Those that accelerate
    keeps on a disk are read one after the other."""
    from h2o.compat_wrappers import (
        device_mesh,
        has_adapters,
        innermost_model,
        saved_tensors,
        virtual_tokens,
    )

    places: dict[str, tuple[Any, str, float]] = {}
    for number, tokens in enumerate(virtual_tokens(model)):
        for name, module in tokens.named_modules():
            for own, _ in saved_tensors(module):
                places[_join(_segment(number), name, own)] = module, own, 1.0
    model = innermost_model(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    adapted = {name: module for name, module in modules.items() if has_adapters(module)}
    for name, module in modules.items():
        for own, _ in saved_tensors(module):
            at_work = _at_work(_join(name, own), adapted)
            if at_work is not None:
                places[at_work[0]] = module, own, at_work[1]
    for name, (module, own, scale) in sorted(places.items()):
        yield Weight(name, _load(module, own), device_mesh(module) is not None, scale)


def is_of_adapter(name: str) -> bool:
    """Whether a weight of that name belongs to an adapter."""
    return any(part.startswith(ADAPTER) for part in name.split("."))


def plain_tensors(name: str, value: Any, *, whole: bool) -> Iterator[tuple[str, Tensor]]:
    """A tensor, or those inside of a quantized one, by name.

    Args:
        whole: of a tensor that is cut over processes give all of it, for which all of them have to
            call this; otherwise the part that is here.
    """
    import torch

    if hasattr(value, "full_tensor"):
        yield name, value.full_tensor() if whole else value.to_local()
    elif hasattr(value, "__tensor_flatten__"):  # torchao's and quanto's subclasses
        inner, _ = value.__tensor_flatten__()
        for part in sorted(inner):
            yield from plain_tensors(f"{name}.{part}", getattr(value, part), whole=whole)
    elif isinstance(value, torch.Tensor):
        yield name, value


def is_cut(weight: Weight) -> bool:
    """Whether other processes have other parts of it."""
    return weight.is_cut or hasattr(weight.tensor, "full_tensor")


def _segment(number: int) -> str:
    """Stands for the name of the first adapter at work, the second one and so on."""
    return ADAPTER if number == 0 else f"{ADAPTER}{number + 1}"


def _join(*names: str) -> str:
    return ".".join(filter(None, names))


def _at_work(name: str, adapted: Mapping[str, Any]) -> tuple[str, float] | None:
    """The name without wrappers and the factor; None for a weight of an adapter not at work."""
    from h2o.compat_wrappers import ADAPTED, adapter_fields, adapter_scale, adapters_at_work

    parts = name.split(".")
    kept, scale = list(parts), 1.0
    for index, part in enumerate(parts):
        layer = adapted.get(".".join(parts[:index]))
        if layer is None:
            continue
        if part in ADAPTED:
            kept[index] = ""
        elif part in adapter_fields(layer):
            at_work = adapters_at_work(layer)
            adapter = next((x for x in parts[index + 1 :] if x in at_work), None)
            if adapter is None:
                return None
            kept[parts.index(adapter, index + 1)] = _segment(at_work.index(adapter))
            scale *= adapter_scale(layer, adapter)
    return _join(*kept), scale


def _load(module: Any, name: str) -> Any:
    """A parameter or buffer, or what accelerate puts in its place for the time of a pass."""
    import torch

    from h2o.compat_wrappers import accelerate_hooks

    value = getattr(module, name).detach()
    for one in accelerate_hooks(module) if value.is_meta else ():
        weights = getattr(one, "weights_map", None)
        if weights is not None:
            return torch.as_tensor(weights[name], device="cpu")
    return value
