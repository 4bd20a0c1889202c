"""The two operations of a forward pass of several tokens, one after the other, in eager layers and
in compiled graphs.

Shape letters: B batch rows, H query heads, G key/value heads, Q new tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from h2o import ops
from h2o.hf.call.attention_call import NewTokens
from h2o.policy import Policy
from h2o.spans import PINNED

__all__ = ["attention", "evicting"]


def attention(tokens: NewTokens, slots: ops.Slots | None, policy: Policy) -> tuple[Tensor, Tensor]:
    """Output [B, Q, H, D] of new tokens over slots and each other, and scores [B, G, Q] of their
    keys."""
    return ops.attend(
        tokens.query,  # not tokens[:3]: torch 2.6 cannot compile slices of named tuples
        tokens.key,
        tokens.value,
        slots,
        mask=tokens.mask,
        scale=tokens.scale,
        softcap=tokens.softcap,
        sink_logits=tokens.sink_logits,
        policy=policy,
    )


def evicting(
    attend: Callable[[], tuple[Tensor, Tensor]], tokens: NewTokens, slots: ops.Slots, policy: Policy
) -> Tensor:
    """The output of `attend`, by whose scores then the slots keep what their budget has room for;
    pinned keys stay pinned. When it raises, the slots are as they were."""
    scores_before = slots.scores.clone()
    try:
        out, scores = attend()
        if policy.decay < 1:  # whose power may be 0
            slots.scores.masked_fill_(scores_before == PINNED, PINNED)
        ops.evict(tokens.key, tokens.value, scores, slots, mask=tokens.mask, policy=policy)
    except Exception:  # the scores are all that attend has touched
        slots.scores.copy_(scores_before)
        raise
    return out
