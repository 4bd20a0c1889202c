"""Multi-head latent attention: a layer stores latents instead of keys.

Each token is one row of L + P elements for all heads: its latent and its rotated key. Its score is
the attention that it received from all query heads. During the prompt, attention uses the keys and
values that transformers expanded. Stored latents are never expanded. Later queries are projected to
the latent space instead (`h2o.hf.model_traits.latent_attention`).

Shape letters as in `h2o.hf`, and D of expanded keys, L elements of a latent, P of a rotated key, V
of a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o import ops
from h2o.errors import UnsupportedError
from h2o.hf.attention.attention_call import AttentionCall, NewTokens, attention, step
from h2o.hf.layers.plain_variant import PlainVariant
from h2o.hf.model_traits import tensor_parallel
from h2o.hf.model_traits.latent_attention import Expansion
from h2o.hf.model_traits.tagged_tensor import TaggedTensor, plain

MANY = 32
"""Number of query heads from which on `attend` (a matrix product) and `evict` outrun `step`."""


class LatentVariant(PlainVariant):
    """Stores the latent and the rotated key of each token in one row."""

    has_values = False

    def __init__(self, latent: int) -> None:
        self.latent = latent
        self._mesh: Any = None
        self._has_run = False
        """Whether the layer has attended, so that later steps need not check the model's weights"""
        self.forget()

    def join(self, layer: Any, keys: Tensor, values: Tensor) -> Tensor:
        """Join latents [B, 1, Q, L] and rotated keys [B, 1, Q, P] to rows [B, 1, Q, L + P]."""
        if keys.shape[:-1] != values.shape[:-1] or keys.shape[-1] != self.latent:
            raise UnsupportedError(
                f"layer {layer.layer_idx} has latents of shape {tuple(keys.shape)} and rotated "
                f"keys of shape {tuple(values.shape)}. The model's config implies latents of "
                f"{self.latent} elements that all heads share"
            )
        rows = torch.cat([keys, values.to(keys.dtype)], dim=-1).detach()
        self._rows = rows
        return rows

    def carry(self, layer: Any, keys: Tensor) -> Tensor:
        """Latents that the model expands before it attends."""
        return TaggedTensor.of(keys, h2o_layer=layer)

    def convert(self, layer: Any, tokens: NewTokens, call: AttentionCall) -> NewTokens:
        """The new rows, and queries in the latent space, of tokens with expanded keys and values.

        The queries of a prompt stay as they are, unless passes are recorded."""
        query, key, value = tokens.query, tokens.key, tokens.value
        self._mesh = tensor_parallel.mesh_of(call.module)
        if self._mesh is not None and layer.config.kv_dtype is not None:
            raise UnsupportedError(
                "h2o does not quantize the latents of a model that is split over processes. Leave "
                "out kv_dtype"
            )
        if self._rows.shape[2] != query.shape[2]:
            raise RuntimeError(
                f"attention of layer {layer.layer_idx} got other keys than its H2OCache. An "
                "H2OCache does not support repeated forward passes: switch gradient checkpointing "
                "off"
            )
        rows = self._rows.to(query.dtype)
        is_prompt = layer.slots is None
        # A cache from a file or a DynamicCache has slots before its first pass.
        is_first = is_prompt or not self._has_run
        expansion = Expansion.of(call.module, query, value, rows, self.latent, fresh=is_first)
        self._expansion, self._has_run = expansion, True
        if is_prompt:
            self._expanded = query, plain(key), plain(value)
        if not is_prompt or layer.record_past:  # `crop` may repeat the prompt, over its rows
            query = expansion.queries(query)
        return tokens._replace(query=query, key=rows, value=None)

    def attention(
        self, layer: Any, tokens: NewTokens, slots: ops.Slots | None
    ) -> tuple[Tensor, Tensor]:
        """Output [B, Q, H, V], and the attention [B, 1, Q] that the new rows received."""
        held = [] if slots is None else [slots.scores]
        if self._mesh is not None and self._mesh.get_local_rank() > 0:
            for x in held:  # already summed over all heads; counted once, by the first process
                x.zero_()
        if self._expanded is not None:
            out, scores = _expanded_attention(layer, *self._expanded, tokens)
        else:
            out, scores = attention(tokens, slots, layer.policy)
            out = self._expand_output(out)
        if self._mesh is not None:
            for x in (*held, scores):
                tensor_parallel.reduce_over_heads(x, self._mesh, layer.policy.scores_largest)
        return out, scores

    def step(self, layer: Any, tokens: NewTokens, slots: ops.Slots) -> Tensor:
        """Store one token and return its output [B, 1, H, V]."""
        # A quantized row must be attended to as it is stored, which only a step does.
        many = tokens.query.shape[1] >= MANY and layer.config.kv_dtype is None
        if many or self._mesh is not None:
            return layer.attend_and_evict(tokens, slots)
        return self._expand_output(step(tokens, slots, layer.policy))

    def _expand_output(self, out: Tensor) -> Tensor:
        """Convert output over rows to output over values, except when `crop` repeats a pass."""
        return out if self._expansion is None else self._expansion.expand_output(out)

    def end_call(self) -> None:
        self._rows: Tensor | None = None
        self._expansion: Expansion | None = None
        self._expanded: tuple[Tensor, Tensor, Tensor] | None = None
        """Queries [B, H, Q, D], keys [B, H, Q, D] and values [B, H, Q, V] of a prompt"""

    forget = end_call

    def unpack_rows(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [B, 1, K, L] and rotated keys [B, 1, K, P]."""
        return keys[..., : self.latent], keys[..., self.latent :]


def _expanded_attention(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, tokens: NewTokens
) -> tuple[Tensor, Tensor]:
    """Attend to a prompt as the model has expanded it. Scores are combined over all heads."""
    V = value.shape[-1]
    if V < key.shape[-1]:  # the operations need the same head dimension for keys and values
        value = torch.nn.functional.pad(value, (0, key.shape[-1] - V))
    out, scores = ops.attend(query, key, value, policy=layer.policy, **tokens.options)
    over_heads = scores.amax if layer.policy.scores_largest else scores.sum
    return out[..., :V], over_heads(dim=1, keepdim=True)
