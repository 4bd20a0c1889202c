"""Cropping a cache: a layer's last forward pass is undone, and done again with fewer tokens.

Evicted keys cannot come back, so a layer that records passes keeps a copy of its state before the
last one, and the tokens of that pass. To remove some of these it restores the copy and runs the
pass again with the remaining ones. Assisted decoding needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from h2o.compat import CROPS_TO_LENGTH
from h2o.hf.attention.attention_call import NewTokens
from h2o.hf.families.layer_kinds import has_states, kind_of
from h2o.hf.store.layer_contents import LayerContents
from h2o.hf.store.layer_state import State, keys_state, layer_state, restore, restore_keys

_NO_RECORD = (
    "an H2OCache cannot go back without a record: evicted keys cannot be restored. Call "
    "cache.activate_past_recording() before the forward pass of which tokens are to be taken back"
)


class CroppableLayer(LayerContents):
    """The part of an `H2OLayer` that takes back tokens of the last forward pass."""

    record_past = False
    """Whether passes are recorded; transformers' name for it"""

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can take back tokens of the last forward pass; transformers asks before
        it drafts."""
        return self.record_past

    @property
    def is_compileable(self) -> bool:
        """Whether `generate()` may compile the steps: not those that may be taken back."""
        return self.stepper.is_compileable and not self.record_past

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
            restore_keys(self, before)  # tensors held until now are not written to
            if columns := left - self.seen:
                self.forward(new.columns(0, columns))
        self.last = None
        self.form.forget()  # what belongs to the pass that was run again

    def check_crop(self, left: int) -> None:
        """Raises NotImplementedError where so few columns cannot be left."""
        if self.last is None:
            raise NotImplementedError(_NO_RECORD)
        began = self.last.before.numbers["seen"]
        if left < began:
            raise NotImplementedError(
                f"an H2OCache goes back within its last forward pass, which began after {began} of "
                f"{self.seen} tokens, and {left} were to be left"
            )


class LastPass(NamedTuple):
    """The record by which the last forward pass of a layer can be run again."""

    before: State
    """Copy of the layer's state before the pass"""
    tokens: NewTokens

    @classmethod
    def of(cls, layer: Any, tokens: NewTokens) -> LastPass:
        """The record of a pass that is to come."""
        without_layer = tokens._replace(key=tokens.key.detach())
        return cls(keys_state(layer).each(Tensor.clone), without_layer)


def crop(layers: Sequence[Any], tokens: int, seen: int, left: int) -> None:
    """`H2OCache.crop` of layers that have all seen the same: they go back together or not at all.

    Raises:
        NotImplementedError: as `check_crop`, with nothing done. After any other error or an
            interrupt all is as it was, but the pass is no longer remembered.
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
                "this model's recurrent states are sums over all tokens seen, and none of these "
                "can be taken out again: fork() the cache before the tokens that may be taken back"
            )
    before = [(layer, layer_state(layer)) for layer in {*h2o_layers, *with_states}]
    try:
        for layer in h2o_layers:
            layer.crop(tokens)
        for layer in other_layers:  # which may refuse it
            if shorter or getattr(layer, "record_past", False):
                layer.crop(tokens)
    except BaseException:
        for layer, state in before:
            restore(layer, state)
        raise


def columns_left(tokens: int, seen: int) -> int:
    """Columns that `crop(tokens)` leaves of `seen`.

    Raises:
        ValueError: a number that this version of transformers does not take.
    """
    if not CROPS_TO_LENGTH and tokens > 0:
        raise ValueError(f"crop({tokens}): give the tokens to remove as a negative number")
    left = tokens if CROPS_TO_LENGTH and tokens >= 0 else seen + tokens
    return min(max(left, 0), seen)
