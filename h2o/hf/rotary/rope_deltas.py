"""The number that some models keep beside a cache: how far the positions of a text with images are
from its number of tokens (`rope_deltas` of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4V and their like).

Such a model has the number of the text that it read last. A cache therefore remembers its own, in
copies and files too, and gives it back to the model whenever a forward pass continues the cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from h2o import compat

_latest: weakref.WeakKeyDictionary[Any, weakref.ref[RopeDeltas]] = weakref.WeakKeyDictionary()
"""The cache whose number each model has."""


class RopeDeltas:
    """The number of one cache, [rows or 1, 1]; None for a text without images."""

    def __init__(self) -> None:
        self.may_be = False
        """Whether the model may keep such a number at all: one that reads more than texts"""
        self.number: Tensor | None = None
        self.is_known = True
        """False for a cache that another one has filled: its number is the model's"""
        self._is_between = True  # two forward passes
        self._keeper: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_keeper": None, "_is_between": True}

    def begin(self, seen: int) -> None:
        """Gives the model its number, if one asks how much the cache has `seen`, which all do
        before they use the number."""
        if torch.compiler.is_compiling():
            return
        if (keeper := compat.keeper_of_rope_deltas()) is None:
            return
        latest = _latest.get(keeper)
        if not self._is_between and latest is not None and latest() is self:
            return  # the model may have made another since
        _latest[keeper] = weakref.ref(self)
        self._keeper, self._is_between = weakref.ref(keeper), False
        if seen == 0:
            keeper.rope_deltas = None
        elif self.is_known:
            number = self.number
            device = next(keeper.parameters()).device
            keeper.rope_deltas = None if number is None else number.to(device)

    def end(self) -> None:
        """Takes the model's number after a forward pass."""
        if torch.compiler.is_compiling() or self._is_between:
            return
        self._is_between = True
        if (keeper := self._keeper()) is not None:
            self.number, self.is_known = keeper.rope_deltas, True

    def reset(self) -> None:
        """Forgets the text."""
        self.number, self.is_known, self._is_between = None, True, True

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Follows the rows of the cache."""
        if self.number is not None and len(self.number) > 1:
            self.number = change(self.number)

    @property
    def offset(self) -> int:
        """Difference of a single row's next position and its number of tokens."""
        return 0 if self.number is None else int(self.number.reshape(-1)[0])

    @property
    def least(self) -> int:
        """Least number that positions of rows of several texts are beyond their tokens."""
        if self.may_be and not self.is_known:
            return -(2**30)  # anything
        return 0 if self.number is None else min(0, int(self.number.min()))
