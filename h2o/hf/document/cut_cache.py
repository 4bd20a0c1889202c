"""Cuts a cache that holds all keys of a document to its budget, in one step for all heads.

Shape letters as in `h2o.hf`, and K tokens of the longest row.
"""

from __future__ import annotations

from torch import Tensor

from h2o import ops
from h2o.config import H2OConfig
from h2o.hf.cache.cache import H2OCache
from h2o.hf.cache_state import slot_layout
from h2o.hf.cache_state.slot_layout import Budgets, Capacity, positions_in
from h2o.hf.cache_state.trace import find_evicted
from h2o.hf.conversation.pins import PinnedRows
from h2o.hf.layers.layer import H2OLayer
from h2o.hf.model_traits import tensor_parallel
from h2o.hf.prompt.cross_head_budget import (
    Prompt,
    add_slots,
    allocate_slots,
    each_head,
    reserve_for_heads,
)
from h2o.hf.prompt.prompt_budget import PromptBudget, PromptRows
from h2o.policy import Policy
from h2o.quantization import smoothing_of

RECENT = 4
"""Number of newest keys of each head that the cut keeps whatever their rank."""
LATER_RECENT = 8
"""Number of newest keys that each head keeps after the cut.

To a question, a document's last words are worth no more than its other words. New text, however,
depends on the words just before it. Measured at 4% of the bytes, with 45 facts and 127 tokens after
each of 16 texts:

    RECENT  LATER_RECENT  facts found  nats lost per token
         8             8           28                0.406
         4             8           31                0.409
         4             4           32                0.448
         8             4           29                0.444
"""


def cut_cache(
    full_cache: H2OCache,
    cache: H2OCache,
    rows: PromptRows,
    config: H2OConfig,
    attention: list[Tensor],
    largest: list[Tensor],
    by_attention: float,
) -> H2OCache:
    """Move the keys that the budget has room for from `full_cache` to `cache`, and empty
    `full_cache`.

    Each head first keeps its sinks and its newest `RECENT` keys. The fraction `by_attention` of its
    remaining budget goes to its highest ranks by the config's own policy. The budget that is then
    left over in all heads of all layers goes to the keys with the highest `largest`. Later
    evictions keep the newest `LATER_RECENT` keys of each head.

    Args:
        full_cache: a cache without a budget that has read the document.
        cache: an empty cache with the config for the text after the document. The caller gives it
            its state.
        rows: the documents.
        config: budgets, storage, and the policy of `attention`.
        attention, largest: a tensor [B, G, K] float32 for each H2O layer. `attention` has scores by
            the config's policy. `largest` has the largest attention of any single query, which is
            each key's score from then on.
        by_attention: fraction in [0, 1].
    """
    pins = rows.pinned
    layers = [
        (source, layer)
        for source, layer in zip(full_cache.layers, cache.layers, strict=True)
        if isinstance(layer, H2OLayer)
    ]
    first, kept, spare, wanted = [], [], [], []
    for (source, layer), scores in zip(layers, attention, strict=True):
        keys, values, mask = _held_tokens(source)
        heads = source.num_heads
        budget = rows.budget(layer.plan, heads, tensor_parallel.WHOLE, source.token_size)
        budgets = each_head(budget.by_row, heads)
        own = [n and n + LATER_RECENT - RECENT for n in pins.counts(len(budgets), config.sinks)]
        first_budget, left = reserve_for_heads(
            budgets, config.sinks, layer.plan.floor, own, by_attention, RECENT
        )
        wanted.append(budgets)
        first.append(first_budget)
        scores = _with_pins(pins, mask, scores)
        kept.append(_keys_to_keep(keys, values, mask, scores, config.policy, first_budget))
        spare.append(left)
    if not layers:
        return cache
    free_slots = [sum(row) for row in zip(*spare, strict=True)]
    more = allocate_slots(free_slots, kept, largest)
    for (source, layer), budgets, first_budget, chosen, scores, counts in zip(
        layers, wanted, first, kept, largest, more, strict=True
    ):
        budget = add_slots(first_budget, counts)
        # Scores are at most 1, so adding 2 ranks the keys chosen by `attention` above all others.
        keys, values, mask = _held_tokens(source)
        ranks = _with_pins(pins, mask, scores + 2 * chosen)
        layer.facts = source.facts
        prompt = Prompt(
            keys, values, mask, ranks, echo=None, counts=[mask.shape[1]], columns=source.seen,
            column_mask=None, budget=PromptBudget(budget, []),
            smoothing=smoothing_of(None, keys, mask) if layer.is_smoothed else None,
        )  # fmt: skip
        layer.store(prompt, budget)
        layer.slots.scores.sub_(2 * (layer.slots.scores >= 2))
        held = layer.slots.budget
        held.copy_(held.new_tensor(_later(budget, budgets)).view_as(held))
        source.empty()
    return cache


def _with_pins(pins: PinnedRows, mask: Tensor, scores: Tensor) -> Tensor:
    return pins.score(scores, positions_in(mask, scores)[0])


def _held_tokens(layer: H2OLayer) -> tuple[Tensor, Tensor | None, Tensor]:
    """All tokens that a layer holds, by ascending position: keys and values [B, G, K, D], and a
    mask [B, K] bool, False after the last token of a row. No values if the keys are also those."""
    fields = {"positions": -1.0, **dict.fromkeys(layer.row_fields, 0.0)}
    positions, *rows = slot_layout.gather_held_keys(layer.slots, layer.capacity.sizes, **fields)
    return rows[0], rows[1] if layer.variant.has_values else None, positions[:, 0] >= 0


def _later(budgets: Budgets, wanted: Budgets) -> Budgets:
    """Budgets with the same totals but more recent keys: as many as `wanted` has, up to
    `LATER_RECENT`."""
    later = []
    for row, wanted_row in zip(budgets, wanted, strict=True):
        recents = [
            min(heavy + recent, most, LATER_RECENT)
            for (heavy, recent), (_, most) in zip(row, wanted_row, strict=True)
        ]
        later.append([(sum(x) - recent, recent) for x, recent in zip(row, recents, strict=True)])
    return later


def _keys_to_keep(
    keys: Tensor, values: Tensor | None, mask: Tensor, scores: Tensor, policy: Policy,
    budgets: Budgets,
) -> Tensor:  # fmt: skip
    """Whether eviction by a policy keeps a key, [B, G, K] bool; also True at padding."""
    sizes = Capacity.of(budgets, policy.sinks, keys.shape[2]).sizes
    slots = slot_layout.create_slots(
        keys, sizes, budgets, value_weighted=policy.value_weighted, shared=values is None
    )
    ops.evict(keys, values, scores, slots, mask=mask, policy=policy)
    positions = slot_layout.by_head(slots, sizes, "positions", -1)
    return ~find_evicted(positions, slots.seen_tokens, keys.shape[2])
