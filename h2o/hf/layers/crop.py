"""Cropping a cache: undo a layer's last forward pass, and repeat it with fewer tokens.

Evicted keys cannot be restored. A layer that records passes therefore keeps a copy of its state
before the last pass, and the tokens of that pass. To remove some of these tokens, it restores the
copy and repeats the pass with the others. Assisted decoding needs this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from h2o.arguments.plain_values import check_integer
from h2o.compat import StatesLayer
from h2o.hf.attention.attention_call import NewTokens
from h2o.hf.cache_state.layer_snapshot import Snapshot, restore, take_snapshot
from h2o.hf.conversation.forward_pass import ForwardPass
from h2o.hf.conversation.pass_guard import PassGuard
from h2o.hf.conversation.state import CacheState, LastPass
from h2o.hf.model_traits.layer_kinds import free_keys_before_window, has_states, kind_of
from h2o.hf.modes import Mode, refusal
from h2o.hf.prompt.prompt_budget import EarlierBudgets


def record_pass(layer: Any, tokens: NewTokens) -> tuple[Snapshot, NewTokens]:
    """A copy of a layer's state before a pass, and the tokens of the pass, with which the layer can
    repeat it. The state has the budget from before the pass, since fewer tokens may let it grow
    less."""
    without_layer = tokens._replace(key=tokens.key.detach())
    earlier = layer.guard.current.take_back
    if earlier is None:
        return take_snapshot(layer, states=False).each(Tensor.clone), without_layer
    grown = EarlierBudgets([layer])
    earlier.put(layer)
    snapshot = take_snapshot(layer, states=False).each(Tensor.clone)
    grown()
    return snapshot, without_layer


def crop(
    layers: Sequence[Any],
    guard: PassGuard,
    tokens: int,
    seen: int,
    left: int,
    plan: Callable[[LastPass, int], ForwardPass],
) -> None:
    """Crop all layers of a cache from `seen` to `left` > 0 columns, or none after an error.

    `plan`: plans the last pass again, up to `left` columns, once the layers were restored.

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
        last = guard.state.last_pass
        with guard.repeating(_pass_to_repeat(guard.state, left)) as the_pass:
            new = [_undo(layer) if left < seen else None for layer in h2o_layers]
            if the_pass.columns and last is not None:
                the_pass.begin_unannounced(plan(last, left))
            for layer, recorded in zip(h2o_layers, new, strict=True):
                _repeat(layer, recorded, the_pass.columns)
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
    """The first columns of the last pass, up to `left` in all, of which `plan_again` says the state
    after it. No column is repeated if none of the pass is left, or if the pass was not recorded and
    nothing is to be removed."""
    last = state.last_pass
    if last is None or left == state.columns:
        return ForwardPass(state, state._replace(last_pass=None), 0)
    columns = left - last.before.columns
    return ForwardPass(last.before, last.before, columns, last.chunked_lengths)


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


def _undo(layer: Any) -> NewTokens:
    """Restore an `H2OLayer` to its state before the last pass, and return the tokens of the pass.
    Its old tensors stay intact, so that they can be restored."""
    before, new = layer.last
    restore(layer, before, states=False)
    tokens: NewTokens = new
    return tokens


def _repeat(layer: Any, new: NewTokens | None, columns: int | None) -> None:
    """Repeat the last pass of an `H2OLayer` with its first columns. None: nothing was undone."""
    if new is not None and columns:
        layer.forward(new.columns(0, columns))
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
