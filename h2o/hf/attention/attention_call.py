"""`AttentionCall`: the arguments of one attention call, and `NewTokens`, made from it for a layer.

`h2o.hf.attention.attention` fills an `AttentionCall` and passes it to the layer, which checks it,
converts it to the dtype of its store (`NewTokens`) and attends.

Shape letters as in `h2o.hf`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from h2o import ops
from h2o.hf.model_traits.tagged_tensor import plain
from h2o.policy import Policy
from h2o.quantization import round_to_bytes, set_smoothing


class AttentionCall(NamedTuple):
    """The arguments of one attention call, for the layer of an `H2OCache` or for the function that
    `h2o.hf.attention.attention_hook` puts in its place."""

    module: nn.Module
    """The model's attention module"""
    query: Tensor
    """[B, H, Q, D]"""
    key: Tensor
    """[B, G, Q, D], as `H2OLayer.update` returned it"""
    value: Tensor
    """[B, G, Q, D]"""
    mask: Tensor | None = None
    """[B, Q] bool, False at padding; None if there is no padding"""
    scale: float | None = None
    """Factor of q.k; None means 1 / sqrt(D)"""
    softcap: float = 0.0
    """c > 0 turns logits x into c * tanh(x / c)"""
    dropout: float = 0.0
    position_ids: Tensor | None = None
    """[B or 1, Q] positions at which queries and keys were rotated; None if not passed on"""
    use_cache: bool | None = None
    """The model's argument of that name; None if the model does not pass it to the layers"""
    sink_logits: Tensor | None = None
    """[H] learned attention sinks, see `h2o.ops.attend`; None if there are none"""
    unsupported: Exception | None = None
    """Error to raise if the call needs more than plain causal attention for inference"""
    layer: int = -1
    """The layer's number; for hooks"""
    cached: bool = False
    """Whether keys and values were returned by an `H2OCache`; for hooks"""
    full: Callable[[], Tensor] | None = None
    """Computes the output [B, Q, H, D] without eviction; for hooks"""

    @property
    def may_begin_text(self) -> bool:
        """Whether the new tokens may be the beginning of a text, according to their positions."""
        return self.position_ids is None or not self.position_ids[..., 0].any()

    @property
    def requires_grad(self) -> bool:
        """Whether autograd, where it is enabled, would record operations on the tensors."""
        tensors = (self.query, self.key, self.value, self.sink_logits)
        return any(x is not None and x.requires_grad for x in tensors)

    def without_backward(self, out: Tensor, reason: str = "") -> Tensor:
        """Make the backward pass of an output of this call raise."""
        inputs = self.query, self.key, self.value, self.sink_logits
        # `apply` never returns for tensors of a class with a __torch_function__.
        tensors = (x if x is None else plain(x) for x in inputs)
        made: Tensor = NoBackward.apply(reason or CACHE_HAS_NO_GRADIENT, out, *tensors)
        return made

    def detached(self) -> AttentionCall:
        """This call outside of autograd's graph."""
        query, key, value = self.query.detach(), self.key.detach(), self.value.detach()
        sinks = None if self.sink_logits is None else self.sink_logits.detach()
        return self._replace(query=query, key=key, value=value, sink_logits=sinks)


class NewTokens(NamedTuple):
    """Queries, keys and values of new tokens, in the form in which a layer stores its tokens."""

    query: Tensor
    """[B, H, Q, D]"""
    key: Tensor
    """[B, G, Q, D]"""
    value: Tensor | None
    """[B, G, Q, D]; None if the keys are also the values"""
    mask: Tensor | None
    """[B, Q] bool, False at padding; None if there is no padding"""
    scale: float | None
    softcap: float
    sink_logits: Tensor | None = None
    """[H] float32"""

    def to(self, dtype: torch.dtype) -> NewTokens:
        """Queries, keys and values in another dtype."""
        value = None if self.value is None else self.value.to(dtype)
        return self._replace(query=self.query.to(dtype), key=self.key.to(dtype), value=value)

    @property
    def options(self) -> dict[str, Any]:
        """Mask, scale, softcap and sinks as keyword arguments of the operations."""
        return {
            "mask": self.mask,
            "scale": self.scale,
            "softcap": self.softcap,
            "sink_logits": self.sink_logits,
        }

    def columns(self, begin: int, end: int) -> NewTokens:
        """The tokens in the padded columns `begin` to `end` - 1."""
        query, key = (x[:, :, begin:end] for x in (self.query, self.key))
        value = None if self.value is None else self.value[:, :, begin:end]
        mask = None if self.mask is None else self.mask[:, begin:end]
        return self._replace(query=query, key=key, value=value, mask=mask)


