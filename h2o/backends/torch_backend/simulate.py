"""`h2o.ops.simulate` in plain torch: the outputs of a whole text, with eviction after every token.
Prompts are processed at once and cut to their budgets. The other padded columns follow one by one.

Shape letters as in `h2o.ops`: B rows, Q padded columns of the text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h2o.backends.torch_backend.attend import apply_softcap, dense, rows_per_block
from h2o.backends.torch_backend.ranking import Budget, highest, lowest, rank_keys, split_budget
from h2o.backends.torch_backend.slot_view import row_norms
from h2o.policy import Policy
from h2o.quantization import dequantize, from_stored
from h2o.sink_logits import softmax


def simulate(
    query: Tensor,
    keys: Tensor,
    values: Tensor | None,
    mask: Tensor | None,
    prompt: Tensor,
    budget: Tensor,
    out: Tensor,
    evicted_at: Tensor,
    scores: Tensor,
    scale: float,
    softcap: float,
    policy: Policy,
    stored_keys: Tensor | None,
    stored_values: Tensor | None,
    offsets: Tensor | None,
    smoothing: Tensor | None,
    sink_logits: Tensor | None,
) -> None:
    """See `h2o.ops.simulate`. Prompts are processed at once. The columns after them follow one by
    one, for all rows and heads together, because each depends on what the column before it evicted.

    Since nothing may wait for the device, the host does not know where a prompt ends. The loop
    therefore goes over all columns, and columns inside a row's prompt change nothing in the row.
    """
    B, _, Q, D = query.shape
    G = keys.shape[1]
    if values is None:
        values, stored_values = keys, stored_keys
    real = torch.ones(B, Q, dtype=torch.bool, device=query.device) if mask is None else mask.bool()
    count = real.cumsum(1)
    position = (count - 1).masked_fill(~real, -1)  # [B, Q]
    first = torch.minimum(prompt, count[:, -1])[:, None]  # [B, 1] tokens processed at once
    early = real & (position < first)
    weights = early * policy.decay ** (first - 1 - position).clamp(min=0).float()
    largest = policy.scores_largest
    received, _ = dense(
        query, keys, values, real, None, weights, scale, softcap, sink_logits, largest, out
    )
    scores.copy_(received)
    evicted_at.copy_((real * Q)[:, None].expand(B, G, Q))

    norms = row_norms(values) if policy.value_weighted else None
    limits = split_budget(budget, policy.sinks)
    positions = position[:, None].expand(B, G, Q).int()
    in_prompt = positions.masked_fill(~early[:, None], -1)
    ranks = rank_keys(policy, scores, in_prompt, norms, first[..., None], limits)
    is_kept = highest(ranks, in_prompt, limits.k)
    evicted = (in_prompt >= 0) & ~is_kept
    end = (early * torch.arange(1, Q + 1, device=query.device)).amax(1)[:, None, None]
    evicted_at.copy_(torch.where(evicted, end, evicted_at))
    later = real & ~early
    if stored_keys is not None and stored_values is not None:
        index = position.clamp(min=0)[:, None, :, None].expand(B, G, Q, D)
        each = [None if x is None else x[:, :, None] for x in (offsets, smoothing)]
        rows = from_stored(dequantize(stored_keys, D), dequantize(stored_values, D), *each)
        keys, values = (x.gather(2, index) for x in rows)
    _one_by_one(
        query, keys, values, later, positions, is_kept, norms, limits, out, evicted_at, scores,
        scale, softcap, policy, sink_logits,
    )  # fmt: skip


def _one_by_one(
    query: Tensor, keys: Tensor, values: Tensor, later: Tensor, positions: Tensor, held: Tensor,
    norms: Tensor | None, limits: Budget, out: Tensor, evicted_at: Tensor, scores: Tensor,
    scale: float, softcap: float, policy: Policy, sink_logits: Tensor | None,
) -> None:  # fmt: skip
    """Process the columns after the prompts as decode steps. Logits and outputs are computed for
    blocks of columns.

    Args:
        later: [B, Q] bool, columns after the prompt of their row.
        positions: [B, G, Q] int32.
        held: [B, G, Q] bool, the keys that are kept of the prompt. Updated.
        out, evicted_at, scores: results. Only what later columns change is written.
    """
    _, H, Q, _ = query.shape
    G = keys.shape[1]
    R = H // G
    rows = rows_per_block(query, Q)
    sinks = None if sink_logits is None else sink_logits.view(1, G, R, 1)
    query = query.unflatten(1, (G, R))
    keys, values = keys.float(), values.float()
    unpadded = values.masked_fill((positions < 0)[..., None], 0)
    values = unpadded.masked_fill(~unpadded.isfinite(), 0)
    for start in range(0, Q, rows):
        stop = min(start + rows, Q)
        scaled = (query[:, :, :, start:stop].float() * scale).flatten(2, 3)
        logits = apply_softcap(scaled @ keys[:, :, :stop].mT, softcap)
        logits = logits.unflatten(2, (R, stop - start)).unbind(3)
        block = []
        near = held[..., :stop]
        score = scores[..., :stop]
        for i in range(start, stop):
            now = later[:, i, None, None]  # [B, 1, 1]
            near[..., i : i + 1] |= now
            unseen = ~(near & now)[:, :, None]
            p = softmax(logits[i - start].masked_fill(unseen, -torch.inf), sinks)
            block.append(p.masked_fill_(unseen, 0))
            if policy.decay != 1.0:
                score.copy_(torch.where(near & now, score * policy.decay, score))
            if policy.scores_largest:
                score.copy_(torch.maximum(score, p.amax(2)))
            else:
                score += p.sum(2)
            alive = positions[..., :stop].masked_fill(~near, -1)
            length = positions[:, :1, i : i + 1] + 1
            norm = None if norms is None else norms[..., :stop]
            order = rank_keys(policy, score, alive, norm, length, limits)
            _, last = lowest(order, alive)
            evicts = now & (length > limits.k)
            near.scatter_(-1, last, near.gather(-1, last) & ~evicts)
            when = evicted_at.gather(-1, last)
            evicted_at.scatter_(-1, last, torch.where(evicts, i + 1, when))
        p = torch.stack(block, 3).flatten(2, 3)  # [B, G, R * n, stop]
        answer = (p @ values[:, :, :stop]).unflatten(2, (R, stop - start))
        answer = answer.permute(0, 3, 1, 2, 4).flatten(2, 3)
        part = out[:, start:stop]
        part.copy_(torch.where(later[:, start:stop, None, None], answer.to(out.dtype), part))
    beyond = _sum_nonfinite(unpadded, evicted_at).masked_fill(~later[:, None, :, None], 0)
    out.unflatten(2, (G, R)).add_(beyond.transpose(1, 2)[:, :, :, None])


def _sum_nonfinite(values: Tensor, evicted_at: Tensor) -> Tensor:
    """Sum [B, G, Q, D], float32, of the values that are not finite and that each query sees; 0 if
    there are none. A key is seen from its own column to the one that evicts it."""
    end = evicted_at.long()[..., None].expand(values.shape)
    total = torch.zeros_like(values)
    for infinity in (torch.inf, -torch.inf):  # NaN counts as both
        begins = ((values == infinity) | values.isnan()).float()
        change = torch.nn.functional.pad(begins, (0, 0, 0, 1)).scatter_add_(2, end, -begins)
        total += torch.where(change.cumsum(2)[:, :, :-1] > 0, infinity, 0.0)
    return total
