"""Attention over a whole text under the published masks that are not this package's cache.

`h2o.ops.simulate` answers as the cache would. The forms here are for comparison with
published numbers (`h2o.simulation_mask` describes each and is their readable
truth); they run in plain torch by blocks of rows, so memory is linear in the text's length.

In all of them a key that has dropped out never returns. What a row sees is therefore one
number per key, as in `h2o.ops.simulate`: row i sees key j if j <= i < evicted_at[j].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

__all__ = ["logit_blocks", "retained_mass", "simulate"]


ROWS = 64  # rows of logits that exist at one time


def simulate(
    variant: str,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    heavy: int,
    recent: int,
    *,
    prompt_len: int = 1,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """One text without pads through a variant; shapes have no batch axis.

    Args:
        variant: "local", "global" or "flexgen".
        query: [H, n, D].
        keys, values: [G, n, D], H = G * R.
        heavy, recent: numbers of tokens; what they mean is the variant's business.
        prompt_len: tokens before the first eviction, "flexgen" only.
        scale: factor of q.k, 1 / sqrt(D) by default.

    Returns:
        (out, evicted_at): [n, H, D] like `query`; [H, n] int32, the first row that no longer sees
        the key, n if none. "flexgen" shares its choice among the heads of a group, as a cache
        does. The other two choose for each query head, as the authors' code does, which
        repeats the keys.
    """
    H, n, D = query.shape
    rule = {"local": _local, "global": _global, "flexgen": _flexgen}[variant]
    evicted_at = np.full((H, n), n, dtype=np.int32)
    if scale is None:
        scale = D**-0.5

    def blocks() -> Iterator[tuple[int, Tensor]]:
        return logit_blocks(query, keys, scale)

    out = torch.empty(n, H, D, dtype=query.dtype, device=query.device)
    grouped = values.float().repeat_interleave(H // len(keys), dim=0)
    choose = rule(blocks, evicted_at, len(keys), heavy, recent, prompt_len)
    for first, logits in blocks():
        choose(first, logits)
        rows, seen = logits.shape[1:]
        visible = _visible(torch.from_numpy(evicted_at).to(out.device), first, rows, seen)
        p = logits.masked_fill(~visible, -torch.inf).softmax(-1)
        out[first : first + rows] = (p @ grouped[:, :seen]).transpose(0, 1).to(out.dtype)
    return out, torch.from_numpy(evicted_at).to(out.device)


def retained_mass(
    query: Tensor,
    keys: Tensor,
    evicted_at: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """How much of the attention that a full cache would pay falls on the keys still seen.

    Args:
        query: [H, n, D]; keys: [G, n, D]; evicted_at: [H, n] or [G, n].
        scale, softcap: as in `h2o.ops.attend`.

    Returns:
        [H, n] float32: of each row i the softmax over all earlier keys, summed over those with
        i < evicted_at[j]. 1 where nothing was evicted.
    """
    H, n, D = query.shape
    evicted_at = evicted_at.repeat_interleave(H // len(evicted_at), dim=0)
    mass = torch.empty(H, n, dtype=torch.float32, device=query.device)
    for first, logits in logit_blocks(query, keys, D**-0.5 if scale is None else scale, softcap):
        rows, seen = logits.shape[1:]
        visible = _visible(evicted_at, first, rows, seen)
        mass[:, first : first + rows] = (logits.softmax(-1) * visible).sum(-1)
    return mass


def logit_blocks(
    query: Tensor, keys: Tensor, scale: float, softcap: float = 0.0
) -> Iterator[tuple[int, Tensor]]:
    """What attention is the softmax of, some rows at a time.

    Args:
        query: [H, n, D]; keys: [G, n, D], H = G * R.
        scale: factor of q.k.
        softcap: c > 0 turns logits x into c * tanh(x / c).

    Yields:
        (first row, logits [H, rows, first + rows] float32, -inf above the diagonal), in order.
    """
    H, n, _ = query.shape
    grouped = keys.float().repeat_interleave(H // len(keys), dim=0)
    for first in range(0, n, ROWS):
        last = min(first + ROWS, n)
        logits = scale * (query[:, first:last].float() @ grouped[:, :last].transpose(-1, -2))
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        future = torch.ones(last - first, last, dtype=torch.bool, device=query.device)
        yield first, logits.masked_fill_(future.triu(first + 1), -torch.inf)


def _visible(evicted_at: Tensor, first: int, rows: int, seen: int) -> Tensor:
    """[H, rows, seen] bool, causality aside."""
    row = torch.arange(first, first + rows, device=evicted_at.device)
    return row[:, None] < evicted_at[:, None, :seen]


# A rule returns a function (first row, logits) that completes evicted_at for these rows, before
# they are attended. It is called on all blocks in order. Choosing is one row after the other on
# a few thousand numbers, which NumPy does at a fraction of torch's cost per call.
Choose = Callable[[int, Tensor], None]
Blocks = Callable[[], Iterator[tuple[int, Tensor]]]


def _band(n: int, recent: int) -> np.ndarray:
    """evicted_at [n] of a window of the last recent + 1 keys."""
    return np.minimum(np.arange(n, dtype=np.int32) + recent + 1, n)


def _local(
    blocks: Blocks, evicted_at: np.ndarray, G: int, heavy: int, recent: int, prompt_len: int
) -> Choose:
    """Rows from `heavy` on drop the lowest of the heavy keys before they join them.

    The window is or-ed on top, so a key is seen until it has left both.
    """
    H, n = evicted_at.shape
    band = _band(n, recent)
    if heavy == 0:
        evicted_at[:] = band
        return lambda first, logits: None
    # Keys lie in descending order, so that argmin, which takes the first of equals, takes the
    # highest position. +inf marks keys that are not in competition.
    score = np.full((H, n), np.inf, dtype=np.float32)
    every = np.arange(H)

    def choose(first: int, logits: Tensor) -> None:
        rows, seen = logits.shape[1:]
        received = logits.softmax(-1).flip(-1).cpu().numpy()
        for i in range(first, first + rows):
            if i >= heavy:
                victim = score.argmin(-1)
                score[every, victim] = np.inf
                position = n - 1 - victim
                evicted_at[every, position] = np.maximum(band[position], i)
            score[:, n - 1 - i] = 0.0
            score[:, n - seen :] += received[:, i - first]

    return choose


def _global(
    blocks: Blocks, evicted_at: np.ndarray, G: int, heavy: int, recent: int, prompt_len: int
) -> Choose:
    """A fixed set for all rows, from the column sums of the whole text. It knows the future."""
    H, n = evicted_at.shape
    received = torch.zeros(H, n)
    for _, logits in blocks():
        received[:, : logits.shape[-1]] += logits.softmax(-1).sum(-2).cpu()
    best = received.argsort(dim=-1, descending=True, stable=True)[:, :heavy].numpy()
    evicted_at[:] = _band(n, recent)
    np.put_along_axis(evicted_at, best, n, axis=-1)
    return lambda first, logits: None


def _flexgen(
    blocks: Blocks, evicted_at: np.ndarray, G: int, heavy: int, recent: int, prompt_len: int
) -> Choose:
    """The key that leaves the window takes the place of the lowest heavy one, unconditionally."""
    H, n = evicted_at.shape
    shared = evicted_at.reshape(G, H // G, n)
    score = np.full((G, n), np.inf, dtype=np.float32)  # descending and +inf as in _local
    every = np.arange(G)

    def drop(newest: int, row: int) -> None:
        """Of the keys at positions up to `newest` the lowest."""
        victim = n - 1 - newest + score[:, n - 1 - newest :].argmin(-1)
        score[every, victim] = np.inf
        shared[every, :, n - 1 - victim] = row

    def choose(first: int, logits: Tensor) -> None:
        rows, seen = logits.shape[1:]
        logits = logits.flip(-1).cpu().numpy().reshape(G, H // G, rows, seen)
        for i in range(first, first + rows):
            score[:, n - 1 - i] = 0.0
            held = np.isfinite(score[:, n - seen :]) | np.isnan(score[:, n - seen :])
            p = np.where(held[:, None], logits[:, :, i - first], -np.inf)
            p = np.exp(p - p.max(-1, keepdims=True))
            score[:, n - seen :] += (p / p.sum(-1, keepdims=True)).sum(1)
            count = i + 1
            if count < prompt_len or count <= heavy + recent:
                continue
            joins = 1 if count > prompt_len and heavy > 0 else 0
            for _ in range(int(held[0].sum()) - heavy - recent):
                drop(i - recent - joins, count)

    return choose
