"""The operands of a call whose slots have offsets, for kernels that know none and no transform.

A softmax does not change if the same number is added to all of its logits. If an offset is
subtracted from the new keys too, all logits of a query are lower by its product with the offset.
Nor do products of queries and keys change if keys are divided by the smoothing and queries
multiplied by it, and if both are transformed (`h2o.quantization.hadamard`). So
kernels can treat what is stored as keys and values, if they get queries, new keys and new values
that are transformed likewise; their output is transformed back.

These are rounded to the dtype of the call. In float16 and bfloat16 the bytes that are stored may
therefore differ a little from those of other backends.

Shape letters as in `h2o.ops`.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from h2o.backends.torch_backend import operation
from h2o.quantization import hadamard, set_offsets, smoothed_query, to_stored

OTHER_LOGITS = ("softcap", "sink_logits", "table", "log_sums")
"""Operands that, if given and not 0, make logits more than products with keys, or make them share a
softmax with others"""


@functools.cache
def places(name: str) -> dict[str, int]:
    """The place of each operand of an operation, by name."""
    names = inspect.signature(operation(name)).parameters
    return {operand: place for place, operand in enumerate(names)}


def has_offsets(name: str, operands: tuple[Any, ...]) -> bool:
    """Whether a call has offsets, in its slots or as an operand."""
    at = places(name)
    if "slots" not in at:
        return operands[at["offsets"]] is not None
    slots = operands[at["slots"]]
    return slots is not None and slots.offsets is not None


def without_offsets(name: str, operands: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The operands without offsets and smoothing, with query, keys and values as the stored ones
    are; None if the operation needs the offsets. Call `restore_output` after the operation.

    They must have been checked, because an operation that only stores keys sets the offsets of
    empty rows, which happens here.
    """
    at, changed = places(name), [*operands]
    given = (operands[at[x]] for x in OTHER_LOGITS if x in at)
    if any(isinstance(x, torch.Tensor) or x for x in given):
        return None
    places_of_rows = [at[x] for x in ("keys", "key", "values", "value") if x in at]
    keys, values = (operands[place] for place in places_of_rows)
    if "slots" not in at:
        offsets, smoothing = (operands[at[x]] for x in ("offsets", "smoothing"))
        changed[at["offsets"]] = changed[at["smoothing"]] = None
    else:
        slots = operands[at["slots"]]
        rows = None if slots.rows is None else slots.rows.long()
        offsets = slots.offsets if rows is None else slots.offsets[rows]
        smoothing = slots.smoothing
        if rows is not None and smoothing is not None:
            smoothing = smoothing[rows]
        if "query" not in at:
            seen = slots.seen_tokens if rows is None else slots.seen_tokens[rows]
            set_offsets(offsets, seen == 0, keys, operands[at["mask"]])
            if rows is not None:
                slots.offsets[rows] = offsets
        changed[at["slots"]] = slots._replace(offsets=None, smoothing=None)
    for place, x in zip(places_of_rows, to_stored(keys, values, offsets, smoothing), strict=True):
        changed[place] = None if x is None else x.to(keys.dtype)
    if "query" in at:
        changed[at["query"]] = smoothed_query(operands[at["query"]], smoothing).to(keys.dtype)
    return tuple(changed)


def restore_output(name: str, operands: tuple[Any, ...]) -> None:
    """Transform the output of an operation back that ran with operands of `without_offsets`."""
    if (place := places(name).get("out")) is not None:
        operands[place].copy_(hadamard(operands[place]))
