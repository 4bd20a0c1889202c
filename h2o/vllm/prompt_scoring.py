"""`score_by="mean-echo"` and `head_shares="echo"` in vLLM, with the code that scores the first pass
of an `H2OCache`.

vLLM's layers pass queries and keys that are rotated already.

Shape letters: H query heads, G key/value heads, Q tokens of a prompt, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from h2o.config import H2OConfig
from h2o.hf.attention.attention_call import NewTokens
from h2o.hf.prompt.cross_head_budget import CrossHeadBudget, Prompt
from h2o.hf.prompt.echo_scorer import PromptEcho, adapt_config
from h2o.hf.prompt.echo_scorer import echo_replacement as echo_replacement  # for validation
from h2o.hf.prompt.prompt_budget import PromptBudget
from h2o.spans import count
from h2o.vllm.page_budget import PageBudget
from h2o.vllm.paged_request import PagedRequest
from h2o.vllm.paged_rows import PromptScores


def layer_scorer(
    model: Any, config: H2OConfig
) -> Callable[[int, float, float], PromptScores] | None:
    """A function that makes the scoring function of a layer, given the layer's number, scale and
    softcap. None if prompts keep the scores that attention gives (`AdaptedConfig.rotary`).

    `model` is the model's transformers config.
    """
    rotary = adapt_config(model, config).rotary
    if rotary is None:
        return None

    def scorer(layer: int, scale: float, softcap: float) -> PromptScores:
        echo = PromptEcho(rotary, layer, config.policy)

        def scores(query: Tensor, key: Tensor, value: Tensor, received: Tensor) -> Any:
            return echo.scores(NewTokens(query, key, value, None, scale, softcap), received)

        return scores

    return scorer


class CrossLayerBudget:
    """Divides the budget of each prompt across all layers, as `H2OCache` does, once the last layer
    has processed the prompt. Until then it holds a copy of each layer's part."""

    def __init__(self, budget: PageBudget) -> None:
        self.budget = budget
        self._by_page: dict[int, CrossHeadBudget] = {}

    def take(
        self, page: int, layer: int, request: PagedRequest,
        keys: Tensor, values: Tensor, scores: Tensor, echo: Tensor, smoothing: Tensor | None,
    ) -> list[tuple[Prompt, list[tuple[int, int]]]]:  # fmt: skip
        """Add a layer's part of a page's prompt. For the last layer return all parts, with the
        budgets (heavy, recent) that each head has received; otherwise return an empty list.

        Args:
            keys, values: [1, G, Q, D].
            scores, echo: [1, G, Q] float32.
            smoothing: that of the page's slots, [1, G, D]; None if they have none.
        """
        budget, config = self.budget, request.config or self.budget.config
        if layer == 0:  # discards what an interrupted pass has left
            plans = {i: budget.layer_plan(config, i, keys) for i in range(budget.layers)}
            self._by_page[page] = CrossHeadBudget(plans, alike=False)
        own = PromptBudget(
            [budget.by_head(layer, keys, request)], [count(request.pinned, config.sinks)]
        )
        tokens = scores.shape[2]
        prompt = Prompt(
            keys.clone(), values.clone(), None, scores.clone(), echo, [tokens], tokens, None, own,
            smoothing=smoothing,
        )  # fmt: skip
        divided = [*self._by_page[page].take(layer, prompt)]
        if divided:
            del self._by_page[page]
        return [(part, by_row[0]) for _, part, by_row in divided]
