"""Budgets of layers and heads in a simulation of `head_shares="echo"`.

A layer's budgets depend on the echo of all layers, including later ones. Each simulated forward
pass is therefore preceded by a pass that evicts nothing. This first pass collects the echo of the
prompts' keys and divides the budget as an `H2OCache` does (`h2o.hf.prompt.cross_head_budget`).

Shape letters as in `h2o.hf`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from h2o.config.layer_plan import LayerPlan
from h2o.hf.attention.attention_call import NewTokens, attention
from h2o.hf.cache_state.pins import Pins
from h2o.hf.cache_state.slot_layout import Budgets
from h2o.hf.prompt.cross_head_budget import CrossHeadBudget, Prompt, positions_in
from h2o.hf.prompt.echo_scorer import PromptEcho
from h2o.hf.prompt.prompt_budget import PromptBudget
from h2o.hf.rotary.model_rotary import ModelRotary


class SimulatedBudgets:
    """Budgets of each layer, row and head, for the text that each thread simulates."""

    def __init__(self, plans: dict[int, LayerPlan], rotary: ModelRotary) -> None:
        """`plans`: plans of the simulated layers, by layer number."""
        self._plans, self._rotary = plans, rotary
        self._thread_local = threading.local()
        self._is_open = False

    @classmethod
    def of(
        cls,
        budgets: Sequence[LayerPlan | None],
        prompt_length: int | Sequence[int],
        rotary: ModelRotary | None,
    ) -> SimulatedBudgets | None:
        """Create from the plans of all layers (`budgets`; None for layers that are not H2O's).

        Returns None if no budget depends on echo, and for prompts of a single token or of sinks
        alone, which have nothing to divide.
        """
        plans = {i: x for i, x in enumerate(budgets) if x is not None}
        shares = [x for x in plans.values() if x.config.shares_by_echo]
        longest = max(prompt_length) if isinstance(prompt_length, Sequence) else prompt_length
        if rotary is None or not shares or longest <= max(1, shares[0].sinks):
            return None
        return cls(plans, rotary)

    @property
    def is_collecting(self) -> bool:
        """Whether this thread is in the pass that collects echo and evicts nothing."""
        return getattr(self._thread_local, "cross_head", None) is not None

    @contextmanager
    def budget_pass(self, model: nn.Module) -> Iterator[None]:
        """Within the block, run a pass that divides the budget before each forward pass of
        the model."""

        def collect_echo(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if self.is_collecting or not self._is_open:  # a copy of the model keeps the hook
                return
            self._thread_local.budgets = {}
            self._thread_local.cross_head = CrossHeadBudget(self._plans, alike=False)
            try:
                with torch.no_grad():
                    model(*args, **kwargs)
            finally:
                self._thread_local.cross_head = None

        self._is_open = True
        try:
            with model.register_forward_pre_hook(collect_echo, with_kwargs=True):
                yield
        finally:
            self._is_open = False

    def take(
        self, layer: int, text: NewTokens, prompts: list[int], by_row: Budgets, pins: Pins
    ) -> None:
        """Collect the echo of the prompts' keys in a layer, whose heads have the budgets `by_row`
        so far."""
        plan = self._plans[layer]
        real = text.key.new_ones(text.key.shape[0], text.key.shape[2], dtype=torch.bool)
        if text.mask is not None:
            real = text.mask.bool()
        lengths = torch.tensor(prompts, dtype=torch.long, device=real.device)[:, None]
        mask = real & (real.cumsum(1) <= lengths)
        tokens = text._replace(mask=mask)
        _, received = attention(tokens, None, plan.policy)
        scores, echo = PromptEcho(self._rotary, layer, plan.policy).scores(tokens, received)
        scores = pins.score(scores, positions_in(mask, scores)[0])
        budget = PromptBudget(by_row, pins.counts(len(prompts), plan.sinks))
        prompt = Prompt(
            tokens.key, tokens.value, mask, scores, echo, mask.sum(1).tolist(), mask.shape[1], mask,
            budget,
        )  # fmt: skip
        divided = self._thread_local.cross_head.take(layer, prompt, layer)
        self._thread_local.budgets.update((index, by_row) for index, _, by_row in divided)

    def budgets(self, layer: int) -> Budgets:
        """(heavy, recent) of each row and head in a layer, as the last pass divided them."""
        budgets: Budgets = self._thread_local.budgets[layer]
        return budgets
