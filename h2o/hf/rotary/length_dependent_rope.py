"""Rotary embeddings whose angles depend on the longest text in a forward pass (longrope, dynamic
NTK).

In `generate()` the longest row of a batch decides the angles of all rows. Code that batches texts
of several lengths therefore groups the texts that have the same angles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from h2o import compat
from h2o.hf.model_traits.wrappers import forward_accepts, unwrap

BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embedding whose angles depend on the length of the text."""


class LengthDependentRope:
    """How the angles of a model's rotary modules depend on the length of a text."""

    def __init__(self, model: Any) -> None:
        found = [
            (module, prefix, kind)
            for module in unwrap(model).modules()
            for prefix, kind in compat.rope_kinds(module).items()
            if kind in BY_LENGTH
        ]
        self._limits = [(kind, compat.original_length(x, prefix)) for x, prefix, kind in found]
        self._dynamic = [(x, prefix) for x, prefix, kind in found if kind == "dynamic"]

    def __bool__(self) -> bool:
        """Whether the angles depend on the length at all."""
        return bool(self._limits)

    def regime(self, length: int) -> tuple[int, ...]:
        """A key that is equal for lengths with the same angles; all 0 for short texts."""
        beyond = {"longrope": 1, "dynamic": length}
        return tuple(beyond[kind] if length > limit else 0 for kind, limit in self._limits)

    def groups(self, rows: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Group the rows that may share a forward pass. `lengths[row]` is a row's token count."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for row in rows:
            groups.setdefault(self.regime(lengths[row]), []).append(row)
        return list(groups.values())

    def forget(self) -> None:
        """Make the next forward pass choose its angles by its own length. Otherwise a dynamic
        embedding keeps the angles of the longest text that it has seen."""
        for module, prefix in self._dynamic:
            compat.forget_longest(module, prefix)


def positions_after(model: Any, seen: int, ids: Tensor) -> dict[str, Tensor]:
    """The keyword argument `position_ids` for ids [1, Q] that follow `seen` tokens, or {} for a
    model that does not accept it. Without it, some models (Bamba) count from 0 in each forward
    pass."""
    if not forward_accepts(model, "position_ids"):
        return {}
    numbers = torch.arange(seen, seen + ids.shape[1], device=ids.device)
    return {"position_ids": numbers[None]}
