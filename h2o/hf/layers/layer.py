"""A forward pass through one layer of an `H2OCache`: attention, then eviction by the budget.

transformers calls `cache.update(key, value, layer)` and then the attention
function, which never sees the cache. So `update` returns the new keys as a
view that carries the layer (`view.h2o_layer`), and the attention function of
h2o.hf.attention.attention hands its whole call to that layer's `attend`. A view per call
keeps two threads apart and makes no reference cycle between layer and tensor.
A prompt, a later chunk of several tokens and a decode step are three ways
through `forward`; each attends, evicts by the config's policy, and stores.

Shape letters: B batch rows, H query heads, G key/value heads, Q new tokens,
D head dimension. A column is an index in the padded batch; a position is a
token's index in its own row, pads not counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o import ops
from h2o.compat import StatesAndKeysLayer, StatesLayer
from h2o.config import H2OConfig
from h2o.config.layer_plan import LayerPlan
from h2o.hf.attention.attention_call import (
    AttentionCall,
    NewTokens,
    as_autocast,
    evict_after,
    round_like_slots,
)
from h2o.hf.families import tensor_parallel
from h2o.hf.families.layer_kinds import has_states
from h2o.hf.layers.crop import CroppableLayer, LastPass
from h2o.hf.layers.plain_form import PlainForm
from h2o.hf.layers.steppers import EagerStepper
from h2o.hf.prompt import prompt_budget
from h2o.hf.prompt.cross_head_budget import Prompt, positions_in
from h2o.hf.prompt.scorers import AttentionScorer
from h2o.hf.store import slot_layout, states
from h2o.hf.store.layer_contents import LayerContents
from h2o.hf.store.layer_state import layer_state, restore
from h2o.hf.store.pass_guard import WITHOUT_CACHE, PassGuard
from h2o.hf.store.slot_layout import Budgets, Capacity


class H2OLayer(CroppableLayer):
    """One layer's store: at most k = sinks + heavy + recent keys of each row and head.

    What differs between layers is answered by three objects, which the layer hands itself:

    - `form`: what slots hold of a token, and how attention reads them (`h2o.hf.layers.plain_form`).
    - `scorer`: which scores keys get (`h2o.hf.prompt.scorers`).
    - `stepper`: how a pass after the prompt runs (`h2o.hf.layers.steppers`).

    Args:
        plan: the layer's budgets, and the config of all layers.
        guard: shared by the layers of a cache.
        trace: whether to remember when each key was evicted.
    """

    def __init__(
        self,
        plan: LayerPlan | None = None,
        guard: PassGuard | None = None,
        *,
        form: PlainForm | None = None,
        scorer: AttentionScorer | None = None,
        stepper: EagerStepper | None = None,
        trace: bool = False,
    ) -> None:
        super().__init__()
        self.plan = plan or LayerPlan.of(H2OConfig(), 0, 1)
        self.config: H2OConfig = self.plan.config
        self.layer_idx = self.plan.layer
        self.guard = guard or PassGuard()
        self.policy = self.plan.policy
        self.form = form or PlainForm()
        self.scorer = scorer or AttentionScorer()
        self.stepper = stepper or EagerStepper()
        self.columns = self.stepper.zero()
        self.traced = trace
        self.part = tensor_parallel.WHOLE  # which part of the model's heads this process has
        self.empty()

    # ---- One forward pass: update, then attend -----------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values [B, G, Q, D], the keys as a view that carries this layer.

        Nothing is stored before attention has been through `attend`.

        Raises:
            RuntimeError: an earlier layer's keys never got there.
            ValueError: another batch size, number of heads or shape.
        """
        rows, values = self.form.rows(self, key_states, value_states)
        shape = rows.shape
        if self.slots is None:
            if shape[0] == 0:
                raise ValueError("an H2OCache needs at least one row, not a batch of 0")
            # Under autocast keys have been rotated in float32; attention makes them as the values.
            last = rows if values is None else values
            self.row_size = last.shape[-1], last.element_size()
        elif shape[0] != self.batch_size:
            self._refuse_rows(shape[0])
        elif shape[1] != self.num_heads:
            raise ValueError(
                f"this cache holds keys of {self.num_heads} heads in layer {self.layer_idx} and "
                f"was given those of {shape[1]}: it is of another model, or of one that was cut "
                "over another number of processes"
            )
        elif self.slots.keys.device != rows.device:  # of a file, or the model has moved
            restore(self, layer_state(self).each(lambda x: x.to(rows.device)))
        keys = self.form.hand_over(self, key_states, rows)
        self.guard.waiting = self.layer_idx
        return keys, value_states

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention of the new queries over what is held and the new keys; then eviction.

        For a later layer that reuses the keys, attention alone.

        Returns:
            [B, Q, H, D]. When it raises, the layer is as it was before `update`.

        Raises:
            UnsupportedError, TypeError, ValueError: the call is one that h2o does not serve.
            RuntimeError: the model is in training, or attends twice to the same keys.
        """
        if self.form.reused_by and call.module.layer_idx in self.form.reused_by:
            return self.form.attend_later(self, call)
        if torch.is_grad_enabled() and call.requires_grad:
            with torch.no_grad():
                out = self.attend(call.detached())
            return call.without_backward(out)
        try:
            return self._attend(call)
        finally:
            self.form.end_call()

    def _attend(self, call: AttentionCall) -> Tensor:
        try:
            call.check()
            # A model may not tell its layers, whose default is False. That it was meant shows when
            # the whole text comes again with its first new token.
            if (
                call.use_cache is False
                and 0 < self.seen == self.prompt_columns == call.query.shape[2] - 1
                and call.may_begin_anew
            ):
                raise ValueError(WITHOUT_CACHE)
            query, key, value = as_autocast(call.query, call.key, call.value)
            dtype = query.dtype
            tokens = self.form.tokens(self, query, key, value, call)
            if self.slots is None or self.unscored:
                self.part = tensor_parallel.part(call.module)
                if self.plan.shares is not None:
                    self.plan.check_attention(call.module)
            if self.slots is not None and self.config.kv_dtype is None:
                stored = self.slots.keys.dtype
                if stored != dtype:  # autocast began, or ended, after what is held was stored
                    tokens = tokens.to(stored)
        except Exception:
            self.guard.take_back(self.layer_idx, has_states=has_states(self))
            raise
        if self.guard.waiting != self.layer_idx:
            raise RuntimeError(
                f"attention of layer {self.layer_idx} ran twice for the same keys: an H2OCache "
                "cannot be used where forward passes are repeated (gradient checkpointing)"
            )
        last = LastPass.of(self, tokens) if self.record_past else None
        seen = None if self.trace is None else self.seen
        try:
            out = self.forward(tokens)
        except Exception:
            if self.trace is None or seen == self.seen:
                self.guard.take_back(self.layer_idx, has_states=has_states(self))
            raise  # what is stored and not in the trace counts as an interrupt
        self.last = last
        self.guard.layer_done(self.layer_idx)
        return out if out.dtype == dtype else out.to(dtype)

    def forward(self, tokens: NewTokens) -> Tensor:
        """Attend and store tokens in the dtype of the store, without checks."""
        if self.slots is None or self.unscored:
            return self._attend_prompt(tokens)
        if tokens.query.shape[2] != 1 or self.waits_for_pins:  # a step does not show a new score
            return self.stepper.chunk(self, tokens)
        return self.stepper.step(self, tokens)

    def _attend_prompt(self, tokens: NewTokens) -> Tensor:
        """The first forward pass, also over keys of a DynamicCache: sets the budgets."""
        B, G, Q, _ = tokens.key.shape
        guard, unscored, size = self.guard, self.slots, self.token_size
        if guard.prompt_counts is None:  # the first of the layers
            before = None if unscored is None else unscored.seen_tokens
            prompt_budget.begin_prompt(
                guard, self.plan, tokens.mask, (B, Q), self.seen + Q, before, size
            )
        counts = guard.prompt_counts
        budget = prompt_budget.prompt_budget(self.plan, guard, counts, G, self.part, size)
        scores_before = None if unscored is None else unscored.scores.clone()
        try:
            out, scores = self.attention(tokens, unscored)
            claims = None
            if unscored is None:
                scores, claims = self.scorer.after_prompt(tokens, scores)
            prompt = Prompt(
                tokens.key, tokens.value, tokens.mask, scores, claims, counts, Q, tokens.mask,
                budget,
            )  # fmt: skip
            if unscored is not None:
                keys, values, mask = slot_layout.together(unscored, *prompt[:3])
                scores = torch.cat([unscored.scores, scores], dim=2)
                prompt = prompt._replace(keys=keys, values=values, mask=mask, scores=scores)
            if guard.pins.rows is not None:
                positions, _ = positions_in(prompt.mask, prompt.scores)
                prompt = prompt._replace(scores=guard.pins.score(prompt.scores, positions))
            self.scorer.store(self, prompt)
        except Exception:  # the scores are all that attend has touched
            if unscored is not None:
                unscored.scores.copy_(scores_before)
            raise
        return out

    # ---- What form, scorer and stepper ask of the layer ----------------------------------------

    def store(self, prompt: Prompt, by_row: Budgets) -> None:
        """Keeps what budgets of each row, and of each head or all, have room for."""
        tensors = prompt.keys, prompt.values, prompt.mask, prompt.scores
        self._keep(*tensors, by_row, max(prompt.counts))
        self.raised, self.floored = prompt.budget.raised, prompt.budget.floored
        self.unscored = False
        self.waits_for_pins = self.guard.pins.rows is not None
        self.count(prompt.columns, prompt.column_mask)
        self.prompt_columns = self.seen

    def attention(self, tokens: NewTokens, slots: ops.Slots | None) -> tuple[Tensor, Tensor]:
        """Output [B, Q, H, D] and scores [B, G, Q] of the new keys."""
        out, scores = self.form.attention(self, tokens, slots)
        if not self.scorer.uses_attention:
            scores = self.scorer.scores(self, tokens, slots, scores)
        return out, scores

    def attend_and_evict(self, tokens: NewTokens, slots: ops.Slots) -> Tensor:
        """Attends over the slots and the new tokens, and keeps what the budget has room for of
        both."""

        def attend() -> tuple[Tensor, Tensor]:
            out, scores = self.attention(round_like_slots(tokens, slots), slots)
            if self.waits_for_pins:
                positions, _ = positions_in(tokens.mask, scores)
                after = (positions + slots.seen_tokens[:, None, None]).masked_fill(
                    positions < 0, -1
                )
                scores = self.guard.pins.score(scores, after)
            return out, scores

        return evict_after(attend, tokens, slots, self.policy)

    # ---- Slots for a prompt -------------------------------------------------------------------

    def set_pruned(
        self, keys: Tensor, values: Tensor | None, mask: Tensor, scores: Tensor,
        by_row: Budgets, source: LayerContents,
    ) -> None:  # fmt: skip
        """Take the state that a prompt of these keys and values [B, G, K, D], mask [B, K], scores
        [B, G, K] and budgets of each row and head would leave; `source` is the layer that read it.
        """
        self._keep(keys, values, mask, scores, by_row, keys.shape[2])
        self.row_size, self.seen = source.row_size, source.seen
        self.prompt_columns = source.seen
        self.waits_for_pins = self.guard.pins.rows is not None
        self.count(0, None)

    def _keep(
        self, keys: Tensor, values: Tensor | None, mask: Tensor | None, scores: Tensor,
        by_row: Budgets, tokens: int,
    ) -> None:  # fmt: skip
        """Makes slots that hold what the budgets have room for, of rows of at most so many
        tokens."""
        widest = slot_layout.widest_budgets(by_row, self.config.sinks)
        capacity = Capacity(widest, self.stepper.capacities(widest, tokens))
        slots = slot_layout.with_budgets(
            keys, capacity.sizes, by_row, value_weighted=self.config.value_weighted,
            kv_dtype=self.config.kv_dtype, shared=not self.form.has_values,
        )  # fmt: skip
        ops.evict(keys, values, scores, slots, mask=mask, policy=self.policy)
        self.set_slots(slots, capacity)
        self.longest = tokens

    def reset(self) -> None:
        """Empties the layer and frees its memory."""
        self.empty()
        self.form.forget()
        self.scorer.reset()


class H2OLayerWithStates(H2OLayer, StatesAndKeysLayer):
    """An `H2OLayer` for the keys, with transformers' states beside it."""

    def __init__(self, *args: Any, number_of_states: int, **kwargs: Any) -> None:
        """`number_of_states`: of each kind."""
        super().__init__(*args, **kwargs)
        StatesLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *keys_and_values: Tensor, **states: Any) -> None:
        """Make the states; slots are made when the prompt's length is known."""
        if states:
            StatesLayer.lazy_initialization(self, **states)

    def reset(self) -> None:
        """Empties the layer."""
        super().reset()
        states.forget(self)

    @property
    def is_croppable(self) -> bool:
        """Never with recurrent states, which are sums over all tokens."""
        return super().is_croppable and not any(self.is_recurrent_states_initialized.values())

    def crop(self, tokens: int) -> None:
        """See `H2OCache.crop`."""
        super().crop(tokens)
        if self.record_past and self.seen:
            StatesLayer.crop(self, tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        super().reorder_cache(beam_idx)
        states.each(self, lambda x: x.index_select(0, beam_idx.to(x.device)))
