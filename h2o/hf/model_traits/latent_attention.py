"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) and its absorbed form.

transformers caches one row per token, which is a latent followed by an already rotated key. Before
it calls the attention function, it expands rows to keys and values of every head (`expand_kv`, with
the linear module `kv_b_proj`). The absorbed form multiplies queries and outputs by the matrix of
`kv_b_proj` instead. All query heads then attend to a single key head, the rows, whose first L
elements are also the values.

This file computes the absorbed form. `h2o.hf.layers.latent_variant` stores latents in a cache, and
`h2o.model_identity` (`latent_row`) recognizes models with latents by their config.

Shape letters as in `h2o.hf`, and N keys, L elements of a latent, P elements of a key that are
rotated, C elements that are not, V elements of a value. A row has L + P elements.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from h2o import compat
from h2o.compat_wrappers import is_offloaded
from h2o.errors import UnsupportedError
from h2o.hf.model_traits import tensor_parallel
from h2o.hf.model_traits.tagged_tensor import TaggedTensor, plain
from h2o.hf.model_traits.weight_sums import weight_sum


@contextmanager
def trace_latents(model: nn.Module) -> Iterator[None]:
    """Within the block, keys that `expand_kv` makes have the attribute `latent` [B, 1, N, L]."""

    def trace(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return TaggedTensor.of(args[0], latent=plain(args[0])), *args[1:]

    with ExitStack() as hooks:
        for module in model.modules():
            if hasattr(module, "expand_kv"):
                hooks.enter_context(module.kv_b_proj.register_forward_pre_hook(trace))
        yield


class Expansion(NamedTuple):
    """`kv_b_proj` as two matrices, which expand latents to keys and to values."""

    keys: Tensor
    """[H, C, L]"""
    values: Tensor
    """[H, V, L]"""

    @classmethod
    def of(
        cls, module: nn.Module, query: Tensor, value: Tensor, row: Tensor, L: int,
        *, fresh: bool = False,
    ) -> Expansion:  # fmt: skip
        """Split `kv_b_proj` for queries [B, H, Q, C + P], values [..., V] and rows [..., L + P].

        The matrices are remembered together with everything that the weight depends on, and split
        again if any of it has changed. Writes through a parameter's `.data` do not show. PEFT's
        `hotswap_adapter` and trainers that copy weights to a generator write so.

        Args:
            fresh: notice such writes as well, because a text begins. A plain linear module is split
                again. The tensors of any other module are read (`weight_sum`), since its weight
                takes a forward pass of `kv_b_proj` over L tokens.

        Raises:
            UnsupportedError: `kv_b_proj` has a bias or an unexpected shape.
        """
        H, width = query.shape[1], query.shape[-1]
        C, V = width - (row.shape[-1] - L), value.shape[-1]
        linear = module.kv_b_proj
        bias = getattr(linear, "bias", None)
        if (bias() if callable(bias) else bias) is not None:  # torch.ao's layers have a method
            raise UnsupportedError("h2o attention does not support a kv_b_proj with a bias")
        weight = _plain_weight(linear, query)
        is_plain = weight is not None
        tensors: list[Tensor] = []
        state = _read_state(linear, weight, query, tensors)
        known = None if state is None else _expansions.get(linear)
        if known is not None and known.state == state:
            if not fresh or (not is_plain and known.sums == _sums(tensors)):
                return known.expansion
        weight = _compute_weight(linear, L, query) if weight is None else weight.to(query.dtype)
        if weight.shape != (H * (C + V), L):
            raise UnsupportedError(
                f"h2o attention ({type(module).__name__}) does not support a kv_b_proj of "
                f"shape {list(weight.shape)}: expected [{H * (C + V)}, {L}]"
            )
        keys, values = weight.view(H, C + V, L).split([C, V], dim=1)
        # torch multiplies few tokens in bfloat16 fastest by matrices in these layouts.
        if state is not None and weight.dtype == torch.bfloat16:
            keys, values = keys.contiguous(), values.mT.contiguous().mT
        expansion = cls(keys, values)
        if state is not None:
            sums = [] if is_plain else _sums(tensors)
            _expansions[linear] = _Known(expansion, state, tensors, sums)
        return expansion

    def queries(self, query: Tensor) -> Tensor:
        """Turn queries [B, H, Q, C + P] for keys into queries [B, H, Q, L + P] for rows."""
        C, by_head = self.keys.shape[1], query.transpose(0, 1)  # [H, B, Q, C + P]
        absorbed = torch.bmm(by_head[..., :C].flatten(1, 2), self.keys).view(*by_head.shape[:3], -1)
        return torch.cat([absorbed, by_head[..., C:]], dim=-1).transpose(0, 1)

    def expand_output(self, out: Tensor) -> Tensor:
        """Turn attention outputs [B, Q, H, L + P] over rows into outputs [B, Q, H, V] over
        values."""
        latents = out[..., : self.values.shape[2]].to(self.values.dtype)
        by_head = torch.bmm(latents.permute(2, 0, 1, 3).flatten(1, 2), self.values.mT)
        return by_head.unflatten(1, latents.shape[:2]).permute(1, 2, 0, 3)


class _Known(NamedTuple):
    """An expansion, and the state of `kv_b_proj` from which it was made."""

    expansion: Expansion
    state: list[Any]
    tensors: list[Tensor]
    """The tensors in `state`, kept alive so that no other object gets their ids"""
    sums: list[int]
    """The result of `_sums` for them; empty for a plain linear module"""


_expansions: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


def to_absorbed_form(call: Any, latent: Tensor) -> tuple[Any, Expansion]:
    """Convert a call of `h2o.hf.attention.attention_hook` with expanded keys to its absorbed form.

    Args:
        latent: the latents that the keys were expanded from, [B, 1, N, L].

    Returns:
        The call over rows, and the expansion that turns its outputs into those over values.

    Raises:
        UnsupportedError: the model is cut over several processes.
    """
    if tensor_parallel.part(call.module) != tensor_parallel.WHOLE:
        raise UnsupportedError(
            "simulation does not support latent attention that is cut over several processes: load "
            "the whole model, without tp_plan"
        )
    L, D = latent.shape[-1], call.query.shape[-1]
    rotated = plain(call.key)[:, :1, :, call.module.qk_nope_head_dim :]
    rows = torch.cat([latent.to(rotated.dtype), rotated], dim=-1)
    expansion = Expansion.of(call.module, call.query, call.value, rows, L, fresh=True)
    scale = D**-0.5 if call.scale is None else call.scale
    query = expansion.queries(call.query)
    return call._replace(query=query, key=rows, value=rows, scale=scale), expansion


def latent_refusal(text: Any) -> str | None:
    """Why h2o does not support a model with latent attention and this text config, or None."""
    if getattr(text, "index_topk", None) is not None:
        return "its latent attention is sparse: an indexer chooses the keys that each query sees"
    return None


def expands_after_cache(model_class: Any) -> bool:
    """Whether the layers of a model class expand cached latents to keys, after the cache."""
    classes = vars(sys.modules[model_class.__module__]).values()
    return any(hasattr(x, "expand_kv") for x in classes if isinstance(x, type))


# ---- The effective weight of kv_b_proj, even if it is quantized, offloaded or has an adapter -----


def _plain_weight(module: nn.Module, like: Tensor) -> Tensor | None:
    """The weight of a plain linear module on the device of `like`, or None for any other module."""
    if type(module) is nn.Linear and module.weight.is_floating_point():
        weight = module.weight.detach()
        if type(weight) is Tensor and not weight.is_meta and weight.device == like.device:
            return weight
    return None


def _compute_weight(module: nn.Module, width: int, like: Tensor) -> Tensor:
    """The weight [outputs, width] of a module, found by feeding the identity matrix through it.

    This costs as much as a forward pass over hundreds of tokens.
    """
    unit_vectors = torch.eye(width, dtype=like.dtype, device=like.device)
    return plain(module(unit_vectors)).detach().to(like.dtype).T.contiguous()


def _read_state(
    module: nn.Module, weight: Tensor | None, like: Tensor, tensors: list[Tensor]
) -> list[Any] | None:
    """A fingerprint of what a module's effective weight depends on: tensors with their version
    counters, and every other attribute, such as an adapter's scale and the name of the active
    adapter. None if some changes would not show.

    Args:
        weight: the result of `_plain_weight`.
        tensors: the tensors in the fingerprint are appended to this list.
    """
    if torch.compiler.is_compiling() or is_offloaded(module):  # offloaded weights keep moving
        return None
    parts = module if weight is None else module.weight
    try:
        return [like.dtype, like.device, *_fingerprint(parts, tensors)]
    except RuntimeError:  # inference tensors have no version counter
        return None


def _sums(tensors: list[Tensor]) -> list[int]:
    """The `weight_sum` of each tensor. Quantized ones are left out, since the list also has the
    tensors inside them."""
    return [weight_sum(x) for x in tensors if not hasattr(x, "__tensor_flatten__")]


def _fingerprint(
    value: Any, tensors: list[Tensor], within: tuple[nn.Module, ...] = ()
) -> Iterator[Any]:
    """Yield a fingerprint of a module's state, as far as its attributes show it.

    Tensors on the way are appended to `tensors`. `within`: the modules that contain the value, so
    that cycles end.
    """
    if isinstance(value, nn.Module):
        yield id(value)
        if value not in within:
            yield from _fingerprint(vars(value), tensors, (*within, value))
    elif isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        yield id(value)
        tensors.append(value)
        names, _ = value.__tensor_flatten__()
        for name in names:
            yield from _fingerprint(getattr(value, name), tensors, within)
    elif isinstance(value, Tensor):
        tensors.append(value)
        yield id(value), value.data_ptr(), compat.tensor_version(value)
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield name
            yield from _fingerprint(part, tensors, within)
    elif isinstance(value, list | tuple | set | frozenset):
        yield len(value)
        for part in value:
            yield from _fingerprint(part, tensors, within)
    else:
        yield value if isinstance(value, bool | int | float | str) else id(value)
