"""Whether the slots of a layer are what eviction by a budget leaves, for tests.

With the environment variable `H2O_CHECK=1` each layer of an `H2OCache` calls `check_slots` after
each forward pass. A misplaced key then raises an error in the pass that misplaced it.

Shape letters as in `h2o.hf`, and Z rows of slots.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from h2o.hf.cache_state.slot_layout import by_head
from h2o.hf.conversation.state import CacheState
from h2o.quantization import dequantize
from h2o.slots import PER_SLOT
from h2o.spans import PINNED

CHECKS_SLOTS = os.environ.get("H2O_CHECK") == "1"
"""Whether layers check their slots after each forward pass"""


def check_slots(layer: Any, state: CacheState) -> None:
    """Check the slots of an `H2OLayer` after a forward pass, also those of rows that it left out.
    `state`: the state of the cache after the pass.

    Raises:
        AssertionError: a row and head does not hold exactly min(tokens seen, k) different positions
            of its own, in its lowest slots, with all sinks, recent and pinned tokens among them.
            If its budget grows it may hold fewer, and after `H2OCache.evict` sinks and recent
            tokens may be missing too. Or a pinned key's score is finite, or a norm is not that of
            its value. Or a tensor has another size than the numbers of slots say.
    """
    slots = layer.slots
    if slots is None or type(slots.scores) is not Tensor or slots.scores.is_meta:
        return  # without values
    checks = _about_positions, _about_scores, _about_sizes
    for what, holds in itertools.chain(*(check(layer, state) for check in checks)):
        if not bool(holds.all()):
            where = (~holds).nonzero()[0].tolist()
            raise AssertionError(
                f"layer {layer.layer_idx}, [row, head, slot] {where}: {what}. The rows have seen "
                f"{slots.seen_tokens.tolist()} tokens, may keep {layer.config.sinks} sinks and "
                f"{slots.budget.tolist()} heavy and recent keys, and hold "
                f"{_positions(layer).tolist()}"
            )


Checks = Iterator[tuple[str, Tensor]]
"""What is wrong where a tensor of bools is False"""


def _positions(layer: Any) -> Tensor:
    """int64 [Z, G, S], -1: empty."""
    return by_head(layer.slots, layer.capacity.sizes, "positions", -1).long().cpu()


def _about_positions(layer: Any, state: CacheState) -> Checks:
    slots, positions, sinks = layer.slots, _positions(layer), layer.config.sinks
    budget = slots.budget.long().cpu()
    heavy, recent = (budget if budget.ndim == 3 else budget[:, None]).unbind(-1)
    seen, held = slots.seen_tokens[:, None].cpu(), positions >= 0
    ordered, count = positions.sort(-1).values, held.sum(-1)
    yield "an empty slot has another position than -1", positions >= -1
    yield "a position occurs twice", (ordered.diff() > 0) | (ordered[..., 1:] < 0)
    yield "a position is beyond the row's tokens", positions < seen[..., None]
    most, has_removed = torch.minimum(seen, sinks + heavy + recent), layer.facts.has_removed
    guard = layer.guard  # a request of generate_all may have a config of its own
    grows = layer.plan.grows or (guard.has_independent_rows and guard.grows)
    may_have_room = grows or has_removed
    yield "a wrong number of keys", count <= most if may_have_room else count == most
    if not has_removed:
        are_sinks = held & (positions < sinks)
        yield "a sink is missing", are_sinks.sum(-1) == seen.clamp(max=sinks)
    # h2o.compress_document leaves fewer recent keys of a document than later budgets have.
    since = 0 if state.columns == state.prompt_columns else state.prompt_columns
    begin = (seen - recent).clamp(min=since)
    are_recent = held & (positions >= begin[..., None])
    if not may_have_room:  # else a token may have left before it became recent again
        yield "a recent token is missing", are_recent.sum(-1) == (seen - begin).clamp(min=0)
    within = torch.arange(positions.shape[-1], device="cpu") <= count[..., None]
    yield "a key is behind an empty slot", within | ~held
    is_gap = within & ~held
    gap = is_gap.int().argmax(-1)
    yield (
        "the next slot is not the empty one",
        (gap == count) | ~is_gap.any(-1) | (gap == slots.next_slot.cpu()),
    )


def _about_scores(layer: Any, state: CacheState) -> Checks:
    slots, positions, guard = layer.slots, _positions(layer), layer.guard
    held, scores = positions >= 0, by_head(slots, layer.capacity.sizes, "scores").cpu()
    if not guard.has_independent_rows:  # the caches of their prompts had the pins
        pinned, all_held = torch.zeros_like(held), torch.ones_like(held[..., 0])
        for row, spans in enumerate(state.pinned.each(len(held))):
            for start, stop in spans:
                of_span = (positions[row] >= start) & (positions[row] < stop)
                stop = min(stop, int(slots.seen_tokens[row]))
                all_held[row] &= of_span.sum(-1) == max(0, stop - start)
                pinned[row] |= of_span
        yield "a pinned token is missing", all_held
        yield "a pinned key has another score than infinity", (scores == PINNED) | ~pinned
    if slots.norms is not None:
        values = slots.keys if slots.values is None else slots.values
        norms = dequantize(values, layer.facts.row_size[0]).float().norm(dim=-1)
        about = 0.2 if layer.config.kv_dtype else 0.01
        right = torch.isclose(slots.norms, norms, rtol=about, atol=1e-3)
        yield "a norm is not that of its value", right | (slots.positions < 0)


def _about_sizes(layer: Any, state: CacheState) -> Checks:
    slots, sizes = layer.slots, layer.capacity.sizes
    Z, G = slots.next_slot.shape
    shape = (Z, G, *sizes) if slots.starts is None else (Z, sum(sizes))
    for name in PER_SLOT:
        field = getattr(slots, name)
        if field is not None:
            same = field.shape[: len(shape)] == shape
            fits = torch.tensor(same, dtype=torch.bool, device="cpu")
            yield f"{name} has the shape {tuple(field.shape)}, not {shape}", fits
    if layer.capacity.tokens < math.inf and not layer.guard.has_independent_rows:
        yield f"`longest` is {state.longest}", slots.seen_tokens <= state.longest
