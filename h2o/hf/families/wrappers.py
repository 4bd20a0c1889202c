"""Models inside the wrappers of PEFT, torch.compile and accelerate."""

from __future__ import annotations

from typing import Any

import torch

from h2o import compat
from h2o.errors import UnsupportedError

__all__ = ["input_device", "unwrap"]


def unwrap(model: Any) -> Any:
    """The model of transformers inside torch.compile's and PEFT's wrappers.

    Raises:
        UnsupportedError: prefix tuning, whose keys belong to no token.
    """
    while True:
        if compat.peft_type(model) in ("PREFIX_TUNING", "CARTRIDGE"):
            raise UnsupportedError(
                "h2o cannot serve prefix tuning: PEFT fills a cache of its own with keys that "
                "belong to no token; LoRA and prompt tuning are served"
            )
        inner = compat.inner_model(model)
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
        for each in compat.accelerate_hooks(module):
            where = getattr(each, "execution_device", None)
            if where is not None:
                return torch.device(where)
    return device
