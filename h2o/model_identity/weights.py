"""The weights that a model currently uses, under their names without wrappers and adapters.

The fingerprint of a model is computed from them (`h2o.model_identity`). PEFT and torch.compile wrap
models, and PEFT also wraps layers, which renames their weights. The weights of an adapter count
while the adapter is active. They do not count while it is disabled. Nor do they count once it is
merged, because the layer's own weights then contain it.

A sample of a few numbers of the weights recognizes them in any dtype (`sample_tensors`,
`WeightsOrigin`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn

TOLERANCE = 0.005
"""Largest relative distance of two samples of weights that are considered equal: more than rounding
to float16, bfloat16 and four digits causes (0.3%), less than training causes."""

NUMBERS = 6
"""Number of elements of a weight that samples and records have."""

SAMPLED = 24
"""Number of weights that a sample has elements of, and as many of adapters."""

ADAPTER = "*"
"""First character of the segment that replaces the adapter's name in the name of a weight."""


class Weight(NamedTuple):
    """A parameter, a persistent buffer, or a tensor that a quantized module packs."""

    name: str
    tensor: Any
    is_shard: bool
    """Whether the weight is cut over several processes, and the tensor has the part of this one"""
    scale: float
    """Scaling factor of the adapter, or 1."""


class Place(NamedTuple):
    """Where a weight is. Nothing is read from disk or dequantized before `read`."""

    module: Any
    own: str
    """The weight's name in the module"""
    scale: float = 1.0
    """Scaling factor of the adapter, or 1."""
    is_packed: bool = False

    def read(self, name: str) -> Weight:
        """The weight that is called `name`. A packed tensor is dequantized. If accelerate offloads
        a weight, its value is the one that it has during a pass."""
        import torch

        from h2o.compat_wrappers import accelerate_hooks, own_tensors

        module, own, scale, is_packed = self
        value: Any = own_tensors(module)[1][own] if is_packed else getattr(module, own)
        value = value.dequantize() if value.is_quantized else value.detach()
        for one in accelerate_hooks(module) if value.is_meta else ():
            if (weights := getattr(one, "weights_map", None)) is not None:
                value = torch.as_tensor(weights[own], device="cpu")
                break
        return Weight(name, value, hasattr(value, "full_tensor"), scale)


def weights_of(model: Any) -> Iterator[Weight]:
    """Yield the weights of a model, sorted by name. Weights that accelerate keeps on disk are read
    one at a time."""
    return (place.read(name) for name, place in sorted(places_of(model).items()))


def weights_inside(module: Any) -> Iterator[Weight]:
    """Yield the weights of a module that is part of a model, and so has no wrappers, as
    `weights_of`."""
    return (place.read(name) for name, place in sorted(places_inside(module).items()))


def places_of(model: Any) -> dict[str, Place]:
    """The places of a model's weights, by name."""
    from h2o.compat_wrappers import innermost_model, own_tensors, prompt_encoders

    places: dict[str, Place] = {}
    for number, tokens in enumerate(prompt_encoders(model)):
        for name, module in tokens.named_modules():
            for own in own_tensors(module)[0]:
                places[_join(_segment(number), name, own)] = Place(module, own)
    return places | places_inside(innermost_model(model))


def places_inside(model: Any) -> dict[str, Place]:
    """The places of the weights of all modules by their names without adapters."""
    from h2o.compat_wrappers import adapter_layers, own_tensors

    places: dict[str, Place] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    adapted = adapter_layers(modules)
    for name, module in modules.items():
        saved, packed = own_tensors(module)
        for own in {**saved, **packed}:
            at_work: tuple[str, float] | None = f"{name}.{own}" if name else own, 1.0
            if adapted:
                at_work = _name_and_scale(at_work[0], adapted)
            if at_work is not None:
                places[at_work[0]] = Place(module, own, at_work[1], own in packed)
    return places


def is_of_adapter(name: str) -> bool:
    """Whether the weight with this name belongs to an adapter."""
    return name.startswith(ADAPTER) or f".{ADAPTER}" in name


