"""Sizes of a tensor of any library, and new tensors like it, for the operations."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

Tensor = Any  # whatever speaks DLPack


def four_sizes(tensor: Tensor) -> tuple[int, int, int, int] | None:
    """The four sizes of a tensor; None for what has others, so that the core can refuse it."""
    try:
        a, b, c, d = tensor.shape
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return a, b, c, d


def default_scale(query: Tensor, sizes: tuple[int, int, int, int] | None) -> float | None:
    """1 / sqrt(D). None, which the core refuses, where D cannot be asked for; any number for a
    query that it will refuse anyway."""
    if sizes is not None:
        return max(1, sizes[3]) ** -0.5
    unsized = hasattr(query, "__dlpack__") and not hasattr(type(query), "shape")
    return None if unsized else 1.0


_NO_MEMORY = ("allocate memory", "out of memory", "size calculation overflowed")


def empty(like: Tensor, shape: tuple[int, ...], dtype: str | None = None) -> Tensor:
    """An uninitialized tensor of like's library, device and (if no other is given) dtype.

    On a device that has no float64 (mps) it is float32 instead.
    """
    if isinstance(like, np.ndarray):
        return np.empty(shape, dtype or like.dtype)
    if not hasattr(like, "new_empty"):
        raise TypeError(
            "outputs can be made for torch tensors and NumPy arrays, not for "
            f"{type(like).__name__}: pass the output tensors yourself"
        )
    try:
        if dtype is None:
            return like.new_empty(shape)
        if dtype == "float64" and like.device.type == "mps":
            dtype = "float32"
        return like.new_empty(shape, dtype=getattr(sys.modules["torch"], dtype))
    except RuntimeError as error:  # torch has no class of its own for this
        if not any(words in str(error) for words in _NO_MEMORY):
            raise
        raise MemoryError(f"no memory for an output of shape {list(shape)}") from error


def full(like: Tensor, shape: tuple[int, ...], value: int, dtype: str | None = None) -> Tensor:
    """A tensor like `empty` gives, filled."""
    tensor = empty(like, shape, dtype)
    tensor[...] = value
    return tensor


def grad_enabled() -> bool:
    """Whether torch is here and records gradients."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.is_grad_enabled()
