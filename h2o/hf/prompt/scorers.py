"""`AttentionScorer`: scores keys by attention. `EchoScorer` is in `h2o.hf.prompt.echo_scorer`.

A layer passes its scorer the attention that its keys received, and stores the scores that the
scorer returns. Eviction then ranks keys by these scores, as the policy says (`h2o.policy`). A new
ranking that can be computed from the attention that each key has received belongs in the policy and
needs no scorer. CONTRIBUTING.md ("How to add") lists the files to change in both cases.

Shape letters as in `h2o.hf`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from h2o.hf.attention.attention_call import NewTokens
from h2o.hf.prompt.cross_head_budget import Prompt


class AttentionScorer:
    """Scores keys by the attention that they receive."""

    def after_prompt(self, tokens: NewTokens, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Turn the attention that a prompt's keys received in its forward pass into scores.

        Returns:
            The scores, and the echo by which the keys of all heads compete for pooled slots (None:
            they do not compete), each [B, G, Q].
        """
        return scores, None

    def store(self, layer: Any, prompt: Prompt) -> None:
        """Have the layer store a prompt once its budgets are known."""
        layer.store(prompt, prompt.budget.by_row)
