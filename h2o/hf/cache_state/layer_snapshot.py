"""`Snapshot`: what a layer of a cache remembers between forward passes, to be taken and restored.

Saving and cropping a cache rely on it. What a cache knows of the text is in its state
(`h2o.hf.conversation.state`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o import ops
from h2o.hf.cache_state import recurrent_states
from h2o.hf.cache_state.slot_layout import Capacity, sizes
from h2o.hf.model_traits.layer_kinds import free_keys_before_window, has_states, kind_of

_SLOTS, _STATES = "slots.", "states."  # prefixes of the names of tensors

_TRACE = {"trace.real": "real", "trace.left": "evicted_after"}
"""Names of tensors in files, and the attributes of a `Trace` that they hold."""


class Snapshot(NamedTuple):
    """A snapshot of one layer. Tensors are not copied, so a forward pass may write to them."""

    tensors: dict[str, Tensor]
    """Tensors by name; empty before the prompt"""
    numbers: dict[str, Any]
    """Plain numbers and lists that JSON supports"""

    def each(self, change: Callable[[Tensor], Tensor]) -> Snapshot:
        """Apply a function to every tensor."""
        return Snapshot({name: change(x) for name, x in self.tensors.items()}, self.numbers)


def take_snapshot(layer: Any, *, states: bool = True) -> Snapshot:
    """Take the snapshot of a layer of an `H2OCache`, either an `H2OLayer` or transformers' own.

    `states`: include convolution and recurrent states."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    if kind_of(layer) == "sliding":
        if layer.is_initialized:
            tensors = {"keys": layer.keys, "values": layer.values}
        numbers["cumulative_length"] = layer.cumulative_length
    elif kind_of(layer) == "h2o":
        if layer.slots is not None:
            tensors = _add_prefix(_SLOTS, layer.slots._asdict())
        if layer.trace is not None:
            trace = {name: getattr(layer.trace, field) for name, field in _TRACE.items()}
            tensors |= _add_prefix("", trace)
        numbers = {**layer.facts._asdict(), "widest": layer.capacity.widest}
    if states and has_states(layer):
        tensors |= _add_prefix(_STATES, recurrent_states.tensors_of(layer))
        numbers["states"] = recurrent_states.numbers_of(layer)
    return Snapshot(tensors, numbers)


def restore(layer: Any, snapshot: Snapshot, *, states: bool = True) -> None:
    """Restore a result of `take_snapshot` in a layer of the same kind and settings.

    The layer uses the tensors without copying them. A layer of transformers' own must be new.
    `states` is as for `take_snapshot`.

    Raises:
        KeyError: a tensor or number is missing.
        TypeError: a tensor is unknown.
    """
    if states and has_states(layer):
        recurrent_states.put(
            layer, _strip_prefix(_STATES, snapshot.tensors), snapshot.numbers["states"]
        )
    if kind_of(layer) == "sliding":
        if "keys" in snapshot.tensors:
            layer.update(snapshot.tensors["keys"], snapshot.tensors["values"])
            free_keys_before_window(layer)  # a layer that recorded its last pass had more keys
        layer.cumulative_length = snapshot.numbers["cumulative_length"]
    elif kind_of(layer) == "h2o":
        _restore_slots(layer, snapshot)


def _restore_slots(layer: Any, snapshot: Snapshot) -> None:
    layer.empty()
    fields = _strip_prefix(_SLOTS, snapshot.tensors)
    if fields and not layer.variant.has_values:
        fields["values"] = None
    slots = ops.Slots(**fields) if fields else None
    if slots is not None:  # the next operation may be a step, which does not open its device
        ops.open_device(slots.keys)
    layer.set_slots(
        slots, Capacity(list(snapshot.numbers["widest"]), sizes(slots) if slots else [])
    )
    numbers = {name: snapshot.numbers[name] for name in layer.facts._fields}
    layer.facts = layer.facts._replace(  # JSON knows no tuples
        **{name: tuple(x) if isinstance(x, list) else x for name, x in numbers.items()}
    )
    if layer.trace is not None:
        for name in _TRACE.keys() & snapshot.tensors.keys():
            setattr(layer.trace, _TRACE[name], snapshot.tensors[name])


def _add_prefix(prefix: str, tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {prefix + name: x for name, x in tensors.items() if isinstance(x, torch.Tensor)}


def _strip_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
