"""Peers in plain torch, which do the same work as h2o.

Each function is written as users of torch write it, with its best settings. If torch offers several
ways, `fastest` chooses one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def fastest(choices: dict[str, Callable[[], Any]]) -> tuple[str, Callable[[], Any]]:
    """Name and function of the choice whose best time over three calls is the shortest."""
    times = {}
    for name, run in choices.items():
        times[name] = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            run()
            times[name] = min(times[name], time.perf_counter() - start)
    name = min(times, key=lambda choice: times[choice])
    return name, choices[name]


def sdpa(query: Tensor, keys: Tensor, values: Tensor, causal: bool) -> dict[str, Callable]:
    """torch's fused attention of query [B,H,Q,D] over keys, values [B,G,S,D], without scores.

    "gqa" lets torch map query heads to key heads. "expanded" passes a copy of keys and values for
    every query head. The copies are made here and not timed.
    """
    R = query.shape[1] // keys.shape[1]
    wide = [x.repeat_interleave(R, dim=1) for x in (keys, values)] if R > 1 else [keys, values]

    def gqa() -> Tensor:
        return scaled_dot_product_attention(query, keys, values, is_causal=causal, enable_gqa=True)

    def expanded() -> Tensor:
        return scaled_dot_product_attention(query, *wide, is_causal=causal)

    return {"gqa": gqa, "expanded": expanded}


def eager_with_sums(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention with the n x n matrix, as in transformers' eager attention, and the matrix's
    column sums.

    Returns:
        (out [B,H,n,D], scores [B,G,n] float32)
    """
    B, H, n, D = query.shape
    G = keys.shape[1]
    keys, values = (x.repeat_interleave(H // G, dim=1) for x in (keys, values))
    logits = query @ keys.transpose(-1, -2) * D**-0.5
    logits += logits.new_full((n, n), torch.finfo(logits.dtype).min).triu(1)
    p = logits.softmax(-1, dtype=torch.float32)
    scores = p.sum(-2).view(B, G, H // G, n).sum(2)
    return p.to(query.dtype) @ values, scores


class TopkGather:
    """Prompt eviction as in most cache-compression code: topk, sort, gather.

    Writes to preallocated tensors, so that no call touches a page for the first time.
    """

    def __init__(self, keys: Tensor, heavy: int, recent: int) -> None:
        B, G, n, D = keys.shape
        self.heavy, self.border = heavy, n - recent
        k = heavy + recent
        self.index = torch.empty(B, G, k, dtype=torch.int64)
        self.index[..., heavy:] = torch.arange(self.border, n)
        self.keys, self.values = keys.new_empty(B, G, k, D), keys.new_empty(B, G, k, D)
        self.scores = torch.empty(B, G, k)

    def __call__(self, keys: Tensor, values: Tensor, scores: Tensor) -> None:
        best = scores[..., : self.border].topk(self.heavy, sorted=False).indices
        self.index[..., : self.heavy] = best.sort().values
        rows = self.index[..., None].expand(-1, -1, -1, keys.shape[-1])
        torch.gather(keys, 2, rows, out=self.keys)
        torch.gather(values, 2, rows, out=self.values)
        torch.gather(scores, 2, self.index, out=self.scores)


def authors_simulation(
    query: Tensor, keys: Tensor, values: Tensor, heavy: int, recent: int
) -> Tensor:
    """The authors' evaluation for lm-eval (FMInference/H2O, h2o_hf/utils_hh). For every query head,
    a Python loop over rows computes the softmax of a row and the topk of the accumulated scores,
    and scatters them into an n x n mask. A band of recent keys is added before attention.

    Returns:
        out [B,H,n,D]
    """
    B, H, n, D = query.shape
    keys, values = (x.repeat_interleave(H // keys.shape[1], dim=1) for x in (keys, values))
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    logits = query @ keys.transpose(-1, -2) * D**-0.5
    lowest = torch.finfo(logits.dtype).min
    logits.masked_fill_(~causal, lowest)
    mask = causal.expand(B, H, n, n).clone()
    scores = logits[:, :, :heavy].softmax(-1, dtype=torch.float32).sum(-2)
    for i in range(heavy, n):
        best = scores.topk(heavy - 1).indices
        kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
        kept[..., i] = True
        mask[:, :, i] = kept
        scores = (scores + logits[:, :, i].softmax(-1, dtype=torch.float32)) * kept
    mask |= causal.triu(-recent)
    p = logits.masked_fill_(~mask, lowest).softmax(-1, dtype=torch.float32)
    return p.to(values.dtype) @ values


def masked_simulation(
    query: Tensor, keys: Tensor, values: Tensor, heavy: int, recent: int
) -> tuple[Tensor, Tensor]:
    """The computation of `h2o.ops.simulate` by a Python loop over rows, which fills an n x n mask,
    and attention under it.

    Each row computes a softmax over the keys that are still kept, and adds it to the scores of its
    group. Then the lowest of the keys outside the recent window is evicted, which is less work than
    a topk.

    Returns:
        (out [B,H,n,D], mask [B,G,n,n] bool)
    """
    B, H, n, D = query.shape
    G = keys.shape[1]
    R = H // G
    grouped = query.view(B, G, R, n, D)
    logits = (grouped @ keys[:, :, None].transpose(-1, -2)) * D**-0.5
    logits = logits.float()
    seen = torch.zeros(B, G, n, n, dtype=torch.bool)
    kept = torch.zeros(B, G, n, dtype=torch.bool)
    scores = torch.zeros(B, G, n)
    for i in range(n):
        kept[..., i] = True
        seen[..., i, :] = kept
        row = logits[..., i, :].masked_fill(~kept[:, :, None], -torch.inf)
        scores += row.softmax(-1).sum(2)
        if i + 1 > heavy + recent:
            rank = scores[..., : i + 1 - recent].masked_fill(
                ~kept[..., : i + 1 - recent], torch.inf
            )
            kept.scatter_(-1, rank.argmin(-1, keepdim=True), False)
    p = logits.masked_fill_(~seen[:, :, None], -torch.inf).softmax(-1).to(values.dtype)
    out = p @ values[:, :, None]
    return out.view(B, H, n, D), seen
