"""The budget (heavy, recent) of each row and head of a layer, in tokens, once a prompt is known.

Budgets may be fractions of the prompt. The prompt's length is the one that the user gave, otherwise
the number of tokens in the first forward pass. Budgets are Python integers. The only tensors that
are read, which makes the host wait for a GPU, are masks and token counts.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from h2o.compat_calls import chunks_of_prompt
from h2o.config.head_budgets import expand_to_heads, make_room
from h2o.config.layer_plan import LayerPlan
from h2o.hf.cache_state.pass_guard import PassGuard
from h2o.hf.cache_state.slot_layout import Budgets

RowSize = tuple[int, int, int]
"""Head dimension, bytes per element in the model's dtype, and vectors per token (a key and a value,
or a latent that is both)"""


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
    before: Tensor | None,
    row_size: RowSize,
) -> None:
    """Record a prompt in the guard of its cache: the tokens of each row, and the pinned positions.

    Called once for all layers, before any of them stores a key.

    Args:
        plan: plan of the calling layer, used if the guard has no plans.
        mask, shape: mask of the first forward pass, [B, Q] bool or None, and (B, Q).
        before: tokens of each row that came from a DynamicCache, [B]; None: no such tokens.
        row_size: as for `prompt_budget`.

    Raises:
        ValueError: the prompt comes in chunks, its length is neither given nor known to generate(),
            and a budget or the pins depend on it. A layer's budget has no room for the pins. A row
            converted from a DynamicCache has only padding in this pass, so nothing would score its
            keys before eviction.
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
        guard.chunked_lengths = _chunked_lengths(guard, B, Q)
    guard.repeat_to(B)
    counts = [Q] * B
    # Counting the mask's tokens waits for a GPU, so do it there only if budgets or pins need the
    # counts. Q is an upper bound, which is enough to size the slots.
    if mask is not None and (mask.is_cpu or (by_length and is_unknown) or guard.pins):
        counts = mask.sum(1).tolist()
    if before is not None:
        counts = _add(counts, before.tolist())
        if guard.chunked_lengths is not None:
            guard.chunked_lengths = _add(guard.chunked_lengths, before.tolist())
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
        mask, columns: as for `h2o.hf.cache_state.pins.Pins.begin`.

    Raises:
        ValueError: some layer's budget has no room for the pins.
    """
    if not guard.pins:
        return
    lengths = _lengths(guard, counts)
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
        part: which part of the model's heads these are (`h2o.hf.model_traits.tensor_parallel`).
        row_size: as for `LayerPlan.for_keys`.

    Raises:
        ValueError: the number of rows or heads does not match. The pinned keys do not fit.
    """
    lengths = _lengths(guard, counts)
    pinned = guard.pins.counts(len(lengths), plan.sinks)
    plan = plan.for_keys(*row_size)
    by_row = expand_to_heads(budgets_by_row(plan, lengths, pinned), heads, part)
    if not plan.needs_prompt_length:
        return PromptBudget(by_row, pinned)
    lengths = list(filter(None, lengths))
    raised, floored = any(map(plan.is_rounded_up, lengths)), any(map(plan.is_floored, lengths))
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


def _lengths(guard: PassGuard, counts: list[int]) -> list[int]:
    """Number of tokens in each row's prompt."""
    prompt_length = guard.prompt_length
    if prompt_length is None:
        prompt_length = guard.chunked_lengths
    if isinstance(prompt_length, int):
        return [prompt_length] * len(counts)
    if prompt_length is not None:
        if len(prompt_length) != len(counts):
            raise ValueError(
                f"prompt_length has {len(prompt_length)} entries for a batch of {len(counts)} rows"
            )
        return list(prompt_length)
    return counts


def _chunked_lengths(guard: PassGuard, B: int, Q: int) -> list[int] | None:
    """Number of tokens in each of B rows of a prompt that `generate()` prefills in chunks, of which
    this pass of Q columns is the first; None for any other prompt.

    Raises:
        ValueError: `generate()` fills another cache, or its mask does not say what is padding.
    """
    found = chunks_of_prompt()
    if found is None:
        return None
    cache, chunks, mask = found
    columns = sum(chunks)
    is_padding_known = mask is None or (mask.ndim == 2 and mask.shape[1] >= columns)
    if getattr(cache, "guard", None) is not guard or not is_padding_known:
        raise ValueError(
            "generate() prefills this prompt in chunks (prefill_chunk_size), and the budget or the "
            "pins depend on the length of the whole prompt, which the cache cannot find. Pass "
            "H2OCache(..., prompt_length=the number of tokens), or give budgets and pinned spans "
            "in tokens"
        )
    lengths = [columns] * B if mask is None else mask[:, -columns:].sum(1).tolist()
    more = Q - chunks[0]  # embeddings that a wrapper has inserted before the prompt
    return [max(1, n + more) for n in lengths]  # a row may be all padding


def _add(counts: list[int], more: list[int]) -> list[int]:
    return [x + y for x, y in zip(counts, more, strict=True)]
