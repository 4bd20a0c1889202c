"""What `score_by="mean-echo"` and `head_shares="echo"` are, in plain torch: the truth for
`h2o.hf.prompt.prompt_echo` and `h2o.hf.prompt.cross_head_budget`.

Key by key and in double precision. Rows, heads and what is held are as in
`tests.reference.operations`, which attends and evicts.

Shape letters: B batch rows, H query heads, G key/value heads, R = H / G, Q columns of a prompt, D
head dimension, n tokens of a row.
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
"""Rotates queries [..., D], which have their own positions, on by so many."""


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
    """The pass over a prompt: attention, scores, eviction. Later passes are those of
    `tests.reference.operations`.

    Args:
        query: [B, H, Q, D]; keys, values: [B, G, Q, D].
        slots: empty, updated in place.
        policy: `H2OConfig.policy`.
        mask, softcap, sink_logits: as in `h2o.ops.attend`.

    Returns:
        Output [B, Q, H, D], scores [B, G, Q] float32 of the keys, 0 at a pad.
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
    """[n]: the largest attention that keys [n, D] get from queries [R, n, D] of their own and the
    `BEFORE` tokens before, each asked n positions later. `sinks`: [R, 1]."""
    n, D = keys.shape
    logits = turn(query, n).double() @ keys.double().T * D**-0.5
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    weights = softmax(logits, None if sinks is None else sinks[:, None].double())
    near = [weights[:, max(0, j - BEFORE) : j + 1, j].max() for j in range(n)]
    return torch.stack(near) if near else weights.new_zeros(0)


def given_out_anew(received: Tensor, echo: Tensor, policy: Policy) -> Tensor:
    """Scores [..., n] of a prompt: three quarters of the attention that keys behind the sinks have
    received go to these keys anew, so that each one's mean of them is in proportion to its echo."""
    n, sinks = received.shape[-1], policy.sinks
    queries = [sum(policy.decay**i for i in range(n - j)) for j in range(n)]  # that saw each key
    weights = (echo * echo.new_tensor(queries))[..., sinks:]
    pool = received[..., sinks:].sum(-1, keepdim=True)
    anew = received.to(echo.dtype, copy=True)
    anew[..., sinks:] = pool * weights / weights.sum(-1, keepdim=True)
    return received / 4 + anew * 3 / 4


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
    queries = torch.arange(n, 0, -1, device=claims.device)  # that have seen each key
    kept = []
    for received, echo, norms in layers:
        ranks = given_out_anew(received, echo, Policy(sinks)) / queries * norms
        best = [(sinks + head[free].topk(next(budgets)).indices).tolist() for head in ranks]
        kept.append([[*range(sinks), *sorted(head), *range(n - recent, n)] for head in best])
    return kept
