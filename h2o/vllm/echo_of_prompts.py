"""`score_by="mean-echo"` and `head_shares="echo"` in vLLM, by the code that scores the first pass
of an `H2OCache`.

The only module here that imports h2o.hf. vLLM's layers hand over queries and keys that are rotated.

Shape letters: H query heads, G key/value heads, Q tokens of a prompt, D head dimension.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from h2o.config import H2OConfig
from h2o.hf.attention.attention_call import NewTokens
from h2o.hf.prompt.cross_head_budget import CrossHeadBudget, Prompt, Recipient
from h2o.hf.prompt.prompt_budget import PromptBudget
from h2o.hf.prompt.prompt_echo import PromptEcho, rotary_for
from h2o.hf.prompt.prompt_echo import not_dealt as not_dealt  # for validation, which asks here
from h2o.hf.store.slot_layout import Budgets
from h2o.vllm.paged_rows import Cut, PromptScores


class PromptEchoes:
    """The scores of prompts in the layers of a model."""

    def __init__(self, model: Any, config: H2OConfig) -> None:
        """`model`: its config, of transformers."""
        self.config = config
        self.rotary = rotary_for(model, config)

    def of_layer(self, layer: int, scale: float, softcap: float) -> PromptScores | None:
        """None where prompts keep the scores that attention gives them: `rotary_for`."""
        if self.rotary is None:
            return None
        echo = PromptEcho(self.rotary, layer, self.config.policy)

        def scores(
            query: Tensor, key: Tensor, value: Tensor, received: Tensor
        ) -> tuple[Tensor, Tensor]:
            return echo.scores(NewTokens(query, key, value, None, scale, softcap), received)

        return scores


class Dealer:
    """Deals the places of each prompt over all layers, as `H2OCache` does, once the last of them
    has read it. Until then a copy of each layer's part is held."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self._waiting: dict[int, list[Cut]] = {}

    def take(self, page: int, layer: int, cut: Cut) -> list[Cut]:
        """Take a layer's part of the prompt of a page. With the last layer all parts are returned,
        with the budgets that each head has been dealt; else none."""
        if layer == 0:  # what a pass that broke off has left is forgotten
            self._waiting[page] = []
        parts = self._waiting[page]
        own = {name: getattr(cut, name).clone() for name in ("keys", "values", "scores")}
        parts.append(cut._replace(**own))
        if len(parts) < self.layers:
            return []
        del self._waiting[page]
        cross_head = CrossHeadBudget({i: part.plan for i, part in enumerate(parts)}, alike=False)
        dealt: list[Cut] = []

        def note(prompt: Prompt, by_row: Budgets) -> None:  # from the first layer to the last
            dealt.append(parts[len(dealt)]._replace(budgets=by_row[0]))

        for i, part in enumerate(parts):
            cross_head.take(Recipient(i, part.plan, note), _prompt(part))
        return dealt


def _prompt(cut: Cut) -> Prompt:
    tokens = cut.scores.shape[2]
    return Prompt(
        cut.keys, cut.values, None, cut.scores, cut.echo, [tokens], tokens, None,
        PromptBudget([cut.budgets], [cut.pinned]),
    )  # fmt: skip
