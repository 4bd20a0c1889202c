"""All ways to pass a tensor give the same answer from the same memory, and release the memory."""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import pytest

from h2o import _core
from tests.core import calls
from tests.core.calls import EVERY_TENSOR, EVERY_WRITTEN, NAMES, Call, make
from tests.core.producers import Producer, Table, capsule_new

OPERATIONS = ["attend", "evict weighted", "step weighted", "simulate"]
DENSE = ("rotary.table", "slots.keys", "slots.values", "slots.positions", "slots.rows")
STRIDED = [pair for pair in EVERY_TENSOR if pair not in EVERY_WRITTEN and pair[1] not in DENSE]
"""Inputs that may have any strides."""


def answer(call: Call) -> dict[str, bytes]:
    """Run the call and return the bytes of the tensors that it writes."""
    call.run()
    return {tensor: call.get(tensor).tobytes() for tensor in call.written}


def behind(call: Call, wrap) -> tuple[Call, dict]:
    """The call with each tensor wrapped, and the wrappers by tensor."""
    wrapped = {tensor: wrap(call.get(tensor)) for tensor in call.tensors()}
    for tensor, wrapper in wrapped.items():
        call = call.put(tensor, wrapper)
    return call, wrapped


# ---- Routes ------------------------------------------------------------------------------------

ASKED = {"max_version": (1, 3)}
PRODUCERS = {
    "versioned": ({}, [ASKED], "used_dltensor_versioned"),
    "a later minor version": ({"version": (1, 99)}, [ASKED], "used_dltensor_versioned"),
    "unversioned": ({"versioned": False}, [ASKED], "used_dltensor"),
    "from before versions": (
        {"versioned": False, "knows_max_version": False},
        [ASKED, {}],
        "used_dltensor",
    ),
    "without deleter": ({"deleter": False}, [ASKED], "used_dltensor_versioned"),
}


