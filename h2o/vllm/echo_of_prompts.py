"""`score_by="mean-echo"` in vLLM: as of the first pass of an `H2OCache`, by the same code.

The only module here that knows what serves transformers: it asks that for the rotary embedding,
which vLLM's layers have on queries and keys already.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from h2o.config import H2OConfig
from h2o.hf.call.attention_call import NewTokens
from h2o.hf.prompt.prompt_echo import PromptEcho, rotary_for
from h2o.vllm.paged_rows import PromptScores

__all__ = ["PromptEchoes"]


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

        def scores(query: Tensor, key: Tensor, value: Tensor, received: Tensor) -> Tensor:
            return echo.scores(NewTokens(query, key, value, None, scale, softcap), received)[0]

        return scores
