"""`h2o.ops.attend` in plain torch: causal attention of Q new queries, and the scores of the keys,
which are the column sums (or maxima) of its probabilities.

Queries are processed in blocks, so that memory is linear in the number of keys. A block's
probabilities [B, G, R * n, S + Q] give its output and its part of the column sums.

Shape letters as in `h2o.ops`, R = H / G, n queries in a block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o.backends.torch_backend.slot_view import SlotView, products
from h2o.policy import Policy
from h2o.sink_logits import softmax

BLOCK = 1 << 22
"""Number of logits of a block of queries on the CPU, so that they fit in its caches. On other
devices a block has eight times as many, because there the number of launches matters."""

FEWEST = 8
"""Minimum number of queries in a block."""


class Stored(NamedTuple):
    """The keys and values in the slots, as queries see them."""

    keys: Tensor
    """[B, G or 1, S, D]"""
    values: Tensor
    """[B, G or 1, S, D], with 0 in place of elements that are not finite"""
    beyond: Tensor
    """[B, G, 1, D], the sums of the elements that are not finite"""
    held: Tensor
    """[B, G, S] bool"""


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor | None,
    mask: Tensor | None,
    slots: Any,
    out: Tensor,
    scores: Tensor,
    scale: float,
    softcap: float,
    policy: Policy,
    sink_logits: Tensor | None,
    log_sums: Tensor | None,
    known_log_sums: Tensor | None,
) -> None:
    """See `h2o.ops.attend`, or `h2o.ops.log_sums` if `log_sums` is given. `known_log_sums` is not
    used here."""
    real = None if mask is None else mask.bool()
    weights = total = None
    decay = policy.decay
    if decay != 1.0:
        order = torch.arange(query.shape[2], device=query.device)[None]
        if real is not None:
            order = real.cumsum(1) - 1
        tokens = order[:, -1:] + 1  # [B or 1, 1]
        weights = decay ** (tokens - 1 - order).float()
        total = decay ** tokens.float()
        if decay > 0:  # not rounded to 0, since a pinned key's infinity times 0 would be NaN
            total = total.clamp(min=torch.finfo(torch.float32).tiny)
    view = stored = None
    if slots is not None:
        view = SlotView(slots)
        held = view.by_head(slots.positions, -1) >= 0
        D = query.shape[-1]
        stored_keys, stored_values = view.keys_and_values(D)
        empty = ~(held if view.first is None else held.any(1, keepdim=True))
        finite, beyond = view.split_nonfinite(stored_values.masked_fill(empty[..., None], 0))
        stored = Stored(stored_keys.float(), finite, beyond, held)
    values = keys if values is None else values
    largest = policy.scores_largest
    new, old = dense(
        query, keys, values, real, stored, weights, scale, softcap, sink_logits, largest, out,
        log_sums,
    )  # fmt: skip
    if log_sums is not None:
        return
    scores.copy_(new)
    if view is not None:
        before = view.by_head(slots.scores, 0)
        if total is not None:
            before = before * total[..., None]
        view.write_by_head(slots.scores, torch.maximum(before, old) if largest else before + old)


def rows_per_block(query: Tensor, columns: int) -> int:
    """Number of queries in a block of `query` [B, H, Q, D], if each has `columns` logits."""
    B, H, Q, _ = query.shape
    logits = BLOCK if query.is_cpu else 8 * BLOCK
    return min(Q, max(FEWEST, logits // (B * H * columns)))


def apply_softcap(logits: Tensor, softcap: float) -> Tensor:
    """Squash logits into (-softcap, softcap). A softcap of 0 leaves them unchanged."""
    return torch.tanh(logits / softcap) * softcap if softcap else logits


def dense(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    real: Tensor | None,
    stored: Stored | None,
    weights: Tensor | None,
    scale: float,
    softcap: float,
    sink_logits: Tensor | None,
    largest: bool,
    out: Tensor,
    log_sums: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Write causal attention to `out` [B, Q, H, D], and return the attention that keys receive.

    Args:
        query: [B, H, Q, D]; keys, values: [B, G, Q, D].
        real: [B, Q] bool, False for padding. None: no padding.
        weights: [B or 1, Q], the weight of each query in the sums; ignored for padding. None: 1.
        largest: return the maxima over queries instead of the sums.
        log_sums: [B, H, Q]. If given, it is written and nothing else is computed.

    Returns:
        (new keys [B, G, Q], stored keys [B, G, S]), float32.

    The probabilities of a block of queries are complete, so they give both the output and the sums,
    and no product is computed twice. Values that are not finite are removed from the product, where
    0 times them would be NaN, and their sum up to each query is added afterwards.
    """
    B, H, Q, _ = query.shape
    G = keys.shape[1]
    S = 0 if stored is None else stored.held.shape[2]
    R = H // G
    rows = rows_per_block(query, S + Q)
    query = query.unflatten(1, (G, R))
    keys = keys.float()
    usable = values.isfinite()
    if real is not None:
        pads = ~real[:, None, :, None]
        values = values.masked_fill(pads, 0)
        usable |= pads
    beyond = values.masked_fill(usable, 0).float().cumsum(2)[:, :, None]
    values = values.masked_fill(~usable, 0)
    sums = keys.new_zeros(B, G, S + Q)
    future = torch.ones(rows, rows, dtype=torch.bool, device=keys.device).triu(1)
    for start in range(0, Q, rows):
        stop = min(start + rows, Q)
        n = stop - start

        def hide(x: Tensor, value: float, start: int = start, stop: int = stop) -> None:
            """Overwrite the entries of x [B, G, R * n, S + stop] that the queries do not see."""
            x = x.unflatten(2, (R, stop - start))
            x[..., S + start :].masked_fill_(future[: stop - start, : stop - start], value)
            if real is not None:
                x[..., S:].masked_fill_(~real[:, None, None, None, :stop], value)
            if stored is not None:
                x[..., :S].masked_fill_(~stored.held[:, :, None, None], value)

        scaled = (query[:, :, :, start:stop].float() * scale).flatten(2, 3)  # [B, G, R * n, D]
        logits = scaled @ keys[:, :, :stop].mT
        if stored is not None:
            logits = torch.cat([products(scaled, stored.keys.mT), logits], -1)
        logits = apply_softcap(logits, softcap)
        hide(logits, -torch.inf)
        sinks = sink_logits
        if sinks is not None:
            sinks = sinks.view(G, R, 1).expand(G, R, n).reshape(1, G, R * n, 1)
        if log_sums is not None:
            total = logits.logsumexp(-1)
            total = total if sinks is None else torch.logaddexp(total, sinks[..., 0])
            total = total.unflatten(2, (R, n)).flatten(1, 2)
            if real is not None:
                total = total.masked_fill(~real[:, None, start:stop], 0)
            log_sums[:, :, start:stop] = total
            continue
        p = softmax(logits, sinks)
        hide(p, 0)  # a single NaN logit makes its whole row NaN
        if real is not None:
            p.unflatten(2, (R, n)).masked_fill_(~real[:, None, None, start:stop, None], 0)
        answer = products(p[..., S:], values[:, :, :stop])
        if stored is not None:
            answer += products(p[..., :S], stored.values) + stored.beyond
        answer = answer.unflatten(2, (R, n)) + beyond[:, :, :, start:stop]
        if real is not None:
            answer = answer.masked_fill(~real[:, None, None, start:stop, None], 0)
        out[:, start:stop] = answer.permute(0, 3, 1, 2, 4).flatten(2, 3)
        if largest:
            if weights is not None:
                p *= weights[:, None, start:stop].repeat(1, 1, R)[..., None]
            part = sums[..., : S + stop]
            part.copy_(torch.maximum(part, p.amax(2)))
        elif weights is None:
            sums[..., : S + stop] += p.sum(2)
        else:
            w = weights[:, None, None, start:stop].repeat(1, 1, 1, R)  # [B or 1, 1, 1, R * n]
            sums[..., : S + stop] += (w @ p)[:, :, 0]
    return sums[..., S:], sums[..., :S]
