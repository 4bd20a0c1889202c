"""The budget (heavy, recent) of each row and head of a layer, in tokens, once a prompt is known.

Budgets may be fractions. After the prompt they are fractions of the prompt, whose length is the one
that the user gave, otherwise the number of tokens in the first forward pass. Budgets of a config
that grows follow the text from then on (`grow_budgets`), and count a first pass that is longer than
the user said. Budgets are Python integers. The only
tensors that are read, which makes the host wait for a GPU, are masks and token counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from h2o.budgets import UNLIMITED, next_growth
from h2o.compat_calls import chunks_of_prompt
from h2o.config.head_budgets import make_room
from h2o.config.layer_plan import LayerPlan, expand_to_heads
from h2o.hf.cache_state.slot_layout import Budgets, Capacity
from h2o.hf.conversation.pass_guard import PassGuard
from h2o.hf.conversation.pins import NOTHING_PINNED, PinnedRows
from h2o.hf.conversation.state import CacheState, broadcast, grows_at, merge

RowSize = tuple[int, int, int]
"""Head dimension, bytes per element in the model's dtype, and vectors per token (a key and a value,
or a latent that is both)"""


class PromptBudget(NamedTuple):
    """The budgets of a layer for the rows of a batch."""

    by_row: Budgets
    """(heavy, recent) of each row, one pair per head or a single pair for all heads"""
    pinned: list[int]
    """Number of pinned keys in each row beyond the sinks; every head keeps them"""
    capacity: Capacity | None = None
    """Slots for these budgets, if layers share them. None: each computes its own"""


class PromptRows:
    """The prompts of a batch, and the budgets that they have in each layer.

    Args:
        counts: tokens of each row in the first forward pass, with those of a DynamicCache.
        counted: tokens of each row that fractions are fractions of.
        pinned: pinned positions of each row.
        capacities: the method of the layers' runners. None: no slots are made.
    """

    def __init__(
        self,
        counts: list[int],
        counted: list[int],
        pinned: PinnedRows,
        capacities: Callable[[list[int], int], list[int]] | None = None,
    ) -> None:
        self.counts, self.counted, self.pinned = counts, counted, pinned
        self._capacities = capacities
        self._budgets: dict[Any, PromptBudget] = {}

    def budget(
        self, plan: LayerPlan, heads: int, part: tuple[int, int], row_size: RowSize
    ) -> PromptBudget:
        """Compute the budgets of a layer. Each head has room for sinks, pinned and recent keys.

        Layers with the same amounts and heads have the same budgets, which are computed once.

        Args:
            plan: the plan of the layer.
            heads: number of the layer's key/value heads in this process.
            part: which part of the model's heads these are (`h2o.hf.model_traits.tensor_parallel`).
            row_size: as for `LayerPlan.for_keys`.

        Raises:
            ValueError: the number of rows or heads does not match. The pinned keys do not fit.
        """
        of_layer = None if plan.shares is None else plan.layer
        key = plan.heavy, plan.recent, of_layer, heads, part, row_size
        if key not in self._budgets:
            plan, counted = plan.for_keys(*row_size), self.counted
            pinned = self.pinned.counts(len(counted), plan.sinks)
            by_row = expand_to_heads(budgets_by_row(plan, counted, pinned), heads, part)
            capacity = None
            if self._capacities is not None:
                capacity = Capacity.of(by_row, plan.sinks, max(self.counts), self._capacities)
            self._budgets[key] = PromptBudget(by_row, pinned, capacity)
        return self._budgets[key]


def begin_prompt(
    guard: PassGuard,
    mask: Tensor | None,
    shape: tuple[int, int],
    before: Tensor | None,
    row_size: RowSize,
    capacities: Callable[[list[int], int], list[int]],
) -> None:
    """Find out the prompt of the forward pass under way, in its first layer, before any layer
    stores a key. The state after the pass gets its lengths and pins.

    Args:
        guard: the guard of the cache.
        mask, shape: mask of the first forward pass, [B, Q] bool or None, and (B, Q).
        before: tokens of each row that came from a DynamicCache, [B]; None: no such tokens.
        row_size, capacities: as for `PromptRows`.

    Raises:
        ValueError: the prompt comes in chunks, its length is neither given nor known to generate(),
            and a budget or the pins depend on it. A layer's budget has no room for the pins. A row
            converted from a DynamicCache has only padding in this pass, so nothing would score its
            keys before eviction.
    """
    the_pass = guard.current
    assert the_pass is not None
    B, Q = shape
    if before is not None and mask is not None:
        empty = ((before > 0) & ~mask.bool().any(1).to(before.device)).tolist()
        if any(empty):
            raise ValueError(
                f"row {empty.index(True)} has only padding in the first forward pass after "
                "from_dynamic_cache, so no attention says which of its keys to keep: give each row "
                "at least one token in this pass, or a cache of its own"
            )
    given, by_length, counts = the_pass.before.prompts, guard.needs_prompt_length, [Q] * B
    # Counting the mask's tokens waits for a GPU, so do it there only if budgets or pins need the
    # counts, as budgets that follow the text do. Q is an upper bound, enough to size the slots.
    needs_counts = guard.grows or (by_length and given is None) or guard.pins
    if mask is not None and (mask.is_cpu or needs_counts):
        counts = mask.sum(1).tolist()
    chunked = the_pass.chunked_lengths
    finds = given is None and chunked is None and (by_length or guard.pins.needs_prompt_length)
    found = _chunked_lengths(guard, B, Q) if finds else None
    if before is not None:
        earlier = before.tolist()
        counts, found = _add(counts, earlier), found and _add(found, earlier)
    chunked = chunked if found is None else found
    lengths = prompt_lengths(given, chunked or counts)
    # Budgets that follow the text count what was read, even beyond a given `prompt_length`.
    counted = [*map(max, counts, lengths)] if guard.grows else lengths
    pinned = resolve_pins(guard, lengths, counted, mask, Q, row_size)
    guard.begin_prompt(
        PromptRows(counts, counted, pinned, capacities),
        state_after_prompt(
            the_pass.after, counts, lengths, counted, pinned, chunked, grows=guard.grows
        ),
    )


class EarlierBudgets:
    """The budgets of layers before they grew. A call lowers them again."""

    def __init__(self, layers: Iterable[Any]) -> None:
        self._known = {layer: (layer.slots.budget, layer.facts) for layer in layers}

    def __call__(self) -> None:
        for layer in self._known:
            self.put(layer)

    def put(self, layer: Any) -> None:
        """Lower the budget of one layer."""
        budget, layer.facts = self._known[layer]
        layer.put_budget(budget.to(layer.slots.budget.device))  # the slots may have moved


def grow_budgets(layers: Sequence[Any], before: list[int], after: list[int]) -> EarlierBudgets:
    """Give the heads of all layers the keys by which their budgets grow with the text. Return what
    takes them back, as long as no key was stored.

    Each head gains what its budget would gain if the prompt had been longer. So a head keeps the
    keys that pins or the budget that all heads share (`h2o.hf.prompt.cross_head_budget`) gave it.

    Args:
        layers: the H2O layers of a cache, after the prompt.
        before, after: the numbers of tokens in each row that fractions were and now are fractions
            of (`RowState.counted`), or a single one for all rows.
    """
    growth, earlier = Growth.of(before, after), EarlierBudgets(layers)
    for layer in layers:
        known = layer.plan, layer.num_heads, layer.facts.part, layer.token_size
        layer.facts = layer.facts._replace(lost_pool=False)  # every head has gained keys
        gains = growth.gains(*known)
        if any(any(pair) for row in gains for pair in row):
            layer.put_budget(layer.raised_budget(gains))
    return earlier


class Growth(NamedTuple):
    """Texts before and after they have grown."""

    before: PromptRows
    after: PromptRows

    @classmethod
    def of(cls, before: list[int], after: list[int]) -> Growth:
        """The growth of rows that fractions were and now are fractions of so many tokens."""
        return cls(*(PromptRows(counts, counts, NOTHING_PINNED) for counts in (before, after)))

    def gains(
        self, plan: LayerPlan, heads: int, part: tuple[int, int], row_size: RowSize
    ) -> Budgets:
        """(heavy, recent) that each row and head of a layer gains, together never less than 0. For
        the arguments see `PromptRows.budget`."""
        rows = (x.budget(plan, heads, part, row_size).by_row for x in self)
        gains = []
        for then, now in zip(*rows, strict=True):
            pairs = [(x[0] - y[0], x[1] - y[1]) for x, y in zip(now, then, strict=True)]
            gains.append([(max(heavy, -recent), recent) for heavy, recent in pairs])
        return gains


def schedule_growth(
    plan: LayerPlan,
    heads: int,
    part: tuple[int, int],
    row_size: RowSize,
    counted: list[int],
    lengths: list[int],
) -> list[dict[int, list[tuple[int, int]]]]:
    """The gains of a layer's heads while texts grow token by token, for each row.

    Args:
        counted: numbers of tokens that fractions are fractions of at first.
        lengths: numbers of tokens at the end.

    Returns:
        For each row (heavy, recent) that each head gains, or one pair for all heads, by the number
        of tokens that the row has seen at that moment.
    """
    schedule = []
    for n, length in zip(counted, lengths, strict=True):
        gains = {}
        while (seen := next_growth(n)) <= length:
            gains[seen] = Growth.of([n], [seen]).gains(plan, heads, part, row_size)[0]
            n = seen
        schedule.append(gains)
    return schedule


def state_after_prompt(
    state: CacheState,
    counts: list[int],
    lengths: list[int],
    counted: list[int],
    pinned: PinnedRows,
    chunked: list[int] | None = None,
    *,
    grows: bool,
) -> CacheState:
    """The state after a prompt, of which the lengths and pins were not known before.

    Args:
        state: the state after the columns of the prompt.
        counts, counted, pinned: as for `PromptRows`.
        lengths: tokens of each row in the whole prompt.
        chunked: `lengths`, if the prompt is the first chunk of a longer one.
        grows: whether some layer's budget follows the text (`LayerPlan.grows`).
    """
    each = broadcast(state.rows, counts, lengths, counted, pinned.rows or [None])
    last, columns = state.last_pass, state.columns
    rows = merge(
        [
            row._replace(prompt=n, counted=base, padding=columns - count, pinned=spans)
            for row, count, n, base, spans in each
        ]
    )
    return state._replace(
        longest=max(counts),
        prompt_columns=columns,
        unscored=False,
        waits_for_pins=pinned.has_pending(counts),
        grows_at=grows_at(rows) if grows else UNLIMITED,
        rows=rows,
        last_pass=None if last is None else last._replace(chunked_lengths=chunked),
    )


def resolve_pins(
    guard: PassGuard,
    lengths: list[int],
    counted: list[int],
    mask: Tensor | None,
    columns: int,
    row_size: RowSize | None = None,
) -> PinnedRows:
    """The positions of a cache's pins, before any key of the prompt is stored.

    Args:
        lengths: tokens of each row in the whole prompt.
        counted: as for `PromptRows`.
        row_size: as for `PromptRows.budget`. None: the size of a row in the model's config.
        mask, columns: as for `h2o.hf.conversation.pins.Pins.resolve`.

    Raises:
        ValueError: some layer's budget has no room for the pins.
    """
    if not guard.pins:
        return NOTHING_PINNED
    pinned = guard.pins.resolve(lengths, mask, columns)
    for plan in guard.plans.values():
        plan = plan if row_size is None else plan.for_keys(*row_size)
        budgets_by_row(plan, counted, pinned.counts(len(counted), plan.sinks))
    return pinned


def check_late_rows(guard: PassGuard, tokens: list[int], mask: Tensor) -> None:
    """Check the rows that had only padding in all passes so far and now get the beginning of their
    prompt. Budgets that are fractions of an unknown prompt, pins that cover one, and echo, are
    those of the first pass.

    Args:
        tokens: tokens of each row before the pass, or a single number for all rows.
        mask: [B, Q] of the new columns, 0 at padding.

    Raises:
        ValueError: the budget, pins or scores of such a row would not be those that it has alone.
    """
    has_echo = any(plan.config.score_by == "mean-echo" for plan in guard.plans.values())
    for row, (before, new) in enumerate(broadcast(tokens, mask.bool().sum(1).tolist())):
        if before or not new:
            continue
        prompt, reason = guard.state.row(row).prompt or 0, ""
        if not prompt and guard.pins.needs_prompt_length:
            reason = 'pinned="prompt" pins the tokens in that pass'
        elif has_echo and max(prompt, new) > 1:
            reason = 'score_by="mean-echo" scores prompts in that pass'
        elif not prompt and guard.needs_prompt_length and new > 1:
            reason = "its budget is a fraction of the tokens in that pass"
        if reason:
            least = guard.state.columns + int(mask[row].bool().long().argmax()) + 1
            raise ValueError(
                f"row {row} had only padding in the first forward pass, and {reason}. Call "
                f"cache.reset() and prefill at least {least} columns in the first pass "
                f"(prefill_chunk_size={least}), so that each row has a token in it. Or pass the "
                "prompts to h2o.generate_all, which prefills each without padding"
            )


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


def prompt_lengths(given: list[int] | None, found: list[int]) -> list[int]:
    """Number of tokens in each row's prompt.

    Args:
        given: as the user gave it, for each row or a single one for all. `generate()` repeats each
            prompt for beams and `num_return_sequences`.
        found: as the first pass shows it.
    """
    B = len(found)
    if given is None:
        return found
    if len(given) < B and B % len(given) == 0:
        return [n for n in given for _ in range(B // len(given))]
    if len(given) != B:
        raise ValueError(f"prompt_length has {len(given)} entries for a batch of {B} rows")
    return given


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
