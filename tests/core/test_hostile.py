"""Misleading memory: overlaps, odd strides, impossible sizes, broken producers.

Each case must raise an exception, and must not read or write memory outside the tensors. The
sanitizers check the latter (`make asan`).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from h2o import ops
from tests.core import calls
from tests.core.calls import EVERY_TENSOR, EVERY_WRITTEN, NAMES, make
from tests.core.producers import Producer, Table

# ---- Layouts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "tensor"), EVERY_WRITTEN)
def test_written_tensors_have_elements_of_their_own(name, tensor, refused):
    call = make(name)
    array = call.get(tensor)
    for axis, size in enumerate(array.shape):
        if size == 1:
            continue
        backwards = np.flip(np.flip(array, axis).copy(), axis)
        repeated = np.broadcast_to(array.take([0], axis), array.shape)
        repeated.flags.writeable = True
        # A window that slides by one element. Neighboring rows share all elements except their
        # ends.
        line = np.zeros(array.size, array.dtype)
        sliding = as_strided(line, array.shape, [array.itemsize] * array.ndim)
        for wrong in (backwards, repeated) + ((sliding,) if array.ndim > 1 else ()):
            refused(call.put(tensor, wrong), ValueError, f"^{tensor}: is written, so its strides")


@pytest.mark.parametrize(("name", "tensor"), EVERY_WRITTEN)
def test_outputs_in_a_larger_tensor(name, tensor):
    """An output may have gaps between its elements, and the gaps are not written."""
    call, plain = make(name), make(name)
    plain.run()
    array = call.get(tensor)
    rubbish = np.full(
        [size + 2 for size in array.shape[:-1]] + [array.shape[-1] + 3], 77, array.dtype
    )
    inner = rubbish[tuple(slice(1, size + 1) for size in array.shape)]
    inner[...] = array
    call.put(tensor, inner).run()
    assert inner.tobytes() == plain.get(tensor).tobytes()
    inner[...] = 77
    assert (rubbish == 77).all()


DENSE = [f"slots.{field}" for field in ("keys", "values", "scores", "positions", "norms")]


@pytest.mark.parametrize(("name", "tensor"), [pair for pair in EVERY_TENSOR if pair[1] in DENSE])
def test_slots_are_dense(name, tensor, refused):
    call = make(name)
    array = call.get(tensor)
    wide = np.repeat(array, 2, axis=-1)[..., ::2]
    refused(call.put(tensor, wide), ValueError, f"^{tensor}: the stride of the last dimension is 2")


@pytest.mark.parametrize(("name", "written"), EVERY_WRITTEN)
def test_no_written_tensor_overlaps_another(name, written, refused):
    for other in (tensor for other_name, tensor in EVERY_TENSOR if other_name == name):
        if other != written:
            overlaps(name, written, other, refused)


def overlaps(name, written, other, refused):
    """A call whose tensors share memory must write nothing."""
    call = make(name)
    a, b = call.get(written), call.get(other)
    size = 8 * (a.nbytes + b.nbytes)
    memory = np.zeros(size, np.uint8)

    def place(array: np.ndarray, start: int) -> np.ndarray:
        copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy

    text = f"^({written}|{other}): is written and shares memory with ({written}|{other})$"
    wide = max(a.itemsize, b.itemsize)
    last = (a.nbytes - 1) // wide * wide
    for start in {0, last}:  # the same first byte; the last element of a on the first of b
        spoilt = call.put(written, place(a, 0)).put(other, place(b, start))
        before = memory.copy()
        with contextlib.suppress(ValueError):  # b's values may make a invalid, which raises as well
            spoilt.run()
            pytest.fail("no exception")
        assert (memory == before).all()
    zeroed = {
        "slots.seen_tokens",
        "slots.budget",
        "slots.positions",
        "slots.next_slot",
        "prompt",
        "budget",
    }
    if not {written, other} & zeroed:
        refused(spoilt, ValueError, text)
    behind = -(-a.nbytes // b.itemsize) * b.itemsize
    call.put(written, place(a, 0)).put(other, place(b, behind)).run()


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_given_twice(name, refused):
    call = make(name)
    for a, b in itertools.permutations(call.tensors(), 2):
        x, y = call.get(a), call.get(b)
        if (
            x.shape == y.shape
            and x.dtype == y.dtype
            and calls.used(name, a)
            and calls.used(name, b)
        ):
            spoilt = call.put(a, y)
            if a in call.written or b in call.written:
                refused(spoilt, ValueError, "is written and shares memory with")
            else:
                spoilt.run()


# ---- Sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_sizes_beyond_all_memory(name, tensor, refused):
    """Broadcasting makes tensors of these sizes from a single element."""
    call = make(name)
    array = call.get(tensor)
    for size, axis in itertools.product([2**31, 2**40, 2**59], range(array.ndim)):
        shape = list(array.shape)
        shape[axis] = size
        one = np.ones((1,) * array.ndim, array.dtype)
        if array.itemsize * np.prod(shape, dtype=object) < 2**63:
            refused(call.put(tensor, np.broadcast_to(one, shape)), ValueError, "^[a-z._]+: has ")


@pytest.mark.parametrize("name", NAMES)
def test_all_sizes_huge(name, refused):
    """Every size is 2^31 - 1, so that all tensors agree and products exceed 64 bits."""
    call = make(name)
    for tensor in call.tensors():
        array = call.get(tensor)
        fixed = {2} if tensor.endswith("budget") else set()
        if name.startswith("step"):
            fixed |= {1}
        shape = [size if size in fixed else 2**31 - 1 for size in array.shape]
        # NumPy does not allow such an array, but DLPack does.
        fields = {"strides": (ctypes.c_int64 * len(shape))(*[0] * len(shape))}
        fields["shape"] = (ctypes.c_int64 * len(shape))(*shape)
        call = call.put(tensor, Producer(array, **fields))
    refused(call, ValueError, "^(query|keys): shape .* is larger than any memory$")


@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_strides_that_leave_all_memory(name, tensor, refused):
    call = make(name)
    array = call.get(tensor)
    wrong = [2**62, -(2**62), 2**63 - 1, -(2**63)]
    for stride, (axis, size) in itertools.product(wrong, enumerate(array.shape)):
        strides = [s // array.itemsize for s in array.strides]
        strides[axis] = stride
        fields = {"strides": (ctypes.c_int64 * array.ndim)(*strides)}
        if size > 1 and abs(stride) * array.itemsize >= 2**63 - 1:
            spoilt = call.put(tensor, Producer(array, **fields))
            refused(spoilt, ValueError, f"^{tensor}: (shape .* is larger than any memory|is wri)")


def test_a_stride_that_is_never_taken_does_not_matter():
    call = make("attend").put("sink_logits", None)  # the only tensor without a batch dimension
    array = call.get("query")[:1]
    strides = [2**62, *(s // array.itemsize for s in array.strides[1:])]
    odd = Producer(array, strides=(ctypes.c_int64 * 4)(*strides))
    for tensor in call.tensors():
        call = call.put(tensor, call.get(tensor)[:1])
    call.run()
    wanted = call.get("out").copy()
    call.get("slots.scores")[...] = calls.slots().scores[:1]
    call.put("query", odd).run()
    assert (call.get("out") == wanted).all()


# ---- Producers ---------------------------------------------------------------------------------


DEVICES = {(2, 0): "CUDA device 0", (2, 3): "CUDA device 3", (99, 0): "type 99", (-1, 0): "type -1"}
DEVICES_AND_MORE = {**DEVICES, (1, 1): "CPU device 1"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("device", DEVICES)
def test_devices_without_kernels(name, device, refused):
    """A call on an unknown device is checked like any other before it is rejected."""
    call = make(name)
    producers = {}
    for tensor in call.tensors():
        array = call.get(tensor)
        producers[tensor] = Producer(array, device_type=device[0], device_id=device[1])
        call = call.put(tensor, producers[tensor])
    text = f"^(query|keys): is on .*{DEVICES[device]}, for which this build"
    refused(call, RuntimeError, text)
    # Each tensor was examined and released once.
    once = {tensor: int(calls.used(name, tensor)) for tensor in producers}
    assert {tensor: len(producer.capsules) for tensor, producer in producers.items()} == once
    assert {tensor: producer.deleted for tensor, producer in producers.items()} == once
    refused(call.put("decay", 2.0), ValueError, "^decay: is 2")


@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_devices_that_differ(name, tensor, refused):
    call = make(name)
    for (kind, number), device in DEVICES_AND_MORE.items():
        producer = Producer(call.get(tensor), device_type=kind, device_id=number)
        text = f"is on (CPU device 0, but .* on .*{device}|.*{device}, but .* on CPU device 0)$"
        refused(call.put(tensor, producer), ValueError, text)
        assert producer.deleted == 1


WRONG = {
    "foreign version": (
        {"version": (2, 0)},
        BufferError,
        "DLPack version 2.0, h2o supports version 1",
    ),
    "no memory": ({"data": None}, BufferError, "has no memory"),
    "misaligned": ({"byte_offset": 1}, BufferError, "not aligned"),
    "no shape": ({"shape": None}, BufferError, "has an invalid DLPack shape"),
    "negative rank": ({"ndim": -1}, BufferError, "has an invalid DLPack shape"),
    "rank of 2 billion": ({"ndim": 2**31 - 1}, ValueError, "has 2147483647 dimensions"),
    "vectors": ({"lanes": 4}, TypeError, "dtype"),
    "unknown dtype": ({"code": 17}, TypeError, "dtype"),
    "odd bits": ({"bits": 4}, TypeError, "dtype"),
    "wrong name": ({"name": b"dltensors"}, BufferError, 'a capsule named "dltensors"'),
    "used name": ({"name": b"used_dltensor_versioned"}, BufferError, "has been used before"),
    "old used name": ({"name": b"used_dltensor"}, BufferError, "has been used before"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("name", ["attend", "evict", "step weighted", "simulate"])
def test_wrong_producers(name, case, refused):
    fields, error, text = WRONG[case]
    call = make(name)
    for tensor in call.tensors():
        array = call.get(tensor)
        if not calls.used(name, tensor) or (case == "misaligned" and array.itemsize == 1):
            continue
        producer = Producer(array, **fields)
        refused(call.put(tensor, producer), error, f"^{tensor}: .*{text}")
        producer.capsules.clear()
        # The core must delete each capsule once. A capsule with a used name belongs to neither the
        # core nor its producer.
        assert producer.deleted == (0 if "used" in case else 1)
        if case == "foreign version":
            assert producer.capsules == []


def test_negative_sizes(refused):
    call = make("attend")
    for size in (-1, -(2**63)):
        array = call.get("query")
        shape = (ctypes.c_int64 * 4)(*[*array.shape[:3], size])
        refused(call.put("query", Producer(array, shape=shape)), ValueError, "^query: has shape")


class Raises:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __dlpack__(self, **keywords):
        raise self.error


@pytest.mark.parametrize("tensor", make("step weighted").tensors())
def test_producers_that_raise(tensor, refused):
    call = make("step weighted")
    for error in (ValueError("first\nsecond"), TypeError("first"), BufferError("first")):
        spoilt = call.put(tensor, Raises(error))
        refused(spoilt, BufferError, f"^{tensor}: this Raises cannot share its memory: first$")
        with pytest.raises(BufferError) as raised:
            spoilt.run()
        assert raised.value.__cause__ is error
    for error in (MemoryError("first"), KeyboardInterrupt("first")):
        refused(call.put(tensor, Raises(error)), type(error), "^first$")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


def test_exceptions_without_words(refused):
    text = "^query: this Raises cannot share its memory: $"
    refused(make("step").put("query", Raises(Unspeakable())), BufferError, text)


class Gives:
    def __init__(self, given: object) -> None:
        self.given = given

    def __dlpack__(self, **keywords):
        return self.given


@pytest.mark.parametrize("given", [None, 5, "dltensor", np.zeros(3)])
def test_producers_that_give_no_capsule(given, refused):
    text = "^query: __dlpack__ returned a .*, wanted a DLPack capsule"
    refused(make("step").put("query", Gives(given)), TypeError, text)


def test_a_capsule_is_used_once(refused):
    call = make("step")
    producer = Producer(call.get("query"))
    gives = Gives(producer.__dlpack__())
    call.put("query", gives).run()
    assert producer.deleted == 1
    refused(call.put("query", gives), BufferError, "^query: .* capsule that has been used before")
    refused(call.put("query", gives).put("key", gives), BufferError, "^query: ")
    assert producer.deleted == 1


class LiesAboutItself:
    @property
    def __dlpack__(self):
        raise AttributeError("no, after all")

    @property
    def shape(self):
        raise ValueError("no shape either")


def test_attributes_that_raise(refused):
    refused(
        make("step").put("query", LiesAboutItself()), TypeError, "^query: a LiesAbout.*not a tensor"
    )


def test_what_came_before_a_failure_is_given_back(refused):
    """When the last argument fails, the deleters of all other arguments run exactly once."""
    call = make("step weighted")
    producers = []
    for tensor in call.tensors():
        producers.append(Producer(call.get(tensor)))
        call = call.put(tensor, producers[-1])
    refused(call.put("slots.norms", Raises(ValueError("no"))), BufferError, "^slots.norms: ")
    refused(call.put("scale", float("nan")), ValueError, "^scale: ")
    before = [producer.deleted for producer in producers]
    asked = [len(producer.capsules) for producer in producers]
    assert before == asked
    call.run()
    assert [producer.deleted for producer in producers] == [n + 1 for n in asked]


def test_deleters_may_run_python_while_an_exception_is_on_its_way(refused):
    call = make("step")

    def disturb() -> None:
        with contextlib.suppress(KeyError):
            raise KeyError("in a deleter")

    producer = Producer(call.get("query"), on_delete=disturb, device_type=2)
    refused(call.put("query", producer), ValueError, "but query on CUDA device 0$")
    assert producer.deleted == 1


def test_a_producer_cannot_take_away_what_others_showed():
    """An array's memory is examined after all Python code has run, so no producer can free it in
    between."""
    call = make("step")
    victim = call.get("query").copy()
    plain = call.put("query", victim.copy())

    class Spoiler(Producer):
        def __dlpack__(self, **keywords):
            victim.resize((0,), refcheck=False)
            return super().__dlpack__(**keywords)

    spoiler = Spoiler(call.get("slots.evicted_score"))
    with pytest.raises(ValueError, match=r"^query: has shape \[0\], wanted \[B, H, 1, D\]"):
        call.put("query", victim).put("slots.evicted_score", spoiler).run()
    assert spoiler.deleted == 1
    plain.run()


def test_a_producer_that_calls_back():
    inner, call = make("step"), make("step")

    class Nested(Producer):
        def __dlpack__(self, **keywords):
            inner.run()
            return super().__dlpack__(**keywords)

    call.put("query", Nested(call.get("query"))).run()
    assert call.get("out").tobytes() == inner.get("out").tobytes()


@pytest.mark.parametrize(
    "fields", [{"data": None}, {"ndim": -1}, {"byte_offset": 2}, {"status": -1}]
)
def test_tables_that_fail(fields, refused):
    call = make("step")
    tensor = Table(call.get("query"), **fields).tensor()
    refused(call.put("query", tensor), BufferError, "^query: ")


# ---- Random state ------------------------------------------------------------------------------

ODD_FLOATS = [0.0, -0.0, 1.0, -1.0, np.nan, np.inf, -np.inf, 1e-45, 3e38, -3e38]
ODD_INTS = [0, 1, -1, 2, 3, 5, 6, 7, 100, 2**31 - 1, -(2**31)]


@given(data=st.data(), name=st.sampled_from(NAMES), dtype=st.sampled_from([np.float32, np.float16]))
def test_any_numbers_in_any_tensor(data, name, dtype):
    """Random numbers are rejected or used, and no access ever leaves the tensors."""
    call = make(name, dtype, seed=data.draw(st.integers(0, 9)))
    for tensor in data.draw(st.sets(st.sampled_from(call.tensors()), min_size=1)):
        array = call.get(tensor)
        odd = ODD_FLOATS if array.dtype.kind == "f" else ODD_INTS
        if array.dtype.kind == "b":
            odd = [False, True]
        chosen = data.draw(st.lists(st.sampled_from(odd), min_size=1, max_size=4))
        places = data.draw(st.lists(st.integers(0, array.size - 1), max_size=8))
        with np.errstate(over="ignore"):
            numbers = np.array(chosen).astype(array.dtype)
        if not places:
            array[...] = np.resize(numbers, array.shape)
        for i, place in enumerate(places):
            array.flat[place] = numbers[i % len(numbers)]
    with contextlib.suppress(ValueError):
        call.run()


@pytest.mark.parametrize("sinks", [0, 1, 50])
@pytest.mark.parametrize("position", [0, 5, 2**31 - 1])
@pytest.mark.parametrize("score", [1.0, np.nan])
def test_positions_that_repeat(position, score, sinks):
    """Keys that differ in nothing tie for the last slot. Only one of them may get it."""
    k, Q = 12 + sinks, 9
    keys = np.zeros((1, 1, Q, 8), np.float32)
    slots = ops.new_slots(keys, k, heavy=8, recent=4)
    slots.positions[...] = position
    slots.scores[...] = score
    slots.seen_tokens[...] = 100
    ops.evict(keys, keys, np.full((1, 1, Q), score, np.float32), slots, sinks=sinks)
    assert (slots.positions >= 0).sum() == k


@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.integers(1, 12),
    policy=st.sampled_from(["sum", "mean"]),
    weighted=st.booleans(),
)
def test_steps_over_nan_and_infinity(seed, steps, policy, weighted):
    """After any scores, the state is still one that the next step accepts."""
    rng = np.random.default_rng(seed)
    slots = calls.slots(norms=weighted)
    slots.budget[...] = [[2, 3], [1, 2]]
    for _ in range(steps):
        call = make("step", seed=int(rng.integers(1 << 30)))
        call = call.put("slots", slots).put("score_by", policy).put("value_weighted", weighted)
        call.get("query").flat[rng.integers(64)] = rng.choice(ODD_FLOATS)
        call.get("value").flat[rng.integers(32)] = rng.choice(ODD_FLOATS)
        slots.scores.flat[rng.integers(slots.scores.size)] = rng.choice(ODD_FLOATS)
        call.run()
        held = np.minimum(slots.seen_tokens, slots.budget.sum(1))
        assert ((slots.positions >= 0).sum(-1) == held[:, None]).all()
    ops.evict(
        *(np.zeros((calls.B, calls.G, 1, calls.D), np.float32) for _ in range(2)),
        np.zeros((calls.B, calls.G, 1), np.float32),
        slots,
        score_by=policy,
        value_weighted=weighted,
    )
