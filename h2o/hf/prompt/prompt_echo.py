"""`score_by="mean-echo"`: attention of a prompt is given out anew, to the keys that echo finds.

The mean attention of a key tells what the next words will need, and nothing of what a later
question will ask for; echo (`h2o.hf.prompt.echo`) tells of that, and less of the next words. So in
the first forward pass of a cache the attention that the keys of a head have received, but for the
sinks, is added up, and `PART` of it given out anew: each key's mean attention from that is
proportional to its echo. The sum stays, and so do the units. What follows is added to these scores
as to any others: keys that were found compete with new tokens by the mean, and fade as it does.

Where queries cannot be rotated on the scores stay as they are: without rotary positions, with
cache-relative ones, in keys that were taken over from a DynamicCache.

Each query of a prompt of n tokens is asked again n positions later: it is the first one, rotated;
where a layer has no rotary positions it is the first one itself.

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
from h2o.hf.call.attention_call import NewTokens
from h2o.hf.families.layer_kinds import full_layers
from h2o.hf.prompt.cross_head_budget import CrossHeadBudget, Prompt, positions_in
from h2o.hf.prompt.echo import largest
from h2o.hf.prompt.scorers import AttentionScorer
from h2o.hf.rotary.model_rotary import Rotary
from h2o.model_identity import describe, latent_row
from h2o.policy import Policy

__all__ = [
    "PART",
    "EchoScorer",
    "PromptEcho",
    "Served",
    "not_dealt",
    "rotary_for",
    "served_as",
]

PART = 0.75
"""Of the attention; chosen on texts and facts of their own (docs/reference/results.md)."""


FEWEST_HEADS = 16
"""Key/value heads with full attention from which places are dealt over all of them. With the three
of Gemma 3 270M equal budgets lose less and find as much; with the 90 of SmolLM2 dealt places are
better (docs/reference/results.md). Where the bound lies in between was not measured."""


class Served(NamedTuple):
    """What a model gets for an `H2OConfig`."""

    config: H2OConfig
    """Without dealt places, where the model does not go with them"""
    rotary: Rotary | None
    """By which echo asks a prompt's queries again; None: prompts keep attention's scores"""
    not_dealt: str
    """What is done instead of dealing places by echo, where that was asked for, and why"""


def served_as(config: Any, h2o_config: H2OConfig) -> Served:
    """What a model with this config gets for an `H2OConfig`."""
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
    """What `H2OConfig.echo` is for a model whose places are not dealt by echo, and why; "" for any
    other."""
    return _instead(config, _rotary(config))


def rotary_for(config: Any, h2o_config: H2OConfig) -> Rotary | None:
    """The rotary embedding of a model whose prompts are ranked by echo; None for any other."""
    return served_as(config, h2o_config).rotary


def _instead(config: Any, rotary: Rotary | str) -> str:
    """What is done instead of dealing places by echo, and why; "": they are dealt."""
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
    """Makes the scores of a prompt in one layer by echo."""

    def __init__(self, rotary: Rotary, layer: int, policy: Policy) -> None:
        """`rotary`: the model's. `policy`: `H2OConfig.policy`, whose `score_by` is "mean"."""
        self.policy = policy
        self.rotary, self.is_rotated = rotary, rotary.turns(layer)

    def scores(self, tokens: NewTokens, received: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and echo of the tokens of a first pass, each [B, G, Q] float32, from the attention
        that they received, a tensor like it."""
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
        """[B, G, Q] float32 of the tokens of a first pass; 0 at a pad."""
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
    """Gives most of a prompt's attention out anew, to the keys that echo finds."""

    def __init__(self, echo: PromptEcho, cross_head: CrossHeadBudget | None) -> None:
        """`cross_head`: of the layers of a cache that share their places."""
        self.echo, self.cross_head = echo, cross_head

    def after_prompt(self, tokens: NewTokens, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `AttentionScorer.after_prompt`; claims are the keys' echo."""
        return self.echo.scores(tokens, scores)

    def store(self, layer: Any, prompt: Prompt) -> None:
        """See `AttentionScorer.store`; with shared places the last layer's prompt stores all."""
        if self.cross_head is None or prompt.claims is None:
            super().store(layer, prompt)
        else:
            self.cross_head.take(layer, prompt)

    def reset(self) -> None:
        """See `AttentionScorer.reset`."""
        if self.cross_head is not None:
            self.cross_head.forget()
