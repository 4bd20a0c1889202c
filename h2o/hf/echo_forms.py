"""Layers that rank by echo and have another form of keys: those of `h2o.hf.other_heads`, and those
that later layers attend to (`h2o.hf.shared_keys_layer`)."""

from __future__ import annotations

from torch import Tensor

from h2o import ops
from h2o.hf.attention_call import NewTokens
from h2o.hf.echo_layer import EchoLayer
from h2o.hf.echo_scores import as_stored
from h2o.hf.other_heads import OtherHeadsLayer
from h2o.hf.shared_keys_layer import SharedKeysLayer

__all__ = ["EchoOtherHeadsLayer", "EchoSharedKeysLayer"]


class EchoOtherHeadsLayer(OtherHeadsLayer, EchoLayer):
    """Queries are asked again in the order in which the operations take them."""


class EchoSharedKeysLayer(SharedKeysLayer, EchoLayer):
    """The queries of the layer itself are asked again."""

    def _attend_and_score(
        self, tokens: NewTokens, slots: ops.Slots | None
    ) -> tuple[Tensor, Tensor]:
        self._note(tokens, slots, rows=True)
        return super()._attend_and_score(tokens, slots)

    def _step(
        self, tokens: NewTokens, slots: ops.Slots, out: Tensor | None, **rotary: ops.Rotary
    ) -> Tensor:
        self._note(as_stored(tokens, slots), slots, rows=True)  # eviction may take any place
        return EchoLayer._step(self, tokens, slots, out, **rotary)
