"""`score_by="mean-echo"` and `head_shares="echo"` in plain torch, written to be read.
`h2o.hf.prompt.echo_scorer` and `h2o.hf.prompt.cross_head_budget` are tested against it.

The functions go key by key, in double precision. `tests.reference.operations` attends and evicts,
so rows, heads and slots are as they are there.

Shape letters: B batch rows, H query heads, G key/value heads, R = H / G query heads in a group, Q
columns of a prompt, D head dimension, n tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from h2o.policy import BEFORE, Policy
from h2o.sink_logits import softmax
from h2o.slots import Slots
from tests.reference import operations as reference

__all__ = ["echo_of", "forward", "given_out_anew", "shared_echo"]

Turn = Callable[[Tensor, int], Tensor]
"""Rotates queries [..., D] from their own positions to positions later by the given number."""


def forward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Slots,
    turn: Turn,
    policy: Policy,
    *,
    mask: Tensor | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The forward pass over a prompt: attention, scores, eviction. Later passes use
    `tests.reference.operations`.

    Args:
        query: [B, H, Q, D]; keys, values: [B, G, Q, D].
        slots: empty, updated in place.
        policy: `H2OConfig.policy`.
        mask, softcap, sink_logits: as in `h2o.ops.attend`.

    Returns:
        Output [B, Q, H, D], and scores [B, G, Q] float32 of the keys, 0 at padding.
    """
    G = keys.shape[1]
    out, received = reference.attend(
        query, keys, values, mask=mask, softcap=softcap, sink_logits=sink_logits, policy=policy
    )
    scores = torch.zeros_like(received)
    for b in range(len(query)):
        real = slice(None) if mask is None else mask[b].bool()
        of_row = query[b][:, real].unflatten(0, (G, -1))
        sinks = [None] * G if sink_logits is None else sink_logits.view(G, -1, 1)
        for g in range(G):
            echo = echo_of(of_row[g], keys[b, g, real], turn, softcap, sinks[g])
            scores[b, g, real] = given_out_anew(received[b, g, real], echo, policy).float()
    reference.evict(keys, values, scores, slots, mask=mask, policy=policy)
    return out, scores


def echo_of(
    query: Tensor, keys: Tensor, turn: Turn, softcap: float, sinks: Tensor | None
) -> Tensor:
    """The echo [n] of keys [n, D]: the largest attention that a key gets from the queries [R, n, D]
    of its own token and the `BEFORE` preceding ones, if these stood n positions later.
    `sinks`: [R, 1]."""
    n, D = keys.shape
    logits = turn(query, n).double() @ keys.double().T * D**-0.5
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    weights = softmax(logits, None if sinks is None else sinks[:, None].double())
    near = [weights[:, max(0, j - BEFORE) : j + 1, j].max() for j in range(n)]
    return torch.stack(near) if near else weights.new_zeros(0)


def given_out_anew(received: Tensor, echo: Tensor, policy: Policy) -> Tensor:
    """Scores [..., n] of a prompt. Three quarters of the attention that the keys after the sinks
    have received are redistributed among these keys, so that each key's mean of this part (per
    query that has seen the key) is proportional to its echo."""
    n, sinks = received.shape[-1], policy.sinks
    # Number of queries that have seen each key, weighted by the decay.
    queries = [sum(policy.decay**i for i in range(n - j)) for j in range(n)]
    weights = (echo * echo.new_tensor(queries))[..., sinks:]
    pool = received[..., sinks:].sum(-1, keepdim=True)
    anew = received.to(echo.dtype, copy=True)
    anew[..., sinks:] = pool * weights / weights.sum(-1, keepdim=True)
    return received / 4 + anew * 3 / 4


def shared_echo(
    layers: list[tuple[Tensor, Tensor, Tensor]], heavy: int, recent: int, sinks: int
) -> list[list[list[int]]]:
    """The positions that `H2OConfig.echo` keeps of one row's prompt, in each layer and head.

    Args:
        layers: for each layer the attention that keys have received, their echo, and the norms of
            their values, each [G, n].
        heavy, recent, sinks: tokens of each head. All heads compete for the heavy ones; sinks and
            recent tokens stay with each head.
    """
    n = layers[0][0].shape[1]
    free = slice(sinks, n - recent)
    claims = torch.cat([(echo * norms)[:, free] for _, echo, norms in layers])
    winners = claims.flatten().topk(heavy * len(claims)).indices // claims.shape[1]
    budgets = iter(winners.bincount(minlength=len(claims)).tolist())
    queries = torch.arange(n, 0, -1, device=claims.device)  # how many have seen each key
    kept = []
    for received, echo, norms in layers:
        ranks = given_out_anew(received, echo, Policy(sinks)) / queries * norms
        best = [(sinks + head[free].topk(next(budgets)).indices).tolist() for head in ranks]
        kept.append([[*range(sinks), *sorted(head), *range(n - recent, n)] for head in best])
    return kept
