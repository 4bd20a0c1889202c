"""Sizes of tensors of any library, and allocation of tensors like them, for the operations."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

Tensor = Any  # any object that supports DLPack


def get_4d_sizes(tensor: Tensor) -> tuple[int, int, int, int] | None:
    """The four sizes of a tensor; None for anything else, which the core then rejects."""
    try:
        a, b, c, d = tensor.shape
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return a, b, c, d


def default_scale(query: Tensor, sizes: tuple[int, int, int, int] | None) -> float | None:
    """1 / sqrt(D). If D is unknown: None, which the core rejects, for a DLPack object without a
    shape, and an arbitrary number for a query that the core rejects anyway."""
    if sizes is not None:
        return max(1, sizes[3]) ** -0.5
    unsized = hasattr(query, "__dlpack__") and not hasattr(type(query), "shape")
    return None if unsized else 1.0


_NO_MEMORY = ("allocate memory", "out of memory", "size calculation overflowed")


def new_tensors(
    like: Tensor, *wanted: tuple[tuple[int, ...], str | None, int | None]
) -> list[Tensor]:
    """Tensors with the library and the device of `like`.

    Each of `wanted` is a shape, a dtype (None: that of `like`) and a number that fills the tensor
    (None: it is not initialized). On mps, which has no float64, float32 takes its place.
    """
    made = []
    for shape, dtype, fill in wanted:
        if isinstance(like, np.ndarray):
            kind = dtype or like.dtype
            made.append(np.empty(shape, kind) if fill is None else np.full(shape, fill, kind))
            continue
        if not hasattr(like, "new_empty"):
            raise TypeError(
                "outputs can be made for torch tensors and NumPy arrays, not for "
                f"{type(like).__name__}: pass the output tensors yourself"
            )
        try:
            if dtype == "float64" and like.device.type == "mps":
                dtype = "float32"
            kind = {} if dtype is None else {"dtype": getattr(sys.modules["torch"], dtype)}
            if fill is None:
                made.append(like.new_empty(shape, **kind))
            else:
                made.append(like.new_full(shape, fill, **kind))
        except RuntimeError as error:  # torch has no exception class for this
            if not any(words in str(error) for words in _NO_MEMORY):
                raise
            raise MemoryError(f"no memory for an output of shape {list(shape)}") from error
    return made


_OUTPUTS = {
    "out": ("BQHD", None),
    "scores": ("BGQ", "float32"),
    "sums": ("BHQ", "float32"),
    "evicted_at": ("BGQ", "int32"),
}
"""Shape and dtype of each output of an operation. None is the dtype of the query."""


def fill_in(
    query: Tensor, keys: Tensor, scale: float | None, **outputs: Tensor | None
) -> tuple[Any, ...]:
    """Return the scale and the `outputs`, replacing None by the default scale and by new tensors.
    Outputs stay None for tensors that the core will reject."""
    sizes, key_sizes = get_4d_sizes(query), get_4d_sizes(keys)
    if scale is None:
        scale = default_scale(query, sizes)
    if sizes is not None and key_sizes is not None:
        size_of = dict(zip("BHQDG", (*sizes, key_sizes[1]), strict=True))
        wanted = {}
        for name, output in outputs.items():
            if output is None:
                letters, dtype = _OUTPUTS[name]
                wanted[name] = tuple(map(size_of.__getitem__, letters)), dtype, None
        outputs |= zip(wanted, new_tensors(query, *wanted.values()), strict=True)
    return scale, *outputs.values()


def needs_check(leader: Tensor) -> bool:
    """Whether `check_memory` is likely to find anything, for a decode step, of which it would be a
    noticeable part. `leader`: the call's first tensor, whose library the others usually share."""
    torch = sys.modules.get("torch")
    records = torch is not None and torch.is_grad_enabled()
    return records or isinstance(leader, np.ndarray)


def check_memory(slots: Any, rotary: Any = None, **tensors: Tensor) -> None:
    """Check the tensors of an operation, given by name, which reads only their memory.

    Args:
        slots, rotary: `h2o.slots.Slots` and `h2o.ops.Rotary`, or None. The core rejects slots of
            another type.

    Raises: BufferError for a tensor that requires grad, if torch records gradients, for one that
    torch has negated without changing its memory, and for a masked array.
    """
    if hasattr(slots, "_fields"):
        tensors |= zip(map("slots.{}".format, slots._fields), slots, strict=True)
    if rotary is not None:
        tensors |= {"rotary.table": rotary[0], "rotary.ranks": rotary[1]}
    torch = sys.modules.get("torch")
    records = torch is not None and torch.is_grad_enabled()
    for name, tensor in tensors.items():
        if records and getattr(tensor, "requires_grad", False):
            raise BufferError(
                f"{name}: requires grad, but h2o's operations are not differentiable; "
                "call them under torch.no_grad() or pass tensor.detach()"
            )
        if hasattr(tensor, "is_neg") and tensor.is_neg():
            raise BufferError(
                f"{name}: is a negative view (as x.conj().imag is), so its memory has the opposite "
                "sign; pass tensor.resolve_neg()"
            )
        if isinstance(tensor, np.ma.MaskedArray):
            raise BufferError(
                f"{name}: is a masked array, whose mask would be ignored; pass mask= for padding, "
                "and array.filled(0) or array.data"
            )
