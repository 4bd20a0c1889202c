"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), and its absorbed form.

transformers caches one row for each token, a latent and a key that is rotated already, and expands
it to keys and values of every head (`expand_kv`, by the linear module `kv_b_proj`) before it calls
the attention function. The absorbed form multiplies queries and outputs by that matrix instead:
then all query heads attend to one head of keys, the rows, whose first elements are the values too.

This file computes the two forms. `h2o.hf.layers.latent_form` stores latents in a cache, and
`h2o.model_identity` (`latent_row`) recognizes models that have them by their config.

Shape letters: B batch rows, H query heads, Q new tokens, N keys, L elements of a latent, P of a
rotated key, C of the rest of a key before attention, V of a value; a row has L + P elements.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from h2o.errors import UnsupportedError
from h2o.hf.families import tensor_parallel
from h2o.hf.families.linear_matrix import made_of_matrix
from h2o.hf.families.tagged_tensor import TaggedTensor, plain


@contextmanager
def trace_latents(model: nn.Module) -> Iterator[None]:
    """Within the block keys that `expand_kv` makes have the attribute `latent` [B, 1, N, L]."""

    def trace(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return TaggedTensor.of(args[0], latent=plain(args[0])), *args[1:]

    hooks = [
        module.kv_b_proj.register_forward_pre_hook(trace)
        for module in model.modules()
        if hasattr(module, "expand_kv")
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Expansion(NamedTuple):
    """How an attention module makes keys and values of latents: `kv_b_proj` as two matrices."""

    keys: Tensor
    """[H, C, L]"""
    values: Tensor
    """[H, V, L]"""

    @classmethod
    def of(
        cls, module: nn.Module, query: Tensor, value: Tensor, row: Tensor, L: int,
        *, fresh: bool = False,
    ) -> Expansion:  # fmt: skip
        """Split `kv_b_proj` for queries [B, H, Q, C + P], values [.., V] and rows [.., L + P].

        `fresh`: do not use what is remembered of a plain module.

        Raises:
            UnsupportedError: a projection with a bias, or of another shape.
        """
        H, width = query.shape[1], query.shape[-1]
        C, V = width - (row.shape[-1] - L), value.shape[-1]
        if getattr(module.kv_b_proj, "bias", None) is not None:
            raise UnsupportedError("h2o attention does not support a kv_b_proj with a bias")

        def split(weight: Tensor, remembered: bool) -> Expansion:
            if weight.shape != (H * (C + V), L):
                raise UnsupportedError(
                    f"h2o attention ({type(module).__name__}) does not support a kv_b_proj of "
                    f"shape {list(weight.shape)}, wanted [{H * (C + V)}, {L}]"
                )
            keys, values = weight.view(H, C + V, L).split([C, V], dim=1)
            if remembered and weight.dtype == torch.bfloat16:  # as torch's products of few tokens
                keys, values = keys.contiguous(), values.mT.contiguous().mT  # read them fastest
            return cls(keys, values)

        return made_of_matrix(module.kv_b_proj, L, query, split, fresh=fresh)

    def queries(self, query: Tensor) -> Tensor:
        """Queries [B, H, Q, C + P] for rows: [B, H, Q, L + P]."""
        C, by_head = self.keys.shape[1], query.transpose(0, 1)  # [H, B, Q, C + P]
        absorbed = torch.bmm(by_head[..., :C].flatten(1, 2), self.keys).view(*by_head.shape[:3], -1)
        return torch.cat([absorbed, by_head[..., C:]], dim=-1).transpose(0, 1)

    def answers(self, out: Tensor) -> Tensor:
        """Answers [B, Q, H, L + P] over rows as those over values: [B, Q, H, V]."""
        latents = out[..., : self.values.shape[2]].to(self.values.dtype)
        by_head = torch.bmm(latents.permute(2, 0, 1, 3).flatten(1, 2), self.values.mT)
        return by_head.unflatten(1, latents.shape[:2]).permute(1, 2, 0, 3)


def over_latents(call: Any, latent: Tensor) -> tuple[Any, Expansion]:
    """A call of `h2o.hf.attention.attention_hook` whose keys are expanded, as one over the rows of
    the latents [B, 1, N, L] that they were made from.

    Raises:
        UnsupportedError: a model that is cut over processes.
    """
    if tensor_parallel.part(call.module) != tensor_parallel.WHOLE:
        raise UnsupportedError(
            "latent attention is not simulated where its heads are cut over processes: load the "
            "model whole, without tp_plan"
        )
    L, D = latent.shape[-1], call.query.shape[-1]
    rotated = plain(call.key)[:, :1, :, call.module.qk_nope_head_dim :]
    rows = torch.cat([latent.to(rotated.dtype), rotated], dim=-1)
    expansion = Expansion.of(call.module, call.query, call.value, rows, L)
    scale = D**-0.5 if call.scale is None else call.scale
    query = expansion.queries(call.query)
    return call._replace(query=query, key=rows, value=rows, scale=scale), expansion


def latent_refusal(text: Any) -> str | None:
    """Why a model with latent attention, by its text config, cannot be served; or None."""
    if getattr(text, "index_topk", None) is not None:
        return "its latent attention is sparse: an indexer chooses what each query sees"
    return None


def expands_after_cache(model_class: Any) -> bool:
    """Whether the layers of a class of models expand their keys from latents after the cache."""
    classes = vars(sys.modules[model_class.__module__]).values()
    return any(hasattr(x, "expand_kv") for x in classes if isinstance(x, type))
