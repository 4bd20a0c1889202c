"""Estimates what evicting keys in each head costs, from one forward and one backward pass.

The cost is the Kullback-Leibler divergence of the evicting model's predictions from those of the
full model, to second order in the change of a head's attention output. This is the quadratic form
of the Fisher information (Martens, "New Insights and Perspectives on the Natural Gradient Method",
JMLR 2020, section 5). It needs gradients of the log-likelihood of tokens that are drawn from the
model's own predictions, not of the text's tokens. It is evaluated for each token and head
separately, as if nothing else were evicted.

Shape letters: H query heads, G key/value heads (H = G * R), n tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from h2o import ops
from h2o.analysis.collect import Attention, analyzable_layers
from h2o.budgets import split_heavy_recent
from h2o.config import H2OConfig
from h2o.hf.attention.attention_call import AttentionCall
from h2o.hf.attention.attention_hook import replace_attention
from h2o.hf.model_traits.wrappers import input_device

SINKS, HEAVY = 4, 0.75

POLICY = H2OConfig.robust(1.0).policy
"""The policy by which heads evict"""


def heavy_and_recent(budget: int) -> tuple[int, int]:
    """The parts of a head's budget besides the sinks, as in `H2OConfig.robust`."""
    return split_heavy_recent(budget - SINKS, HEAVY)


def watch_gradients(
    model: Any, ids: Tensor, generator: torch.Generator, draws: int
) -> dict[int, tuple[Attention, list[Tensor]]]:
    """Run a model on a text [n] without eviction, and record each full layer.

    Returns:
        by layer (attention, gradients with respect to its output). There is one gradient [n, H, D]
        float32 for each drawn continuation, of the log-likelihood of the continuation.
    """
    layers: dict[int, tuple[Attention, list[Tensor]]] = {}
    outputs: list[Tensor] = []

    def attention(call: AttentionCall) -> Tensor:
        out = call.full()
        if not out.requires_grad:  # the first layer, if its parameters are frozen
            out.requires_grad_()
        outputs.append(out)
        layers[call.layer] = Attention.of(call), []
        return out

    with replace_attention(model, analyzable_layers(model), attention), torch.enable_grad():
        logits = model(ids[None].to(input_device(model)), use_cache=False).logits
        for draw in range(draws):
            direction = _likelihood_gradient(logits[0].detach(), generator)
            gradients = torch.autograd.grad(
                logits, outputs, direction[None], retain_graph=draw + 1 < draws
            )
            for (_, of_layer), gradient in zip(layers.values(), gradients, strict=True):
                of_layer.append(gradient[0].float())
    return layers


def measure_costs(seen: Attention, gradients: list[Tensor], budgets: Sequence[int]) -> Tensor:
    """Cost of evicting in each key/value head alone at each budget, in nats per token.

    Args:
        seen, gradients: a result of `watch_gradients`.
        budgets: numbers of tokens that a head may hold.

    Returns:
        float64 [G, budgets]: mean over the draws of sum_t (g_t . do_t)^2 / 2n, where do_t is the
        change of the output of the head's queries at token t with eviction from the first token on.
    """
    G, n, _ = seen.keys.shape
    amounts = [heavy_and_recent(min(budget, n)) for budget in budgets]
    out, _ = attend_with_budgets(seen, [*amounts, (n, 0)])
    change = (out[:-1] - out[-1]).reshape(len(budgets), n, G, -1)
    total = torch.zeros(len(budgets), G, dtype=torch.float64, device=out.device)
    for gradient in gradients:
        by_token = (change * gradient.reshape(n, G, -1)).sum(-1)
        total += by_token.double().square().sum(1)
    return (total.T / (2 * n * len(gradients))).cpu()


@torch.no_grad()
def attend_with_budgets(seen: Attention, amounts: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Attend with eviction from the first token on, once for each entry of `amounts`: (heavy,
    recent) of all heads or of each key/value head. This is done in float32, since costs are
    computed from differences between outputs.

    Returns:
        (outputs [budgets, n, H, D], evicted_at [budgets, G, n]) as of `h2o.ops.simulate`.
    """
    rows, device = len(amounts), seen.query.device
    tensors = seen.query, seen.keys, seen.values
    out, evicted_at, _ = ops.simulate(
        *(x.detach().float().expand(rows, *x.shape) for x in tensors),
        torch.ones(rows, dtype=torch.int32, device=device),
        torch.tensor(amounts, dtype=torch.int32, device=device),
        scale=seen.scale, softcap=seen.softcap, sink_logits=seen.sink_logits, policy=POLICY,
    )  # fmt: skip
    return out, evicted_at


ROWS = 128  # rows of logits in memory at one time


def _likelihood_gradient(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Gradient, with respect to logits [n, vocabulary], of the log-likelihood of drawn tokens."""
    gradient = torch.empty_like(logits)
    for first in range(0, len(logits), ROWS):
        rows = logits[first : first + ROWS].float().softmax(-1)
        total = rows.cumsum(-1)
        point = torch.rand(len(rows), 1, generator=generator, dtype=torch.float32, device="cpu")
        point = point.to(rows.device) * total[:, -1:]
        drawn = torch.searchsorted(total, point).clamp_(max=rows.shape[1] - 1)
        rows.neg_().scatter_add_(1, drawn, torch.ones_like(point))
        gradient[first : first + ROWS] = rows
    return gradient
