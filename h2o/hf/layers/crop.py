"""Cropping a cache: undo a layer's last forward pass, and repeat it with fewer tokens.

Evicted keys cannot be restored. A layer that records passes therefore keeps a copy of its state
before the last pass, and the tokens of that pass. To remove some of these tokens, it restores the
copy and repeats the pass with the others. Assisted decoding needs this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from h2o.arguments.plain_values import check_integer
from h2o.compat import StatesLayer
from h2o.hf.attention.attention_call import NewTokens
from h2o.hf.cache_state.layer_snapshot import Snapshot, restore, take_snapshot
from h2o.hf.conversation.forward_pass import ForwardPass
from h2o.hf.conversation.pass_guard import PassGuard
from h2o.hf.conversation.state import CacheState
from h2o.hf.model_traits.layer_kinds import free_keys_before_window, has_states, kind_of
from h2o.hf.modes import Mode, refusal


def record_pass(layer: Any, tokens: NewTokens) -> tuple[Snapshot, NewTokens]:
    """A copy of a layer's state before a pass, and the tokens of the pass, with which the layer can
    repeat it."""
    without_layer = tokens._replace(key=tokens.key.detach())
    return take_snapshot(layer, states=False).each(Tensor.clone), without_layer


def crop(layers: Sequence[Any], guard: PassGuard, tokens: int, seen: int, left: int) -> None:
    """Crop all layers of a cache from `seen` to `left` > 0 columns, or none after an error.

    Raises:
        NotImplementedError: tokens cannot be removed. Nothing has changed. After any other error or
            an interrupt the layers are restored, but the record of the pass is lost.
    """
    h2o_layers = [layer for layer in layers if kind_of(layer) == "h2o"]
    with_states = [layer for layer in layers if has_states(layer)]
    if left < seen:
        _check_record(h2o_layers, guard, left)
        if any(any(layer.is_recurrent_states_initialized.values()) for layer in with_states):
            raise NotImplementedError(refusal({Mode.CROP, Mode.HYBRID}))
    before = [(layer, take_snapshot(layer)) for layer in {*h2o_layers, *with_states}]
    try:
        with guard.repeating(_pass_to_repeat(guard.state, left)) as the_pass:
            for layer in h2o_layers:
                _crop_layer(layer, left < seen, the_pass)
                if has_states(layer) and layer.record_past:
                    StatesLayer.crop(layer, tokens)
            for layer in layers:  # transformers' own layers may raise
                if kind_of(layer) in ("sliding", "states") and (
                    left < seen or getattr(layer, "record_past", False)
                ):
                    layer.crop(tokens)
    except BaseException:
        for layer, state in before:
            restore(layer, state)
        raise
    for layer in layers:
        if kind_of(layer) == "sliding":
            free_keys_before_window(layer)


def _pass_to_repeat(state: CacheState, left: int) -> ForwardPass:
    """The first columns of the last pass, up to `left` in all. Before and after it are the same
    state if no column of the pass is left, or if the pass was not recorded and nothing is to be
    removed."""
    last = state.last_pass
    if last is None or left == state.columns:
        return ForwardPass(state, state._replace(last_pass=None), 0)
    columns = left - last.before.columns
    return ForwardPass(last.before, last.crop(left), columns, last.chunked_lengths)


def _check_record(h2o_layers: Sequence[Any], guard: PassGuard, left: int) -> None:
    """Raise NotImplementedError if a layer cannot be cropped to `left` columns."""
    last = guard.state.last_pass
    for layer in h2o_layers:
        if layer.last is None or last is None:
            raise NotImplementedError(
                "an H2OCache cannot remove tokens of a pass that was not recorded: evicted keys "
                "cannot be restored. Give generate() a copy, cache.fork(), if you may have to drop "
                "its tokens, or call cache.activate_past_recording() before a single forward pass"
            )
        began = last.before.columns
        if left < began:
            raise NotImplementedError(
                "an H2OCache can only remove tokens of its last forward pass, which began after "
                f"{began} of {layer.seen} tokens. This crop() would leave {left}. To go back "
                "further, keep a copy, cache.fork(), from before the tokens"
            )


def _crop_layer(layer: Any, removes: bool, the_pass: ForwardPass) -> None:
    """Crop an `H2OLayer`. Its old tensors stay intact, so that they can be restored."""
    if removes:
        before, new = layer.last
        restore(layer, before, states=False)
        if the_pass.columns:
            layer.forward(new.columns(0, the_pass.columns))
    layer.last = None
    layer.variant.forget()  # the state of the repeated pass


def columns_left(tokens: int, seen: int) -> int:
    """Number of columns, out of `seen`, that remain after `crop(tokens)`.

    Raises:
        TypeError: the number is not an integer.
        ValueError: the number is positive.
    """
    tokens = check_integer("tokens", tokens)
    if tokens > 0:
        raise ValueError(f"crop({tokens}): pass the number of tokens to remove as a negative int")
    return max(seen + tokens, 0)
