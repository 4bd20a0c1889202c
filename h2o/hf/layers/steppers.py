"""How a layer runs a forward pass once its prompt is stored: as passes come, or scoring alone.

`h2o.hf.layers.captured` has the third way, in a graph of torch.compile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o.hf.call.attention_call import NewTokens
from h2o.hf.store import slot_layout

__all__ = ["EagerStepper", "ScoringStepper"]


class EagerStepper:
    """Runs passes as they come, in slots that grow with the text. One object for each layer."""

    is_compileable = False
    stores = True
    """Whether new keys are stored"""

    def __init__(self, seen: int = 0) -> None:
        self.seen = seen
        """Columns that the layer has seen"""
        self._out: Tensor | None = None  # the last decode step's output, in the query's dtype

    @property
    def length(self) -> Any:
        """Columns seen, for the model."""
        return self.seen

    def step(self, layer: Any, tokens: NewTokens) -> Tensor:
        """A decode step."""
        slots = layer.slots
        if layer.capacity.tokens <= layer.longest:
            slots = layer.make_room(layer.longest + 1)
        last = self._out
        fits = last is not None and last.dtype == tokens.query.dtype  # autocast may have ended
        out: Tensor = layer.step(tokens, slots, torch.empty_like(last) if fits else None)
        self._out = out
        layer.longest += 1
        layer.count(1, tokens.mask)
        return out

    def chunk(self, layer: Any, tokens: NewTokens) -> Tensor:
        """A later forward pass of several tokens: a chunk of the prompt, a chat turn."""
        Q = tokens.key.shape[2]
        out: Tensor = layer.attend_and_evict(tokens, layer.make_room(layer.longest + Q))
        layer.longest += Q
        layer.count(Q, tokens.mask)
        return out

    def capacities(self, widest: list[int], tokens: int) -> list[int]:
        """Slots of each head, or of all, for budgets and rows of so many tokens."""
        return slot_layout.capacities(widest, tokens)

    def slots_changed(self, layer: Any) -> None:
        """Notices that the layer has other slots."""
        self._out = None


class ScoringStepper(EagerStepper):
    """Gives the keys that are held scores, and stores nothing."""

    stores = False

    def step(self, layer: Any, tokens: NewTokens) -> Tensor:
        """Attention of the new tokens to what is held and to themselves."""
        out: Tensor = layer.attention(tokens, layer.slots)[0]
        return out

    chunk = step
