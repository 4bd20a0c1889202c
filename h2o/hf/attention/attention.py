"""The attention that transformers runs for attn_implementation="h2o".

Two functions are registered under that name: the attention function and its mask function. Keys
that an `H2OCache` returns carry their layer, and that layer handles the whole call. Other calls (no
cache, transformers' own caches, training) get the same dense attention as under "sdpa".

The only mask that an H2O layer needs is the padding mask [B, Q] of the new tokens: all stored keys
are visible, and causality among new tokens follows from their order.

Shape letters as in `h2o.hf`, and N keys that attention sees.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.modeling_utils import PreTrainedModel

from h2o import compat
from h2o.compat_calls import is_transformed, wants_attention_weights
from h2o.errors import UnsupportedError
from h2o.hf.attention.attention_call import AttentionCall
from h2o.hf.model_traits.layer_kinds import CROSS_ATTENTION
from h2o.hf.model_traits.shared_keys import Pads, pads_of
from h2o.sink_logits import softmax

_OTHER = 'Call model.set_attn_implementation("sdpa") or "eager", and use no H2OCache'

_FOREIGN = {
    "sinks": f"attention sinks under another name than s_aux. {_OTHER}",
    "position_bias": f"an additive position bias. {_OTHER}",
    "block_indices": f"block-sparse attention. {_OTHER}",
    "cache": (
        "paged attention (continuous batching). If you gave the model cache=H2OCache(...): this "
        "version of transformers calls that argument past_key_values"
    ),
    "output_attentions": (
        "output_attentions=True (attention weights are never kept as a whole). Use h2o.analyze(), "
        'or without an H2OCache call model.set_attn_implementation("eager")'
    ),
}
"""Keyword arguments of attention functions that request attention which h2o does not support."""


def h2o_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers' AttentionInterface.

    Args:
        query: [B, H, Q, D]; key, value: [B, G, N, D], where N = Q if they are from an `H2OCache`.
        attention_mask: None, [B, Q] or [B, N] bool as returned by `h2o_mask`, or 4-D for dense
            attention.
        s_aux: [H], transformers' name for learned attention sinks (`h2o.ops.attend`).

    Returns:
        (output [B, Q, H, D], None).

    Raises:
        UnsupportedError: the model needs attention that h2o does not support.
        TypeError, RuntimeError: the model is in float64 or in training, and has an `H2OCache`.
    """
    if type(attention_mask) is Pads:
        attention_mask = pads_of(attention_mask)
    layer: Any = getattr(key, "h2o_layer", None)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if layer is not None:
        error = None
        the_pass = layer.guard.current
        if the_pass is None or the_pass.may_be_transformed:
            error = find_transform(query, key, value, s_aux)
        is_plain = causal and sliding_window is None and not torch.compiler.is_compiling()
        is_plain = is_plain and _FOREIGN.keys().isdisjoint(kwargs)
        if error is None and not (
            is_plain and (attention_mask is None or attention_mask.ndim == 2)
        ):
            error = find_unsupported(module, kwargs, attention_mask, sliding_window, causal)
        if error is None and (module.training or dropout or query.dtype == torch.float64):
            error = _inference_error(query)
        call = AttentionCall(
            module, query, key, value, attention_mask, scaling, softcap or 0.0, dropout,
            kwargs.get("position_ids"), kwargs.get("use_cache"), s_aux, error,
        )  # fmt: skip
        return layer.attend(call), None
    if feature := _foreign(kwargs):
        raise _unsupported_error(module, feature)
    mask = _dense_mask(query, key, attention_mask, causal)
    how = {"scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux, "dropout": dropout}
    if s_aux is not None:
        return _attention_with_sinks(query, key, value, mask, causal, **how), None
    if softcap is not None:
        Q, N = query.shape[2], key.shape[2]
        if mask is None and causal and Q > 1:
            mask = _causal(Q, N, query.device)
        return softmax_attention(query, key, value, mask, **how), None
    return sdpa_attention_forward(
        module, query, key, value, mask,
        dropout=dropout, scaling=scaling, is_causal=is_causal if causal else False, **kwargs,
    )  # fmt: skip


def find_unsupported(
    module: nn.Module,
    kwargs: dict[str, Any],
    attention_mask: Tensor | None,
    sliding_window: int | None,
    causal: bool,
) -> UnsupportedError | None:
    """Error for a call that needs more than full causal attention, or None.

    Args:
        kwargs: further keyword arguments of the attention function.
        causal: whether attention is causal. If the call does not say so, the module does.
    """
    feature = _foreign(kwargs)
    if not feature and sliding_window is not None:
        feature = (
            f"a sliding window of {sliding_window} in a layer that has full attention according to "
            "the H2OCache: make the cache from the config of this model"
        )
    if not feature and not causal:
        feature = (
            "bidirectional attention (an encoder, is_causal=False): no key can be evicted while "
            f"all tokens of its text still attend to it. {CROSS_ATTENTION}"
        )
    if not feature and attention_mask is not None and attention_mask.ndim != 2:
        feature = (
            "4-D masks and other patterns (packed texts, prefix or block attention): give a 2-D "
            "attention_mask, or use DynamicCache"
        )
        config = getattr(module, "config", None)
        if config is not None and has_bidirectional_images(config):
            feature += f". Or, if there are images: {BIDIRECTIONAL_IMAGES}"
    return _unsupported_error(module, feature) if feature else None


def find_transform(*tensors: Tensor | None) -> UnsupportedError | None:
    """Error for tensors that belong to a torch.func transform, have a tangent or are traced, or
    None. The operations cannot see values inside a transform, and would drop tangents. A trace
    would record their results as constants."""
    if not is_transformed(*tensors):
        return None
    return UnsupportedError(
        "attention through an H2OCache or h2o.simulated is not supported inside torch.func (grad, "
        "jvp, vmap), torch.jit.trace or forward-mode differentiation (torch.autograd.forward_ad). "
        'Call the model without H2O there, with use_cache=False and attn_implementation="eager"'
    )


def _inference_error(query: Tensor) -> Exception:
    """Error for a call that no cache supports: in float64, or in training."""
    if query.dtype == torch.float64:
        return TypeError(
            "h2o computes in float32, float16 and bfloat16, not in float64: call model.float(), or "
            "use DynamicCache"
        )
    return RuntimeError(
        "an H2OCache is for inference: call model.eval(), or train with use_cache=False"
    )


def _foreign(kwargs: dict[str, Any]) -> str:
    """The unsupported feature that a keyword argument of an attention function requests, or ""."""
    for name, argument in kwargs.items():
        if name in _FOREIGN and argument is not None and argument is not False:
            return _FOREIGN[name]
    return ""


def _unsupported_error(module: nn.Module, feature: str) -> UnsupportedError:
    return UnsupportedError(f"h2o attention ({type(module).__name__}) does not support {feature}")


def h2o_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """A mask function of transformers' AttentionMaskInterface.

    Returns:
        For plain causal attention the part of the 2-D mask that belongs to the keys: [B, Q] for
        an `H2OCache`, which announces kv_length = q_length; [B, N] otherwise; None if there is no
        mask. For any other pattern (a window, packed texts, bidirectional attention) the 4-D mask
        of "sdpa", which dense attention accepts and for which an H2O layer raises.

    Raises:
        UnsupportedError: output_attentions=True, or a cache with another layout of its keys
            (StaticCache).
        ValueError: the mask has the wrong shape or length.
    """
    if wants_attention_weights():
        raise UnsupportedError(f"h2o attention does not support {_FOREIGN['output_attentions']}")
    if mask_function is not causal_mask_function:
        # sdpa_mask may return None for a mask that hides nothing, but here None means causal.
        kwargs["allow_is_bidirectional_skip"] = False
        pattern = functools.partial(
            sdpa_mask, batch_size=batch_size, q_length=q_length, kv_length=kv_length,
            q_offset=q_offset, kv_offset=kv_offset, attention_mask=attention_mask, **kwargs,
        )  # fmt: skip
        mask = pattern(mask_function=mask_function)
        if not compat.adds_to_causal(mask_function) or torch.compiler.is_compiling():
            return mask
        if not torch.equal(mask, pattern(mask_function=causal_mask_function)):
            return mask
        # Causal after all: only tokens of images look ahead, and this text has no images.
    # In a compileable cache offsets are tensors, and comparing them would wait for their device.
    is_h2o = kv_length == q_length and (kv_offset is q_offset or kv_offset == q_offset)
    if not is_h2o and kv_offset + kv_length != q_offset + q_length:
        raise UnsupportedError(
            f"h2o attention does not support caches such as StaticCache. This one has {kv_length} "
            f"keys for {q_offset} + {q_length} tokens: use H2OCache or DynamicCache"
        )
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}; expected [rows, tokens]"
        )
    length = attention_mask.shape[1]
    if length != kv_length and length != q_offset + q_length:
        raise mask_length_error(length, q_offset, q_length)
    mask = attention_mask[:, length - kv_length :]
    if is_h2o:
        # The view's stride grows with each token, and each stride would need its own graph.
        mask = mask.clone(memory_format=torch.contiguous_format)
    if q_length > 1 and getattr(kwargs.get("config"), "num_kv_shared_layers", None):
        return Pads.over(mask, q_length)
    return mask


