"""Objects that share a NumPy array's memory in every way that DLPack allows, and in wrong ways.

DLPack's structs are deliberately declared here a second time, with ctypes. The core's own
declarations are tested against these and against torch.
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

_KEPT: list[Any] = []
"""Everything that C code may still call. Like a real library, it stays alive until the process
ends."""


@atexit.register
def _return_capsules() -> None:
    """Free the capsules while Python can still run their destructors."""
    for kept in _KEPT:
        vars(kept).get("capsules", []).clear()


CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
CPU = (1, 0)


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


class ExchangeAPI(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocator", ctypes.c_void_p),
        ("managed_from", ctypes.c_void_p),
        ("managed_to", ctypes.c_void_p),
        ("tensor_from", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    )


DELETER = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
TENSOR_FROM = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))


def _python_api(name: str, result: Any, *arguments: Any) -> Any:
    """A function of Python's C API, with types of its own that no other code can change."""
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


capsule_new = _python_api(
    "PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)
# Takes an address, because the capsule may be about to be freed.
_is_valid = _python_api("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
_get_name = _python_api("PyCapsule_GetName", ctypes.c_char_p, ctypes.py_object)


def fill(tensor: DLTensor, array: np.ndarray, **fields: Any) -> list[Any]:
    """Describe `array` in `tensor`, then set `fields`. Returns the objects that must stay alive."""
    n = array.ndim
    shape = (ctypes.c_int64 * max(n, 1))(*array.shape)
    strides = (ctypes.c_int64 * max(n, 1))(*(s // array.itemsize for s in array.strides))
    tensor.data = array.ctypes.data
    tensor.device_type, tensor.device_id = CPU
    tensor.ndim = n
    tensor.code, tensor.bits, tensor.lanes = CODES[array.dtype.kind], 8 * array.itemsize, 1
    tensor.shape, tensor.strides, tensor.byte_offset = shape, strides, 0
    for name, value in fields.items():
        setattr(tensor, name, value)
    return [array, shape, strides]


class Producer:
    """An object with `__dlpack__` and no other protocol.

    `versioned`, `version`, `flags` and `name` describe the capsules, `fields` their tensor.
    `capsules` has those handed out, and `deleted` counts the calls of their deleter.
    """

    def __init__(
        self,
        array: np.ndarray,
        *,
        versioned: bool = True,
        version: tuple[int, int] = (1, 3),
        flags: int = 0,
        name: bytes | None = None,
        deleter: bool = True,
        knows_max_version: bool = True,
        on_delete: Callable[[], None] | None = None,
        **fields: Any,
    ) -> None:
        self.capsules: list[Any] = []
        self.deleted = 0
        self.knows_max_version = knows_max_version
        self.calls: list[dict[str, Any]] = []
        self._versioned = versioned
        self._name = name or (b"dltensor_versioned" if versioned else b"dltensor")
        self._managed = (DLManagedTensorVersioned if versioned else DLManagedTensor)()
        self._alive = fill(self._managed.tensor, array, **fields)
        if versioned:
            self._managed.major, self._managed.minor = version
            self._managed.flags = flags

        def delete(_address: int) -> None:
            self.deleted += 1
            if on_delete is not None:
                on_delete()

        def destroy(capsule: int) -> None:  # the producer frees what no consumer took
            if not self._name.startswith(b"used_") and _is_valid(capsule, self._name):
                delete(0)

        self._delete = DELETER(delete)
        self._destroy = DELETER(destroy)
        _KEPT.append(self)
        if deleter:
            self._managed.deleter = ctypes.cast(self._delete, ctypes.c_void_p)

    def __dlpack__(self, **keywords: Any) -> Any:
        self.calls.append(keywords)
        if keywords and not self.knows_max_version:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        destructor = ctypes.cast(self._destroy, ctypes.c_void_p)
        capsule = capsule_new(ctypes.addressof(self._managed), self._name, destructor)
        self.capsules.append(capsule)
        return capsule

    def names(self) -> list[str]:
        """Current names of the capsules."""
        return [_get_name(capsule).decode() for capsule in self.capsules]


class Table:
    """A DLPack exchange table of a given version. Its function describes `array`."""

    def __init__(
        self,
        array: np.ndarray,
        *,
        version: tuple[int, int] = (1, 3),
        previous: Table | None = None,
        status: int = 0,
        null: bool = False,
        **fields: Any,
    ) -> None:
        self.calls = 0
        self._alive: list[Any] = [previous]

        def tensor_from(_object: Any, tensor: Any) -> int:
            self.calls += 1
            self._alive.append(fill(tensor.contents, array, **fields))
            return status

        self._function = TENSOR_FROM(tensor_from)
        _KEPT.append(self)
        self.api = ExchangeAPI()
        self.api.major, self.api.minor = version
        if previous is not None:
            self.api.previous = ctypes.addressof(previous.api)
        if not null:
            self.api.tensor_from = ctypes.cast(self._function, ctypes.c_void_p)

    def capsule(self, name: bytes = b"dlpack_exchange_api") -> Any:
        return capsule_new(ctypes.addressof(self.api), name, None)

    def tensor(self, **attributes: Any) -> Any:
        """An object of a new type that has this table."""
        members = {"__dlpack_c_exchange_api__": self.capsule(), **attributes}
        return type("Tensor", (), members)()
