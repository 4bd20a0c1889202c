"""Refinement of an allocation, with eviction in all heads at once.

If much is evicted, the costs of single heads do not add up. Here the model runs with eviction in
all heads, and the effect of a head's budget on the Kullback-Leibler divergence from the full
model's predictions is estimated to first order: as the product of the gradient of the divergence
with respect to the head's output and the difference of the output between a larger and a smaller
budget. A step moves keys to the heads where they help most.

Shape letters: H query heads, G key/value heads (H = G * R), n tokens, D head dimension.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from h2o import ops
from h2o.analysis.collect import analyzable_layers, forward
from h2o.calibration.head_costs import POLICY, ROWS, heavy_and_recent
from h2o.config.head_budgets import expand_to_heads
from h2o.hf.attention.attention import softmax_attention
from h2o.hf.attention.attention_call import AttentionCall
from h2o.hf.attention.attention_hook import replace_attention
from h2o.hf.model_traits import tensor_parallel
from h2o.hf.model_traits.wrappers import input_device

RATIO = 1.5
"""The larger budget is this factor times a budget, the smaller one the budget divided by it."""


def surround(budgets: np.ndarray, least: int, most: int) -> np.ndarray:
    """Stack budgets with larger and smaller ones: int [3, ...], unchanged, larger, smaller."""
    three = np.stack([budgets, budgets * RATIO, budgets / RATIO])
    return np.clip(np.rint(three), least, most).astype(int)


def measure_worth(model: Any, ids: Tensor, budgets: np.ndarray) -> tuple[np.ndarray, float]:
    """Measure the worth to each head of the keys between its smaller and its larger budget.

    Args:
        ids: [n], without padding.
        budgets: int [3, full layers, G], from `surround`.

    Returns:
        (worth, divergence). worth is float64 [full layers, G of this process]: the increase of the
        divergence from the larger to the smaller budget, to first order. Both are in nats per
        token.
    """
    order = {layer: index for index, layer in enumerate(analyzable_layers(model))}
    full_logits = forward(model, ids, logits=True)
    outputs: list[Tensor] = []
    changes: list[Tensor] = []

    def attention(call: AttentionCall) -> Tensor:
        query, key, value = call.query, call.key, call.value
        device = query.device
        of_layer = budgets[:, order[call.layer]].tolist()
        amounts = [[heavy_and_recent(budget) for budget in row] for row in of_layer]
        part = tensor_parallel.part(call.module)
        by_head = expand_to_heads(amounts, key.shape[1], part)
        with torch.no_grad():
            q, k, v = (x.detach().float().expand(3, *x.shape[1:]) for x in (query, key, value))
            out, evicted_at, _ = ops.simulate(
                q, k, v,
                torch.ones(3, dtype=torch.int32, device=device),
                torch.tensor(by_head, dtype=torch.int32, device=device),
                scale=call.scale, softcap=call.softcap, sink_logits=call.sink_logits,
                policy=POLICY,
            )  # fmt: skip
            changes.append((out[2] - out[1]).reshape(len(ids), k.shape[1], -1))
        logits = call.scale, call.softcap, call.sink_logits
        attended = _attend(query[0], key[0], value[0], evicted_at[0], *logits)
        if not attended.requires_grad:  # the first layer, if its parameters are frozen
            attended.requires_grad_()
        outputs.append(attended)
        return attended

    with replace_attention(model, order, attention), torch.enable_grad():
        logits = model(ids[None].to(input_device(model)), use_cache=False).logits
        rise, divergence = _divergence(full_logits, logits[0].detach())
        gradients = torch.autograd.grad(logits, outputs, rise[None])
    n = len(ids)
    rows = [
        (change * gradient[0].float().reshape(change.shape)).double().sum((0, 2)) / n
        for change, gradient in zip(changes, gradients, strict=True)
    ]
    return torch.stack(rows).cpu().numpy(), divergence / n


def move_budgets(budgets: np.ndarray, between: np.ndarray, worths: np.ndarray) -> np.ndarray:
    """Budgets after a step: each is multiplied by the square root of its head's worth per key,
    relative to the mean of all heads. The factor is between 0.5 and 2.

    Args:
        budgets: [full layers, G].
        between: number of keys between the larger and the smaller budget.
        worths: worth of these keys, from `measure_worth`.
    """
    each = worths / np.maximum(between, 1)
    relative = each / max(each.mean(), 1e-12)
    return budgets * np.clip(np.sqrt(np.clip(relative, 0, None)), 0.5, 2)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    evicted_at: Tensor,
    scale: float | None,
    softcap: float,
    sink_logits: Tensor | None,
) -> Tensor:
    """The attention of `ops.simulate`, with a gradient, but none for the choice of keys.

    query is [H, n, D], keys and values are [G, n, D], and the result is [1, n, H, D].
    """
    H, n, D = query.shape
    G = len(keys)
    row = torch.arange(n, device=query.device)
    seen = (row[:, None] < evicted_at[:, None]) & (row[:, None] >= row)
    if softcap or sink_logits is not None:
        batch = query[None], keys[None], values[None], seen[None]
        return softmax_attention(*batch, scale, softcap, sink_logits)
    q = query.reshape(G, H // G, n, D)
    k, v = (x[:, None].expand(q.shape) for x in (keys, values))
    out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], scale=scale)
    return out.reshape(1, H, n, D).transpose(1, 2).contiguous()


def _divergence(wanted: Tensor, logits: Tensor) -> tuple[Tensor, float]:
    """Return (gradient with respect to logits [n, vocabulary], divergence), where the divergence is
    the sum over tokens of KL(wanted || logits)."""
    gradient = torch.empty_like(logits)
    total = 0.0
    for first in range(0, len(logits), ROWS):
        p = wanted[first : first + ROWS].float().log_softmax(-1)
        q = logits[first : first + ROWS].float().log_softmax(-1)
        total += (p.exp() * (p - q)).sum().item()
        gradient[first : first + ROWS] = q.exp() - p.exp()
    return gradient, total
