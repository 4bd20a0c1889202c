"""`rank_by="mean-echo"`: attention of a prompt is given out anew, to the keys that echo finds.

The mean attention of a key tells what the next words will need, and nothing of what a later
question will ask for; echo (`h2o.hf.echo_scores`) tells of that, and less of the next words. So in
the first forward pass of a cache the attention that the keys of a head have received, but for the
sinks, is added up, and `PART` of it given out anew: each key's mean attention from that is
proportional to its echo. The sum stays, and so do the units. What follows is added to these scores
as to any others: keys that were found compete with new tokens by the mean, and fade as it does.

Where queries cannot be rotated on the scores stay as they are: without rotary positions, with
cache-relative ones, in keys that were taken over from a DynamicCache.

Shape letters: B batch rows, G key/value heads, Q columns of the prompt.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from h2o import ops
from h2o.config import H2OConfig
from h2o.errors import Unsupported
from h2o.hf.attention_call import NewTokens
from h2o.hf.echo_scores import EchoScores, as_stored, echo_rotary
from h2o.hf.layer_kinds import full_layers
from h2o.hf.model_rotary import Rotary
from h2o.hf.one_budget import positions_in
from h2o.model_identity import describe
from h2o.policy import Policy

__all__ = ["PART", "PromptEcho", "not_dealt", "rotary_for", "served_as"]

PART = 0.75
"""Of the attention; chosen on texts and facts of their own (docs/results.md)."""


FEWEST_HEADS = 16
"""Key/value heads with full attention from which places are dealt over all of them: with fewer
there is little to deal, and what echo gives to one head another one lacks (docs/results.md)."""


def not_dealt(config: Any) -> str:
    """Why the places of a model's prompts are not dealt by echo; "" where they are."""
    text = config.get_text_config(decoder=True)
    heads = len(full_layers(text)) * describe(config).get("num_key_value_heads", 1)
    if heads < FEWEST_HEADS:
        return f"it has {heads} key/value heads with full attention, and {FEWEST_HEADS} are needed"
    try:
        echo_rotary(config)
    except Unsupported as error:
        return str(error).partition(": ")[2] or str(error)
    return ""


def served_as(config: Any, h2o_config: H2OConfig) -> tuple[H2OConfig, str]:
    """The config that a model gets in place of one with `shares="echo"`, and why not that one.

    The fallback is `H2OConfig.robust`, with heads that are all alike.
    """
    reason = not_dealt(config) if h2o_config.shares == "echo" else ""
    if not reason:
        return h2o_config, ""
    return dataclasses.replace(h2o_config, rank_by="mean", shares=None), reason


def rotary_for(config: Any, h2o_config: H2OConfig) -> Rotary | None:
    """Of a model with this config; None where prompts keep the scores that attention gives."""
    asked = h2o_config.rank_by == "mean-echo" and h2o_config.positions == "original"
    if not asked:
        return None
    try:
        return echo_rotary(config)
    except Unsupported:
        return None


class PromptEcho:
    """Makes the scores of a prompt in one layer."""

    def __init__(self, rotary: Rotary, layer: int, policy: Policy) -> None:
        """`rotary`: the model's. `policy`: `H2OConfig.policy`, whose `rank_by` is "mean"."""
        self.echo, self.policy = EchoScores(rotary, layer, None), policy

    def scores(self, tokens: NewTokens, received: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and echo of the tokens of a first pass, each [B, G, Q] float32, from the attention
        that they received, a tensor like it."""
        positions, count = positions_in(tokens.mask, received)
        is_sink = positions < self.policy.sinks  # or a pad
        queries = self.policy.queries_of(positions, count)
        echo = self.echo.of_prompt(tokens)
        weights = (echo * queries).masked_fill(is_sink, 0.0)
        pool = received.masked_fill(is_sink, 0.0).sum(-1, keepdim=True)
        total = weights.sum(-1, keepdim=True)
        anew = torch.where((total > 0) & ~is_sink, weights / total * pool, received)
        return received + PART * (anew - received), echo

    def received(self, tokens: NewTokens) -> Tensor:
        """[B, G, Q] float32, the attention that the tokens of a first pass receive."""
        return self._attention(tokens, None)[1]

    def prompt(self, tokens: NewTokens) -> tuple[Tensor, Tensor]:
        """What a first pass makes: [B, Q, H, D], and [B, G, Q] float32 of the new keys."""
        out, received = self._attention(tokens, None)
        return out, self.scores(tokens, received)[0]

    def step(self, token: NewTokens, slots: ops.Slots) -> tuple[Tensor, Tensor]:
        """The same of one later token, whose attention is added to the scores of the slots."""
        return self._attention(as_stored(token, slots), slots)

    def _attention(self, tokens: NewTokens, slots: ops.Slots | None) -> tuple[Tensor, Tensor]:
        return ops.attend(
            *tokens[:3], slots, mask=tokens.mask, scale=tokens.scale, softcap=tokens.softcap,
            sink_logits=tokens.sink_logits, policy=self.policy,
        )  # fmt: skip
