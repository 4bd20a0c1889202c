"""`BaseLayer`: what a layer of an `H2OCache` holds between forward passes, slots and token counts.

It is the base class of `H2OLayer` (`h2o.hf.layers.layer`), which adds the forward pass.

Shape letters as in `h2o.hf`, and n columns of another cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from h2o import ops
from h2o.config.layer_plan import LayerPlan
from h2o.errors import UnsupportedError
from h2o.hf.cache_state import slot_layout
from h2o.hf.cache_state.kept_keys import Kept
from h2o.hf.cache_state.report import LayerReport
from h2o.hf.cache_state.slot_layout import Budgets, Capacity
from h2o.hf.cache_state.trace import Trace
from h2o.hf.conversation.pass_guard import PassGuard
from h2o.hf.conversation.state import broadcast
from h2o.hf.layers.named_eviction import move_forward
from h2o.hf.layers.pass_runners import EagerRunner
from h2o.hf.layers.plain_variant import PlainVariant
from h2o.hf.model_traits import tensor_parallel
from h2o.hf.prompt.echo_scorer import PromptEcho
from h2o.kv_dtype import has_four_bit_keys
from h2o.quantization import dequantize, from_stored
from h2o.spans import PINNED


class LayerFacts(NamedTuple):
    """Plain facts about what a layer holds. Files and copies go over these fields."""

    row_size: tuple[int, int] = (0, 0)
    """D, and bytes per element in the model's dtype"""
    part: tuple[int, int] = tensor_parallel.WHOLE
    """The part of the model's heads in this process (`h2o.hf.model_traits.tensor_parallel`)"""
    lost_pool: bool = False
    """Whether a head got none of the slots that all heads share, and keeps `min_tokens` keys"""
    has_removed: bool = False
    """Whether `H2OCache.evict` has removed keys. Of the text that remains, sinks and recent tokens
    may have been evicted before"""


