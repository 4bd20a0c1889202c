"""Replacement for `_core` in a build without it: the torch backend for tensors of any library.

It checks the operands, shapes, dtypes, devices and policy of a call like the core. It does not
check for overlapping memory, nor the sizes stored in tensors (lengths, budgets, free slots).

Tensors of other libraries are read and written in place, through torch views of their memory. torch
is imported when an operation runs.

Shape letters as in `h2o.ops`.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
from typing import Any

import numpy as np

from h2o import packages
from h2o.arguments.plain_values import is_number
from h2o.kv_dtype import is_four_bit_key
from h2o.policy import check_policy
from h2o.slots import KINDS, MOST_TRANSFORMED, Kind, Slots

OPERATIONS = ("attend", "evict", "step", "simulate")

if os.environ.get("H2O_CPU"):
    raise ValueError(f"H2O_CPU={os.environ['H2O_CPU']}: no such level; {packages.without_core()}")


def _operand(shape: str, dtype: str = "", *, written: bool = False, optional: bool = False) -> Kind:
    return Kind(shape, written, optional, dtype)


OPERANDS: dict[str, Kind] = {
    "query": _operand("BHQD"),
    "keys": _operand("BGQD"),
    "values": _operand("BGQD", optional=True),
    "key": _operand("BGQD"),
    "value": _operand("BGQD", optional=True),
    "mask": _operand("BQ", optional=True, dtype="uint8"),
    "prompt": _operand("B", dtype="int32"),
    "budget": _operand("B2", dtype="int32"),
    "out": _operand("BQHD", written=True),
    "scores": _operand("BGQ", written=True, dtype="float32"),
    "evicted_at": _operand("BGQ", written=True, dtype="int32"),
    "table": _operand("P2F", optional=True, dtype="float32"),
    "ranks": _operand("ZGS", written=True, optional=True, dtype="int32"),
    "stored_keys": _operand("BGQD", optional=True, dtype="uint8"),
    "stored_values": _operand("BGQD", optional=True, dtype="uint8"),
    "offsets": _operand("BGD", optional=True, dtype="float16"),
    "smoothing": _operand("BGD", optional=True, dtype="float16"),
    "sink_logits": _operand("H", optional=True, dtype="float32"),
    "log_sums": _operand("BHQ", written=True, optional=True, dtype="float32"),
    "known_log_sums": _operand("BHQ", optional=True, dtype="float32"),
}
"""Operands by name. They must equal the rows of `csrc/<operation>.c`; a test compares them."""


@functools.cache
def parameters(operation: str) -> tuple[str, ...]:
    """Names of an operation's operands, in order."""
    from h2o.backends import torch_backend

    return tuple(inspect.signature(torch_backend.operation(operation)).parameters)


def info() -> dict[str, Any]:
    """Like `_core.info`. The number of threads is torch's, if torch has been imported."""
    torch = sys.modules.get("torch")
    return {
        "level": "none",
        "levels": [],
        "features": "",
        "threads": torch.get_num_threads() if torch is not None else 1,
        "thread_source": "torch",
        "version": packages.pure_version(),
    }


def call(operation: str, mode: str, /, *operands: Any) -> None:
    """Run or check an operation, like `_core.call` with mode "run" or "check".

    Raises: ValueError, TypeError and BufferError as documented in `h2o.ops`; ImportError if torch
    is missing.
    """
    from h2o.backends import torch_backend

    try:
        run = torch_backend.operation(operation)
    except ModuleNotFoundError as error:
        needed = f"torch, which is missing: {packages.install_command('hf')}"
        raise ImportError(f"{packages.without_core()}; torch operations need {needed}") from error
    names = parameters(operation)
    if len(operands) != len(names):
        raise TypeError(f"{operation}: takes {len(names)} arguments, got {len(operands)}")
    named = dict(zip(names, operands, strict=True))
    _Check(operation).operands(named)
    if mode == "run":
        run(*named.values())


