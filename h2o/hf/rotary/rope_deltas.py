"""`rope_deltas`: state that some models keep outside the cache (Qwen2-VL, Qwen2.5-VL, Qwen3-VL,
GLM-4V and similar models).

For a text with images it is the difference between the next position and the number of tokens. The
model holds only the value of the text that it processed last. A cache therefore keeps the value of
its own text, which copies and files preserve, and restores it in the model before each forward pass
that continues the cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from h2o import compat

_latest: weakref.WeakKeyDictionary[Any, weakref.ref[RopeDeltas]] = weakref.WeakKeyDictionary()
"""For each model, the `RopeDeltas` whose value it holds now."""


class RopeDeltas:
    """The `rope_deltas` of one cache: `number`, [rows or 1, 1], or None for a text without
    images."""

    def __init__(self) -> None:
        self.is_possible = False
        """Whether the model may keep such a number at all, as models for more than text do"""
        self.number: Tensor | None = None
        self.is_known = True
        """False for a cache converted from another one, whose number only the model has"""
        self._is_idle = True  # whether no forward pass is under way
        self._module_ref: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module_ref": None, "_is_idle": True}

    def begin(self, seen: int) -> None:
        """Give the number to the model that asks how much the cache has `seen`. Models ask this
        before they use their number."""
        if torch.compiler.is_compiling():
            return
        if (module := compat.find_rope_deltas_module()) is None:
            return
        latest = _latest.get(module)
        if not self._is_idle and latest is not None and latest() is self:
            return  # the model may have computed a new number since
        _latest[module] = weakref.ref(self)
        self._module_ref, self._is_idle = weakref.ref(module), False
        if seen == 0:
            module.rope_deltas = None
        elif self.is_known:
            number = self.number
            device = next(module.parameters()).device
            module.rope_deltas = None if number is None else number.to(device)

    def end(self, rows: int) -> None:
        """Take over the model's number after a forward pass over a batch of `rows` rows."""
        if torch.compiler.is_compiling() or self._is_idle:
            return
        self._is_idle = True
        if (module := self._module_ref()) is not None:
            self.number, self.is_known = module.rope_deltas, True
            if self.number is not None and 1 < len(self.number) < rows:
                # generate() repeats prompts (num_beams, num_return_sequences) after the model has
                # computed its number.
                self.number = self.number.repeat_interleave(rows // len(self.number), dim=0)

    def reset(self) -> None:
        """Forget the text."""
        self.number, self.is_known, self._is_idle = None, True, True

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Select or repeat rows as the cache does."""
        if self.number is not None and len(self.number) > 1:
            self.number = change(self.number)

    @property
    def offset(self) -> int:
        """Difference between a single row's next position and its number of tokens."""
        return 0 if self.number is None else int(self.number.reshape(-1)[0])

    @property
    def least(self) -> int:
        """Lower bound over the rows of the difference between next position and number of tokens,
        at most 0."""
        if self.is_possible and not self.is_known:
            return -(2**30)  # it could be anything
        return 0 if self.number is None else min(0, int(self.number.min()))
