"""Models inside the wrappers of PEFT, torch.compile and accelerate."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import GenerationMixin

from h2o import compat, compat_wrappers
from h2o.compat_wrappers import num_virtual_tokens
from h2o.errors import UnsupportedError


def unwrap(model: Any) -> Any:
    """The transformers model inside the wrappers of torch.compile and PEFT.

    Raises:
        UnsupportedError: the model uses prefix tuning, whose keys belong to no token.
    """
    while True:
        if compat_wrappers.peft_type(model) in ("PREFIX_TUNING", "CARTRIDGE"):
            raise UnsupportedError(
                "h2o does not support prefix tuning, because PEFT fills a cache of its own with "
                "keys that belong to no token: use LoRA or prompt tuning"
            )
        inner = compat_wrappers.inner_model(model)
        if inner is None:
            return model
        model = inner


def forward_accepts(model: Any, *names: str) -> bool:
    """Whether the model inside all wrappers has arguments of these names in its `forward()`.

    The wrappers pass on every argument, but their own `forward()` does not name it."""
    return compat.accepts(unwrap(model).forward, *names)


def decoder_of(model: Any) -> Any:
    """The part of a model that computes hidden states from token ids and fills a cache, without the
    layer that makes logits. It contains the weights of adapters but no wrapper."""
    return generating_part(unwrap(model)).base_model


def generating_part(model: Any) -> Any:
    """The part of a model that generates, where the model's own `generate()` calls that of its
    language model, as in BLIP-2 and Qwen2.5-Omni. Otherwise the model."""
    is_generating = isinstance(model, GenerationMixin)
    code = inspect.unwrap(type(model).generate).__code__ if is_generating else None
    if code is None or code is inspect.unwrap(GenerationMixin.generate).__code__:
        return model
    if "__class__" in code.co_freevars:  # it calls super().generate()
        return model
    text = model.config.get_text_config(decoder=True)
    named = [getattr(model, name, None) for name in code.co_names]
    parts: list[Any] = [part for part in named if isinstance(part, GenerationMixin)]
    ours = (part for part in parts if part.config.get_text_config(decoder=True) is text)
    return next(ours, model)


def input_device(model: Any) -> torch.device:
    """The device on which a model expects token ids. If accelerate offloads the weights to a file
    or to host memory, this is the device that they are moved to for a forward pass.

    Raises:
        TypeError: this is a model's config, which has no weights.
        ValueError: the model is on the device "meta", so that its weights have no values.
    """
    if not hasattr(model, "device"):
        raise TypeError(
            f"expected a model of transformers, not {type(model).__name__}, which has no weights: "
            "write model, tokenizer = h2o.load_model(name) and pass model"
        )
    device: torch.device = model.device
    if device.type != "meta":
        return device
    for module in model.modules():
        for each in compat_wrappers.accelerate_hooks(module):
            where = getattr(each, "execution_device", None)
            if where is not None:
                return torch.device(where)
    raise ValueError(
        'the model is on the device "meta", where tensors have a shape but no values, so it cannot '
        "compute anything: load its weights, as with h2o.load_model(name) or from_pretrained(name)"
    )


def model_after_prompt(model: Any) -> Any:
    """The model to call after the first forward pass over a prompt. With prompt tuning this is the
    model without PEFT's wrapper, which would put its embeddings before the text again."""
    return unwrap(model) if num_virtual_tokens(model) else model


def check_passes(model: Any, what: str) -> None:
    """Check that decode steps of a model need no tokens of the prompt. `what` names the caller in
    the error.

    Raises:
        UnsupportedError: tokens of the prompt activate an adapter (aLoRA).
    """
    if compat_wrappers.activates_by_tokens(model):
        raise UnsupportedError(
            f"{what} does not support aLoRA: PEFT looks for the invocation tokens in each forward "
            "pass, and a decode step has none of them. Call model.generate() with an H2OCache"
        )


def check_no_tuned_prompt(model: Any, what: str) -> None:
    """Check as `check_passes` does, and that no forward pass puts embeddings before its tokens.

    Raises:
        UnsupportedError: aLoRA or prompt tuning.
    """
    check_passes(model, what)
    if num_virtual_tokens(model):
        raise UnsupportedError(
            f"{what} does not support prompt tuning: PEFT puts its embeddings before the text in "
            "each forward pass. Use h2o.generate_all, or model.generate() with an H2OCache"
        )


def check_pins(model: Any, pinned: Any) -> None:
    """Check that pinned positions are those of the text.

    Raises:
        UnsupportedError: prompt tuning shifts the text by its embeddings.
    """
    if pinned is not None and (n := num_virtual_tokens(model)):
        raise UnsupportedError(
            f"pinned counts all tokens of a row, and prompt tuning puts {n} before the text: call "
            f"model.generate() with H2OCache(model.config, pinned=[(start + {n}, stop + {n})])"
        )
