"""`H2OLayer`: a forward pass through one layer of an `H2OCache`, attention and then eviction.

transformers calls `cache.update(key, value, layer_idx)` and then the attention function, which
never sees the cache. Therefore `update` returns the new keys as a view that carries the layer
(`view.h2o_layer`), and the attention function in h2o.hf.attention.attention passes its arguments to
that layer's `attend`, which checks and converts them and calls `forward`. Each call gets its own
view, which keeps threads apart and avoids a reference cycle between layer and tensor. `forward` has
three paths: a prompt, a later chunk of several tokens, and a decode step. Each attends, evicts down
to the budget by the config's policy, and stores.

Shape letters as in `h2o.hf`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o import backends, ops
from h2o.compat import StatesAndKeysLayer, StatesLayer
from h2o.hf.attention.attention_call import (
    AttentionCall,
    NewTokens,
    as_autocast,
    as_operand,
    attention,
    evict_after,
    round_like_slots,
)
from h2o.hf.cache_state import slot_layout
from h2o.hf.cache_state.layer_snapshot import restore, take_snapshot
from h2o.hf.cache_state.slot_layout import Budgets, Capacity, positions_in
from h2o.hf.conversation.forward_pass import disagreement_message
from h2o.hf.conversation.pass_guard import WITHOUT_CACHE
from h2o.hf.layers.base_layer import BaseLayer, LayerFacts
from h2o.hf.layers.crop import record_pass
from h2o.hf.layers.named_eviction import move_forward
from h2o.hf.layers.slot_check import CHECKS_SLOTS, check_slots
from h2o.hf.model_traits import tensor_parallel
from h2o.hf.modes import Mode, check_modes
from h2o.hf.prompt import prompt_budget
from h2o.hf.prompt.cross_head_budget import CrossHeadBudget, Prompt
from h2o.quantization import smoothing_of
from h2o.slots import should_center
from h2o.tensors import check_memory


class H2OLayer(BaseLayer):
    """The cache of one layer, with at most k = sinks + heavy + recent keys per row and head.

    `BaseLayer` has the arguments, and what the layer holds between passes.
    """

    # ---- One forward pass: update, then attend -----------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values [B, G, Q, D], the keys as a view that carries this layer.

        Nothing is stored until `attend`.

        Raises:
            ValueError: wrong batch size, number of heads or size of a head.
            UnsupportedError: (a ValueError) key and value shapes that h2o does not support.
        """
        shape, rows, last = key_states.shape, key_states, value_states
        if self.variant.join is not None:
            rows = last = self.variant.join(self, key_states, value_states)
        elif shape != value_states.shape:
            self._raise_shape_error(shape, value_states.shape)
        if self.slots is None:
            if shape[0] == 0:
                raise ValueError("an H2OCache needs at least one row, not a batch of 0")
            # Under autocast, keys are float32 after rotation. Attention casts them like the values.
            self.facts = self.facts._replace(row_size=(last.shape[-1], last.element_size()))
        elif shape[0] != self.batch_size:
            self._raise_batch_error(shape[0])
        elif shape[1] != self.num_heads:
            raise ValueError(
                f"this cache holds keys of {self.num_heads} heads in layer {self.layer_idx} and "
                f"was given keys of {shape[1]} heads. It belongs to another model, or to the same "
                "model split over another number of processes. Use a new H2OCache"
            )
        elif last.shape[-1] != self.facts.row_size[0]:
            raise ValueError(
                f"this cache holds keys of {self.facts.row_size[0]} elements in layer "
                f"{self.layer_idx} and was given keys of {last.shape[-1]}. It belongs to another "
                "model. Use a new H2OCache"
            )
        elif self.slots.keys.device != rows.device:  # loaded from a file, or the model was moved
            restore(self, take_snapshot(self).each(lambda x: x.to(rows.device)))
        if self.guard.current is None:  # the layer is used without a cache
            self.guard.enter(self.layer_idx, shape[2])
        # A detached view is the cheapest. If gradients are required, the view must stay in the
        # graph, so that a backward pass raises an error.
        keys: Any = key_states[:] if key_states.requires_grad else key_states.detach()
        keys.h2o_layer = self
        if self.variant.carry is not None:
            keys = self.variant.carry(self, keys)
        return keys, value_states

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend to the stored and the new keys, then evict.

        For a later layer that reuses this layer's keys, only attend.

        Returns:
            Output [B, Q, H, D]. After an error the layer is as it was before `update`.

        Raises:
            UnsupportedError, TypeError, ValueError: h2o does not support the call.
            RuntimeError: the model is in training mode, or attends twice to the same keys.
        """
        if self.variant.reused_by and call.module.layer_idx in self.variant.reused_by:
            return self.variant.attend_later(self, call)
        if torch.is_grad_enabled() and call.requires_grad:
            with torch.no_grad():
                out = self.attend(call.detached())
            return call.without_backward(out)
        guard, the_pass = self.guard, self.guard.current
        compiling = torch.compiler.is_compiling()
        if not compiling and (the_pass is None or the_pass.waiting != self.layer_idx):
            raise RuntimeError(
                f"attention of layer {self.layer_idx} ran twice for the same keys. An H2OCache "
                "does not support repeated forward passes: switch gradient checkpointing off"
            )
        has_stored = the_pass is not None and self.layer_idx in the_pass.stored
        if has_stored and call.unsupported is None:  # the last layers did not run
            guard.layer_rejected()
            raise RuntimeError(disagreement_message(the_pass, guard.counting))
        try:
            if call.unsupported is not None:
                raise call.unsupported
            state, is_prompt = guard.state, self.slots is None or guard.state.unscored
            # Some models do not pass use_cache on to their layers, where it defaults to False. It
            # really is False if the whole text comes again together with its first new token.
            if (
                call.use_cache is False
                and 0 < state.columns == state.prompt_columns == call.query.shape[2] - 1
                and call.may_begin_text
            ):
                raise ValueError(WITHOUT_CACHE)
            if self.layer_idx == guard.first and not compiling:
                begins = self.slots is None
                if begins or guard.origin.module() is not call.module:
                    guard.origin.check(call.module, begins=begins)
            query, key, value = call.query, call.key, call.value
            if not query.dtype == key.dtype == value.dtype:
                query, key, value = as_autocast(query, key, value)
            dtype = query.dtype
            sinks = None if call.sink_logits is None else as_operand(call.sink_logits)
            scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
            tokens = NewTokens(query, key, value, call.mask, scale, call.softcap, sinks)
            if self.variant.convert is not None:
                tokens = self.variant.convert(self, tokens, call)
            if self.facts.has_removed and state.moved_back and not compiling:
                heads = tokens.query.shape[1], tokens.key.shape[1]
                both = move_forward(self, torch.cat([tokens.query, tokens.key], dim=1))
                query, key = both.split(heads, dim=1)
                tokens = tokens._replace(query=query, key=key)
            if is_prompt:
                if tensor_parallel.is_distributed():
                    self.facts = self.facts._replace(part=tensor_parallel.part(call.module))
                if self.plan.shares is not None:
                    self.plan.check_attention(call.module)
            if self.slots is not None and (self.config.kv_dtype is None or is_prompt):
                stored = self.slots.keys.dtype  # keys of a DynamicCache are not quantized yet
                if stored != dtype:  # autocast was switched on or off since the keys were stored
                    tokens = tokens.to(stored)
            last = record_pass(self, tokens) if self.record_past else None
            out = self.forward(tokens)
        except Exception:
            if the_pass is None or self.layer_idx not in the_pass.stored:
                guard.layer_rejected()
            raise  # keys stored but missing from the trace: treat the pass as interrupted
        finally:
            if self.variant.end_call is not None:
                self.variant.end_call()
        self.last = last
        guard.layer_done(self.layer_idx, stores=self.slots is not None and not compiling)
        if CHECKS_SLOTS and the_pass is not None:
            check_slots(self, the_pass.after)
        return out if out.dtype == dtype else out.to(dtype)

    def forward(self, tokens: NewTokens) -> Tensor:
        """Attend to and store tokens that were checked and cast to the dtype of the slots."""
        state = self.guard.state
        if self.slots is None or state.unscored:
            return self._attend_prompt(tokens)
        out: Tensor
        if self.guard.only_scores:
            out, _ = self._attention(tokens, self.slots)
            return out
        if self.runner.is_compileable and self.runner.captures(self, tokens):
            return self.runner.run(self, tokens)
        Q = tokens.query.shape[2]
        if state.longest + Q > self.capacity.tokens:
            self.make_room(state.longest + Q)
        if Q > 1 or state.waits_for_pins:  # a step cannot pin its key
            out = self.attend_and_evict(tokens, self.slots)
        elif self.variant.step is not None:
            out = self.variant.step(self, tokens, self.slots)
        else:  # not by `ops.step`, since every call counts in each layer of each token's pass
            query, key, value, mask, scale, softcap, sinks = tokens
            if torch.is_grad_enabled():
                check_memory(
                    self.slots, query=query, key=key, value=value, mask=mask, sink_logits=sinks
                )
            B, H, Q, D = query.shape
            out = query.new_empty(B, Q, H, D)
            backends.backend_if_open(query).step(
                query, key, value, mask, self.slots, out, scale, softcap, self.policy, None, None,
                sinks,
            )  # fmt: skip
        if state.waits_for_pins:
            self.guard.layer_stored(self.layer_idx, self.slots.seen_tokens)
        if self.trace is not None:
            self._record_evictions(Q, tokens.mask)
        return out

    def _attend_prompt(self, tokens: NewTokens) -> Tensor:
        """Run the first pass, possibly over keys of a DynamicCache too, and set the budgets."""
        B, G, Q, _ = tokens.key.shape
        the_pass, unscored, size = self.guard.current, self.slots, self.token_size
        assert the_pass is not None
        if the_pass.prompt is None:  # this is the first layer
            before = None if unscored is None else unscored.seen_tokens
            prompt_budget.begin_prompt(
                self.guard, tokens.mask, (B, Q), before, size, self.runner.capacities
            )
        rows = the_pass.prompt
        budget = rows.budget(self.plan, G, self.facts.part, size)
        scores_before = None if unscored is None else unscored.scores.clone()
        try:
            out, scores = self._attention(tokens, unscored)
            keys, values, mask, echo = tokens.key, tokens.value, tokens.mask, None
            if unscored is None:
                if self.scorer is not None:
                    scores, echo = self.scorer.scores(tokens, scores)
            else:
                keys, values, mask = slot_layout.join_slots_and_tokens(unscored, keys, values, mask)
                scores = torch.cat([unscored.scores, scores], dim=2)
            if rows.pinned.rows:
                scores = rows.pinned.score(scores, positions_in(mask, scores)[0])
            centers = self.config.kv_dtype is not None and self._centers_keys(tokens)
            smoothing = None
            if centers and self.is_smoothed:  # the queries of a DynamicCache's keys are not known
                query = tokens.query if unscored is None else None
                smoothing = smoothing_of(query, keys, mask)
            prompt = Prompt(
                keys, values, mask, scores, echo, rows.counts, Q, tokens.mask, budget, centers,
                smoothing,
            )  # fmt: skip
            if the_pass.pool is None or echo is None:
                self.store(prompt, budget.by_row)
            else:
                self._compete(prompt, the_pass.pool)
        except Exception:  # `attend` has changed nothing but the scores
            if unscored is not None:
                unscored.scores.copy_(scores_before)
            raise
        return out

    def _attention(self, tokens: NewTokens, slots: ops.Slots | None) -> tuple[Tensor, Tensor]:
        """Output [B, Q, H, D], and the attention [B, G, Q] that the new keys received."""
        if self.variant.attention is None:
            return attention(tokens, slots, self.policy)
        return self.variant.attention(self, tokens, slots)  # type: ignore[no-any-return]

    def _centers_keys(self, tokens: NewTokens) -> bool:
        """Whether a prompt's quantized keys are stored with offsets."""
        is_possible = self.variant.centers_on_gpus or not tokens.key.is_cuda
        return is_possible and should_center(tokens.key, tokens.softcap, tokens.sink_logits)

    def _compete(self, prompt: Prompt, pool: CrossHeadBudget) -> None:
        """Let the keys of a prompt compete with those of other layers for one budget. The last
        layer stores the prompts of all.

        Raises:
            UnsupportedError: this process has only some of the model's heads.
        """
        if self.facts.part != tensor_parallel.WHOLE:
            check_modes({Mode.TENSOR_PARALLEL, Mode.SHARED_BUDGET})
        for layer, own, by_row in pool.take(self.layer_idx, prompt, self):
            layer.store(own, by_row)
            self.guard.layer_stored(layer.layer_idx)

    def store(self, prompt: Prompt, by_row: Budgets) -> None:
        """Store the keys of a prompt that fit the budgets. `by_row`: see `Budgets`."""
        capacity = prompt.budget.capacity
        if capacity is None or by_row is not prompt.budget.by_row:
            sinks, tokens = self.config.sinks, max(prompt.counts)
            capacity = Capacity.of(by_row, sinks, tokens, self.runner.capacities)
        slots = slot_layout.create_slots(
            prompt.keys, capacity.sizes, by_row, value_weighted=self.config.value_weighted,
            kv_dtype=self.config.kv_dtype, shared=not self.variant.has_values,
            offsets=prompt.centers_keys,
        )._replace(smoothing=prompt.smoothing)  # fmt: skip
        ops.evict(
            prompt.keys, prompt.values, prompt.scores, slots, mask=prompt.mask, policy=self.policy
        )
        self.set_slots(slots, capacity)
        self.facts = self.facts._replace(lost_pool=prompt.lost_pool)
        if self.trace is not None:
            self._record_evictions(prompt.columns, prompt.column_mask)

    def _record_evictions(self, columns: int, mask: Tensor | None) -> None:
        """Record in the trace what a pass has evicted. An error leaves a pass that was interrupted,
        because the layer has stored its keys."""
        assert self.trace is not None
        self.guard.layer_stored(self.layer_idx)
        self.trace.record(self.slots, self.capacity.sizes, columns, mask)

    def attend_and_evict(self, tokens: NewTokens, slots: ops.Slots) -> Tensor:
        """Attend to the slots and the new tokens, then keep as many of both as fit the budget."""

        def attend() -> tuple[Tensor, Tensor]:
            out, scores = self._attention(round_like_slots(tokens, slots), slots)
            if self.guard.state.waits_for_pins:
                positions, _ = positions_in(tokens.mask, scores)
                after = (positions + slots.seen_tokens[:, None, None]).masked_fill(
                    positions < 0, -1
                )
                scores = self.guard.state.pinned.score(scores, after)
            return out, scores

        return evict_after(attend, tokens, slots, self.policy)

    def import_keys(self, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
        """Store keys and values [B, G, n, D] of another cache, except padding (mask [B, n]).

        The slots hold them in ascending order of position. Their scores are 0, and the budget is
        unlimited, until the next forward pass scores them and evicts down to the budget
        (`CacheState.unscored`)."""
        rows: tuple[Tensor, Tensor | None] = keys, values
        if self.variant.join is not None:
            rows = self.variant.join(self, keys, values), None
        elif keys.shape != values.shape:
            self._raise_shape_error(keys.shape, values.shape)
        self.variant.forget()  # no attention follows
        size = 1 + (keys.shape[2] if mask is None else int(mask.sum(1).max()))
        kind = {"value_weighted": self.config.value_weighted}
        slots = ops.new_slots(rows[0], size, shared=rows[1] is None, **kind)
        scores = torch.zeros(rows[0].shape[:3], dtype=torch.float32, device=keys.device)
        ops.evict(*rows, scores, slots, mask=mask, **kind)
        self.facts = LayerFacts(row_size=(rows[0].shape[-1], keys.element_size()))
        self.set_slots(slots, Capacity(self.capacity.widest, [size]))
        if self.trace is not None:
            self.trace.record(self.slots, self.capacity.sizes, keys.shape[2], mask)

    def reset(self) -> None:
        """Empty the layer and free its memory."""
        self.empty()
        self.variant.forget()


class H2OLayerWithStates(H2OLayer, StatesAndKeysLayer):
    """An `H2OLayer` that also holds transformers' convolution and recurrent states."""

    def __init__(self, *args: Any, number_of_states: int, **kwargs: Any) -> None:
        """`number_of_states`: number of states of each kind."""
        super().__init__(*args, **kwargs)
        StatesLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *keys_and_values: Tensor, **states: Any) -> None:
        """Create the states. Slots are created once the prompt's length is known."""
        if states:
            StatesLayer.lazy_initialization(self, **states)

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` is possible. Recurrent states, sums over all tokens, prevent it."""
        return super().is_croppable and not any(self.is_recurrent_states_initialized.values())
