"""Rotary angles that depend on the longest text in a forward pass (longrope, dynamic NTK).

`generate()` has one text, or a batch whose longest row chooses for all. What reads texts of several
lengths together asks here which of them have the same angles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from h2o import compat
from h2o.compat import accepts
from h2o.hf.families.wrappers import unwrap

BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embedding whose angles depend on how long the text is."""


class AnglesByLength:
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
        """Whether they depend on it at all."""
        return bool(self._limits)

    def regime(self, length: int) -> tuple[int, ...]:
        """Key of the angles of a text of `length` tokens; all 0 for a short one."""
        beyond = {"longrope": 1, "dynamic": length}
        return tuple(beyond[kind] if length > limit else 0 for kind, limit in self._limits)

    def groups(self, rows: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """The rows that may share a forward pass; `lengths` has the tokens of each row number."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for row in rows:
            groups.setdefault(self.regime(lengths[row]), []).append(row)
        return list(groups.values())

    def forget(self) -> None:
        """Makes the next forward pass choose its angles by its own length. A dynamic embedding
        would keep those of a longer text that it has seen."""
        for module, prefix in self._dynamic:
            compat.forget_longest(module, prefix)


def positions_after(model: Any, seen: int, ids: Tensor) -> dict[str, Tensor]:
    """The keyword argument that numbers ids [1, Q] which follow `seen` tokens; {} for a model that
    takes none. Some models (Bamba) would count from 0 in each forward pass."""
    if not accepts(unwrap(model).forward, "position_ids"):
        return {}
    numbers = torch.arange(seen, seen + ids.shape[1], device=ids.device)
    return {"position_ids": numbers[None]}
