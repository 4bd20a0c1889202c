"""`h2o.hf.simulation` for `rank_by="echo"`: what a layer's cache does with a text, token by token.

A score depends on the keys that are held when its key comes. So the prompts are read at once and
all later tokens one after the other, by the operations that an `EchoLayer` goes by.

Shape letters: B batch rows, H query heads, G key/value heads, N columns of the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from h2o import ops
from h2o.hf import slot_layout
from h2o.hf.attention_call import NewTokens
from h2o.hf.echo_scores import EchoScores
from h2o.hf.trace import by_column, not_held
from h2o.policy import Policy

__all__ = ["simulate"]


def simulate(
    text: NewTokens,
    prompts: Sequence[int],
    by_row: list[list[tuple[int, int]]],
    echo: EchoScores,
    policy: Policy,
    kv_dtype: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `h2o.ops.simulate`.

    Args:
        text: N tokens.
        prompts: tokens of each row that are read before the first eviction, at least 1.
        by_row: (heavy, recent) of each row and each head, or one for all heads.
        policy: `H2OConfig.policy`.

    Returns:
        Output [B, N, H, D], evicted_at int32 [B, G, N], scores float32 [B, G, N].
    """
    B, _, N, _ = text.query.shape
    G, device = text.key.shape[1], text.key.device
    real = torch.ones(B, N, device=device).bool() if text.mask is None else text.mask.bool()
    order = real.cumsum(1) - 1
    early = real & (order < torch.tensor(prompts, device=device)[:, None])
    widest = [policy.sinks + max(map(sum, rows)) for rows in zip(*by_row, strict=True)]
    sizes = slot_layout.capacities(widest, N)
    slots = slot_layout.with_capacities(
        text.key, sizes, value_weighted=policy.value_weighted, kv_dtype=kv_dtype
    )
    slots.budget.copy_(torch.tensor(by_row, dtype=torch.int32).squeeze(1))
    evicted_after = torch.full((B, G, N), -1, dtype=torch.int32, device=device)

    def record(seen: Tensor) -> None:
        """When rows [B] have seen so many columns."""
        evicted = not_held(slots, sizes, N) & (evicted_after < 0)
        evicted_after.copy_(torch.where(evicted, seen[:, None, None].int(), evicted_after))

    out, scores, asked = echo.prompt(text._replace(mask=early))
    ops.evict(text.key, text.value, scores, slots, mask=early, policy=policy)
    columns = torch.arange(1, N + 1, device=device)
    seen = (early * columns).amax(1)
    record(seen)
    late = real & ~early
    for i in late.any(0).nonzero()[:, 0].tolist():
        one = text.columns(i, i + 1)._replace(mask=late[:, i : i + 1])
        answer, score, asked = echo.step(one, asked, slots)
        ops.evict(one.key, one.value, score, slots, mask=one.mask, policy=policy)
        out[:, i : i + 1] += answer  # 0 where it is of no row
        scores[..., i : i + 1] += score
        record(seen.fill_(i + 1))
    return out, by_column(evicted_after, real), scores
