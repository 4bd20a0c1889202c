"""Multi-head latent attention: a layer holds latents instead of keys.

A token is one row of L + P elements for all heads, its latent and its rotated key; its score is the
attention that it got from all query heads. The prompt is attended to as transformers has expanded
it. What is held never is: later queries are brought to the latents
(`h2o.hf.families.latent_attention`).

Shape letters: B batch rows, H query heads, Q new tokens, D head dimension of expanded keys, L
elements of a latent, P of a rotated key, V of a value, K rows held.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o import ops
from h2o.errors import UnsupportedError
from h2o.hf.attention.attention_call import AttentionCall, NewTokens
from h2o.hf.families import tensor_parallel
from h2o.hf.families.latent_attention import Expansion
from h2o.hf.families.tagged_tensor import TaggedTensor, plain
from h2o.hf.layers.plain_form import PlainForm

MANY = 32
"""Query heads from which on `attend`, a product of matrices, and `evict` are faster than `step`."""


class _Pass(NamedTuple):
    """State of the forward pass that is under way, beside its tokens."""

    expansion: Expansion
    expanded: tuple[Tensor, Tensor, Tensor] | None
    """Queries [B, H, Q, D], keys [B, H, Q, D] and values [B, H, Q, V] of a prompt"""


class LatentForm(PlainForm):
    """Holds a latent and a rotated key of each token in one row."""

    has_values = False

    def __init__(self, latent: int) -> None:
        self.latent = latent
        self._mesh: Any = None
        self.forget()

    def rows(self, layer: Any, keys: Tensor, values: Tensor | None) -> tuple[Tensor, None]:
        """One row [B, 1, Q, L + P] of a latent [B, 1, Q, L] and a rotated key [B, 1, Q, P]; those
        that come without values are rows already."""
        if values is None:
            return keys, None
        if keys.shape[:-1] != values.shape[:-1] or keys.shape[-1] != self.latent:
            raise UnsupportedError(
                f"layer {layer.layer_idx} has latents of shape {tuple(keys.shape)} and rotated "
                f"keys of {tuple(values.shape)}: its model's config tells of {self.latent} "
                "elements of a latent, the same for all heads"
            )
        return torch.cat([keys, values.to(keys.dtype)], dim=-1), None

    def hand_over(self, layer: Any, keys: Tensor, rows: Tensor) -> Tensor:
        """The new latents, which the model expands before it attends."""
        self._rows = rows.detach()
        return TaggedTensor.of(keys, h2o_layer=layer)

    def tokens(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> NewTokens:
        """The new rows, and queries brought to latents but for a prompt's; keys and values come
        expanded."""
        self._mesh = tensor_parallel.mesh_of(call.module)
        if self._mesh is not None and layer.config.kv_dtype is not None:
            raise UnsupportedError(
                "h2o does not quantize latents of a model that is cut over processes: leave "
                "kv_dtype out"
            )
        if self._rows is None or self._rows.shape[2] != query.shape[2]:
            raise RuntimeError(
                f"attention of layer {layer.layer_idx} got other keys than its H2OCache: an "
                "H2OCache cannot be used where forward passes are repeated (gradient checkpointing)"
            )
        scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
        rows = self._rows.to(query.dtype)
        is_prompt = layer.slots is None
        expansion = Expansion.of(call.module, query, value, rows, self.latent, fresh=is_prompt)
        self._pass = _Pass(expansion, (query, plain(key), plain(value)) if is_prompt else None)
        if not is_prompt or layer.record_past:  # which may read the prompt once more
            query = expansion.queries(query)
        tokens = super().tokens(layer, query, rows, rows, call)
        return tokens._replace(value=None, scale=scale)

    def attention(
        self, layer: Any, tokens: NewTokens, slots: ops.Slots | None
    ) -> tuple[Tensor, Tensor]:
        """Output [B, Q, H, V], and the attention [B, 1, Q] of all heads."""
        held = [] if slots is None else [slots.scores]
        if self._mesh is not None and self._mesh.get_local_rank() > 0:
            for x in held:  # of all heads already: the first process adds to them
                x.zero_()
        if self._pass is not None and self._pass.expanded is not None:
            out, scores = _expanded_attention(layer, *self._pass.expanded, tokens)
        else:
            out, scores = super().attention(layer, tokens, slots)
            out = self._answers(out)
        if self._mesh is not None:
            for x in (*held, scores):
                tensor_parallel.over_all_heads(x, self._mesh, layer.policy.scores_largest)
        return out, scores

    def step(
        self, layer: Any, tokens: NewTokens, slots: ops.Slots, out: Tensor | None, **rotary: Any
    ) -> Tensor:
        """Output [B, 1, H, V] of one token, which is stored."""
        # A quantized store's new rows are read as they are stored, which only a step does.
        many = tokens.query.shape[1] >= MANY and layer.config.kv_dtype is None
        if many or self._mesh is not None:
            attended: Tensor = layer.attend_and_evict(tokens, slots)
            return attended
        return self._answers(super().step(layer, tokens, slots, None, **rotary))

    def _answers(self, out: Tensor) -> Tensor:
        """Output of the model's size; of a pass that `crop` runs again it is not read."""
        return out if self._pass is None else self._pass.expansion.answers(out)

    def end_call(self) -> None:
        self._pass: _Pass | None = None
        self._rows: Tensor | None = None

    forget = end_call

    def read(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [B, 1, K, L] and rotated keys [B, 1, K, P]."""
        return keys[..., : self.latent], keys[..., self.latent :]


def _expanded_attention(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, tokens: NewTokens
) -> tuple[Tensor, Tensor]:
    """Attention to a prompt as the model has expanded it; scores are those of all heads."""
    V = value.shape[-1]
    if V < key.shape[-1]:  # the operations know one head dimension
        value = torch.nn.functional.pad(value, (0, key.shape[-1] - V))
    out, scores = ops.attend(query, key, value, policy=layer.policy, **tokens.options)
    over_heads = scores.amax if layer.policy.scores_largest else scores.sum
    return out[..., :V], over_heads(dim=1, keepdim=True)
