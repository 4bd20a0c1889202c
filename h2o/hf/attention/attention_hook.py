"""`replace_attention`: a context manager that puts a function in place of some layers' attention.

Simulation, analysis and calibration use it to see the queries, keys and values of a forward pass
over a whole text.

Shape letters as in `h2o.hf`, and n tokens.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from h2o import compat, compat_calls
from h2o.errors import UnsupportedError
from h2o.hf.attention import attention
from h2o.hf.attention.attention_call import AttentionCall, as_autocast, as_operand
from h2o.hf.attention.attention_switch import AttentionSwitch, use_attention
from h2o.hf.model_traits.shared_keys import pads_of
from h2o.hf.model_traits.wrappers import unwrap


@contextmanager
def replace_attention(
    model: Any, layers: Collection[int], visit: Callable[[AttentionCall], Tensor]
) -> Iterator[None]:
    """Within the block use `visit(call)` as the attention output [B, n, H, D] of some layers.

    Other layers attend as before. After the block, also after an error, the model is unchanged, and
    so is a copy of it that was made within the block.

    Raises:
        UnsupportedError: the model has attention code of its own, or its forward pass needs more
            than plain causal attention.
        RuntimeError: another thread or task has the model in such a block, or a forward pass
            follows `set_attn_implementation` in the block.
    """

    def function(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        layer = shared.layer(module)  # None for a module of a vision model
        attention_mask = pads_of(attention_mask)

        def full() -> Tensor:
            given = query, key, value, attention_mask
            return attention.h2o_attention_forward(module, *given, **kwargs)[0]

        if layer not in layers:
            return full(), None
        sinks, window = kwargs.get("s_aux"), kwargs.get("sliding_window")
        if error := attention.find_transform(query, key, value, sinks):
            raise error
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        error = attention.find_unsupported(module, kwargs, attention_mask, window, causal)
        if error is not None:
            has_4d_mask = attention_mask is not None and attention_mask.ndim > 2
            if has_4d_mask and compat_calls.is_called_compiled():
                raise UnsupportedError(_COMPILED)
            raise error
        call = AttentionCall(
            module,
            *as_autocast(query, key, value),
            mask=None if attention_mask is None else attention_mask.bool(),
            scale=kwargs.get("scaling"),
            softcap=kwargs.get("softcap") or 0.0,
            dropout=kwargs.get("dropout", 0.0),
            sink_logits=as_operand(sinks),
            layer=layer,
            cached=hasattr(key, "h2o_layer"),
            full=full,
        )
        return visit(call), None

    model = unwrap(model)  # PEFT and torch.compile leave attention to the model they wrap
    config = model.config.get_text_config(decoder=True)
    shared = _SharedModules(type(config))
    name = f"h2o_simulated:{next(_numbers)}"
    compat.register_attention(name, function, attention.h2o_mask)
    _open.add(name)
    try:
        with (
            use_attention("simulated", model, name) as change,
            shared.watched(model),
            model.register_forward_pre_hook(_Check(change, config)),
        ):
            yield
    finally:
        _open.remove(name)
        compat.unregister_attention(name)


class _Check:
    """Hook of a model whose attention is replaced. Raises if `set_attn_implementation` has changed
    that. A copy of the model gets a `_PutBack` instead."""

    def __init__(self, change: AttentionSwitch, config: Any) -> None:
        self.change, self.config = change, config

    def __call__(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            raise UnsupportedError(_COMPILED)
        self.change.check(self.config)

    def __reduce__(self) -> Any:
        return _PutBack, (self.change.name, self.change.original)


class _PutBack:
    """Hook of a copy that was made within the block, by deepcopy or pickle. After the block it puts
    back the attention that the configs named before."""

    def __init__(self, name: str, original: list[tuple[Any, str]]) -> None:
        self.name, self.original = name, original

    def __call__(self, *_: Any) -> None:
        for config, name in () if self.name in _open else self.original:
            if compat.attention_name(config) == self.name:
                compat.put_attention_name(config, name)


_COMPILED = (
    "h2o.simulated(), h2o.analyze() and h2o.calibrate() do not support torch.compile: call the "
    "model itself, not what torch.compile(model) returned, and not after model.compile()"
)


class _SharedModules:
    """Tracks which layer each attention module is computing. Some models (Zamba) share a module
    between layers and pass `layer_idx` to its forward."""

    def __init__(self, text_config: type) -> None:
        self._thread_local, self._text_config = threading.local(), text_config

    def layer(self, module: nn.Module) -> int | None:
        """The layer that this module is computing; None if it is part of another model inside."""
        if not isinstance(getattr(module, "config", None), self._text_config | None):
            return None
        layer: int | None = getattr(module, "layer_idx", None)
        return vars(self._thread_local).get(str(id(module)), layer)

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """Record the `layer_idx` that such modules are given within the block."""

        def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            vars(self._thread_local)[str(id(module))] = kwargs["layer_idx"]

        with ExitStack() as hooks:
            for module in model.modules():
                is_attention = hasattr(module, "layer_idx") and hasattr(module, "is_causal")
                if is_attention and compat.accepts(module.forward, "layer_idx"):
                    hooks.enter_context(module.register_forward_pre_hook(note, with_kwargs=True))
            yield


_numbers = itertools.count()

_open: set[str] = set()
"""Names under which the functions of open blocks are registered"""
