"""Cropping a cache: undo a layer's last forward pass, and repeat it with fewer tokens.

Evicted keys cannot be restored. A layer that records passes therefore keeps a copy of its state
before the last pass, and the tokens of that pass. To remove some of these tokens, it restores the
copy and repeats the pass with the others. Assisted decoding needs this.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from h2o.compat import CROPS_TO_LENGTH
from h2o.hf.attention.attention_call import NewTokens
from h2o.hf.cache_state.layer_snapshot import (
    Snapshot,
    restore,
    restore_keys,
    take_keys_snapshot,
    take_snapshot,
)
from h2o.hf.layers.base_layer import BaseLayer
from h2o.hf.model_traits.layer_kinds import free_keys_before_window, has_states, kind_of

_NO_RECORD = (
    "an H2OCache cannot remove tokens of a pass that was not recorded: evicted keys cannot be "
    "restored. Call cache.activate_past_recording() before the forward pass"
)


class CroppableLayer(BaseLayer):
    """The part of an `H2OLayer` that removes tokens of the last forward pass."""

    record_past = False
    """Whether passes are recorded (the name is transformers')"""

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can remove tokens of the last pass. transformers asks before it drafts."""
        return self.record_past

    @property
    def is_compileable(self) -> bool:
        """Whether `generate()` may compile the decode steps. False while passes are recorded."""
        return self.runner.is_compileable and not self.record_past

    def activate_past_recording(self) -> None:
        """See `H2OCache.activate_past_recording`."""
        self.record_past = True

    def crop(self, tokens: int) -> None:
        """See `H2OCache.crop`."""
        left = columns_left(tokens, self.seen)
        if left == 0:
            self.reset()
        elif left < self.seen:
            self.check_crop(left)
            before, new = self.last
            restore_keys(self, before)  # leaves the old tensors intact, for `crop` to restore
            if columns := left - self.seen:
                self.forward(new.columns(0, columns))
        self.last = None
        self.variant.forget()  # the state of the repeated pass

    def check_crop(self, left: int) -> None:
        """Raise NotImplementedError if the layer cannot be cropped to `left` columns."""
        if self.last is None:
            raise NotImplementedError(_NO_RECORD)
        began = self.last.before.numbers["seen"]
        if left < began:
            raise NotImplementedError(
                "an H2OCache can only remove tokens of its last forward pass, which began after "
                f"{began} of {self.seen} tokens. This crop() would leave {left}"
            )


class LastPass(NamedTuple):
    """Record with which a layer can repeat its last forward pass."""

    before: Snapshot
    """Copy of the layer's state before the pass"""
    tokens: NewTokens

    @classmethod
    def of(cls, layer: Any, tokens: NewTokens) -> LastPass:
        """Record the state of a layer before a pass, and the tokens of the pass."""
        without_layer = tokens._replace(key=tokens.key.detach())
        return cls(take_keys_snapshot(layer).each(Tensor.clone), without_layer)


def crop(layers: Sequence[Any], tokens: int, seen: int, left: int) -> None:
    """Crop all layers of a cache, or none after an error. All must have seen the same columns.

    Raises:
        NotImplementedError: as `check_crop`. Nothing has changed. After any other error or an
            interrupt the layers are restored, but the record of the pass is lost.
    """
    h2o_layers = [layer for layer in layers if kind_of(layer) == "h2o"]
    other_layers = [layer for layer in layers if kind_of(layer) in ("sliding", "states")]
    with_states = [layer for layer in layers if has_states(layer)]
    shorter = left < seen
    for layer in h2o_layers if shorter else []:
        layer.check_crop(left)
    for layer in with_states if shorter else []:
        if any(layer.is_recurrent_states_initialized.values()):
            raise NotImplementedError(
                "this model's recurrent states are sums over all tokens, from which no token can "
                "be removed. Call cache.fork() before you add tokens that you may have to remove"
            )
    before = [(layer, take_snapshot(layer)) for layer in {*h2o_layers, *with_states}]
    try:
        for layer in h2o_layers:
            layer.crop(tokens)
        for layer in other_layers:  # transformers' own layers may raise
            if shorter or getattr(layer, "record_past", False):
                layer.crop(tokens)
    except BaseException:
        for layer, state in before:
            restore(layer, state)
        raise
    for layer in other_layers:
        if kind_of(layer) == "sliding":
            free_keys_before_window(layer)


def columns_left(tokens: int, seen: int) -> int:
    """Number of columns, out of `seen`, that remain after `crop(tokens)`.

    Raises:
        TypeError: the number is not an integer.
        ValueError: this version of transformers does not accept the number.
    """
    try:
        tokens = operator.index(tokens)  # int() would round, and NaN is below no number
    except TypeError:
        raise TypeError(f"crop({tokens!r}): expected an integer") from None
    if not CROPS_TO_LENGTH and tokens > 0:
        raise ValueError(f"crop({tokens}): pass the number of tokens to remove as a negative int")
    left = tokens if CROPS_TO_LENGTH and tokens >= 0 else seen + tokens
    return min(max(left, 0), seen)
