"""Tensors on a device that this machine lacks. They have shapes but no values.

Under `on_fake_device()` torch's FakeTensorMode creates all tensors on that device. Their values
cannot be read: `.item()`, `.tolist()`, `bool()`, `int()` and a boolean index raise. An operation on
tensors of two devices raises as well. Code that runs here therefore never waits for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

__all__ = ["WAITS", "forget_default_device", "moved", "on_fake_device"]

WAITS = "aten._local_scalar_dense|aten.nonzero|aten.index|not linked with support"
"""Pattern of the RuntimeError that is raised where the host would wait for values of the device"""


@contextlib.contextmanager
def on_fake_device(device: str = "cuda") -> Iterator[None]:
    with torch.no_grad(), FakeTensorMode(), torch.device(device), _WithoutDriver():
        yield


def forget_default_device() -> None:
    """Undo torch.set_default_device(). Setting None is not enough with torch 2.6: afterwards
    torch.get_default_device(), which transformers calls, would fail."""
    torch.set_default_device(None)
    context = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)
    if getattr(context, "device_context", False) is None:
        del context.device_context


def moved(model: nn.Module) -> nn.Module:
    """Move a model to the device of the current context, in place."""
    for part in model.modules():
        for tensors in (part._parameters, part._buffers):
            for name, x in tensors.items():
                if x is not None:
                    new = torch.empty(x.shape, dtype=x.dtype)
                    is_parameter = isinstance(x, nn.Parameter)
                    tensors[name] = nn.Parameter(new, requires_grad=False) if is_parameter else new
    return model


class _WithoutDriver(TorchFunctionMode):
    """Replaces functions that torch does not support for a device that it was built without."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _INSTEAD:
            return _INSTEAD[func](*args, **kwargs)
        return func(*args, **kwargs)


def _put(x: Tensor, key: Any, value: Any) -> None:
    keys = key if isinstance(key, tuple) else (key,)
    if any(isinstance(k, Tensor) for k in keys):
        value = value if isinstance(value, Tensor) else torch.as_tensor(value)
        torch.ops.aten.index_put_(x, keys, value)
    elif isinstance(value, Tensor):
        _copy(_at(x, key), value)
    else:
        _at(x, key).fill_(value)


def _copy(x: Tensor, value: Tensor, non_blocking: bool = False) -> Tensor:
    """Check only that the shapes are compatible, since there are no values."""
    value.expand(x.shape)
    return x


def _contiguous(x: Tensor, memory_format: Any = torch.contiguous_format) -> Tensor:
    return x if x.is_contiguous() else x.clone(memory_format=memory_format)


def _new_tensor(x: Tensor, numbers: Any, dtype: torch.dtype | None = None) -> Tensor:
    return x.new_empty(np.shape(numbers), dtype=dtype)


def _at(x: Tensor, key: Any) -> Tensor:
    keys = key if isinstance(key, tuple) else (key,)
    keys = [torch.tensor(k) if isinstance(k, list) else k for k in keys]
    if Ellipsis in [k for k in keys if not isinstance(k, Tensor)]:
        place = next(i for i, k in enumerate(keys) if k is Ellipsis)
        named = sum(k is not None and k is not Ellipsis for k in keys)
        keys[place : place + 1] = [slice(None)] * (x.ndim - named)
    dim, indices = 0, {}
    for k in keys:
        if k is None:
            x = x.unsqueeze(dim)
        elif isinstance(k, slice):
            x = torch.ops.aten.slice(x, dim, k.start, k.stop, k.step or 1)
        elif isinstance(k, Tensor):
            indices[dim] = k
        else:
            x = x.select(dim, k)
            continue
        dim += 1
    if not indices:
        return x
    return torch.ops.aten.index(x, [indices.get(i) for i in range(max(indices) + 1)])


_INSTEAD = {
    Tensor.__getitem__: _at,
    Tensor.__setitem__: _put,
    Tensor.__invert__: torch.bitwise_not,
    Tensor.copy_: _copy,
    Tensor.contiguous: _contiguous,
    Tensor.new_tensor: _new_tensor,
}
