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

from h2o.analysis.collect import Attention, analyzable_layers, forward
from h2o.calibration.head_costs import ROWS, attend_with_budgets, heavy_and_recent
from h2o.config.layer_plan import expand_to_heads
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
        seen = Attention.of(call)
        of_layer = budgets[:, order[call.layer]].tolist()
        amounts = [[heavy_and_recent(budget) for budget in row] for row in of_layer]
        G, part = len(seen.keys), tensor_parallel.part(call.module)
        out, evicted_at = attend_with_budgets(seen, expand_to_heads(amounts, G, part))
        changes.append((out[2] - out[1]).reshape(len(ids), G, -1))
        attended = _attend(seen, evicted_at[0])
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


def _attend(seen: Attention, evicted_at: Tensor) -> Tensor:
    """The attention [1, n, H, D] of `ops.simulate`, with a gradient, but none for the choice of
    keys."""
    query, keys, values = seen.query, seen.keys, seen.values
    (H, n, D), G = query.shape, len(keys)
    row = torch.arange(n, device=query.device)
    mask = (row[:, None] < evicted_at[:, None]) & (row[:, None] >= row)
    if seen.softcap or seen.sink_logits is not None:
        batch = query[None], keys[None], values[None], mask[None]
        return softmax_attention(*batch, seen.scale, seen.softcap, seen.sink_logits)
    q = query.reshape(G, H // G, n, D)
    k, v = (x[:, None].expand(q.shape) for x in (keys, values))
    out = nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask[:, None], scale=seen.scale
    )
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
