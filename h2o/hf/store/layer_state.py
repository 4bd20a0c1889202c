"""`State`: the state of a cache's layer between forward passes, to be extracted and restored.

Saving and cropping a cache rely on it, so new attributes of a layer need to be added only here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o import ops
from h2o.hf.families.layer_kinds import has_states, kind_of
from h2o.hf.store import states
from h2o.hf.store.slot_layout import Capacity, sizes

_NUMBERS = (
    "seen", "longest", "prompt_columns", "row_size", "unscored", "raised", "floored", "part",
    "waits_for_pins",
)  # fmt: skip
"""Attributes of an `H2OLayer` to save, in addition to its slots, their capacity and the trace."""

_SLOTS, _STATES = "slots.", "states."  # prefixes of the names of tensors

_TRACE = {"trace.real": "real", "trace.left": "evicted_after"}
"""Names of tensors in files, and the attributes of a `Trace` that they hold."""


class State(NamedTuple):
    """The state of one layer. Tensors are not copied, so a forward pass may write to them."""

    tensors: dict[str, Tensor]
    """Tensors by name; empty before the prompt"""
    numbers: dict[str, Any]
    """Plain numbers and lists that JSON supports"""

    def each(self, change: Callable[[Tensor], Tensor]) -> State:
        """Apply a function to every tensor."""
        return State({name: change(x) for name, x in self.tensors.items()}, self.numbers)


def layer_state(layer: Any) -> State:
    """Extract the state of a layer of an `H2OCache`, either an `H2OLayer` or transformers' own."""
    state = keys_state(layer)
    if has_states(layer):
        state.tensors.update(_add_prefix(_STATES, states.tensors_of(layer)))
        state.numbers["states"] = states.numbers_of(layer)
    return state


def keys_state(layer: Any) -> State:
    """Extract the state of a layer without its convolution and recurrent states."""
    if kind_of(layer) in ("states", "none"):
        return State({}, {})
    if kind_of(layer) in ("sliding", "cross"):
        tensors = {"keys": layer.keys, "values": layer.values} if layer.is_initialized else {}
        numbers = {"cumulative_length": layer.cumulative_length} if layer.is_sliding else {}
        return State(tensors, numbers)
    tensors = {}
    if layer.slots is not None:
        tensors = _add_prefix(_SLOTS, layer.slots._asdict())
    if layer.trace is not None:
        trace = {name: getattr(layer.trace, field) for name, field in _TRACE.items()}
        tensors |= _add_prefix("", trace)
    numbers = {name: getattr(layer, name) for name in _NUMBERS}
    return State(tensors, numbers | {"widest": layer.capacity.widest})


def restore(layer: Any, state: State) -> None:
    """Restore the result of `layer_state` in a layer of the same kind and settings.

    The layer uses the tensors without copying them. A layer of transformers' own must be new.

    Raises:
        KeyError: a tensor or number is missing.
        TypeError: a tensor is unknown.
    """
    if has_states(layer):
        states.put(layer, _strip_prefix(_STATES, state.tensors), state.numbers["states"])
    restore_keys(layer, state)


def restore_keys(layer: Any, state: State) -> None:
    """Restore the result of `keys_state`. Convolution and recurrent states are not touched."""
    if kind_of(layer) in ("states", "none"):
        return
    if kind_of(layer) in ("sliding", "cross"):
        if "keys" in state.tensors:
            layer.update(state.tensors["keys"], state.tensors["values"])
        if layer.is_sliding:
            layer.cumulative_length = state.numbers["cumulative_length"]
        return
    layer.empty()
    fields = _strip_prefix(_SLOTS, state.tensors)
    if fields and not layer.form.has_values:
        fields["values"] = None
    slots = ops.Slots(**fields) if fields else None
    if slots is not None:  # the next operation may be a step, which does not open its device
        ops.open_device(slots.keys)
    layer.set_slots(slots, Capacity(list(state.numbers["widest"]), sizes(slots) if slots else []))
    for name in _NUMBERS:
        setattr(layer, name, state.numbers[name])
    layer.row_size, layer.part = tuple(layer.row_size), tuple(layer.part)
    if layer.trace is not None:
        for name in _TRACE.keys() & state.tensors.keys():
            setattr(layer.trace, _TRACE[name], state.tensors[name])


def _add_prefix(prefix: str, tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {prefix + name: x for name, x in tensors.items() if isinstance(x, torch.Tensor)}


def _strip_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
