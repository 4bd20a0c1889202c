"""`PassGuard`: holds the state of one `H2OCache`, and replaces it when a forward pass has ended.

A pass (`ForwardPass`) is planned before its first layer runs, with the state before it and the
state after it. The last layer commits it. This is the only place that changes the state. A pass
that was interrupted, or whose keys never reached h2o's attention, leaves the old state and is
noticed by the next call, because some layers have stored its keys. A second thread is noticed too.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from h2o.budgets import check_prompt_length
from h2o.compat import calls_a_module
from h2o.compat_calls import ModelCall, has_transforms
from h2o.config.layer_plan import LayerPlan
from h2o.hf.cache_state.slot_layout import writable
from h2o.hf.conversation.forward_pass import (
    ForwardPass,
    disagreement_message,
    in_use_elsewhere,
    interruption,
    waiting_message,
)
from h2o.hf.conversation.pins import NO_PINS, Pins
from h2o.hf.conversation.rope_deltas import put_rope_deltas
from h2o.hf.conversation.state import (
    CacheState,
    NewColumns,
    RowState,
    change_list,
)
from h2o.model_identity.weights import WeightsOrigin

WITHOUT_CACHE = (
    "use_cache=False with an H2OCache: generate() then feeds the whole text again for each token. "
    "Pass use_cache=True, or no cache. If you did not pass use_cache, it comes from "
    "model.generation_config or model.config, which training may have changed"
)
"""Error message when `generate()` feeds the whole text again, together with its first new token."""

_lock = threading.Lock()
"""Guards the beginning of passes of all caches. They share one lock, because locks cannot be
copied."""


class PassGuard:
    """The state of a cache outside its layers, and the forward pass under way."""

    def __init__(
        self,
        prompt_length: Any = None,
        kinds: Sequence[str] = ("h2o",),
        last: int = 0,
        with_states: Iterable[int] = (),
        pins: Pins = NO_PINS,
        *,
        plans: Mapping[int, LayerPlan] | None = None,
        makes_pool: Callable[[], Any] | None = None,
        drops_cache_after: float | None = None,
        config: Any = None,
    ) -> None:
        """
        Args:
            prompt_length: number of tokens in the whole prompt, or in each row's; None if the user
                did not say.
            kinds: the kind of each layer (`h2o.hf.model_traits.layer_kinds`).
            last: the last layer that attends to an earlier layer's keys, or 0.
            with_states: the layers that have states.
            plans: budgets of the H2O layers, by layer number.
            makes_pool: makes the `CrossHeadBudget` that the layers share for one prompt. None: they
                share none.
            drops_cache_after: see `h2o.hf.support.drops_cache_after`.
            config: the model's config. None: any model may use the cache.
        """
        if prompt_length is not None:
            prompt_length = check_prompt_length(prompt_length)
        self.plans: Mapping[int, LayerPlan] = plans or {}
        self.first = min(self.plans, default=-1)  # the first layer with a budget
        self.needs_prompt_length = any(x.needs_prompt_length for x in self.plans.values())
        """Whether any budget is a fraction"""
        self.grows = any(plan.grows for plan in self.plans.values())
        """Whether any budget follows the text"""
        self.makes_pool = makes_pool
        self.kinds = kinds
        self.storing = [index for index, kind in enumerate(kinds) if kind != "none"]
        """The layers that store something in every forward pass"""
        self.counting = [index for index in self.storing if kinds[index] != "states"]
        """The layers that store keys"""
        self.last = max(self.storing[-1], last)
        """The last layer that uses the cache"""
        self.with_states = tuple(with_states)
        self.has_states = bool(self.with_states)
        self.has_windows = "sliding" in kinds
        """Whether some layers are transformers' own with a sliding window, which store padding"""
        self.counts_padding = self.has_states or self.has_windows
        """Whether any layer treats padding that follows a token as text"""
        self.drops_cache_after = drops_cache_after
        text_config = None if config is None else config.get_text_config(decoder=True)
        self.has_rope_deltas = text_config is not config
        """Whether the model may keep `rope_deltas`, as models for more than text do"""
        self.checked_config = text_config
        """The config, of a model's text part, that the cache was made for or compared with"""
        self.has_independent_rows = False
        """Whether the rows are independent conversations, as in `generate_all`"""
        self.records_passes = False
        """Whether passes are recorded, so that `H2OCache.crop` can take back their columns"""
        self.only_scores = False
        """Whether the pass only adds attention to the scores of stored keys, and stores no new keys
        """
        self.pins = pins
        self.origin = WeightsOrigin()
        self.counter: Tensor | None = None
        """Number of columns seen, which captured graphs count by themselves"""
        self.state = CacheState()
        if isinstance(prompt_length, int):
            self.state = CacheState(rows=(RowState(prompt=prompt_length),))
        elif prompt_length is not None:
            self.state = CacheState(rows=tuple(RowState(prompt=n) for n in prompt_length))
        self.planned: ForwardPass | None = None
        """The pass that is about to begin"""
        self.current: ForwardPass | None = None
        """The pass under way. An interrupt leaves it set"""
        self.finished: ForwardPass | None = None
        """The last pass of a model with states, whose last layer may still change its states"""
        self.told: ModelCall | None = None
        """The inputs of the pass, if the caller of the model tells them"""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "planned": None, "told": None, "checked_config": None}

    @property
    def columns(self) -> Any:
        """Number of columns seen: an int, or a tensor in which captured graphs count them."""
        return self.state.columns if self.counter is None else self.counter

    # ---- A forward pass ------------------------------------------------------------------------

    def announce(self, planned: ForwardPass) -> None:
        """Take the plan of the pass that is about to begin, in place of one that never began."""
        self.planned = planned

    @contextmanager
    def telling(self, call: ModelCall | None, *, only_scores: bool = False) -> Iterator[None]:
        """Within the block a forward pass has these inputs. None: they are read from the calls of
        transformers (`h2o.compat_calls`). `only_scores`: whether it only adds attention to the
        scores of stored keys, and stores no new keys."""
        self.told, self.only_scores = call, only_scores
        try:
            yield
        finally:
            self.told, self.only_scores = None, False

    def accept_config(self, config: Any) -> None:
        """Note that the cache was compared with this config, which takes longer than all other
        checks of a decode step."""
        self.checked_config = config

    def record_passes(self) -> None:
        """Record passes from now on."""
        self.records_passes = True

    def separate_rows(self) -> None:
        """Let the rows be independent conversations from now on."""
        self.has_independent_rows = True

    def admit_growth(self) -> None:
        """Let rows have budgets that follow the text by the config of their own request."""
        self.grows = True

    def enter(
        self, layer: int, Q: int | None = None, plan: Callable[[int], ForwardPass] | None = None
    ) -> None:
        """Begin the planned pass before the first of its layers gets new keys, or check that this
        thread may go on with the pass under way.

        Args:
            layer: the layer that gets them.
            Q: number of columns. None: the layer gets a state, not keys.
            plan: plans a pass of Q columns that the model does not announce, because its masks were
                made before. None: the layer is used without a cache.

        Raises:
            RuntimeError: another thread is running a forward pass, an earlier layer's keys never
                reached its attention, or the last pass was interrupted.
        """
        if torch.compiler.is_compiling():  # a captured graph cannot query the thread
            self.check_keys_arrived()
            return
        the_pass = self.current
        if the_pass is None or the_pass.thread != threading.get_ident():
            the_pass = self._begin(Q)
        elif the_pass.waiting is not None:
            self.check_keys_arrived()
        if Q is None:
            return
        if layer in the_pass.stored and self.kinds[layer] != "h2o":  # which ask in `attend`
            raise RuntimeError(disagreement_message(the_pass, self.counting))
        the_pass.waiting = layer
        if the_pass.columns is None:  # the model does not announce its passes
            the_pass.columns = Q
            if plan is not None and not self.only_scores:
                the_pass.begin_unannounced(plan(Q))
            elif not self.only_scores:
                the_pass.after = NewColumns(Q).advance(self.state, None, self.records_passes)

    def _begin(self, Q: int | None) -> ForwardPass:
        with _lock:
            if self.current is not None or self.finished is not None:
                self.check_complete()
            the_pass = self.planned
            if the_pass is not None and the_pass.thread != threading.get_ident():
                raise in_use_elsewhere()
            is_planned = the_pass is not None and the_pass.before is self.state
            if the_pass is None or not is_planned or Q not in (None, the_pass.columns):
                the_pass = ForwardPass(self.state, self.state, None)
            if self.makes_pool is not None and (not self.state.columns or self.state.unscored):
                the_pass.pool = self.makes_pool()
            the_pass.may_be_transformed = has_transforms()
            if self.has_states:
                the_pass.accesses = dict.fromkeys(self.with_states, 0)
            if the_pass.raise_budgets is not None:
                the_pass.take_back = the_pass.raise_budgets()
            self.current, self.planned, self.finished = the_pass, None, None
            return the_pass

    def enter_states(self, layer: int) -> None:
        """Do the same as `enter` before a layer's states change."""
        if layer != self.last:
            self.enter(layer)
        elif self.kinds[layer] == "states":
            self.layer_done(layer)
        self.count_state_access(layer)

    def count_state_access(self, layer: int) -> None:
        """Count that a layer reads or has replaced one of its states."""
        the_pass = self.current or self.finished
        if the_pass is not None and not torch.compiler.is_compiling():
            the_pass.accesses[layer] += 1

    def begin_prompt(self, prompt: Any, after: CacheState) -> None:
        """Note what the first layer of a prompt has found out: the `PromptRows`, and the state
        after the pass."""
        assert self.current is not None
        self.current.prompt, self.current.after = prompt, after

    def layer_stored(self, layer: int, tokens: Tensor | None = None) -> None:
        """Record that a layer has stored its new keys, if something is left to do before
        `layer_done`. `tokens`: the number [B] that each row has seen, if the layer may pin some."""
        if (the_pass := self.current) is not None:
            the_pass.stored.add(layer)
            if tokens is not None and the_pass.after.waits_for_pins:
                the_pass.check_pins(tokens)

    def layer_done(self, layer: int, *, stores: bool = False) -> None:
        """Record that a layer is done with its new keys. The last layer that stores any commits the
        pass, and the last one that attends to them ends it. `stores`: whether it has stored them,
        if that is not recorded yet."""
        the_pass = self.current
        if the_pass is not None:
            if stores:
                the_pass.stored.add(layer)
            is_whole = self.only_scores or len(the_pass.stored) == len(self.counting)
            if layer == self.storing[-1] and is_whole:
                self._commit(the_pass)
            the_pass.waiting = None  # an interrupt before this line is noticed
            if layer == self.last and is_whole:
                self.current = None

    def layer_rejected(self) -> None:
        """Record that a layer rejected its new keys and stored nothing. The pass is over if nor did
        any other layer."""
        the_pass = self.current
        if the_pass is not None:
            the_pass.waiting = None
            if not the_pass.has_changed:
                self.current = None
                if the_pass.take_back is not None:
                    the_pass.take_back()

    def _commit(self, the_pass: ForwardPass) -> None:
        """The state after a pass becomes the state of the cache."""
        self.state = the_pass.after
        the_pass.prompt = the_pass.pool = None
        if self.has_states:
            self.finished = the_pass
        if self.counter is not None:
            self.counter.fill_(self.state.columns)
        if self.has_rope_deltas:  # the model had none, or those of an earlier text
            put_rope_deltas(self.state)

    def settle(self) -> None:
        """Take over what captured graphs have counted. They can neither begin nor end a pass."""
        if self.counter is None or self.current is not None:
            return
        counted, planned = int(self.counter), self.planned
        if counted != self.state.columns:
            if planned is not None and planned.after.columns == counted:
                self.state = planned.after
            else:
                uncounted = NewColumns(counted - self.state.columns)
                self.state = uncounted.advance(self.state, None, is_step=True)
            self.planned = None

    @contextmanager
    def repeating(self, the_pass: ForwardPass) -> Iterator[ForwardPass]:
        """Within the block the layers repeat a pass, in the state before it. It is committed at the
        end of the block. After an error the state is as before the block."""
        state = self.state
        the_pass.may_be_transformed = False
        the_pass.pool = None if self.makes_pool is None else self.makes_pool()
        self.state, self.current = the_pass.before, the_pass
        try:
            yield the_pass
            state = the_pass.after
        finally:
            self.put(state)

    def put(self, state: CacheState, pins: Pins | None = None) -> None:
        """Give the cache a state that no pass has computed, with keys that were copied. `pins`:
        those that the cache was made with, if they change too."""
        self.state, self.pins = state, self.pins if pins is None else pins
        self.planned = self.current = self.finished = None
        if self.counter is not None:
            self.counter.fill_(state.columns)

    # ---- Checks --------------------------------------------------------------------------------

    def check_thread(self) -> None:
        """Raise RuntimeError if another thread, still running, is within a forward pass."""
        the_pass = self.current
        if the_pass is None or torch.compiler.is_compiling():
            return
        if the_pass.thread != threading.get_ident() and calls_a_module(the_pass.thread):
            raise in_use_elsewhere()

    def check_keys_arrived(self) -> None:
        """Raise RuntimeError if a layer's new keys never reached its attention."""
        the_pass = self.current
        if the_pass is not None and the_pass.waiting is not None:
            raise RuntimeError(waiting_message(the_pass.waiting))

    def check_complete(self) -> None:
        """Raise RuntimeError if another thread is within a forward pass, or if the last pass was
        interrupted. A pass that has stored nothing is forgotten."""
        self.check_thread()
        if message := interruption(self.current, self.finished, self.counting):
            raise RuntimeError(message)
        self.current = None  # nothing was stored, or only layers that reuse keys are missing

    @property
    def is_broken(self) -> bool:
        """Whether a forward pass is under way or was interrupted."""
        return bool(interruption(self.current, self.finished, self.counting))

    def check_angles(self, seen: int, new: int) -> None:
        """Raise ValueError if `new` tokens would change the rotary angles of the `seen` tokens."""
        limit = self.drops_cache_after
        if limit is not None and 0 < seen <= limit < seen + new:
            raise ValueError(
                f"the cache has seen {seen} tokens and {new} follow. Beyond {limit} tokens this "
                "model's rotary angles change (longrope), and the whole text has to be processed "
                "again. Call model.generate() in h2o.patched(), which does this, or begin with a "
                "longer prompt"
            )

    def allow_cache_drop(self) -> None:
        """Let the model drop the cache when angles change, because a patch will make another."""
        if self.drops_cache_after != math.inf:
            self.drops_cache_after = None

    # ---- Between passes ------------------------------------------------------------------------

    def count_in(self, counter: Tensor) -> None:
        """Count columns in this tensor, which captured graphs add to, as in transformers'
        StaticLayer."""
        self.counter = writable(counter)

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Select or repeat the batch rows, even before the prompt.

        `change` does so with the first axis of a tensor."""
        self.settle()
        if self.state.prompt_columns == 0:
            self.pins = self.pins.change_rows(functools.partial(change_list, change))
        self.state = self.state.change_rows(change)

    def reset(self) -> None:
        """Start over as the guard of an empty cache without a known prompt length."""
        self.put(CacheState())
