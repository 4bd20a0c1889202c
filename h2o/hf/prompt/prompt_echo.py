"""`score_by="mean-echo"`: most of a prompt's attention is redistributed in proportion to echo.

The mean attention of a key predicts what the next words need, but not what a later question asks
for. Echo (`h2o.hf.prompt.echo`) predicts the question better and the next words worse. The first
forward pass of a cache therefore sums the attention that the keys of a head received, sinks
excluded, and redistributes `PART` of the sum so that each key's mean attention from this part is
proportional to its echo. The total and the unit of the scores stay the same. Later attention is
added to these scores as to any others: keys that echo found compete with new tokens by their mean,
which decreases while nothing attends to them.

The scores stay those of attention where queries cannot be rotated: in models without rotary
positions, with cache-relative positions, and for keys that come from a DynamicCache. A layer
without rotary positions in a model that has them evaluates its queries again as they are.

Shape letters: B batch rows, H query heads, G key/value heads, Q columns of the prompt, D head
dimension.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o.config import H2OConfig
from h2o.errors import UnsupportedError
from h2o.hf.attention.attention_call import NewTokens
from h2o.hf.families.layer_kinds import full_layers
from h2o.hf.prompt.cross_head_budget import CrossHeadBudget, Prompt, positions_in
from h2o.hf.prompt.echo import largest
from h2o.hf.prompt.scorers import AttentionScorer
from h2o.hf.rotary.model_rotary import Rotary
from h2o.model_identity import describe, latent_row
from h2o.policy import Policy

PART = 0.75
"""Share of the attention that is redistributed, chosen on separate texts and facts
(docs/reference/results.md)"""


FEWEST_HEADS = 16
"""Fewest key/value heads with full attention that share one budget. With the 3 of Gemma 3 270M
equal budgets lose less and find as much; in SmolLM2 one budget is as good or better also where
eviction is limited to 3 to 45 of its 90 (docs/reference/results.md). No model with heads between
these numbers was measured."""


class Served(NamedTuple):
    """An `H2OConfig` as a model can follow it."""

    config: H2OConfig
    """With equal budgets of heads, where the model does not support one budget for all"""
    rotary: Rotary | None
    """Rotary embedding of the queries of echo; None: prompts keep the scores of attention"""
    not_dealt: str
    """What replaces one budget for all heads, and why; "" where nothing does"""


def served_as(config: Any, h2o_config: H2OConfig) -> Served:
    """Adapt an `H2OConfig` to what a model with this config supports."""
    rotary: Rotary | str = "attention ranks its keys"
    if h2o_config.positions == "cache_relative":
        rotary = "its positions are cache-relative"
    elif h2o_config.score_by == "mean-echo":
        rotary = _rotary(config)
    instead = _instead(config, rotary) if h2o_config.shares_by_echo else ""
    if instead:
        score_by = "mean" if isinstance(rotary, str) else h2o_config.score_by
        h2o_config = dataclasses.replace(h2o_config, score_by=score_by, head_shares=None)
    return Served(h2o_config, None if isinstance(rotary, str) else rotary, instead)


def not_dealt(config: Any) -> str:
    """Say what `H2OConfig.echo` becomes for a model whose heads cannot share one budget, and why;
    "" for any other model."""
    return _instead(config, _rotary(config))


def rotary_for(config: Any, h2o_config: H2OConfig) -> Rotary | None:
    """The rotary embedding of a model whose prompts are ranked by echo; None for any other."""
    return served_as(config, h2o_config).rotary


def _instead(config: Any, rotary: Rotary | str) -> str:
    """What replaces one budget for all heads, and why; "": nothing does."""
    if isinstance(rotary, str):
        return f"as H2OConfig.robust, since {rotary}"
    text = config.get_text_config(decoder=True)
    heads = len(full_layers(text)) * describe(config).get("num_key_value_heads", 1)
    if heads >= FEWEST_HEADS:
        return ""
    return (
        f"equal budgets of heads, since it has {heads} key/value heads with full attention and "
        f"{FEWEST_HEADS} are needed"
    )


def _rotary(config: Any) -> Rotary | str:
    """A model's rotary embedding, or why its prompts have no echo."""
    if latent_row(config):
        return "its keys are latents, each one for all heads"
    try:
        return Rotary(config, asked='score_by="mean-echo"')
    except UnsupportedError as error:
        return str(error).partition(": ")[2] or str(error)


class PromptEcho:
    """Computes the scores of a prompt in one layer."""

    def __init__(self, rotary: Rotary, layer: int, policy: Policy) -> None:
        """`rotary`: the model's. `policy`: `H2OConfig.policy`, whose `score_by` is "mean"."""
        self.policy = policy
        self.rotary, self.is_rotated = rotary, rotary.turns(layer)

    def scores(self, tokens: NewTokens, received: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and echo of the tokens of a first pass, each [B, G, Q] float32.

        received: the attention that the tokens received, [B, G, Q] float32.
        """
        positions, count = positions_in(tokens.mask, received)
        is_sink = positions < self.policy.sinks  # or a pad
        queries = self.policy.queries_of(positions, count)
        echo = self.echo(tokens)
        weights = (echo * queries).masked_fill(is_sink, 0.0)
        pool = received.masked_fill(is_sink, 0.0).sum(-1, keepdim=True)
        total = weights.sum(-1, keepdim=True)
        anew = torch.where((total > 0) & ~is_sink, weights / total * pool, received)
        return received + PART * (anew - received), echo

    def echo(self, tokens: NewTokens) -> Tensor:
        """Echo of the tokens of a first pass, [B, G, Q] float32; 0 at padding."""
        B, G, Q, _ = tokens.key.shape
        echo = torch.zeros(B, G, Q, dtype=torch.float32, device=tokens.key.device)
        longest = self._longest(tokens)
        for b in range(B):
            real = slice(None) if tokens.mask is None else tokens.mask[b].bool()
            query, key = tokens.query[b][:, real], tokens.key[b][:, real]
            n = query.shape[1]
            angles = None
            if self.is_rotated and n:
                angles = self.rotary.shift(n, longest).to(query.device)
            echo[b, :, real] = largest(
                self.rotary.halves(query), self.rotary.halves(key), angles,
                scale=tokens.scale, softcap=tokens.softcap, sink_logits=tokens.sink_logits,
            )  # fmt: skip
        return echo

    def _longest(self, tokens: NewTokens) -> int:
        """Tokens of the longest row, where angles depend on them; else 0."""
        if not (self.is_rotated and self.rotary.by_length):
            return 0
        return tokens.key.shape[2] if tokens.mask is None else int(tokens.mask.sum(1).max())


class EchoScorer(AttentionScorer):
    """Redistributes most of a prompt's attention in proportion to echo."""

    def __init__(self, echo: PromptEcho, cross_head: CrossHeadBudget | None) -> None:
        """`cross_head`: the budget that the layers of a cache share; None: each has its own."""
        self.echo, self.cross_head = echo, cross_head

    def after_prompt(self, tokens: NewTokens, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `AttentionScorer.after_prompt`; claims are the keys' echo."""
        return self.echo.scores(tokens, scores)

    def store(self, layer: Any, prompt: Prompt) -> None:
        """See `AttentionScorer.store`; with one budget the last layer's prompt stores all."""
        if self.cross_head is None or prompt.claims is None:
            super().store(layer, prompt)
        else:
            self.cross_head.take(layer, prompt)

    def reset(self) -> None:
        """See `AttentionScorer.reset`."""
        if self.cross_head is not None:
            self.cross_head.forget()