class _Check:
    """Checks of one call. Collects its sizes by shape letter, its floating dtype and its device."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.sizes: dict[str, int] = {}
        self.floating = self.leader = ""
        self.device: Any = None
        self.has_starts = self.has_rows = False

    def operands(self, named: dict[str, Any]) -> None:
        """Check the operands, and replace tensors of other libraries by torch tensors."""
        check_policy(named["policy"])
        for name in ("scale", "softcap"):
            number = named.get(name, 0.0)
            if not is_number(number):
                raise TypeError(f"{name}: is {number!r}, wanted a number")
            if not math.isfinite(number) or (name == "softcap" and number < 0):
                raise ValueError(f"{name}: is {number}, wanted a finite number, a softcap from 0")
        stored = named.get("slots")
        if stored is not None and not isinstance(stored, Slots):
            raise TypeError(f"slots: is a {type(stored).__name__}, wanted Slots")
        self.has_starts = stored is not None and stored.starts is not None
        self.has_rows = stored is not None and stored.rows is not None
        evicts = self.operation == "evict"  # writes only to slots
        for name, kind in OPERANDS.items():
            if name in named:
                kind = kind._replace(written=False) if evicts else kind
                named[name] = self.tensor(_LABELS.get(name, name), named[name], kind)
        if self.operation == "simulate":
            stored_rows = named["stored_keys"], named["stored_values"]
            self.check_offsets("", named["offsets"], *stored_rows, "stored_keys")
            self.check_smoothing("", named, named["stored_keys"], "stored_keys")
            return
        if stored is None and self.operation != "attend":
            raise TypeError("slots: is None, wanted Slots")
        if stored is not None:
            named["slots"] = self.slots(stored, named["policy"])

    def slots(self, slots: Slots, policy: Any) -> Slots:
        """Checked slots, as torch tensors. `attend` does not need all fields."""
        attends = self.operation == "attend"
        tensors = {}
        for name, kind in KINDS.items():
            kind = kind._replace(optional=attends or kind.optional)
            tensors[name] = self.tensor(f"slots.{name}", getattr(slots, name), kind)
        weighted = policy.value_weighted
        if not attends and (tensors["norms"] is not None) != weighted:
            presence = "None" if weighted else "given"
            raise ValueError(f"slots.norms: is {presence}, but value_weighted is {weighted}")
        self.check_offsets("slots.", tensors["offsets"], tensors["keys"], tensors["values"])
        self.check_smoothing("slots.", tensors, tensors["keys"], "keys")
        return Slots(**tensors)

    def shape_of(self, kind: Kind, axes: int) -> str:
        """The shape letters that an operand with `axes` axes must have in this call."""
        shape = kind.shape.replace("GS", "T") if self.has_starts else kind.shape
        shape = shape.replace("Q", "1") if self.operation == "step" else shape
        if shape in ("B2", "Z2") and axes == 3:  # budgets by head
            shape = f"{shape[0]}G2"
        shape = "Z+" if (shape, axes) == ("+", 2) else shape
        return shape if self.has_rows else shape.replace("Z", "B")

    def tensor(self, name: str, tensor: Any, needs: Kind) -> Any:
        """A checked operand, as a torch tensor."""
        shape, written = self.shape_of(needs, len(getattr(tensor, "shape", ()))), needs.written
        if tensor is None:
            if needs.optional:
                return None
            raise TypeError(f"{name}: is None, wanted a tensor {self.letters(shape)}")
        tensor = _as_torch(name, tensor, written)
        if self.device is None:
            self.device, self.leader = tensor.device, name
        elif tensor.device != self.device:
            raise ValueError(f"{name}: is on {tensor.device}, but {self.leader} on {self.device}")
        kept = name.startswith(("slots.", "stored_"))
        kind = str(tensor.dtype).removeprefix("torch.")
        self.check_dtype(name, kind, needs.dtype, kept)
        self.check_shape(name, tensor, shape, bytes_too=kept and kind == "uint8")
        axes = zip(tensor.shape, tensor.stride(), strict=True)
        if written and any(n > 1 and not step for n, step in axes):
            raise ValueError(f"{name}: is written, so its elements must not share memory")
        return tensor

    def check_dtype(self, name: str, kind: str, wanted: str, kept: bool) -> None:
        if wanted == "":
            if kind == "uint8" and kept:
                return
            if kind not in ("float32", "float16", "bfloat16"):
                raise TypeError(f"{name}: has dtype {kind}, wanted float32, float16 or bfloat16")
            self.floating = self.floating or kind
            wanted = self.floating
        served = {wanted, "bool"} if wanted == "uint8" else {wanted}
        if wanted == "float64" and self.device.type != "cpu":
            served.add("float32")  # not every device has float64
        if kind not in served:
            raise TypeError(f"{name}: has dtype {kind}, wanted {wanted}")

    def check_shape(self, name: str, tensor: Any, shape: str, bytes_too: bool) -> None:
        letters = shape[:-1] if bytes_too else shape  # quantized rows do not have length D
        right = tensor.ndim == len(shape) and min(tensor.shape, default=0) >= 1
        for letter, size in zip(letters, tensor.shape, strict=False):
            if letter == "+":
                wanted = self.sizes["G"] + 1
            else:
                wanted = int(letter) if letter.isdigit() else self.sizes.get(letter, size)
            right = right and size == wanted
        if not right:
            raise ValueError(
                f"{name}: has shape {list(tensor.shape)}, wanted {self.letters(shape)}"
            )
        new = {x: n for x, n in zip(letters, tensor.shape, strict=False) if x.isalpha()}
        self.sizes |= new
        if "G" in new and self.sizes.get("H", 0) % self.sizes["G"]:
            heads = f"{self.sizes['H']} heads, no multiple of the {self.sizes['G']} of {name}"
            raise ValueError(f"{self.leader}: has {heads}")

    def check_offsets(
        self, prefix: str, offsets: Any, keys: Any, values: Any, name: str = "keys"
    ) -> None:
        """Raise ValueError for offsets of keys that are not quantized, or are the values too, or
        are too long."""
        if offsets is None:
            return
        if values is None or str(keys.dtype) != "torch.uint8":
            reason = "is not quantized" if values is not None else "has no values beside it"
            raise ValueError(f"{prefix}offsets: is given, but {prefix}{name} {reason}")
        if (D := self.sizes["D"]) > MOST_TRANSFORMED:
            reason = f"rows have {D} elements, wanted at most {MOST_TRANSFORMED}"
            raise ValueError(f"{prefix}offsets: is given, but {reason}")

    def check_smoothing(self, prefix: str, given: dict[str, Any], keys: Any, name: str) -> None:
        """Raise ValueError for smoothing of keys that do not have four bits, or without offsets."""
        if given["smoothing"] is None:
            return
        if given["offsets"] is None:
            raise ValueError(f"{prefix}smoothing: is given, but {prefix}offsets is None")
        if not is_four_bit_key(keys.shape[-1], self.sizes["D"]):
            reason = f"{prefix}{name} does not have four bits"
            raise ValueError(f"{prefix}smoothing: is given, but {reason}")

    def letters(self, shape: str) -> str:
        """A shape and the known sizes of its letters, such as "[B, G, Q, D] with B = 2"."""
        names = ["G + 1" if x == "+" else x for x in shape]
        known = ", ".join(f"{x} = {self.sizes[x]}" for x in shape if x in self.sizes)
        return f"[{', '.join(names)}]" + (f" with {known}" if known else "")


_LABELS = {"table": "rotary.table", "ranks": "rotary.ranks"}
"""Names for errors, of operands that `h2o.ops` calls differently."""


def _as_torch(name: str, tensor: Any, written: bool) -> Any:
    """A torch tensor on the same memory. An input that torch cannot view is copied."""
    import torch

    if isinstance(tensor, torch.Tensor):
        return tensor
    try:
        if isinstance(tensor, np.ndarray):
            if tensor.flags.writeable and min(tensor.strides, default=0) >= 0:
                return torch.from_numpy(tensor)
            if written:
                raise ValueError(f"{name}: is written, but is read-only or has negative strides")
            return torch.from_numpy(tensor.copy())
        if hasattr(tensor, "__dlpack__"):
            return torch.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError) as error:
        raise type(error)(f"{name}: {error}") from error
    raise TypeError(
        f"{name}: a {type(tensor).__name__} is not a tensor; wanted a torch tensor, a NumPy array "
        "or another object with __dlpack__"
    )
