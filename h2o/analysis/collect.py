"""Run one forward pass of a model, and measure the queries, keys and scores of each layer.

Memory grows by one number per key or query. Column sums come from `h2o.ops.attend`, which builds no
attention matrix. Measurements that need single entries work on blocks of rows.

Shape letters: H query heads, G key/value heads (H = G * R), n tokens, D head dimension.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from h2o import ops
from h2o.attention_blocks import logit_blocks
from h2o.errors import UnsupportedError
from h2o.hf.attention.attention_call import AttentionCall
from h2o.hf.attention.attention_hook import replace_attention
from h2o.hf.model_traits.layer_kinds import kind_of
from h2o.hf.model_traits.wrappers import forward_accepts, input_device, unwrap
from h2o.hf.rotary.length_dependent_rope import LengthDependentRope
from h2o.hf.support import transformers_layers
from h2o.model_identity import config_of, latent_row


@dataclasses.dataclass(frozen=True)
class Attention:
    """The inputs of one layer's attention for one text."""

    query: Tensor
    """[H, n, D]"""
    keys: Tensor
    """[G, n, D]"""
    values: Tensor
    """[G, n, D]"""
    scale: float | None
    """Factor of q.k, or None for 1 / sqrt(D)"""
    softcap: float
    sink_logits: Tensor | None = None
    """[H] float32, see `h2o.ops.attend`"""

    @classmethod
    def of(cls, call: AttentionCall) -> Attention:
        """The attention of a call with one row."""
        tensors = call.query[0], call.key[0], call.value[0]
        return cls(*tensors, call.scale, call.softcap, call.sink_logits)

    def first(self, tokens: int) -> Attention:
        """The attention among the first tokens of the text."""
        parts = {x: getattr(self, x)[:, :tokens] for x in ("query", "keys", "values")}
        return dataclasses.replace(self, **parts)


def analyzable_layers(model: Any) -> list[int]:
    """The layers with full attention, at least one.

    Raises:
        UnsupportedError: h2o does not support the model, or its heads have no keys of their own.
        ValueError: there is no such layer.
        TypeError: the model has no head that predicts tokens.
        RuntimeError: the model is in training mode.
    """
    if latent_row(config_of(model)) is not None:
        raise UnsupportedError(
            f"analysis and calibration do not support {model.config.model_type}: all heads of a "
            "layer share its latents (multi-head latent attention)"
        )
    input_device(model)  # raises for a model without weights
    if model.get_output_embeddings() is None:
        raise TypeError(
            f"analysis and calibration need predictions, and a {type(unwrap(model)).__name__} has "
            "none: load the model with h2o.load_model(name) or AutoModelForCausalLM"
        )
    if model.training:
        raise RuntimeError("analysis and calibration are for inference: call model.eval()")
    full = [i for i, x in enumerate(transformers_layers(model.config)) if kind_of(x) == "h2o"]
    if not full:
        raise ValueError(
            "every layer has a sliding window: there is nothing for h2o to analyze or calibrate"
        )
    return full


def watch(
    model: Any, ids: Tensor, visit: Callable[[int, Attention], Tensor], *, logits: bool = False
) -> Tensor:
    """Do what `forward` does, with `visit(layer, attention)` computing the output [n, H, D] of the
    full layers' attention."""

    def attention(call: AttentionCall) -> Tensor:
        return visit(call.layer, Attention.of(call))[None]

    with replace_attention(model, analyzable_layers(model), attention):
        return forward(model, ids, logits=logits)


def forward(model: Any, ids: Tensor, *, logits: bool = False) -> Tensor:
    """Run a model on a text [n] without padding.

    Returns:
        the logits [n, vocabulary]. Unless `logits` is true, they may be those of the last token
        only, because all logits may need more memory than everything else.
    """
    arguments = {}
    if not logits and forward_accepts(model, "logits_to_keep"):
        arguments["logits_to_keep"] = 1
    LengthDependentRope(model).forget()
    with torch.no_grad():
        out = model(ids[None].to(input_device(model)), use_cache=False, **arguments)
    return out.logits[0]


def attend(seen: Attention) -> tuple[Tensor, Tensor]:
    """Compute the model's causal attention, and the score of every key for each query head.

    The kernel adds up the scores of a group, so keys and values are repeated for each query head.

    Returns:
        (output [n, H, D], scores [H, n] float32)
    """
    R = len(seen.query) // len(seen.keys)
    keys, values = (x.repeat_interleave(R, dim=0)[None] for x in (seen.keys, seen.values))
    logits = {"scale": seen.scale, "softcap": seen.softcap, "sink_logits": seen.sink_logits}
    out, scores = ops.attend(seen.query[None], keys, values, **logits)
    return out[0], scores[0]


def sparsity(seen: Attention, threshold: float) -> Tensor:
    """Share of the causal attention entries below `threshold` times their row's maximum.

    Returns:
        [H] float64. Entry (i, j), j <= i, counts where p(i, j) < threshold * max of p(i, .);
        a text of n tokens has n (n + 1) / 2 entries.
    """
    H, n, _ = seen.query.shape
    below = torch.zeros(H, dtype=torch.float64, device=seen.query.device)
    for _, logits in logit_blocks(seen.query, seen.keys, seen.scale, seen.softcap):
        rows = logits.shape[1]
        # A ratio of probabilities is a difference of logits: no exponential is needed.
        least = logits.amax(-1, keepdim=True) + math.log(threshold)
        future = rows * (rows - 1) // 2  # entries above the diagonal, which are -inf
        below += (logits < least).sum((-1, -2)) - future
    return below / (n * (n + 1) / 2)
