"""A layer of an `H2OCache` with multi-head latent attention: it holds latents instead of keys.

A token is one row of L + P elements for all heads, its latent and its rotated key; its score is the
attention that it got from all query heads. The prompt is attended to as transformers has expanded
it. What is held never is: later queries are brought to the latents
(`h2o.hf.families.latent_attention`).

Shape letters: B batch rows, H query heads, Q new tokens, n columns of another cache, D head
dimension of expanded keys, L elements of a latent, P of a rotated key, V of a value, K rows held.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o import ops
from h2o.errors import UnsupportedError
from h2o.hf.call.attention_call import AttentionCall, NewTokens
from h2o.hf.call.traced_tensor import TracedTensor, plain
from h2o.hf.families import tensor_parallel
from h2o.hf.families.latent_attention import Expansion
from h2o.hf.layers.layer import H2OLayer

__all__ = ["LatentLayer"]

MANY = 32
"""Query heads from which on `attend`, a product of matrices, and `evict` are faster than `step`."""


class _Pass(NamedTuple):
    """What the forward pass that is under way needs beside its tokens."""

    expansion: Expansion
    expanded: tuple[Tensor, Tensor, Tensor] | None
    """Queries [B, H, Q, D], keys [B, H, Q, D] and values [B, H, Q, V] of a prompt"""


class LatentLayer(H2OLayer):
    """An `H2OLayer` of latents of `latent` elements each."""

    shared = True

    def __init__(self, *args: Any, latent: int, **kwargs: Any) -> None:
        self.latent = latent
        super().__init__(*args, **kwargs)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new latents [B, 1, Q, L] and rotated keys [B, 1, Q, P]; see `H2OLayer.update`."""
        rows = self._joined(key_states, value_states)
        super().update(rows, rows)
        self._rows = rows.detach()
        return TracedTensor.of(key_states, h2o_layer=self), value_states

    def attend(self, call: AttentionCall) -> Tensor:
        """As `H2OLayer.attend`, given the new tokens' expanded keys and values; [B, Q, H, V]."""
        try:
            return super().attend(call)
        finally:
            self._pass = self._rows = None

    def take_over(self, keys: Tensor, values: Tensor | None, mask: Tensor | None) -> None:
        """Holds latents [B, 1, n, L] and rotated keys [B, 1, n, P] of another cache."""
        super().take_over(keys if values is None else self._joined(keys, values), None, mask)

    def held(self) -> tuple[Tensor, Tensor]:
        """Latents [B, 1, K, L] and rotated keys [B, 1, K, P] in the order of `kept`."""
        rows, _ = super().held()
        return rows[..., : self.latent], rows[..., self.latent :]

    def by_slot(self) -> tuple[Tensor, Tensor]:
        """Latents [B, 1, S, L] and rotated keys [B, 1, S, P]."""
        rows, _ = super().by_slot()
        return rows[..., : self.latent], rows[..., self.latent :]

    def reset(self) -> None:
        """Empties the layer and frees its memory."""
        super().reset()
        self._pass: _Pass | None = None
        self._rows: Tensor | None = None
        self._mesh: Any = None

    def _joined(self, latents: Tensor, rotated: Tensor) -> Tensor:
        if latents.shape[:-1] != rotated.shape[:-1] or latents.shape[-1] != self.latent:
            raise UnsupportedError(
                f"layer {self.layer_idx} has latents of shape {tuple(latents.shape)} and rotated "
                f"keys of {tuple(rotated.shape)}: its model's config tells of {self.latent} "
                "elements of a latent, the same for all heads"
            )
        return torch.cat([latents, rotated.to(latents.dtype)], dim=-1)

    def _in_form_of_store(
        self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> NewTokens:
        self._mesh = tensor_parallel.mesh_of(call.module)
        if self._mesh is not None and self.config.kv_dtype is not None:
            raise UnsupportedError(
                "h2o does not quantise latents of a model that is cut over processes: leave "
                "kv_dtype out"
            )
        if self._rows is None or self._rows.shape[2] != query.shape[2]:
            raise RuntimeError(
                f"attention of layer {self.layer_idx} got other keys than its H2OCache: an "
                "H2OCache cannot be used where forward passes are repeated (gradient checkpointing)"
            )
        scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
        rows = self._rows.to(query.dtype)
        is_prompt = self.slots is None
        expansion = Expansion.of(call.module, query, value, rows, self.latent, fresh=is_prompt)
        self._pass = _Pass(expansion, (query, plain(key), plain(value)) if is_prompt else None)
        if not is_prompt or self.record_past:  # which may read the prompt once more
            query = expansion.queries(query)
        tokens = super()._in_form_of_store(query, rows, rows, call)
        return tokens._replace(value=None, scale=scale)

    def _attention(self, tokens: NewTokens, slots: ops.Slots | None) -> tuple[Tensor, Tensor]:
        held = [] if slots is None else [slots.scores]
        if self._mesh is not None and self._mesh.get_local_rank() > 0:
            for x in held:  # of all heads already: the first process adds to them
                x.zero_()
        if self._pass is not None and self._pass.expanded is not None:
            out, scores = self._expanded_attention(*self._pass.expanded, tokens)
        else:
            out, scores = super()._attention(tokens, slots)
            out = self._answers(out)
        if self._mesh is not None:
            for x in (*held, scores):
                tensor_parallel.over_all_heads(x, self._mesh, self.policy.scores_largest)
        return out, scores

    def _expanded_attention(
        self, query: Tensor, key: Tensor, value: Tensor, tokens: NewTokens
    ) -> tuple[Tensor, Tensor]:
        V = value.shape[-1]
        if V < key.shape[-1]:  # the operations know one head dimension
            value = torch.nn.functional.pad(value, (0, key.shape[-1] - V))
        out, scores = ops.attend(
            query, key, value,
            mask=tokens.mask, scale=tokens.scale, softcap=tokens.softcap,
            sink_logits=tokens.sink_logits, policy=self.policy,
        )  # fmt: skip
        over_heads = scores.amax if self.policy.scores_largest else scores.sum
        return out[..., :V], over_heads(dim=1, keepdim=True)

    def _step(
        self, tokens: NewTokens, slots: ops.Slots, out: Tensor | None, **rotary: ops.Rotary
    ) -> Tensor:
        # A quantised store's new rows are read as they are stored, which only a step does.
        many = tokens.query.shape[1] >= MANY and self.config.kv_dtype is None
        if many or self._mesh is not None:
            return self._attend_and_evict(tokens, slots)
        return self._answers(super()._step(tokens, slots, None, **rotary))

    def _answers(self, out: Tensor) -> Tensor:
        """Of a pass that `crop` runs again they are not read."""
        return out if self._pass is None else self._pass.expansion.answers(out)
