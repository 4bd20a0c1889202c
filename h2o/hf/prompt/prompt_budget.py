"""The budget (heavy, recent) of each row and head of a layer, in tokens, once a prompt is known.

Budgets may be fractions of the prompt. The prompt's length is the one that the user gave, otherwise
the number of tokens in the first forward pass. Everything is computed in plain numbers. The only
tensors read are masks and token counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from h2o import compat
from h2o.config.head_budgets import expand_to_heads, make_room
from h2o.config.layer_plan import LayerPlan
from h2o.hf.store.pass_guard import PassGuard
from h2o.hf.store.slot_layout import Budgets

RowSize = tuple[int, int, int]
"""Head dimension, bytes per element in the model's dtype, and rows per token (a key and a value, or
one row that is both)"""


class PromptBudget(NamedTuple):
    """The budgets of a layer for the rows of a batch."""

    by_row: Budgets
    """(heavy, recent) of each row, one pair per head or a single pair for all heads"""
    pinned: list[int]
    """Number of pinned keys in each row beyond the sinks; every head keeps them"""
    raised: bool = False
    """Whether a fraction came to less than one token in some row, and was raised to one"""
    floored: bool = False
    """Whether `min_tokens` gave some head of some row more keys than its fraction"""


def begin_prompt(
    guard: PassGuard,
    plan: LayerPlan,
    mask: Tensor | None,
    shape: tuple[int, int],
    columns: int,
    before: Tensor | None,
    row_size: RowSize,
) -> None:
    """Record a prompt in the guard of its cache: the tokens of each row, and the pinned positions.

    Called once for all layers, before any of them stores a key.

    Args:
        plan: plan of the calling layer, used if the guard has no plans.
        mask, shape: mask of the first forward pass, [B, Q] bool or None, and (B, Q).
        columns: number of columns that the cache has seen after the first forward pass.
        before: tokens of each row that came from a DynamicCache, [B]; None: no such tokens.
        row_size: as for `prompt_budget`.

    Raises:
        ValueError: the prompt comes in chunks, its length was not given, and a budget or the pins
            depend on it. A layer's budget has no room for the pins. A row converted from a
            DynamicCache has only padding in this pass, so nothing would score its keys before
            eviction.
    """
    B, Q = shape
    if before is not None and mask is not None:
        empty = ((before > 0) & ~mask.bool().any(1).to(before.device)).tolist()
        if any(empty):
            raise ValueError(
                f"row {empty.index(True)} has only padding in the first forward pass after "
                "from_dynamic_cache, so no attention says which of its keys to keep: give each row "
                "at least one token in this pass, or a cache of its own"
            )
    plans = guard.plans.values() or [plan]
    by_length = [x for x in plans if x.needs_prompt_length]
    is_unknown = guard.prompt_length is None
    if is_unknown and (by_length or guard.pins.needs_prompt_length):
        _check_chunks(columns, bool(by_length))
    guard.repeat_to(B)
    counts = [Q] * B
    # Counting the mask's tokens waits for a GPU, so do it there only if budgets or pins need the
    # counts. Q is an upper bound, which is enough to size the slots.
    if mask is not None and (mask.is_cpu or (by_length and is_unknown) or guard.pins):
        counts = mask.sum(1).tolist()
    if before is not None:
        counts = [x + y for x, y in zip(counts, before.tolist(), strict=True)]
    guard.prompt_counts = counts
    begin_pins(guard, counts, mask, Q, row_size)


def begin_pins(
    guard: PassGuard,
    counts: list[int],
    mask: Tensor | None,
    columns: int,
    row_size: RowSize | None = None,
) -> None:
    """Set the positions of a cache's pins before any key of the prompt is stored.

    Args:
        counts, row_size: as for `prompt_budget`. With `row_size=None` the size of a row is the one
            in the model's config.
        mask, columns: as for `h2o.hf.store.pins.Pins.begin`.

    Raises:
        ValueError: some layer's budget has no room for the pins.
    """
    if not guard.pins:
        return
    lengths = _lengths(guard.prompt_length, counts)
    guard.pins.begin(lengths, mask, columns)
    for plan in guard.plans.values():
        plan = plan if row_size is None else plan.for_keys(*row_size)
        budgets_by_row(plan, lengths, guard.pins.counts(len(lengths), plan.sinks))


def prompt_budget(
    plan: LayerPlan,
    guard: PassGuard,
    counts: list[int],
    heads: int,
    part: tuple[int, int],
    row_size: RowSize,
) -> PromptBudget:
    """Compute the budgets of a layer. Each head has room for sinks, pinned and recent keys.

    Args:
        plan: the plan of the layer.
        guard: has the pins, and the length of the whole prompt if the user gave it.
        counts: tokens of each row in this forward pass. They count as the whole prompt if the guard
            has no length.
        heads: number of the layer's key/value heads in this process.
        part: which part of the model's heads these are (`h2o.hf.families.tensor_parallel`).
        row_size: as for `LayerPlan.for_keys`.

    Raises:
        ValueError: the number of rows or heads does not match. The pinned keys do not fit.
    """
    lengths = _lengths(guard.prompt_length, counts)
    pinned = guard.pins.counts(len(lengths), plan.sinks)
    plan = plan.for_keys(*row_size)
    by_row = expand_to_heads(budgets_by_row(plan, lengths, pinned), heads, part)
    if not plan.needs_prompt_length:
        return PromptBudget(by_row, pinned)
    lengths = list(filter(None, lengths))
    raised, floored = any(map(plan.is_raised, lengths)), any(map(plan.is_floored, lengths))
    return PromptBudget(by_row, pinned, raised, floored)


def budgets_by_row(plan: LayerPlan, lengths: list[int], pinned: list[int]) -> Budgets:
    """(heavy, recent) of each row, one pair per head or a single pair for all heads, for prompts of
    these `lengths` with these numbers of `pinned` keys.

    Raises: ValueError for pinned keys that do not fit.
    """
    rows = []
    for length, pins in zip(lengths, pinned, strict=True):
        heads = plan.head_tokens(length, pins)
        rows.append(make_room(heads, pins, plan.sinks) if pins else heads)
    return rows


def _lengths(prompt_length: int | Sequence[int] | None, counts: list[int]) -> list[int]:
    """Number of tokens in each row's prompt."""
    if isinstance(prompt_length, int):
        return [prompt_length] * len(counts)
    if prompt_length is not None:
        if len(prompt_length) != len(counts):
            raise ValueError(
                f"prompt_length has {len(prompt_length)} entries for a batch of {len(counts)} rows"
            )
        return list(prompt_length)
    return counts


def _check_chunks(columns: int, by_length: bool) -> None:
    """Raise ValueError if `generate(prefill_chunk_size=...)` has more columns of the prompt than
    the first chunk. `by_length`: whether budgets are fractions of the prompt; if not, all of it is
    pinned."""
    if columns < compat.columns_in_chunks():
        reason = 'pinned="prompt" means the whole prompt'
        if by_length:
            reason = "the budget is a fraction of the whole prompt"
        raise ValueError(
            f"generate() prefills this prompt in chunks (prefill_chunk_size), and {reason}. An "
            "H2OCache cannot know the prompt's length from its first chunk. Pass H2OCache(..., "
            "prompt_length=the number of tokens). Or use h2o.patched(), which finds the length "
            "itself, or give budgets and pinned spans in tokens"
        )
