"""The operands of a call without the offsets of its keys, for kernels that know no offsets.

A softmax does not change if the same number is added to all of its logits. If an offset is
subtracted from the new keys too, all logits of a query are lower by its product with the offset,
and kernels can treat what is stored as keys.

The new keys are rounded to their dtype once more. The bytes that are stored may therefore differ by
one from those of other backends in float16 and bfloat16.

Shape letters as in `h2o.ops`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from h2o.quantization import set_offsets, subtract


class Places(NamedTuple):
    """Where an operation has these operands."""

    keys: int
    slots: int
    logits: tuple[int, ...] = ()
    """Operands that, if given and not 0, make logits more than sums of products, or share a softmax
    with them: softcap, sinks, angles, and log sums"""


PLACES = {
    "attend": Places(1, 4, (8, 10, 11)),
    "evict": Places(0, 4),
    "step": Places(1, 4, (7, 9, 11)),
    "simulate": Places(1, 14, (10, 15)),
}
"""The place of each operand, and of the offsets themselves in `simulate`."""


def without_offsets(name: str, operands: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The operands with centered keys and without offsets; None if the operation cannot do without.

    They must have been checked, because `evict` sets the offsets of empty rows first.
    """
    places = PLACES[name]
    slots = operands[places.slots]
    given = (operands[i] for i in places.logits)
    if any(isinstance(x, torch.Tensor) or x for x in given):
        return None
    keys, changed = operands[places.keys], [*operands]
    if name == "simulate":
        offsets, changed[places.slots] = slots, None
    else:
        rows = None if slots.rows is None else slots.rows.long()
        offsets = slots.offsets if rows is None else slots.offsets[rows]
        if name == "evict":
            seen = slots.seen_tokens if rows is None else slots.seen_tokens[rows]
            set_offsets(offsets, seen == 0, keys, operands[3])
            if rows is not None:
                slots.offsets[rows] = offsets
        changed[places.slots] = slots._replace(offsets=None)
    changed[places.keys] = subtract(keys, offsets).to(keys.dtype)
    return tuple(changed)


def has_offsets(name: str, operands: tuple[Any, ...]) -> bool:
    """Whether a call has offsets."""
    place = operands[PLACES[name].slots]
    if isinstance(place, torch.Tensor) or place is None:
        return place is not None
    return place.offsets is not None
