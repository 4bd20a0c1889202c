"""The budgets (heavy, recent) of each row and head of a layer in tokens, once a prompt is known.

Budgets may be fractions of the prompt: of the length that the user gave, or else of the tokens of
the first forward pass. Plain numbers; the only tensor read is the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from h2o import compat
from h2o.head_budgets import expand_to_heads, make_room
from h2o.hf.store.pass_guard import PassGuard
from h2o.hf.store.pins import Pins
from h2o.layer_plan import LayerPlan

__all__ = [
    "PromptBudget",
    "begin_pins",
    "budgets_by_row",
    "count_tokens",
    "prompt_budget",
    "refuse_chunks",
]


RowSize = tuple[int, int, int]
"""Head dimension, bytes of an element as the model gives it, and rows of a token"""


class PromptBudget(NamedTuple):
    """The budgets of a layer for the rows of a batch."""

    by_row: list[list[tuple[int, int]]]
    """(heavy, recent) of each row and each head, or one for all heads"""
    raised: bool
    """Whether, in some row, a fraction came to less than one token and was raised to one"""
    floored: bool
    """Whether, in some row, a head has `min_tokens` keys, which is more than its fraction"""


def count_tokens(
    mask: Tensor | None, B: int, Q: int, plan: LayerPlan, guard: PassGuard
) -> list[int]:
    """Tokens of each of B rows of a first pass of Q columns, by their mask [B, Q].

    Q for all where nothing but the room they may take depends on it, and counting them would have
    to wait for the device.
    """
    unknown = guard.prompt_length is None
    needed = (plan.needs_prompt_length and unknown) or guard.pins
    if mask is None or not (needed or mask.is_cpu):
        return [Q] * B
    tokens: list[int] = mask.sum(1).tolist()
    return tokens


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
        budgets_by_row(plan, lengths, guard.pins)


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
        row_size: as of `LayerPlan.for_keys`.

    Raises:
        ValueError: another number of rows or heads; no room for the pinned keys.
    """
    lengths = _lengths(guard.prompt_length, counts)
    plan = plan.for_keys(*row_size)
    by_row = expand_to_heads(budgets_by_row(plan, lengths, guard.pins), heads, part)
    lengths = list(filter(None, lengths))
    raised, floored = any(map(plan.is_raised, lengths)), any(map(plan.is_floored, lengths))
    return PromptBudget(by_row, raised, floored)


def budgets_by_row(plan: LayerPlan, lengths: list[int], pins: Pins) -> list[list[tuple[int, int]]]:
    """(heavy, recent) of each row and each head, or one for all heads; of prompts of these lengths.

    Raises: ValueError for pins that have no room.
    """
    counts = pins.counts(len(lengths), plan.sinks)
    return [
        make_room(plan.head_tokens(length, pinned), pinned, plan.sinks)
        for length, pinned in zip(lengths, counts, strict=True)
    ]


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


def refuse_chunks(plan: LayerPlan, guard: PassGuard, columns: int) -> None:
    """To be called at the first forward pass, which ends at so many columns.

    Raises:
        ValueError: `generate(prefill_chunk_size=...)` has more of the prompt, of which the budget
            is a fraction, and its length was not given.
    """
    why = {
        "the budget is a fraction of the whole prompt": plan.needs_prompt_length,
        'pinned="prompt" means the whole prompt': guard.pins.needs_prompt_length,
    }
    if not any(why.values()) or guard.prompt_length is not None:
        return
    if columns < compat.columns_in_chunks():
        reason = next(reason for reason, holds in why.items() if holds)
        raise ValueError(
            f"generate() reads this prompt in chunks (prefill_chunk_size), and {reason}, whose "
            "length an H2OCache cannot know from its first chunk. Use h2o.patched(), which tells "
            "it. Or give H2OCache(..., prompt_length=the prompt's number of tokens), or budgets "
            "and spans in tokens"
        )
