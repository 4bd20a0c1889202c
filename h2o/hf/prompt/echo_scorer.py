"""`score_by="mean-echo"`: most of a prompt's attention is redistributed in proportion to echo.

A key's mean attention predicts how much the next words need the key, but not whether a later
question asks for it. Echo (`h2o.hf.prompt.echo`) predicts the question better and the next words
worse. In the first forward pass each head's attention is therefore summed over its keys, sinks
excluded, and the fraction `PART` of the sum is redistributed, so that each key's mean attention
from this fraction is proportional to its echo. The total and the unit of the scores stay the same.
Later attention is added to these scores as to any others. A key that echo found competes with new
tokens by its mean, which decreases while no query attends to the key.

Scores are those of attention alone where queries cannot be rotated: in models without rotary
positions, with cache-relative positions, and for keys converted from a DynamicCache. A layer
without rotary positions, in a model that has them elsewhere, evaluates its queries again
unrotated.

Shape letters as in `h2o.hf`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o.config import H2OConfig
from h2o.hf.attention.attention_call import NewTokens
from h2o.hf.cache_state.slot_layout import positions_in
from h2o.hf.model_traits.layer_kinds import full_layers
from h2o.hf.prompt.echo import largest
from h2o.hf.rotary.model_rotary import ModelRotary, find_rotary
from h2o.model_identity import describe, latent_row
from h2o.policy import Policy

PART = 0.75
"""Fraction of the attention that is redistributed, chosen on separate texts and facts
(docs/reference/results.md)"""


FEWEST_HEADS = 16
"""Minimum number of key/value heads with full attention for which one budget is shared. Gemma 3
270M has 3 such heads; there equal budgets lose less and find as much. SmolLM2 has 90; there one
budget is as good or better, even if only 3 to 45 of the heads evict (docs/reference/results.md). No
model with a number in between was measured."""


class AdaptedConfig(NamedTuple):
    """An `H2OConfig`, adapted to a model."""

    config: H2OConfig
    """The config. Where the model or the positions support no echo, it has the mean, and where they
    support no shared budget, equal budgets for all heads."""
    rotary: ModelRotary | None
    """Rotary embedding that echo rotates queries with; None: attention alone scores prompts"""
    echo_replacement: str
    """What replaces echo or one budget for all heads, and why; empty if nothing does"""


def adapt_config(config: Any, h2o_config: H2OConfig) -> AdaptedConfig:
    """Adapt an `H2OConfig` to a model with this config."""
    if h2o_config.score_by != "mean-echo":
        return AdaptedConfig(h2o_config, None, "")
    is_relative = h2o_config.positions == "cache_relative"
    rotary = "its positions are cache-relative" if is_relative else _rotary(config)
    has_echo, instead = not isinstance(rotary, str), ""
    if h2o_config.shares_by_echo:
        instead = _describe_replacement(config, rotary)
    elif not has_echo:
        instead = f'score_by="mean", because {rotary}'
    if instead:
        score_by = h2o_config.score_by if has_echo else "mean"
        shares = None if h2o_config.shares_by_echo else h2o_config.head_shares
        h2o_config = dataclasses.replace(h2o_config, score_by=score_by, head_shares=shares)
    return AdaptedConfig(h2o_config, rotary if has_echo else None, instead)


def echo_replacement(config: Any) -> str:
    """What replaces the policy of `budget=` (`H2OConfig.echo`) for a model whose heads cannot share
    one budget, and why; empty for any other model."""
    return _describe_replacement(config, _rotary(config))


def _describe_replacement(config: Any, rotary: ModelRotary | str) -> str:
    """What replaces one budget for all heads, and why; empty if nothing does."""
    if isinstance(rotary, str):
        return (
            f"mean attention and equal budgets for all heads (H2OConfig.robust), because {rotary}"
        )
    text = config.get_text_config(decoder=True)
    heads = len(full_layers(text)) * describe(config).get("num_key_value_heads", 1)
    if heads >= FEWEST_HEADS:
        return ""
    return (
        f"equal budgets for all heads, because the model has {heads} key/value heads with full "
        f"attention and a shared budget needs {FEWEST_HEADS}"
    )


def _rotary(config: Any) -> ModelRotary | str:
    """A model's rotary embedding, or the reason why its prompts have no echo."""
    if latent_row(config):
        return "its keys are latents, which all heads share"
    return find_rotary(config)


class PromptEcho:
    """The scorer of one layer, which redistributes most of a prompt's attention in proportion to
    echo."""

    def __init__(self, rotary: ModelRotary, layer: int, policy: Policy) -> None:
        """`policy` is `H2OConfig.policy`; its `score_by` is "mean"."""
        self.policy = policy
        self.rotary, self.is_rotated = rotary, layer in rotary.rotated_layers

    def scores(self, tokens: NewTokens, received: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of the tokens in a first pass, and the echo by which the keys of all heads compete
        for pooled slots, each [B, G, Q] float32.

        `received`: the attention that the tokens received, [B, G, Q] float32.
        """
        positions, count = positions_in(tokens.mask, received)
        is_sink = positions < self.policy.sinks  # True at padding as well
        queries = self.policy.queries_of(positions, count)
        echo = self.echo(tokens)
        weights = (echo * queries).masked_fill(is_sink, 0.0)
        pool = received.masked_fill(is_sink, 0.0).sum(-1, keepdim=True)
        total = weights.sum(-1, keepdim=True)
        anew = torch.where((total > 0) & ~is_sink, weights / total * pool, received)
        return received + PART * (anew - received), echo

    def echo(self, tokens: NewTokens) -> Tensor:
        """Echo of the tokens in a first pass, [B, G, Q] float32; 0 at padding."""
        B, G, Q, _ = tokens.key.shape
        echo = torch.zeros(B, G, Q, dtype=torch.float32, device=tokens.key.device)
        longest = 0  # number of tokens in the longest row, if the rotary angles depend on it
        if self.is_rotated and self.rotary.by_length:
            longest = Q if tokens.mask is None else int(tokens.mask.sum(1).max())
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
