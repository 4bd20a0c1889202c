"""What transformers runs for attn_implementation="h2o".

Two functions are registered under that name: the attention, and the maker of
its mask. Keys that come out of an `H2OCache` carry their layer, which then does
the work; all others (no cache, transformers' own caches, training) get dense
attention, the same as under "sdpa".

An H2O layer is told of pads by a mask [B, Q] of the new tokens alone: whatever
it holds is visible, and causality among new tokens follows from their order.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.modeling_utils import AttentionInterface
from transformers.utils.output_capturing import _active_collector

from h2o.errors import Unsupported
from h2o.hf import parallel, rotary
from h2o.hf.layer import H2OLayer
from h2o.hf.rolled import RolledLayer
from h2o.hf.served import transformers_layers
from h2o.hf.support import Support

__all__ = [
    "Undifferentiable",
    "as_autocast",
    "h2o_attention_forward",
    "h2o_mask",
    "refuse_both_ways",
    "refuse_foreign",
    "register",
    "supports",
    "switch",
    "unregister",
]

_FOREIGN = {
    "s_aux": "attention sinks as parameters",
    "sinks": "attention sinks as parameters",
    "position_bias": "an additive position bias",
    "block_indices": "block-sparse attention",
    "cache": "paged attention (continuous batching)",
    "output_attentions": "output_attentions=True (attention weights are never made whole)",
}
"""Keyword arguments of attention functions that change what attention is."""


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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers' AttentionInterface.

    Args:
        query: [B, H, Q, D]; key, value: [B, G, N, D], with N = Q out of an `H2OCache`.
        attention_mask: None, [B, Q] or [B, N] bool as `h2o_mask` makes it, or 4-D for dense
            attention.

    Returns:
        (output [B, Q, H, D], None).

    Errors: `Unsupported` for what a model asks for and h2o does not do, RuntimeError in training.
    """
    layer: H2OLayer | None = getattr(key, "h2o_layer", None)
    if layer is None:
        refuse_foreign(module, kwargs)
        mask = _dense_mask(module, query, key, attention_mask, is_causal)
        if softcap is not None:
            return _softcapped(query, key, value, mask, scaling, softcap, dropout), None
        return sdpa_attention_forward(
            module, query, key, value, mask,
            dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs,
        )  # fmt: skip
    try:
        refuse_foreign(module, kwargs, attention_mask, sliding_window)
        refuse_both_ways(module, is_causal)
        if query.dtype == torch.float64:
            raise TypeError(
                "h2o computes in float32, float16 and bfloat16, not in float64: call "
                "model.float(), or use DynamicCache"
            )
        # A model may not tell its layers, whose default is False. That it was meant shows when
        # the whole text comes again with its first new token.
        if kwargs.get("use_cache") is False and layer.is_whole_text_again(query.shape[2]):
            raise ValueError(
                "use_cache=False with an H2OCache: generate() then feeds the whole text again for "
                "each token; give one of the two only"
            )
        if module.training or dropout:
            raise RuntimeError(
                "an H2OCache is for inference: call model.eval(), or train with use_cache=False"
            )
    except Exception:
        layer.forget_update()
        raise
    query, key, value = as_autocast(query, key, value)
    if layer.slots is None or layer.unscored:
        layer.part = parallel.part(module)
    held, given = layer.float_dtype(query.dtype), query.dtype
    if isinstance(layer, RolledLayer):
        query, key = layer.unrotated(query, key, kwargs.get("position_ids"))
    if held != given:  # autocast began, or ended, after what is held was stored
        query, key, value = (x.to(held) for x in (query, key, value))
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))):
        out = layer.attend(query, key, value, attention_mask, scaling, softcap or 0.0)
        return (out if held == given else out.to(given)), None
    with torch.no_grad():
        out = layer.attend(
            query.detach(), key.detach(), value.detach(), attention_mask, scaling, softcap or 0.0
        ).to(given)
    return Undifferentiable.apply(out, query, key, value), None


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast projections come in its dtype, rotated queries and keys in float32."""
    first = tensors[0]
    device = first.device.type
    if all(x.dtype == first.dtype for x in tensors) or not torch.is_autocast_enabled(device):
        return tensors  # the operations will name a dtype that does not fit
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)


def refuse_foreign(
    module: nn.Module,
    kwargs: dict[str, Any],
    attention_mask: Tensor | None = None,
    sliding_window: int | None = None,
) -> None:
    """Errors: `Unsupported` where a model asks for more than full causal attention.

    `kwargs` are the attention function's further keyword arguments. The mask and the window
    are those of a layer that h2o is to serve.
    """
    for name, argument in kwargs.items():
        if name in _FOREIGN and argument is not None and argument is not False:
            raise _unsupported(module, _FOREIGN[name])
    if sliding_window is not None:
        raise _unsupported(
            module,
            f"a sliding window of {sliding_window} in a layer that the H2OCache takes for full "
            "attention: make the cache from the config of this model",
        )
    if attention_mask is not None and attention_mask.ndim != 2:
        raise _unsupported(
            module,
            "4-D masks and other patterns (packed texts, prefix or block attention): give a 2-D "
            "attention_mask, or use DynamicCache",
        )


def refuse_both_ways(module: nn.Module, is_causal: bool | None) -> None:
    """Errors: `Unsupported` for attention that is not causal, by the caller's or module's word."""
    if not _looks_back_only(module, is_causal):
        raise _unsupported(
            module,
            "attention that looks both ways (an encoder, is_causal=False): nothing can be evicted "
            "that later tokens of the same text still see",
        )


def _unsupported(module: nn.Module, feature: str) -> Unsupported:
    return Unsupported(f"h2o attention ({type(module).__name__}) does not support {feature}")


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
        an `H2OCache`, which announces kv_length = q_length; [B, N] otherwise; None without
        pads. For any other pattern (a window, packed texts, both directions) the 4-D mask of
        "sdpa", which dense attention takes and an H2O layer refuses.

    Errors: `Unsupported` for output_attentions=True and for a cache that lays its keys out
    otherwise (StaticCache), ValueError for a mask of the wrong length.
    """
    if "attentions" in (_active_collector.get() or ()):  # not every model tells its attention
        raise Unsupported(f"h2o attention does not support {_FOREIGN['output_attentions']}")
    if mask_function is not causal_mask_function:
        # None stands for plain causal attention here, so "everything is seen" must be said.
        kwargs["allow_is_bidirectional_skip"] = False
        return sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
            kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
            **kwargs,
        )  # fmt: skip
    # Offsets are tensors where the cache is to be compiled, whose numbers nobody should ask for.
    ours = kv_length == q_length and (kv_offset is q_offset or kv_offset == q_offset)
    if not ours and (kv_offset != 0 or kv_length != q_length + q_offset):
        raise Unsupported(
            f"h2o attention was given a cache with {kv_length} places for {q_offset} + {q_length} "
            "tokens, such as StaticCache: use H2OCache or DynamicCache"
        )
    if attention_mask is None:
        return None
    length = attention_mask.shape[1]
    if length != kv_length and length != q_offset + q_length:
        raise ValueError(
            f"attention_mask has {length} columns; {q_offset + q_length} are needed: "
            f"{q_offset} tokens seen and {q_length} new ones"
        )
    return attention_mask[:, length - kv_length :]


