"""`score_by="mean-echo"` and `head_shares="echo"` in vLLM, with the code that scores the first pass
of an `H2OCache`.

Only this module of `h2o.vllm` imports `h2o.hf`. vLLM's layers pass queries and keys that are
rotated already.

Shape letters: H query heads, G key/value heads, Q tokens of a prompt, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from h2o.config import H2OConfig
from h2o.hf.attention.attention_call import NewTokens
from h2o.hf.cache_state.slot_layout import Budgets
from h2o.hf.prompt.cross_head_budget import CrossHeadBudget, Prompt
from h2o.hf.prompt.echo_scorer import PromptEcho, adapt_config
from h2o.hf.prompt.echo_scorer import echo_replacement as echo_replacement  # for validation
from h2o.hf.prompt.prompt_budget import PromptBudget
from h2o.vllm.paged_rows import Cut, PromptScores


class PromptEchoes:
    """The scores of prompts in the layers of a model."""

    def __init__(self, model: Any, config: H2OConfig) -> None:
        """`model` is the model's transformers config."""
        self.config = config
        self.rotary = adapt_config(model, config).rotary

    def layer_scorer(self, layer: int, scale: float, softcap: float) -> PromptScores | None:
        """The scoring function of a layer, or None if prompts keep the scores that attention gives
        (`AdaptedConfig.rotary`)."""
        if self.rotary is None:
            return None
        echo = PromptEcho(self.rotary, layer, self.config.policy)

        def scores(
            query: Tensor, key: Tensor, value: Tensor, received: Tensor
        ) -> tuple[Tensor, Tensor]:
            return echo.scores(NewTokens(query, key, value, None, scale, softcap), received)

        return scores


class CrossLayerBudget:
    """Divides the budget of each prompt across all layers, as `H2OCache` does, once the last layer
    has processed the prompt. Until then it holds a copy of each layer's part."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self._waiting: dict[int, list[Cut]] = {}

    def take(self, page: int, layer: int, cut: Cut) -> list[Cut]:
        """Add a layer's part of a page's prompt. For the last layer return all parts, with the
        budgets that each head has received; otherwise return an empty list."""
        if layer == 0:  # discards what an interrupted pass has left
            self._waiting[page] = []
        parts = self._waiting[page]
        own = {name: getattr(cut, name).clone() for name in ("keys", "values", "scores")}
        parts.append(cut._replace(**own))
        if len(parts) < self.layers:
            return []
        del self._waiting[page]
        cross_head = CrossHeadBudget({i: part.plan for i, part in enumerate(parts)}, alike=False)
        divided: Iterable[tuple[Cut, Prompt, Budgets]] = ()
        for i, part in enumerate(parts):
            divided = cross_head.take(i, _prompt(part), part)
        return [part._replace(budgets=by_row[0]) for part, _, by_row in divided]


def _prompt(cut: Cut) -> Prompt:
    tokens = cut.scores.shape[2]
    return Prompt(
        cut.keys, cut.values, None, cut.scores, cut.echo, [tokens], tokens, None,
        PromptBudget([cut.budgets], [cut.pinned]),
    )  # fmt: skip
