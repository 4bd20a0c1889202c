"""Refinement of an allocation, with eviction in all heads at once.

What heads cost alone does not add up where much is evicted. Here the model runs as the caches
would let it, and what a head's budget does to the Kullback-Leibler divergence of the full model's
predictions from these is seen to first order: the gradient of the divergence by the head's output
times what the output would gain with more keys, and lose with fewer. A step moves keys to where
they do most.

Shape letters: H query heads, G key/value heads (H = G * R), n tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from h2o import ops
from h2o.analysis.collect import forward, full_layers
from h2o.calibration.head_costs import ROWS
from h2o.config import H2OConfig
from h2o.config.head_budgets import expand_to_heads
from h2o.hf.attention.attention import softmax_attention
from h2o.hf.attention.attention_call import AttentionCall
from h2o.hf.attention.attention_hook import attending
from h2o.hf.families import tensor_parallel
from h2o.hf.families.wrappers import input_device

RATIO = 1.5
"""The factor between a budget and the larger and the smaller one that it is compared with."""


def surround(budgets: np.ndarray, least: int, most: int) -> np.ndarray:
    """Surround budgets with larger and smaller ones: int [3, ...], as they are, more, and less."""
    three = np.stack([budgets, budgets * RATIO, budgets / RATIO])
    return np.clip(np.rint(three), least, most).astype(int)


def measure_worth(
    model: Any, ids: Tensor, budgets: np.ndarray, policy: Callable[[int], H2OConfig]
) -> tuple[np.ndarray, float]:
    """Measure what the keys between the smaller and the larger budget are worth to each head.

    Args:
        ids: [n], no pads.
        budgets: int [3, full layers, G], from `around`.
        policy: the cache's config for a budget.

    Returns:
        (float64 [full layers, G], of the heads that are here: by how much the divergence rises
        from the higher to the lower budget, nats per token, to first order; the divergence itself)
    """
    order = {layer: index for index, layer in enumerate(full_layers(model))}
    said = forward(model, ids, logits=True)
    outputs: list[Tensor] = []
    changes: list[Tensor] = []

    def attention(call: AttentionCall) -> Tensor:
        query, key, value = call.query, call.key, call.value
        device = query.device
        configs = [[policy(int(x)) for x in row] for row in budgets[:, order[call.layer]]]
        amounts = [[config.tokens(len(ids)) for config in row] for row in configs]
        part = tensor_parallel.part(call.module)
        by_head = expand_to_heads(amounts, key.shape[1], part)
        with torch.no_grad():
            q, k, v = (x.detach().float().expand(3, *x.shape[1:]) for x in (query, key, value))
            out, evicted_at, _ = ops.simulate(
                q, k, v,
                torch.ones(3, dtype=torch.int32, device=device),
                torch.tensor(by_head, dtype=torch.int32, device=device),
                scale=call.scale, softcap=call.softcap, sink_logits=call.sink_logits,
                policy=configs[0][0].policy,
            )  # fmt: skip
            changes.append((out[2] - out[1]).reshape(len(ids), k.shape[1], -1))
        logits = call.scale, call.softcap, call.sink_logits
        attended = _attend(query[0], key[0], value[0], evicted_at[0], *logits)
        if not attended.requires_grad:  # a first layer whose parameters are frozen
            attended.requires_grad_()
        outputs.append(attended)
        return attended

    with attending(model, order, attention), torch.enable_grad():
        logits = model(ids[None].to(input_device(model)), use_cache=False).logits
        rise, divergence = _divergence(said, logits[0].detach())
        gradients = torch.autograd.grad(logits, outputs, rise[None])
    n = len(ids)
    rows = [
        (change * gradient[0].float().reshape(change.shape)).double().sum((0, 2)) / n
        for change, gradient in zip(changes, gradients, strict=True)
    ]
    return torch.stack(rows).cpu().numpy(), divergence / n


def move_budgets(budgets: np.ndarray, between: np.ndarray, worths: np.ndarray) -> np.ndarray:
    """Budgets after a step: a head's times the root of its keys' worth over the mean of all.

    Args:
        budgets: [full layers, G].
        between: keys between the higher and the lower of the budgets compared.
        worths: of these keys.
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
    """Attention of `ops.simulate` with a gradient: [1, n, H, D] from [H, n, D] and twice [G, n, D].

    The choice of keys has no gradient.
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
    """(gradient by the logits [n, vocabulary], sum over tokens of KL(wanted || these))."""
    gradient = torch.empty_like(logits)
    total = 0.0
    for first in range(0, len(logits), ROWS):
        p = wanted[first : first + ROWS].float().log_softmax(-1)
        q = logits[first : first + ROWS].float().log_softmax(-1)
        total += (p.exp() * (p - q)).sum().item()
        gradient[first : first + ROWS] = q.exp() - p.exp()
    return gradient, total
