"""The operands of a call without the offsets of its keys, for kernels that know no offsets.

A softmax does not change if the same number is added to all of its logits. If an offset is
subtracted from the new keys too, all logits of a query are lower by its product with the offset,
and kernels can treat what is stored as keys.

The centered keys are rounded to the dtype of the call. In float16 and bfloat16 the bytes that are
stored may therefore differ by one from those of other backends.

Shape letters as in `h2o.ops`.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from h2o.backends.torch_backend import operation
from h2o.quantization import set_offsets, subtract

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
    """The operands with centered keys and without offsets; None if the operation needs the offsets.

    They must have been checked, because an operation that only stores keys sets the offsets of
    empty rows, which happens here.
    """
    at, changed = places(name), [*operands]
    given = (operands[at[x]] for x in OTHER_LOGITS if x in at)
    if any(isinstance(x, torch.Tensor) or x for x in given):
        return None
    place = at.get("keys", at.get("key"))
    assert place is not None
    keys = operands[place]
    if "slots" not in at:
        offsets, changed[at["offsets"]] = operands[at["offsets"]], None
    else:
        slots = operands[at["slots"]]
        rows = None if slots.rows is None else slots.rows.long()
        offsets = slots.offsets if rows is None else slots.offsets[rows]
        if "query" not in at:
            seen = slots.seen_tokens if rows is None else slots.seen_tokens[rows]
            set_offsets(offsets, seen == 0, keys, operands[at["mask"]])
            if rows is not None:
                slots.offsets[rows] = offsets
        changed[at["slots"]] = slots._replace(offsets=None)
    changed[place] = subtract(keys, offsets).to(keys.dtype)
    return tuple(changed)
