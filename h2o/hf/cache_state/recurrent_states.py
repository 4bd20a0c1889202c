"""Access to the convolution and recurrent states that transformers' own layers hold.

Their size does not depend on the length of the text, and they are never evicted. A layer may have
several states of each kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from h2o.hf.cache_state.slot_layout import writable

_NAMES = ("conv", "recurrent")


def tensors_of(layer: Any) -> dict[str, Tensor]:
    """States by name, such as "conv.0"; empty before the prompt. Nothing is copied."""
    return {
        f"{name}.{index}": state
        for name in _NAMES
        for index, state in getattr(layer, f"{name}_states").items()
        if getattr(layer, f"is_{name}_states_initialized")[index]
    }


def numbers_of(layer: Any) -> dict[str, Any]:
    """Numbers that belong to the tensors, for JSON."""
    return {
        "conv_kernel_size": list(layer.conv_kernel_size.values()),
        "has_previous_state": list(layer.has_previous_state.values()),
    }


def put(layer: Any, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Give a layer the states of another layer of the same kind, without copying the tensors.

    Columns that the other layer recorded of its past are dropped, unless this layer records too."""
    forget(layer)
    if not layer.record_past:
        tensors = _without_past(tensors, numbers)
    for name, state in tensors.items():
        name, _, index = name.partition(".")
        getattr(layer, f"{name}_states")[int(index)] = state
        getattr(layer, f"is_{name}_states_initialized")[int(index)] = True
        layer.dtype, layer.device = state.dtype, state.device
    for name, values in numbers.items():
        getattr(layer, name).update(enumerate(values))


def _without_past(tensors: dict[str, Tensor], numbers: dict[str, Any]) -> dict[str, Tensor]:
    """Cut or pad convolution states to the columns that the next step needs.

    A layer that records its past keeps more columns, or fewer after a short prompt."""
    widths = {f"conv.{index}": width for index, width in enumerate(numbers["conv_kernel_size"])}
    return {
        name: nn.functional.pad(x, (widths[name] - x.shape[-1], 0)) if name in widths else x
        for name, x in tensors.items()
    }


def forget(layer: Any) -> None:
    """Drop the states, because the next prompt may have another batch size or device."""
    for index in range(layer.number_of_states):
        layer.has_previous_state[index] = False
        layer.conv_kernel_size[index] = None
        for name in _NAMES:
            getattr(layer, f"{name}_states")[index] = None
            getattr(layer, f"is_{name}_states_initialized")[index] = False
    layer.dtype = layer.device = None


def each(layer: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Apply a function to every state [B, ...]."""
    put(layer, {name: change(x) for name, x in tensors_of(layer).items()}, numbers_of(layer))


def make_writable(layer: Any) -> None:
    """Copy states created under `torch.inference_mode`, because transformers writes to them."""
    if any(x.is_inference() for x in tensors_of(layer).values()):
        each(layer, writable)


def take_row(layer: Any, row: int, source: Any, rows: int) -> None:
    """Overwrite row `row` of `rows` with the only row of another layer, in place."""
    taken = _without_past(tensors_of(source), numbers_of(source))
    if not tensors_of(layer):
        empty = {name: x.new_zeros(rows, *x.shape[1:]) for name, x in taken.items()}
        put(layer, empty, numbers_of(source))
    make_writable(layer)
    for name, state in tensors_of(layer).items():
        state[row].copy_(taken[name][0])


def bytes_of(layer: Any) -> int:
    """Bytes of all states."""
    return sum(x.nbytes for x in tensors_of(layer).values())