class BaseLayer(CacheLayerMixin):
    """Slots and counts of an `H2OLayer`, without its forward pass.

    Three objects define how layers differ. The layer passes itself to their methods:

    - `variant` of attention: what a slot holds for each token, and how attention uses it
      (`h2o.hf.layers.plain_variant`).
    - `scorer`: what makes a prompt's scores of the attention that its keys received, such as
      `PromptEcho` (`h2o.hf.prompt.echo_scorer`). None: that attention is the score.
    - `runner`: whether later passes run in captured graphs (`h2o.hf.layers.pass_runners`).

    Args:
        plan: the layer's budgets, and the config of all layers.
        guard: shared by all layers of a cache.
        rotaries: the rotary embeddings of the cache's layers (`h2o.hf.layers.named_eviction`).
        trace: whether to record when each key is evicted.
    """

    kind = "h2o"
    is_sliding = False
    supports_early_init = False
    record_past = False
    """Whether passes are recorded, so that `H2OCache.crop` can remove tokens of the last one. The
    name is transformers'."""

    def __init__(
        self,
        plan: LayerPlan,
        guard: PassGuard | None = None,
        *,
        variant: PlainVariant | None = None,
        scorer: PromptEcho | None = None,
        runner: EagerRunner | None = None,
        rotaries: Any = None,
        trace: bool = False,
    ) -> None:
        super().__init__()
        self.plan, self.config, self.policy = plan, plan.config, plan.policy
        self.layer_idx = plan.layer
        self.guard = guard or PassGuard(plans={plan.layer: plan})
        self.variant: Any = variant or PlainVariant()
        has_smoothing = self.variant.has_values and has_four_bit_keys(plan.config.kv_dtype)
        self.is_smoothed = has_smoothing and self.variant.smooths
        """Whether slots with offsets get smoothing"""
        self.scorer = scorer
        self.runner: Any = runner or EagerRunner()
        self.rotaries = rotaries
        self.trace = Trace() if trace else None
        self.empty()

    def take_rows(
        self, rows: list[int], source: BaseLayer, source_rows: list[int], B: int, longest: int
    ) -> None:
        """Overwrite some of the B rows with rows of another layer, in place.

        Args:
            rows: numbers of the rows to overwrite.
            source: a layer with the same settings. Its tensors are copied.
            source_rows: numbers of the rows to copy, as many as `rows`.
            longest: number of tokens that the longest of all rows has seen.
        """
        if self.slots is None:
            self.facts = source.facts
            copies = slot_layout.change_rows(
                source.slots, lambda x: x[:1].expand(B, *x.shape[1:]).clone()
            )
            self.set_slots(copies, source.capacity)
        capacity, others = self.capacity, source.capacity
        widest = list(map(max, capacity.widest, others.widest))
        needed = self.runner.capacities(widest, longest)
        sizes = list(map(max, needed, capacity.sizes, others.sizes))
        slots = slot_layout.enlarge(self.slots, capacity.sizes, sizes)
        if source.facts.has_removed:
            self.facts = self.facts._replace(has_removed=True)
        to, index = (slot_layout.row_index(x, slots.keys.device) for x in (rows, source_rows))
        joining = slot_layout.change_rows(source.slots, lambda x: x[index])
        slot_layout.put_rows(slots, to, slot_layout.enlarge(joining, others.sizes, sizes))
        self.set_slots(slots, Capacity(widest, sizes))

    def select_rows(self, rows: Tensor | None) -> None:
        """Select the rows of the next batches: distinct numbers [n] int32, or None for all."""
        self.set_slots(self.slots._replace(rows=rows), self.capacity)

    def row_bytes(self) -> int:
        """Bytes of one row, over all tensors, once its budget is full."""
        widest = self.capacity.widest
        return slot_layout.row_bytes(self.slots, slot_layout.capacities(widest, max(widest)))

    def _raise_shape_error(self, keys: torch.Size, values: torch.Size) -> None:
        """Raise UnsupportedError because new keys and values have different shapes."""
        raise UnsupportedError(
            f"layer {self.layer_idx} has keys of shape {tuple(keys)} and values of shape "
            f"{tuple(values)}. h2o needs the same head dimension for both"
        )

    def _raise_batch_error(self, given: int) -> None:
        """Raise ValueError because a batch of `given` rows does not fit."""
        text = f"this cache holds a batch of {self.batch_size} rows and was given {given}"
        if given % self.batch_size == 0:
            raise ValueError(
                f"{text}. To continue each row several times (num_beams, num_return_sequences, "
                f"questions about one document), use cache.fork(rows={given // self.batch_size}). "
                "For other conversations use a new H2OCache, or cache.reset()"
            )
        raise ValueError(
            f"{text}. One cache holds one batch of conversations, so use a new H2OCache, or "
            "cache.reset()"
        )

    def make_room(self, tokens: int) -> ops.Slots:
        """Enlarge the slots if rows of `tokens` tokens and one more might not fit. Return them."""
        if tokens > self.capacity.tokens:
            capacity = self.capacity.larger(tokens)
            self.set_slots(
                slot_layout.enlarge(self.slots, self.capacity.sizes, capacity.sizes), capacity
            )
        return self.slots

    def raised_budget(self, gains: Budgets) -> Tensor:
        """`Slots.budget` with (heavy, recent) added to the budgets of each row, or of all rows."""
        budget = self.slots.budget
        more = torch.tensor(gains, dtype=torch.int32, device="cpu").to(budget.device)
        return (budget + (more if budget.ndim == 3 else more.squeeze(1))).clamp_(min=0)

    def put_budget(self, budget: Tensor) -> None:
        """Let rows and heads keep more or fewer keys from the next pass on, which makes room for
        them. `budget` is that of the slots (`Slots.budget`)."""
        # Rows grow at different times. The widest is only known from all of them.
        widest = self.config.sinks + budget.long().sum(-1).amax(0).reshape(-1)
        slots = self.slots._replace(budget=budget)
        self.set_slots(slots, Capacity(widest.tolist(), self.capacity.sizes))

    def set_slots(self, slots: ops.Slots | None, capacity: Capacity) -> None:
        """Hold these slots, or none. Tensors made under `torch.inference_mode` are copied."""
        if slots is not None:
            for name, x in zip(slots._fields, slots, strict=True):
                if x is not None and x.is_inference():
                    slots = slots._replace(**{name: slot_layout.writable(x)})
        self.slots = slots
        self.capacity = capacity
        self.is_initialized = slots is not None
        batch = None if slots is None else slots.scores if slots.rows is None else slots.rows
        self.batch_size = 0 if batch is None else len(batch)
        self.num_heads = 0 if slots is None else slots.next_slot.shape[1]
        for changes in (self.variant, self.runner):
            if changes.slots_changed is not None:
                changes.slots_changed(self)

    # ---- For transformers --------------------------------------------------------------------

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """The key in each slot, [B, G, S, D], dequantized; None before the prompt.

        This is the counterpart of a DynamicCache layer's `keys`, but slots are in no order, and
        some are empty."""
        return None if self.slots is None else self.by_slot()[0]

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """The value in each slot, like `keys`."""
        return None if self.slots is None else self.by_slot()[1]

    @keys.setter
    def keys(self, new: Tensor | None) -> None:
        """Accept None, to which transformers' constructor sets the attribute."""
        if new is not None:
            raise AttributeError(
                "the keys and values of an H2OLayer cannot be replaced. To select or repeat rows "
                "call the methods of the H2OCache, such as cache.reorder_cache(beam_idx)"
            )

    values = values.setter(keys.fset)  # type: ignore[assignment]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing. Slots are created once the prompt's length is known."""

    @property
    def seen(self) -> int:
        """Number of columns seen by the cache, including padding."""
        return int(self.guard.columns)

    def get_seq_length(self) -> Any:
        """Number of columns seen, including padding and evicted tokens.

        transformers numbers new tokens from here."""
        return self.guard.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the mask. It covers new tokens only: stored keys are all visible."""
        return query_length, self.guard.columns

    def get_max_length(self) -> int:
        """-1, which means unbounded."""
        return -1

    @property
    def is_croppable(self) -> bool:
        """Whether tokens of the last pass can be removed. transformers asks before it drafts."""
        return self.record_past

    @property
    def is_compileable(self) -> bool:
        """Whether `generate()` may compile the decode steps. False while passes are recorded."""
        return self.runner.is_compileable and not self.record_past

    def activate_past_recording(self) -> None:
        """See `H2OCache.activate_past_recording`."""
        self.record_past = True

    def empty(self) -> None:
        """Empty the slots. Convolution and recurrent states are not touched."""
        self.facts = LayerFacts()
        self.set_slots(None, slot_layout.NO_CAPACITY)
        self.trace = None if self.trace is None else Trace()
        self.last: Any = None  # the result of `record_pass` for the last pass, if it was recorded

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Select or repeat the batch rows, including their budgets, but not those of states.

        `change` does so with the first axis of a tensor."""
        if self.slots is not None:
            self.set_slots(slot_layout.change_rows(self.slots, change), self.capacity)
            self.last = None  # it recorded other rows
            if self.trace is not None:
                self.trace.each(change)

    def offload(self) -> None:
        raise NotImplementedError("an H2O layer cannot be offloaded. Its budget keeps it small")

    prefetch = offload

    # ---- For users ---------------------------------------------------------------------------

    def kept(self) -> Kept:
        """Positions and scores of the kept keys: see `H2OCache.kept`."""
        if self.slots is None:
            return Kept(_empty(3, torch.int64), _empty(3))
        return Kept(
            *slot_layout.gather_held_keys(self.slots, self.capacity.sizes, positions=-1, scores=0)
        )

    def kept_rows(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, K, D] in the order of `kept`, with 0 where the position is -1."""
        if self.slots is None:
            return _empty(4), _empty(4)
        fields = dict.fromkeys(self.row_fields, 0.0)
        positions, *rows = slot_layout.gather_held_keys(
            self.slots, self.capacity.sizes, positions=-1, **fields
        )
        return self._unpack_rows(rows, positions)

    def by_slot(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, S, D]; 0 where a head has fewer slots than another.

        Does not wait for the device. Copies only if the slots are quantized or heads differ in
        their number of slots."""
        by_head = functools.partial(slot_layout.by_head, self.slots, self.capacity.sizes)
        return self._unpack_rows([by_head(x) for x in self.row_fields], by_head("positions", -1))

    @property
    def row_fields(self) -> tuple[str, ...]:
        """Fields of `Slots` that hold the tokens' rows."""
        return ("keys", "values") if self.variant.has_values else ("keys",)

    def _unpack_rows(self, rows: list[Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
        """Convert rows of slots [B, G, n, ...] at these positions [B, G, n] to the model's keys and
        values."""
        (D, _), slots = self.facts.row_size, self.slots
        changes = (None if x is None else x[:, :, None] for x in (slots.offsets, slots.smoothing))
        keys, values = from_stored(dequantize(rows[0], D), dequantize(rows[-1], D), *changes)
        if slots.offsets is not None:
            keys = keys.masked_fill((positions < 0)[..., None], 0)
        return self.variant.unpack_rows(move_forward(self, keys, -1), values)

    @property
    def token_size(self) -> tuple[int, int, int]:
        """Elements per row, bytes per element in the model's dtype, and rows per token and head."""
        return *self.facts.row_size, 1 + self.variant.has_values

    def report(self) -> LayerReport:
        """Report on this layer; see `h2o.hf.cache_state.report`."""
        if self.slots is None:
            return LayerReport(self.layer_idx, "h2o")
        slots, sizes = self.slots, self.capacity.sizes
        B, G = slots.next_slot.shape
        budget = slots.budget if slots.budget.ndim == 3 else slots.budget[:, None].expand(B, G, 2)
        stored = [0 if x is None else x.nbytes for x in slots]
        kept = slot_layout.by_head(slots, sizes, "positions", -1) >= 0
        pinned = kept & (slot_layout.by_head(slots, sizes, "scores") == PINNED)
        scores = slots.scores[slots.positions >= 0]
        plan = self.plan.for_keys(*self.token_size)
        counted = {row.counted for row in self.guard.state.rows} - {0}
        return LayerReport(
            layer=self.layer_idx,
            kind="h2o",
            seen=slots.seen_tokens.tolist(),
            removed=[row.removed for row, _ in broadcast(self.guard.state.rows, range(B))],
            kept_by_head=kept.sum(-1).tolist(),
            pinned_by_head=pinned.sum(-1).tolist(),
            budget_by_head=(budget.sum(-1) + self.config.sinks).tolist(),
            bytes_held=sum(stored[:2]),
            bytes_full=self.seen * B * G * math.prod(self.token_size),
            bytes_bookkeeping=sum(stored[2:]),
            mass_evicted=slots.evicted_score.sum().item(),
            mass_kept=scores[scores < PINNED].cpu().double().sum().item(),
            raised=any(map(plan.is_rounded_up, counted)),
            floored=self.facts.lost_pool or any(map(plan.is_floored, counted)),
            unscored=self.guard.state.unscored,
        )


def _empty(axes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros([0] * axes, dtype=dtype, device="cpu")