def mask_length_error(columns: int, seen: int, new: int) -> ValueError:
    """Error for a mask whose columns are neither all nor the new ones."""
    return ValueError(
        f"attention_mask has {columns} columns; expected {seen + new}, for {seen} tokens seen so "
        f"far and {new} new ones"
    )


def _dense_mask(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    """Convert the result of `h2o_mask` to the mask that "sdpa" expects."""
    if mask is not None and mask.ndim != 2:
        return mask
    if mask is None and not causal:
        return None
    Q, N = query.shape[2], key.shape[2]
    if mask is None and Q in (1, N):
        return None  # sdpa_attention_forward applies causality by itself here
    return sdpa_mask(
        batch_size=query.shape[0], q_length=Q, kv_length=N, q_offset=N - Q,
        attention_mask=mask, device=query.device,
    )  # fmt: skip


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
    dropout: float = 0.0,
) -> Tensor:
    """Dense attention with a softcap and learned sinks [H]. `mask` is 4-D; None hides nothing."""
    B, H, Q, D = query.shape
    G = key.shape[1]
    grouped = query.reshape(B, G, H // G, Q, D)
    logits = grouped @ key[:, :, None].mT * (D**-0.5 if scale is None else scale)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None and mask.dtype == torch.bool:
        # The lowest finite number, not -inf, which would give NaN for a query that sees nothing.
        logits = logits.masked_fill(~mask[:, :, None], torch.finfo(logits.dtype).min)
    elif mask is not None:
        logits = logits + mask[:, :, None]
    if sinks is not None:
        sinks = sinks.view(G, H // G, 1, 1)
    weights = softmax(logits, sinks, torch.float32).to(query.dtype)
    if dropout:
        weights = nn.functional.dropout(weights, dropout)
    return (weights @ value[:, :, None]).reshape(B, H, Q, -1).transpose(1, 2).contiguous()


ROWS = 512
"""Number of queries whose logits are computed at a time."""


def _attention_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, **how: Any
) -> Tensor:
    """`softmax_attention` in blocks of queries, since all logits of a long prompt at once would
    fill the memory."""
    Q, N = query.shape[2], key.shape[2]
    parts = []
    for first in range(0, Q, ROWS):
        last = min(first + ROWS, Q)
        end = N - Q + last if mask is None and causal else N
        seen = None if mask is None else mask.expand(-1, -1, Q, N)[:, :, first:last]
        if mask is None and causal and last - first > 1:
            seen = _causal(last - first, end, query.device)
        rows = query[:, :, first:last], key[:, :, :end], value[:, :, :end]
        parts.append(softmax_attention(*rows, seen, **how))
    return torch.cat(parts, dim=1)


def _causal(Q: int, N: int, device: torch.device) -> Tensor:
    """The causal mask [1, 1, Q, N] bool of the last Q of N tokens."""
    return torch.ones(Q, N, dtype=torch.bool, device=device).tril(N - Q)[None, None]


def switch(model: Any, name: str) -> None:
    """Make a model use the attention registered under a name.

    Raises:
        UnsupportedError: the model has attention code of its own. transformers would only log a
            warning and change nothing.
    """
    if not compat.can_set_attention(model):
        # A model for images may have attention code of its own where its language model has none.
        text = model.config.get_text_config(decoder=True)
        parts = (x for x in model.modules() if isinstance(x, PreTrainedModel) and x is not model)
        language = next((x for x in parts if x.config is text is not model.config), None)
        if language is not None:
            switch(language, name)
            return
        raise UnsupportedError(
            f"h2o does not support {type(model).__name__}: it has attention code of its own "
            "instead of transformers' AttentionInterface"
        )
    model.set_attn_implementation(name)


compat.register_attention("h2o", h2o_attention_forward, h2o_mask)


_TYPES = ("gemma3", "gemma3_text", "molmo2", "molmo2_text")
"""Model types whose image tokens attend to each other. Gemma 4 says so in its config instead."""

BIDIRECTIONAL_IMAGES = (
    "attention among the tokens of an image is bidirectional. Prefill text and images in a "
    "DynamicCache, convert it with H2OCache.from_dynamic_cache(full, model.config, ...), and "
    "continue without images, token_type_ids and mm_token_type_ids"
)
"""Why an `H2OCache` cannot prefill images, and what to do instead."""


def has_bidirectional_images(config: Any) -> bool:
    """Whether the tokens of an image attend to each other in a model or language model with this
    config."""
    text = config.get_text_config(decoder=True)
    says_so = getattr(text, "use_bidirectional_attention", None) == "vision"
    return says_so or config.model_type in _TYPES