def plain_tensors(name: str, value: Any, *, whole: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor, or the tensors inside a quantized one, by name.

    Args:
        whole: if a tensor is cut over processes, yield all of it, which all processes must call
            together. Otherwise yield the part of this process.
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


def _segment(number: int) -> str:
    """Replacement for the name of active adapter number `number`, from 0."""
    return ADAPTER if number == 0 else f"{ADAPTER}{number + 1}"


def _join(*names: str) -> str:
    return ".".join(filter(None, names))


def _name_and_scale(name: str, adapted: Mapping[str, Any]) -> tuple[str, float] | None:
    """(name without wrappers, scale) of a weight; None if it belongs to an inactive adapter."""
    from h2o.compat_wrappers import ADAPTED, adapter_fields, adapter_scale, applied_adapters

    parts = name.split(".")
    kept, scale = list(parts), 1.0
    for index, part in enumerate(parts):
        layer = adapted.get(".".join(parts[:index]))
        if layer is None:
            continue
        if part in ADAPTED:
            kept[index] = ""
        elif part in adapter_fields(layer):
            at_work = applied_adapters(layer)
            adapter = next((x for x in parts[index + 1 :] if x in at_work), None)
            if adapter is None:
                return None
            kept[parts.index(adapter, index + 1)] = _segment(at_work.index(adapter))
            scale *= adapter_scale(layer, adapter)
    return _join(*kept), scale


# ---- a few numbers, the same in any dtype ----------------------------------------------------


def sample_tensors(places: Mapping[str, Place]) -> dict[str, Any]:
    """A few numbers of a few weights: tensors on their devices, for which nothing waits.

    Only the weights that are in the sample are read, up to `SAMPLED` of the model's own and up to
    `SAMPLED` of its adapters', evenly spaced by name.
    """
    own: list[str] = []
    adapters: list[str] = []
    for name in sorted(places):
        (adapters if is_of_adapter(name) else own).append(name)
    numbers = {}
    for names in (own, adapters):
        for name in names[:: max(1, -(-len(names) // SAMPLED))]:
            if (tensor := _sample(places[name].read(name))) is not None:
                numbers[name] = tensor
    return numbers


def rounded(numbers: Any) -> list[float]:
    """The numbers of a tensor, rounded to four digits."""
    return [float(f"{number:.4g}") for number in numbers.tolist()]


def first_difference(
    here: Mapping[str, Weight], weights: Mapping[str, Sequence[float]]
) -> str | None:
    """The first difference between the weights that are here and a sample `weights` of others, or
    None."""
    for name, wanted in weights.items():
        if is_of_adapter(name) and name not in here:
            return f"its adapter's {name} is not active in this model"
        values = numbers_of(here[name], len(wanted)) if name in here else None
        if values is None:  # quantized or cut weights cannot be compared
            continue
        if apart := relative_distance(values, wanted):
            return f"the shapes are equal, but the weights of {name} differ by {apart:.1%}"
    added = next(filter(is_of_adapter, here), None)
    if added is not None and not any(map(is_of_adapter, weights)):
        return f"this model has an active adapter that the other did not have: {added}"
    return None


def relative_distance(values: Sequence[float], wanted: Sequence[float]) -> float:
    """Relative distance of two samples; 0 if it is within the tolerance."""
    apart = math.dist(values, wanted) / (math.hypot(*wanted) or 1.0)
    return 0.0 if apart <= TOLERANCE else apart


def numbers_of(weight: Weight, numbers: int = NUMBERS) -> list[float] | None:
    """Evenly spaced numbers of a weight, `rounded`; None as for `_sample`."""
    tensor = _sample(weight, numbers)
    return None if tensor is None else rounded(tensor)


def _sample(weight: Weight, numbers: int = NUMBERS) -> Any:
    """Evenly spaced numbers of a weight as a float32 tensor; None if the weight is quantized, cut
    or not in memory."""
    tensor = weight.tensor
    if weight.is_shard or not tensor.dtype.is_floating_point or tensor.element_size() < 2:
        return None
    if tensor.is_meta or tensor.numel() < numbers or hasattr(tensor, "__tensor_flatten__"):
        return None
    step = tensor.numel() // numbers
    return weight.scale * tensor.reshape(-1)[step // 2 : step * numbers : step].float()


class WeightsOrigin:
    """Recognizes the weights that computed the keys of a cache.

    Two fine-tunes of a model have the same config, so nothing else tells the caches of one from
    those of the other. A sample of the attention module of one layer is taken when a text begins,
    and compared if a later pass comes from another module. Only then does the CPU wait for a
    device.
    """

    def __init__(self) -> None:
        self.module: Callable[[], Any] = _no_module
        """A weak reference to the module that was checked last, since a cache must not keep a model
        alive"""
        self._sample: dict[str, Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"module": _no_module, "_sample": self._sample}

    def check(self, module: nn.Module, *, begins: bool) -> None:
        """Check the module of a forward pass, if it is another one than `self.module()`, or if the
        pass `begins` a text.

        Raises:
            ValueError: the module's weights differ from those of the module that began the text.
        """
        if begins or self._sample is None:
            self._sample = sample_tensors(places_inside(module))
            self.module = weakref.ref(module)
            return
        here = {x.name: x for x in weights_inside(module)}
        if reason := first_difference(here, {x: rounded(y) for x, y in self._sample.items()}):
            raise ValueError(
                f"another model computed the keys in this cache: {reason} in the first layer with "
                "a budget. Use a new H2OCache for each model"
            )
        self.module = weakref.ref(module)


def _no_module() -> None:
    """What a reference to no module returns."""