@pytest.mark.parametrize("case", PRODUCERS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_dunder(name, case):
    fields, asked, used = PRODUCERS[case]
    wanted = answer(make(name))
    plain = make(name)
    call, producers = behind(plain, lambda array: Producer(array, **fields))
    call.run()
    assert {tensor: plain.get(tensor).tobytes() for tensor in plain.written} == wanted
    for tensor, producer in producers.items():
        if calls.used(name, tensor):
            assert producer.calls == asked
            assert producer.names() == [used]
            assert producer.deleted == (case != "without deleter")
            producer.capsules.clear()  # freeing the capsule must not call the deleter again
            assert producer.deleted == (case != "without deleter")
        else:
            assert producer.calls == []


@pytest.mark.parametrize("name", OPERATIONS)
def test_table(name):
    wanted = answer(make(name))
    plain = make(name)
    call, tables = behind(plain, Table)
    for tensor, table in tables.items():
        call = call.put(tensor, table.tensor())
    call.run()
    assert {tensor: plain.get(tensor).tobytes() for tensor in plain.written} == wanted
    assert all(table.calls == calls.used(name, tensor) for tensor, table in tables.items())


def test_tables_of_several_versions():
    """The newest table of the known major version is used, wherever it is in the list."""
    wanted = answer(make("step"))
    call = make("step")
    array = call.get("query")
    old = Table(array, version=(1, 0))
    newer = Table(
        np.zeros(1), version=(3, 0), previous=Table(np.zeros(1), version=(2, 7), previous=old)
    )
    assert answer(call.put("query", newer.tensor())) == wanted
    assert old.calls == 1
    assert newer.calls == 0


def without_table(array: np.ndarray) -> dict:
    unusable = Table(array, null=True), Table(array, version=(2, 0))
    misnamed = Table(array).capsule(b"dlpack_exchange")
    return {
        "no function": unusable[0].capsule(),
        "foreign version": unusable[1].capsule(),
        "misnamed": misnamed,
        "no capsule": 5,
        "none": None,
    }


@pytest.mark.parametrize("case", without_table(np.zeros(1)))
def test_an_unusable_table_is_passed_over(case):
    wanted = answer(make("step"))
    call = make("step")
    array = call.get("query")
    members = {"__dlpack_c_exchange_api__": without_table(array)[case]}
    producer = type("Both", (Producer,), members)(array)
    assert answer(call.put("query", producer)) == wanted
    assert producer.deleted == 1


def test_an_interrupt_while_a_table_is_looked_up_gets_through():
    class Meta(type):
        @property
        def __dlpack_c_exchange_api__(cls):
            raise KeyboardInterrupt

    call = make("step")
    producer = Meta("Interrupted", (Producer,), {})(call.get("query"))
    with pytest.raises(KeyboardInterrupt):
        call.put("query", producer).run()


def test_a_table_belongs_to_a_type():
    """A table on the object itself, not on its type, is ignored."""
    call = make("step")
    table, producer = Table(call.get("query")), Producer(call.get("query"))
    producer.__dlpack_c_exchange_api__ = table.capsule()
    call.put("query", producer).run()
    assert (table.calls, producer.deleted) == (0, 1)


def test_types_come_and_go():
    """A new type may get the address of a freed one. It must not get that type's table."""
    wanted = answer(make("step"))
    for _ in range(40):
        call = make("step")
        table = Table(call.get("query"))
        assert answer(call.put("query", table.tensor())) == wanted
        assert table.calls == 1


def test_subclasses_of_arrays(tmp_path):
    wanted = answer(make("simulate"))
    call = make("simulate")
    file = np.memmap(
        tmp_path / "query", call.get("query").dtype, "w+", shape=call.get("query").shape
    )
    file[...] = call.get("query")
    assert answer(call.put("query", file)) == wanted


# ---- What the memory looks like ----------------------------------------------------------------


def flipped(array: np.ndarray) -> np.ndarray:
    """An array with the same numbers, stored in reverse order."""
    return np.flip(np.flip(array).copy())


def transposed(array: np.ndarray) -> np.ndarray:
    return array.T.copy().T


def gapped(array: np.ndarray) -> np.ndarray:
    return np.repeat(array, 3, axis=-1)[..., 1::3]


@pytest.mark.parametrize(("name", "tensor"), STRIDED)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_inputs_of_any_strides(name, tensor, dtype):
    wanted = answer(make(name, dtype))
    for layout in (flipped, transposed, gapped):
        call = make(name, dtype)
        array = layout(call.get(tensor))
        assert answer(call.put(tensor, array)) == wanted
        call = make(name, dtype)
        assert answer(call.put(tensor, Producer(array))) == wanted


# A budget that repeats does not belong to the slots.
@pytest.mark.parametrize(
    ("name", "tensor"), [pair for pair in STRIDED if pair[1] != "slots.budget"]
)
def test_inputs_that_repeat(name, tensor):
    plain, call = make(name), make(name)
    array = call.get(tensor)
    for axis in range(array.ndim):
        repeated = np.broadcast_to(array.take([0], axis), array.shape)
        plain, call = make(name), make(name)
        wanted = answer(plain.put(tensor, repeated.copy()))
        assert answer(call.put(tensor, repeated)) == wanted


@pytest.mark.parametrize("name", NAMES)
def test_inputs_may_be_read_only(name):
    wanted = answer(make(name))
    call = make(name)
    for tensor in set(call.tensors()) - set(call.written):
        call.get(tensor).flags.writeable = False
    assert answer(call) == wanted
    for tensor in set(call.tensors()) - set(call.written):
        for flags in (1, 2, 3):  # read-only, a copy, both
            call = make(name)
            assert answer(call.put(tensor, Producer(call.get(tensor), flags=flags))) == wanted


@pytest.mark.parametrize(("name", "tensor"), EVERY_WRITTEN)
@pytest.mark.parametrize("flags", [1, 2, 3])
def test_outputs_may_be_neither_read_only_nor_copies(name, tensor, flags, refused):
    call = make(name)
    producer = Producer(call.get(tensor), flags=flags)
    refused(call.put(tensor, producer), ValueError, f"^{tensor}: .* read-only or a copy")
    assert producer.deleted == 1


@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_byte_offsets(name, tensor):
    wanted = answer(make(name))
    call = make(name)
    array = call.get(tensor)
    for offset in (array.itemsize, 7 * array.itemsize):
        call = make(name)
        array = call.get(tensor)
        producer = Producer(array, data=array.ctypes.data - offset, byte_offset=offset)
        call.put(tensor, producer).run()
        assert {tensor: call.get(tensor).tobytes() for tensor in call.written} == wanted


@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_strides_may_be_missing(name, tensor):
    wanted = answer(make(name))
    call = make(name)
    call.put(tensor, Producer(call.get(tensor), versioned=False, strides=None)).run()
    assert {tensor: call.get(tensor).tobytes() for tensor in call.written} == wanted


@pytest.mark.parametrize("name", NAMES)
def test_masks(name):
    """Masks of bool and uint8 are equivalent, and any byte except 0 marks a token."""
    call = make(name)
    mask = call.get("mask")
    mask[1, 0] = False
    answers = []
    for dtype, one in ((bool, 1), (np.uint8, 1), (np.uint8, 255), (np.uint8, 128)):
        again = make(name)
        answers.append(answer(again.put("mask", (mask * one).astype(dtype))))
        again = make(name)
        answers.append(answer(again.put("mask", Producer((mask * one).astype(dtype)))))
    assert all(got == answers[0] for got in answers)
    assert answers[0] != answer(make(name))


@pytest.mark.parametrize("name", NAMES)
def test_dtypes_that_have_two_names(name):
    """NumPy's longlong is int64 like long, but has another type number."""
    wanted = answer(make(name))
    call = make(name)
    for tensor in call.tensors():
        if call.get(tensor).dtype == np.int64:
            twin = call.get(tensor).astype(np.longlong)
            assert twin.dtype.num != call.get(tensor).dtype.num
            call = call.put(tensor, twin)
    assert answer(call) == wanted


def rounded(array: np.ndarray) -> np.ndarray:
    """float32 numbers that bfloat16 can represent exactly."""
    return (array.view(np.uint32) & 0xFFFF0000).view(np.float32)


def halves(array: np.ndarray) -> np.ndarray:
    """The bits of these numbers as bfloat16, in uint16, since NumPy has no bfloat16."""
    return (array.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("name", OPERATIONS)
def test_bfloat16(name):
    """NumPy has no bfloat16, so it comes through DLPack. The answer equals that of float32 up to
    rounding."""
    exact, call = make(name), make(name)
    patterns = {}
    for tensor in call.tensors():
        if call.get(tensor).ndim == 4:
            exact.get(tensor)[...] = rounded(call.get(tensor))
            patterns[tensor] = halves(call.get(tensor))
            call = call.put(tensor, Producer(patterns[tensor], code=4))
    exact.run()
    call.run()
    for tensor in call.written:
        got = call.get(tensor)
        if tensor in patterns:
            got = (patterns[tensor].astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(got, exact.get(tensor), rtol=2**-6, atol=2**-6)


def test_arrays_whose_strides_split_elements(refused):
    call = make("step")
    query = call.get("query")
    packed = np.zeros(query.shape, [("tag", np.uint8), ("number", np.float32)])
    packed["number"] = query
    refused(call.put("query", packed["number"]), BufferError, "^query: .*(stride|not aligned)")
    padded = np.zeros(query.shape, [("number", np.float32), ("tag", np.uint16)])
    aligned = np.zeros(query.size * 8, np.uint8)[: padded.nbytes].view(padded.dtype)
    text = "^query: a stride of 6 bytes is not a multiple of the element size 4"
    refused(call.put("query", aligned.reshape(query.shape)["number"]), BufferError, text)


def test_misaligned_arrays(refused):
    call = make("step")
    query = call.get("query")
    memory = np.zeros(query.nbytes + 8, np.uint8)
    odd = memory[1 : 1 + query.nbytes].view(query.dtype).reshape(query.shape)
    refused(call.put("query", odd), BufferError, "^query: memory at 0x[0-9a-f]+ is not aligned")


def test_what_has_no_shape_attribute():
    """With outputs and scale given, an object needs nothing except DLPack."""
    for name in NAMES:
        call, _ = behind(make(name), Producer)
        call.run()
    call = make("step")
    with pytest.raises(TypeError, match=r"^scale: is None, wanted a number"):
        call.put("query", Producer(call.get("query"))).put("scale", None).run()


def test_a_capsule_is_no_tensor(refused):
    call = make("step")
    capsule = capsule_new(ctypes.addressof(ctypes.c_int()), b"dltensor_versioned", None)
    refused(call.put("query", capsule), TypeError, "^query: a PyCapsule is not a tensor")


def test_producers_are_asked_for_interned_names():
    """For a library without a table, each tensor of each call is asked for both attributes. The
    names must be interned once, not created again for each lookup."""
    asked = []

    class Asked(type):
        def __getattribute__(cls, name):
            asked.append(name)
            return super().__getattribute__(name)

    class Recording(Producer, metaclass=Asked):
        def __getattribute__(self, name):
            asked.append(name)
            return super().__getattribute__(name)

    call, producers = behind(make("attend"), Recording)
    asked.clear()
    call.run()
    names = [name for name in asked if name.startswith("__dlpack")]
    assert names.count("__dlpack__") == names.count("__dlpack_c_exchange_api__") >= 3
    assert all(name is sys.intern(name) for name in names)
    keywords = [key for producer in producers.values() for call in producer.calls for key in call]
    assert keywords.count("max_version") >= 3
    assert all(key is sys.intern(key) for key in keywords)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("way", ["numpy", "dunder", "table"])
def test_no_reference_is_kept_or_lost(name, way):
    """References must not leak or get lost in calls that succeed, or in calls that fail early or
    late."""
    wrap = {"numpy": lambda x: x, "dunder": Producer, "table": lambda x: Table(x).tensor()}[way]
    call, tensors = behind(make(name), wrap)
    call.run()
    counts = [sys.getrefcount(tensor) for tensor in tensors.values()]
    logits = "decay" if name == "evict weighted" else "scale"
    for _ in range(20):
        for failing in (call.put(logits, float("nan")), call.put("mask", 5), call.put(logits, "")):
            with pytest.raises((ValueError, TypeError)):
                failing.run()
        for producer in tensors.values():
            if isinstance(producer, Producer):
                producer.capsules.clear()
                producer.calls.clear()
    del failing, producer
    assert [sys.getrefcount(tensor) for tensor in tensors.values()] == counts


def test_info_loses_no_memory():
    _core.info()
    before = sys.getallocatedblocks()
    for _ in range(200):
        _core.info()
    assert sys.getallocatedblocks() - before < 100  # each call creates the names of four levels


@pytest.mark.parametrize("name", ["attend", "evict", "step", "simulate"])
@pytest.mark.parametrize(("mode", "more"), [("measure", 1), ("launch", 2)])
def test_modes_want_their_own_arguments_too(name, mode, more):
    """The arguments of a mode follow those of the operation."""
    for count in range(more):
        with pytest.raises(TypeError, match=rf"^{name}: takes \d+ arguments, got {count}"):
            _core.call(name, mode, *[None] * count)
