"""What `rank_by="echo"` and `shares="echo"` are, in plain torch: the truth for `h2o.hf.echo_scores`
and `h2o.hf.one_budget`.

Key by key and in double precision, with every query of a text at hand. Rows, heads and what is
held are as in `h2o.reference`, which attends and evicts.

Shape letters: B batch rows, H query heads, G key/value heads, R = H / G, Q new tokens, D head
dimension, n tokens of a row's prompt, t of its text so far, m keys that a query sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from h2o import reference
from h2o.policy import BEFORE, Policy
from h2o.quantisation import dequantised, stored_like
from h2o.sink_logits import softmax
from h2o.slots import Slots

__all__ = ["LATER", "forward", "shared_echo"]

LATER = 256
"""How many positions later the queries of what follows a prompt are asked."""

Turn = Callable[[Tensor, int], Tensor]
"""Rotates queries [..., D], which have their own positions, on by so many."""


def forward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Slots,
    queries: list[Tensor],
    turn: Turn,
    policy: Policy,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One pass over Q new tokens, the first ones being the prompt: attention, scores, eviction.

    Args:
        query: [B, H, Q, D]; keys, values: [B, G, Q, D].
        slots: updated in place.
        queries: of each row [H, t, D], those of all tokens so far; empty before the prompt. The new
            ones are added.
        policy: of which sinks and value_weighted count.
        mask, scale, softcap, sink_logits: as in `h2o.ops.attend`.

    Returns:
        Output [B, Q, H, D], scores [B, G, Q] float32 of the new keys, 0 at a pad.
    """
    B, H, Q, D = query.shape
    G = keys.shape[1]
    is_prompt, is_step = not queries, bool(queries) and Q == 1
    seen = [keys, values]
    if is_step:  # a single token reads itself as it is stored
        stores = zip(seen, (slots.keys, slots.values), strict=True)
        seen = [dequantised(stored_like(x, s), D).to(x.dtype) for x, s in stores]
    unscored = slots._replace(scores=torch.zeros_like(slots.scores))
    out, _ = reference.attend(
        query, seen[0], seen[1], None if is_prompt else unscored,
        mask=mask, scale=scale, softcap=softcap, sink_logits=sink_logits,
    )  # fmt: skip
    if is_prompt:
        queries.extend(query.new_zeros(H, 0, D) for _ in range(B))

    def weight(asked: Tensor, g: int, visible: Tensor, j: int) -> float:
        """The largest attention that queries [R, D] of group g, of keys [m, D], give to key j."""
        logits = asked.double() @ visible.double().T * (D**-0.5 if scale is None else scale)
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        R = H // G
        sinks = None if sink_logits is None else sink_logits[g * R : (g + 1) * R, None].double()
        return float(softmax(logits, sinks)[:, j].max())

    scores = torch.zeros(B, G, Q, dtype=torch.float32, device=query.device)
    for b in range(B):
        real = torch.arange(Q, device=query.device) if mask is None else mask[b].nonzero()[:, 0]
        n, t = len(real), queries[b].shape[1]
        queries[b] = torch.cat([queries[b], query[b][:, real]], dim=1)
        for g in range(G):
            new, asked = keys[b, g, real], queries[b].unflatten(0, (G, H // G))[g]  # [R, t + n, D]
            held = None if is_prompt else _held_keys(slots, b, g, D)

            def later(i: int, t: int = t, asked: Tensor = asked) -> Tensor:
                """Query i, read back where it came in an earlier pass and is stored in bytes."""
                turned = turn(asked[:, i], LATER)
                if i >= t or slots.keys.dtype != torch.uint8:
                    return turned
                return dequantised(stored_like(turned, slots.keys), D)

            for j, column in enumerate(real.tolist()):
                near = range(max(0, t + j - BEFORE), t + j + 1)
                if held is None:
                    weights = [weight(turn(asked[:, i], n), g, new, j) for i in near]
                else:
                    visible = torch.cat([held, new[: j + 1].to(held.dtype)])
                    weights = [weight(later(i), g, visible, -1) for i in near]
                scores[b, g, column] = max(weights)
    by_largest = policy._replace(rank_by="max", decay=1.0, merge=None)
    reference.evict(keys, values, scores, slots, mask=mask, policy=by_largest)
    return out, scores


def _held_keys(slots: Any, b: int, g: int, D: int) -> Tensor:
    """[m, D], as they are read from the slots of a row and head."""
    where: Any = (b, g)
    if slots.starts is not None:
        where = (b, slice(int(slots.starts[g]), int(slots.starts[g + 1])))
    return dequantised(slots.keys[where][slots.positions[where] >= 0], D)


def shared_echo(
    layers: list[tuple[Tensor, Tensor, Tensor]], heavy: int, recent: int, sinks: int
) -> list[list[list[int]]]:
    """Positions that `H2OConfig.echo` keeps of one row's prompt, in each layer and head.

    Args:
        layers: of each layer the attention that keys have received and their echo, [G, n] each, and
            the norms of their values, [G, n].
        heavy, recent, sinks: tokens of each head, of which the heavy ones are dealt over all.
    """
    n = layers[0][0].shape[1]
    free = slice(sinks, n - recent)
    claims = torch.cat([echo[:, free] for _, echo, _ in layers])
    winners = claims.flatten().topk(heavy * len(claims)).indices // claims.shape[1]
    budgets = iter(winners.bincount(minlength=len(claims)).tolist())
    queries = torch.arange(n, 0, -1)  # that have seen each key
    kept = []
    for received, echo, norms in layers:
        weights = queries * echo
        pool = received[:, sinks:].sum(1, keepdim=True)
        anew = pool * weights / weights[:, sinks:].sum(1, keepdim=True)
        ranks = (received / 4 + anew * 3 / 4) / queries * norms
        best = [(sinks + head[free].topk(next(budgets)).indices).tolist() for head in ranks]
        kept.append([[*range(sinks), *sorted(head), *range(n - recent, n)] for head in best])
    return kept