def _dense_mask(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool | None
) -> Tensor | None:
    """The mask that "sdpa" expects, from what `h2o_mask` gave."""
    if mask is not None and mask.ndim != 2:
        return mask
    if mask is None and not _looks_back_only(module, is_causal):
        return None
    Q, N = query.shape[2], key.shape[2]
    if mask is None and Q in (1, N):
        return None  # sdpa_attention_forward is causal by itself here
    return sdpa_mask(
        batch_size=query.shape[0], q_length=Q, kv_length=N, q_offset=N - Q,
        attention_mask=mask, device=query.device,
    )  # fmt: skip


def _looks_back_only(module: nn.Module, is_causal: bool | None) -> bool:
    """Whether attention is causal, by the caller's word or the module's."""
    return getattr(module, "is_causal", True) if is_causal is None else is_causal


def _softcapped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float,
    dropout: float,
) -> Tensor:
    """Dense attention with logits squeezed into (-softcap, softcap), which "sdpa" lacks."""
    B, H, Q, D = query.shape
    G, N = key.shape[1:3]
    grouped = query.reshape(B, G, H // G, Q, D)
    logits = grouped @ key[:, :, None].mT * (D**-0.5 if scale is None else scale)
    logits = softcap * torch.tanh(logits / softcap)
    if mask is None and Q > 1:
        mask = torch.ones(Q, N, dtype=torch.bool, device=query.device).tril(N - Q)[None, None]
    if mask is not None and mask.dtype == torch.bool:
        # The lowest number, not -inf: a query that sees nothing must not become NaN.
        logits = logits.masked_fill(~mask[:, :, None], torch.finfo(logits.dtype).min)
    elif mask is not None:
        logits = logits + mask[:, :, None]
    weights = logits.softmax(-1, dtype=torch.float32).to(query.dtype)
    if dropout:
        weights = nn.functional.dropout(weights, dropout)
    return (weights @ value[:, :, None]).reshape(B, H, Q, D).transpose(1, 2).contiguous()


class Undifferentiable(torch.autograd.Function):
    """The output of an H2O layer where gradients are recorded: an error if they are asked for."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            "attention through an H2OCache has no gradient: train with use_cache=False, or run "
            "the model under torch.no_grad()"
        )


def register(name: str, function: Any) -> None:
    """Makes an attention function known to transformers, with the mask that h2o's layers take."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, h2o_mask)


def unregister(name: str) -> None:
    """Takes a name back."""
    del AttentionInterface._global_mapping[name]
    del AttentionMaskInterface._global_mapping[name]


def switch(model: Any, name: str) -> None:
    """Makes a model use the attention registered under a name.

    Errors: `Unsupported` for a model with attention code of its own; transformers would only
    log a warning and go on as before.
    """
    if not model._can_set_attn_implementation():
        raise Unsupported(
            f"h2o cannot serve {type(model).__name__}: it has attention code of its own instead "
            "of transformers' AttentionInterface"
        )
    model.set_attn_implementation(name)


def supports(config: Any) -> Support:
    """Whether h2o can serve the causal language model that a config describes, and how.

    Goes by the config and by the model's class; needs no weights. What only a forward pass
    can show (a model that alters keys after the cache, or that looks at an image's tokens both
    ways) is found there and raises. Of a model that reads images or sound too, the layers are those
    of its language model.
    """
    model_type = config.model_type
    try:
        layers = transformers_layers(config)
    except Unsupported as error:
        return Support(model_type, False, str(error).partition(": ")[2], ())
    classes = _model_classes(config)
    if not classes:
        return Support(model_type, False, "transformers has no causal language model of it", ())
    if not all(model_class._can_set_attn_implementation() for model_class in classes):
        return Support(
            model_type, False, "it has attention code of its own instead of AttentionInterface", ()
        )
    kinds = tuple("sliding" if layer.is_sliding else "h2o" for layer in layers)
    not_rolled = rotary.refusal(config, windows="sliding" in kinds) or ""
    return Support(model_type, True, "", kinds, not_rolled)


def _model_classes(config: Any) -> list[Any]:
    """The class that generates from this config, and that of its language model if that is a part;
    none where transformers has none that generates."""
    autos = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText,
             transformers.AutoModelForMultimodalLM)  # fmt: skip
    found = _first_class(config, *autos)
    text = config.get_text_config(decoder=True)
    if found is None or text is config:
        return [] if found is None else [found]
    language = _first_class(text, transformers.AutoModel, *autos)
    return [found] if language is None else [found, language]


def _first_class(config: Any, *autos: Any) -> Any:
    """The first of the Auto classes' models for this config; None if there is none."""
    for auto in autos:
        try:
            found = auto._model_mapping[type(config)]
        except (KeyError, ValueError):  # ValueError: named there, but not to be imported
            continue
        return found[0] if isinstance(found, tuple) else found
    return None


register("h2o", h2o_attention_forward)
