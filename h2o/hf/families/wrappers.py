"""Models inside the wrappers of PEFT, torch.compile and accelerate."""

from __future__ import annotations

from typing import Any

import torch

from h2o import compat_wrappers
from h2o.errors import UnsupportedError


def unwrap(model: Any) -> Any:
    """The model of transformers inside torch.compile's and PEFT's wrappers.

    Raises:
        UnsupportedError: prefix tuning, whose keys belong to no token.
    """
    while True:
        if compat_wrappers.peft_type(model) in ("PREFIX_TUNING", "CARTRIDGE"):
            raise UnsupportedError(
                "h2o cannot serve prefix tuning: PEFT fills a cache of its own with keys that "
                "belong to no token; LoRA and prompt tuning are served"
            )
        inner = compat_wrappers.inner_model(model)
        if inner is None:
            return model
        model = inner


def input_device(model: Any) -> torch.device:
    """The device that a model takes token ids on. If accelerate keeps the weights in a file or in
    the host's memory, it is the device that they are moved to for a forward pass."""
    device: torch.device = model.device
    if device.type != "meta":
        return device
    for module in model.modules():
        for each in compat_wrappers.accelerate_hooks(module):
            where = getattr(each, "execution_device", None)
            if where is not None:
                return torch.device(where)
    return device


def continuing(model: Any) -> Any:
    """The model that takes what follows on the first forward pass over a prompt: without the
    wrapper that would put its embeddings before the text again."""
    return unwrap(model) if virtual_tokens(model) else model


def check_passes(model: Any, what: str) -> None:
    """Checks that a model's forward passes may follow each other; `what` is named in the error.

    Raises:
        UnsupportedError: an adapter that tokens of the prompt switch on.
    """
    if compat_wrappers.activates_by_tokens(compat_wrappers.compiled_model(model)):
        raise UnsupportedError(
            f"{what} cannot serve aLoRA: PEFT looks for the invocation tokens in each forward "
            "pass, and a decode step has none of them. Call model.generate() with an H2OCache"
        )


def check_no_tuned_prompt(model: Any, what: str) -> None:
    """Checks what `check_passes` does, where all forward passes over a prompt must be alike."""
    check_passes(model, what)
    if virtual_tokens(model):
        raise UnsupportedError(
            f"{what} cannot serve prompt tuning: PEFT puts its embeddings before the text in each "
            "forward pass. Use h2o.generate_all, or model.generate() with an H2OCache"
        )


def check_pins(model: Any, pinned: Any) -> None:
    """Checks that pinned positions are those of the text.

    Raises:
        UnsupportedError: prompt tuning, whose embeddings are tokens of the row.
    """
    if pinned is not None and (n := virtual_tokens(model)):
        raise UnsupportedError(
            f"pinned counts the tokens of a row, and prompt tuning puts {n} before the text: call "
            f"model.generate() with H2OCache(model.config, pinned=[(start + {n}, stop + {n})])"
        )


def virtual_tokens(model: Any) -> int:
    """Embeddings that prompt tuning puts before a prompt; 0 for any other model."""
    return compat_wrappers.num_virtual_tokens(compat_wrappers.compiled_model(model))
