"""Attention of a whole text in blocks of rows, so that memory is linear in the text's length.

The logits [H, rows, keys] of a block serve two purposes: to measure which share of the attention
goes to keys that were not evicted (`retained_mass`), and to apply the masks of published
evaluations. An evicted key never returns, so one number per key says which rows see it: row i sees
key j if j <= i < evicted_at[j].

Shape letters: H query heads, G key/value heads, n tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from h2o.sink_logits import softmax

ROWS = 64  # rows of logits in memory at one time


def logit_blocks(
    query: Tensor, keys: Tensor, scale: float | None, softcap: float = 0.0, rows: int = ROWS
) -> Iterator[tuple[int, Tensor]]:
    """Compute attention logits, a few rows at a time.

    Args:
        query: [H, n, D]; keys: [G, n, D], H = G * R.
        scale: factor of q.k, 1 / sqrt(D) by default.
        softcap: c > 0 turns logits x into c * tanh(x / c).
        rows: number of rows of a block.

    Yields:
        (first row, logits [H, rows, first + rows] float32, -inf above the diagonal), in order.
    """
    H, n, D = query.shape
    scale = D**-0.5 if scale is None else scale
    grouped = keys.float().repeat_interleave(H // len(keys), dim=0)
    for first in range(0, n, rows):
        last = min(first + rows, n)
        logits = scale * (query[:, first:last].float() @ grouped[:, :last].transpose(-1, -2))
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        future = torch.ones(last - first, last, dtype=torch.bool, device=query.device)
        yield first, logits.masked_fill_(future.triu(first + 1), -torch.inf)


def attend_blocks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    hide: Callable[[int, Tensor], Tensor],
    *,
    scale: float | None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    rows: int = ROWS,
) -> Tensor:
    """Attention [n, H, D] without some of the keys.

    Args:
        query: [H, n, D]; keys, values: [G, n, D].
        hide: function of a block's first row and its logits that returns which keys the rows do
            not see, [H, rows, keys] bool.
        scale, softcap, rows: as in `logit_blocks`.
        sinks: [H, 1, 1], see `h2o.sink_logits`.
    """
    H, n, D = query.shape
    out = torch.empty(n, H, D, dtype=query.dtype, device=query.device)
    values = values.float().repeat_interleave(H // len(values), dim=0)
    for first, logits in logit_blocks(query, keys, scale, softcap, rows):
        last = logits.shape[2]
        p = softmax(logits.masked_fill(hide(first, logits), -torch.inf), sinks)
        out[first:last] = (p @ values[:, :last]).transpose(0, 1).to(out.dtype)
    return out


def retained_mass(
    query: Tensor,
    keys: Tensor,
    evicted_at: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Share of a full cache's attention that falls on the keys still seen.

    Args:
        query: [H, n, D]; keys: [G, n, D]; evicted_at: [H, n] or [G, n].
        scale, softcap: as in `h2o.ops.attend`.

    Returns:
        [H, n] float32: for each row i the softmax over all keys j <= i, summed over those with
        i < evicted_at[j]. 1 if nothing was evicted.
    """
    H, n, _ = query.shape
    evicted_at = evicted_at.repeat_interleave(H // len(evicted_at), dim=0)
    mass = torch.empty(H, n, dtype=torch.float32, device=query.device)
    for first, logits in logit_blocks(query, keys, scale, softcap):
        rows, seen = logits.shape[1:]
        not_evicted = visible(evicted_at, first, rows, seen)
        mass[:, first : first + rows] = (logits.softmax(-1) * not_evicted).sum(-1)
    return mass


def visible(evicted_at: Tensor, first: int, rows: int, seen: int) -> Tensor:
    """Which of the first `seen` keys the rows from `first` on still see, [H, rows, seen] bool,
    ignoring causality."""
    row = torch.arange(first, first + rows, device=evicted_at.device)
    return row[:, None] < evicted_at[:, None, :seen]