def round_like_slots(tokens: NewTokens, slots: ops.Slots) -> NewTokens:
    """Round new tokens as slots that store them quantized would.

    A decode step stores its token before it attends, so the token is rounded. A row with a single
    new token after its prompt is a decode step, whatever the padding around the token. In rows with
    several new tokens nothing is rounded.
    """
    several = tokens.query.shape[2] > 1
    if several and tokens.mask is None:
        return tokens
    rounded = as_stored(tokens, slots)
    if rounded is tokens or not several:
        return rounded
    assert tokens.mask is not None
    is_step = ((tokens.mask.sum(1) == 1) & (slots.seen_tokens > 0))[:, None, None, None]
    key = torch.where(is_step, rounded.key, tokens.key)
    if rounded.value is None or tokens.value is None:
        return tokens._replace(key=key)
    return tokens._replace(key=key, value=torch.where(is_step, rounded.value, tokens.value))


def as_stored(tokens: NewTokens, slots: ops.Slots) -> NewTokens:
    """Round tokens as slots whose offsets are set would store them. Returns the same object if
    slots are not quantized."""
    if slots.keys.dtype != torch.uint8:
        return tokens
    changes = slots.offsets, slots.smoothing
    if slots.rows is not None:
        index = slots.rows.long()
        changes = tuple(None if x is None else x[index] for x in changes)
    sizes = [x.shape[-1] for x in (slots.keys, slots.values) if x is not None]
    key, value = round_to_bytes(tokens.key, tokens.value, sizes, *changes)
    if value is None or tokens.value is None:
        return tokens._replace(key=key.to(tokens.key.dtype))
    return tokens._replace(key=key.to(tokens.key.dtype), value=value.to(tokens.value.dtype))


def as_operand(sink_logits: Tensor | None) -> Tensor | None:
    """Convert learned sinks [H] to the operations' form: float32, without a gradient."""
    return None if sink_logits is None else sink_logits.detach().float()


def as_autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast all three to autocast's dtype if autocast is enabled, since rotary embedding makes
    queries and keys float32."""
    if query.dtype == key.dtype == value.dtype:
        return query, key, value
    device = query.device.type
    if not torch.is_autocast_enabled(device):
        return query, key, value  # the operations raise for dtypes that differ
    dtype = torch.get_autocast_dtype(device)
    return query.to(dtype), key.to(dtype), value.to(dtype)


CACHE_HAS_NO_GRADIENT = (
    "attention through an H2OCache has no gradient: train with use_cache=False, or call the model "
    "under torch.no_grad()"
)


class NoBackward(torch.autograd.Function):
    """Pass an output through and raise `reason` when its gradient is computed."""

    @staticmethod
    def forward(ctx: Any, reason: str, out: Tensor, *inputs: Tensor) -> Tensor:
        ctx.reason = reason
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(ctx.reason)


def attention(tokens: NewTokens, slots: ops.Slots | None, policy: Policy) -> tuple[Tensor, Tensor]:
    """Output [B, Q, H, D] of new tokens over slots and each other, and scores [B, G, Q] of their
    keys."""
    query, key, value, mask, scale, softcap, sinks = tokens
    return ops.attend(
        query, key, value, slots, mask=mask, scale=scale, softcap=softcap, sink_logits=sinks,
        policy=policy,
    )  # fmt: skip


def step(
    tokens: NewTokens, slots: ops.Slots, policy: Policy, rotary: ops.Rotary | None = None
) -> Tensor:
    """Store one new token and return its output [B, 1, H, D]."""
    query, key, value, mask, scale, softcap, sinks = tokens
    return ops.step(  # type: ignore[no-any-return]
        query, key, value, slots, mask=mask, scale=scale, softcap=softcap, rotary=rotary,
        sink_logits=sinks, policy=policy,
    )  # fmt: skip


def evict_after(
    attend: Callable[[], tuple[Tensor, Tensor]], tokens: NewTokens, slots: ops.Slots, policy: Policy
) -> Tensor:
    """Return the output of `attend`, and evict by the scores that it returns. Pinned keys stay
    pinned. If an error is raised, no key has changed."""
    scores_before = slots.scores.clone()
    try:
        out, scores = attend()
        set_smoothing(slots.smoothing, slots.seen_tokens, tokens.query, tokens.key, tokens.mask)
        ops.evict(tokens.key, tokens.value, scores, slots, mask=tokens.mask, policy=policy)
    except Exception:  # attend has changed nothing but the scores
        slots.scores.copy_(scores_before)
        raise
    return out
