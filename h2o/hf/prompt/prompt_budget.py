"""The budgets (heavy, recent) of each row and head of a layer in tokens, once a prompt is known.

Budgets may be fractions of the prompt: of the length that the user gave, or else of the tokens of
the first forward pass. Plain numbers; the only tensor read is the mask.
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
"""Head dimension, bytes of an element as the model gives it, and rows of a token"""


class PromptBudget(NamedTuple):
    """The budgets of a layer for the rows of a batch."""

    by_row: Budgets
    """(heavy, recent) of each row and each head, or one for all heads"""
    pinned: list[int]
    """Keys of each row, beyond the sinks, that every head keeps"""
    raised: bool = False
    """Whether, in some row, a fraction came to less than one token and was raised to one"""
    floored: bool = False
    """Whether, in some row, a head has `min_tokens` keys, which is more than its fraction"""


def begin_prompt(
    guard: PassGuard,
    plan: LayerPlan,
    mask: Tensor | None,
    shape: tuple[int, int],
    columns: int,
    before: Tensor | None,
    row_size: RowSize,
) -> None:
    """Tell the guard of a cache its prompt: the tokens of each row, and where pins are.

    Asked once for all layers, before any of them stores a key.

    Args:
        plan: of a layer, where the guard has none.
        mask, shape: of the first forward pass, [B, Q] bool or None, and (B, Q).
        columns: where the first forward pass ends.
        before: [B] tokens of each row that came from a DynamicCache; None: none.
        row_size: as of `prompt_budget`.

    Raises:
        ValueError: the prompt comes in chunks, and a budget is a fraction of its length, which was
            not given; some layer's budget has no room for the pins; a row from a DynamicCache has
            nothing but padding, so that nothing scores its keys before they are cut.
    """
    B, Q = shape
    if before is not None and mask is not None:
        empty = ((before > 0) & ~mask.bool().any(1).to(before.device)).tolist()
        if any(empty):
            raise ValueError(
                f"row {empty.index(True)} has only padding in the first forward pass after "
                "from_dynamic_cache, whose attention says which keys stay: give each row a token "
                "in this pass, or a cache of its own"
            )
    plans = guard.plans.values() or [plan]
    by_length = [x for x in plans if x.needs_prompt_length]
    is_unknown = guard.prompt_length is None
    if is_unknown and (by_length or guard.pins.needs_prompt_length):
        _refuse_chunks(columns, bool(by_length))
    guard.repeat_to(B)
    counts = [Q] * B
    # Where nothing but the room that rows may take depends on it, no device is waited for.
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
    """Tell the pins of a cache its prompt, before anything of that is stored.

    Args:
        counts, row_size: as of `prompt_budget`; None: as the model's config says.
        mask, columns: as of `h2o.hf.store.pins.Pins.begin`.

    Raises:
        ValueError: some layer's budget has no room for them.
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
    """The budgets of a layer. Each head has room for sinks, pinned and recent keys.

    Args:
        plan: the layer's.
        guard: has the length of the whole prompt, where the user gave it, and the pins.
        counts: tokens of each row as they are here, which are taken for the prompt otherwise.
        heads: key/value heads of the layer that are here.
        part: which part of the model's heads they are (`h2o.hf.families.tensor_parallel`).
        row_size: as for `LayerPlan.for_keys`.

    Raises:
        ValueError: another number of rows or heads; no room for the pinned keys.
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
    """(heavy, recent) of each row and each head, or one for all heads; of prompts of these lengths
    and so many pinned keys.

    Raises: ValueError for pins that have no room.
    """
    rows = []
    for length, pins in zip(lengths, pinned, strict=True):
        heads = plan.head_tokens(length, pins)
        rows.append(make_room(heads, pins, plan.sinks) if pins else heads)
    return rows


def _lengths(prompt_length: int | Sequence[int] | None, counts: list[int]) -> list[int]:
    """Tokens of each row's prompt."""
    if isinstance(prompt_length, int):
        return [prompt_length] * len(counts)
    if prompt_length is not None:
        if len(prompt_length) != len(counts):
            raise ValueError(
                f"prompt_length has {len(prompt_length)} entries for a batch of {len(counts)} rows"
            )
        return list(prompt_length)
    return counts


def _refuse_chunks(columns: int, by_length: bool) -> None:
    """Raises ValueError where `generate(prefill_chunk_size=...)` has more of the prompt than
    `columns`, of which budgets are fractions (`by_length`) or all is pinned."""
    if columns < compat.columns_in_chunks():
        reason = 'pinned="prompt" means the whole prompt'
        if by_length:
            reason = "the budget is a fraction of the whole prompt"
        raise ValueError(
            f"generate() reads this prompt in chunks (prefill_chunk_size), and {reason}. An "
            "H2OCache cannot know the prompt's length from its first chunk. Give H2OCache(..., "
            "prompt_length=the number of tokens). Or use h2o.patched(), which finds the length by "
            "itself, or give budgets and spans in tokens"
        )
