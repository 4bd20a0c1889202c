"""Wrong arguments: the right exception names the argument, and no tensor is written."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

from h2o import _core, ops
from tests.core import calls
from tests.core.calls import EVERY_TENSOR, EVERY_WRITTEN, NAMES, make

OPTIONAL = {"mask", "slots.norms", "sink_logits"}
FLOATING = {"query", "keys", "values", "key", "value", "out", "slots.keys", "slots.values"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_calls_that_these_tests_spoil_are_right(name, dtype):
    call = make(name, dtype)
    before = call.snapshot()
    call.run()
    after = call.snapshot()
    changed = {tensor for tensor in before if before[tensor] != after[tensor]}
    assert changed
    assert changed <= set(call.written)


# ---- Tensors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_ranks(name, tensor, refused):
    call = make(name)
    array = call.get(tensor)
    for wrong in (array[0, ...], array[None], array[..., None, None, None, None]):
        refused(call.put(tensor, wrong), ValueError, f"^{tensor}: has ", "wanted ")


@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_sizes(name, tensor, refused):
    call = make(name)
    array = call.get(tensor)
    for axis in range(array.ndim):
        if (tensor, axis) in (("rotary.table", 0), ("rotary.table", 2)):
            continue  # any number of ranks and angles is valid
        for more in (1, 5):
            wrong = np.concatenate([array] + [array.take([0], axis)] * more, axis)
            spoilt = call.put(tensor, wrong)
            if axis < 2 and tensor == "query" and axis == 1:  # H + 1 heads are no multiple of G
                refused(spoilt, ValueError)
            else:
                refused(spoilt, ValueError, "has shape|not a multiple|shares memory")


@pytest.mark.parametrize("name", ["attend", "step", "simulate"])
def test_heads_that_do_not_divide(name, refused):
    call = make(name)
    for tensor, axis in (("query", 1), ("out", 2), ("sink_logits", 0)):
        call = call.put(tensor, np.repeat(call.get(tensor), 2, axis).take(range(5), axis))
    text = "^query: has 5 heads, which is not a multiple of the 2 key/value heads of keys?$"
    refused(call, ValueError, text)


@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_zero_sizes(name, tensor, refused):
    call = make(name)
    array = call.get(tensor)
    for axis in range(array.ndim):
        refused(call.put(tensor, array.take([], axis)), ValueError, "^[a-z_.]+: has shape ")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_at_all(name, refused):
    """Sizes that are all 0 agree with each other, but are still invalid."""
    call = make(name)
    for tensor in call.tensors():
        array = call.get(tensor)
        call = call.put(tensor, np.zeros([0] * array.ndim, array.dtype))
    refused(call, ValueError, "every size must lie in 1..2147483647")


@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_dtypes(name, tensor, refused):
    call = make(name)
    array = call.get(tensor)
    for dtype in "float64 float32 float16 int32 int64 int8 uint16 bool".split():
        spoilt = call.put(tensor, array.astype(dtype))
        if tensor in ("query", "keys") and dtype == "float16":  # then the others do not match
            refused(spoilt, TypeError, "has dtype float(32|16), wanted float(32|16) like ")
        elif array.dtype != dtype:
            refused(spoilt, TypeError, f"^{tensor}: ", "dtype ", ("wanted |only "))


@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_dtypes_that_nothing_takes(name, tensor, refused):
    call = make(name)
    array = call.get(tensor)
    swapped = array.astype(array.dtype.newbyteorder(">")) if array.dtype.itemsize > 1 else None
    bfloat16 = np.zeros(array.shape, [("bfloat16", np.uint16)])  # kind "V", like ml_dtypes'
    for wrong in (
        swapped,
        bfloat16,
        array.astype(np.complex64),
        array.astype(object),
        array.astype("S4"),
        array.astype("M8[s]") if array.dtype.kind == "i" else None,
        array.astype(np.longdouble),
    ):
        if wrong is not None:
            refused(call.put(tensor, wrong), TypeError, f"^{tensor}: NumPy arrays of dtype")


@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_what_is_no_tensor(name, tensor, refused):
    call = make(name)
    for wrong in ([1.0, 2.0], 3, "text", object(), np.float32(1), b"abc", {}):
        refused(call.put(tensor, wrong), TypeError, f"^{tensor}: .*is not a tensor")
    refused(call.put(tensor, np.ndarray), BufferError, f"^{tensor}: ")


@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_none(name, tensor, refused):
    call = make(name)
    made = {"out", "evicted_at"} | ({"scores"} if "evict" not in name else set())
    if tensor.startswith("rotary."):
        refused(call.put(tensor, None), ValueError, "^rotary.ranks: is .*, but rotary.table is ")
    elif tensor == "slots.rows":
        refused(call.put(tensor, None), ValueError, "^slots.keys: has shape")
    elif tensor in OPTIONAL | made or (name, tensor) == ("simulate", "values"):
        if tensor == "slots.norms":
            refused(call.put(tensor, None), ValueError, "^slots.norms: is None, but value_weighted")
        else:
            call.put(tensor, None).run()
    else:
        refused(call.put(tensor, None), TypeError, "^[a-z_.]+: is None, wanted ")


@pytest.mark.parametrize("name", ["attend", "step", "simulate"])
@pytest.mark.parametrize("tensor", ["query", "keys"])
def test_without_a_scale_the_tensor_is_named(name, tensor, refused):
    """The default scale is computed from the query's shape. An error in the query must not be
    reported as an error in the scale."""
    call = make(name).put("scale", None)
    tensor = "key" if (name, tensor) == ("step", "keys") else tensor
    array = call.get(tensor)
    refused(call.put(tensor, array[0]), ValueError, f"^{tensor}: has shape")
    refused(call.put(tensor, array[..., :0]), ValueError, f"^{tensor}: has shape")
    refused(call.put(tensor, None), TypeError, f"^{tensor}: is None")
    refused(call.put(tensor, [1.0]), TypeError, f"^{tensor}: a list is not a tensor")


@pytest.mark.parametrize("keys", [None, [1.0], np.zeros((2, 3, 4), np.float32)])
def test_keys_that_cannot_be_quantized(keys):
    operands = [make("simulate").get(x) for x in ("query", "values", "prompt", "budget")]
    with pytest.raises(ValueError, match=r"^keys: has shape .*, wanted \[B, G, any, D\]"):
        ops.simulate(operands[0], keys, *operands[1:], kv_dtype="int8")


def test_slots_take_whole_numbers():
    keys = np.zeros((1, 2, 3, 4), np.float32)
    assert ops.new_slots(keys, np.int64(5), np.int64(2)).keys.shape == (1, 2, 5, 4)
    for wrong in ({"capacity": 1.5}, {"capacity": [2, 1.5]}, {"heavy": 0.5}, {"recent": 0.5}):
        with pytest.raises(TypeError, match="expected an integer"):
            ops.new_slots(keys, **{"capacity": 3, **wrong})
    for name, wrong in itertools.product(("heavy", "recent"), (-1, 2**31)):
        with pytest.raises(
            ValueError, match=f"^{name} is .*; expected an integer from 0 to 2147483647"
        ):
            ops.new_slots(keys, **{"capacity": 3, name: wrong})


@pytest.mark.parametrize(("name", "tensor"), EVERY_WRITTEN)
def test_read_only_outputs(name, tensor, refused):
    call = make(name)
    array = call.get(tensor)
    array.flags.writeable = False
    refused(call, ValueError, f"^{tensor}: is written, but its memory is read-only")


@pytest.mark.parametrize("name", ["attend", "evict", "step"])
@pytest.mark.parametrize("wrong", [5, (), "slots", [None] * 9, (None,) * 8])
def test_slots_that_are_none(name, wrong, refused):
    refused(make(name).put("slots", wrong), TypeError, "^slots: is a .*, wanted h2o.ops.Slots")


@pytest.mark.parametrize("name", ["evict", "step"])
def test_norms_without_use(name, refused):
    call = make(name).put("slots.norms", np.zeros((calls.B, calls.G, calls.S), np.float32))
    refused(call, ValueError, "^slots.norms: is given, but value_weighted is false")


@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
def test_masked_arrays(name, tensor, refused):
    """The mask of a masked array must not be lost. Its memory alone looks like any array's."""
    call = make(name)
    masked = np.ma.masked_array(call.get(tensor))
    text = f"^{tensor}: is a masked array, .* pass mask="
    refused(call.put(tensor, masked), BufferError, text)


def test_objects_that_outputs_cannot_be_made_for():
    class Shaped:
        shape = (1, 1, 1, 1)

    with pytest.raises(TypeError, match="pass the output tensors yourself"):
        ops.step(Shaped(), Shaped(), Shaped(), calls.slots())
    with pytest.raises(ValueError, match=r"^keys: has shape \(2, 3\), wanted \[B, G, any, D\]"):
        ops.new_slots(np.zeros((2, 3)), 4)


# ---- Scalars -----------------------------------------------------------------------------------

NAN, INFINITE = float("nan"), float("inf")
SCALARS = [
    *[("scale", wrong, ValueError) for wrong in (NAN, INFINITE, -INFINITE, 1e39, 10**400)],
    *[("scale", wrong, TypeError) for wrong in ("1", [], 1j, np.ones(2))],
    *[("softcap", wrong, ValueError) for wrong in (NAN, INFINITE, -1.0, 1e39)],
    *[("softcap", wrong, TypeError) for wrong in ("1", None)],
    *[("decay", wrong, ValueError) for wrong in (NAN, INFINITE, -0.01, 1.01)],
    *[("decay", wrong, TypeError) for wrong in ("1", None)],
    *[("sinks", wrong, ValueError) for wrong in (-1, -(2**31), 2**31, 2**63, 10**30)],
    *[("sinks", wrong, TypeError) for wrong in (1.5, "1", None)],
    *[("score_by", wrong, ValueError) for wrong in ("", "summ", "SUM", "\N{SNOWMAN}", "\ud800")],
    *[("score_by", wrong, TypeError) for wrong in (None, b"sum", 0)],
    *[("value_weighted", wrong, TypeError) for wrong in ("false", None, [])],
    *[("value_weighted", wrong, ValueError) for wrong in (np.ones(2),)],
]


@pytest.mark.parametrize("name", ["attend", "evict", "step", "simulate"])
def test_scalars(name, refused):
    call = make(name)
    for scalar, wrong, error in SCALARS:
        if scalar in call.arguments:
            texts = (f"^{scalar}: is ",) if scalar != "value_weighted" else ()
            refused(call.put(scalar, wrong), error, *texts)


class Shouting:
    """A number whose conversion raises an unexpected exception."""

    def __float__(self):
        raise ZeroDivisionError("shout")

    def __index__(self):
        raise ZeroDivisionError("shout")


@pytest.mark.parametrize("scalar", ["scale", "softcap", "sinks", "decay"])
def test_exceptions_of_scalars_pass(scalar, refused):
    refused(make("step").put(scalar, Shouting()), ZeroDivisionError, "^shout$")


def test_numbers_of_numpy_are_numbers():
    call = make("step")
    for scalar in ("scale", "softcap", "decay"):
        call = call.put(scalar, np.float32(0.5))
    call.put("sinks", np.int64(0)).run()


@pytest.mark.parametrize("name", ["attend", "evict", "step", "simulate"])
def test_counts_of_arguments(name):
    for count in (0, 1, 8, 20):
        with pytest.raises(TypeError, match=rf"^{name}: takes \d+ arguments, got {count}"):
            _core.call(name, "run", *[None] * count)


def test_operations_modes_and_devices_have_names():
    with pytest.raises(TypeError, match=r"^call: takes an operation, a mode and operands"):
        _core.call("step")
    with pytest.raises(ValueError, match=r"^operation: there is no 'steps'"):
        _core.call("steps", "run")
    with pytest.raises(TypeError, match=r"^operation: there is no 3"):
        _core.call(3, "run")
    with pytest.raises(ValueError, match=r"^mode: there is no 'walk'"):
        _core.call("".join(["st", "ep"]), "walk")  # not interned, but still a valid name
    with pytest.raises(ValueError, match=r"^device: there is no 'abacus'"):
        _core.devices("abacus")
    with pytest.raises(TypeError, match=r"^device: there is no None"):
        _core.load(None, b"", 0)
    with pytest.raises(TypeError, match=r"^load: takes 3 arguments, got 2"):
        _core.load("cuda", b"")


@pytest.mark.parametrize("wrong", [None, (), (0, "sum", 1.0), [0, "sum", 1.0, False]])
def test_a_policy_is_a_record(wrong):
    call = make("evict")
    operands = [call.arguments[name] for name in ("keys", "values", "scores", "mask", "slots")]
    with pytest.raises(TypeError, match=r"^policy: is a .*, wanted h2o.ops.Policy"):
        _core.call("evict", "run", *operands, wrong)


@pytest.mark.parametrize("name", ["attend", "evict", "step", "simulate"])
def test_a_policy_comes_whole_or_by_its_fields(name):
    fields = ("sinks", "score_by", "decay", "value_weighted")
    call = make(name)
    policy = ops.Policy(**{field: call.arguments.pop(field) for field in fields if field in
                           call.arguments})  # fmt: skip
    with_record, parts = call.put("policy", policy), make(name)
    with_record.run()
    parts.run()
    assert with_record.snapshot() == parts.snapshot()
    with pytest.raises(TypeError, match="a policy or its fields, not both: decay"):
        with_record.put("decay", 1.0).run()
    for wrong, meant in (("scored_by", "score_by"), ("masks", "mask")):
        with pytest.raises(TypeError, match=rf"unknown parameter '{wrong}'.*mean {meant}\?"):
            make(name).put(wrong, None).run()


# ---- Numbers in tensors ------------------------------------------------------------------------

LAST = 2**31 - 1
STATES = [
    ("slots.seen_tokens", [-1, 3], r"^slots.seen_tokens\[0\]: is -1, wanted 0\.\."),
    (
        "slots.seen_tokens",
        [7, -(2**63)],
        r"^slots.seen_tokens\[1\]: is -9223372036854775808, wanted",
    ),
    ("slots.seen_tokens", [7, LAST], r"^slots.seen_tokens\[1\]: is 2147483647, wanted"),
    (
        "slots.seen_tokens",
        [7, 2**63 - 1],
        r"^slots.seen_tokens\[1\]: is 9223372036854775807, wanted",
    ),
    ("slots.budget", [[2, 3], [-1, 5]], r"^slots.budget\[1\]: is \(-1, 5\), wanted at least 0"),
    ("slots.budget", [[2, -(2**31)], [1, 5]], r"^slots.budget\[0\]: is \(2, -2147483648\)"),
    ("slots.budget", [[0, 0], [2, 3]], r"^slots.budget\[0\]: sinks \+ heavy \+ recent is 0"),
]
STEP_STATES = [
    ("slots.next_slot", [[2, -1], [3, 3]], r"^slots.next_slot\[0, 1\]: is -1, wanted 0..5"),
    ("slots.next_slot", [[2, 2], [4, 3]], r"^slots.next_slot\[1, 0\]: is 4, wanted 0..3"),
    (
        "slots.next_slot",
        [[2, 2], [3, LAST]],
        r"^slots.next_slot\[1, 1\]: is 2147483647, wanted 0..3",
    ),
]
EVICT_STATES = [
    ("slots.seen_tokens", [3, 3], r"^slots.positions\[0, 0\]: 5 of the slots are filled"),
    ("slots.positions", [[[0, 1, -1, 4, 5, 6]] * 2, [[0] * 6] * 2], r"\[1, 0\]: 6 of the slots"),
    ("slots.positions", [[[0, 1, -1, 4, 5, 6]] * 2, [[-1, -1, -1, 0, 1, 2]] * 2], r"\[1, 0\]: 3"),
]


@pytest.mark.parametrize(
    ("name", "tensor", "numbers", "text"),
    [("step", *state) for state in [*STATES, *STEP_STATES]]
    + [("evict", *state) for state in [*STATES, *EVICT_STATES]],
)
def test_states_that_cannot_be(name, tensor, numbers, text, refused):
    call = make(name)
    call.get(tensor)[...] = numbers
    refused(call, ValueError, text)


@pytest.mark.parametrize(
    ("tensor", "numbers", "text"),
    [
        ("prompt", [1, 0], r"^prompt\[1\]: is 0, wanted at least 1"),
        ("prompt", [-(2**31), 1], r"^prompt\[0\]: is -2147483648"),
        ("budget", [[0, 0], [1, 1]], r"^budget\[0\]: sinks \+ heavy \+ recent is 0"),
        ("budget", [[1, 1], [1, -1]], r"^budget\[1\]: is \(1, -1\)"),
    ],
)
def test_numbers_of_simulate(tensor, numbers, text, refused):
    call = make("simulate")
    call.get(tensor)[...] = numbers
    refused(call, ValueError, text)


def test_evict_needs_room(refused):
    call = make("evict")
    call.get("slots.budget")[...] = [[2, 3], [7, 3]]
    call.get("slots.seen_tokens")[1] = 4
    call.get("slots.positions")[1, :, 3] = 3
    refused(call, ValueError, "^slots.keys: has 6 slots, but row 1 must keep 7 tokens")
    call.get("mask")[1] = [True, True, False]  # now row 1 keeps 6 tokens
    call.run()


def test_a_masked_row_needs_no_room():
    call = make("step")
    call.get("slots.budget")[0] = [4, 3]
    call.get("slots.positions")[0] = [0, 1, 3, 4, 5, 6]
    call.get("slots.next_slot")[0] = 6
    call.get("slots.seen_tokens")[0] = 6
    with pytest.raises(ValueError, match="all 6 slots of row 0 are taken"):
        call.run()
    call.get("mask")[0] = False
    call.run()


# ---- Memory ------------------------------------------------------------------------------------

SCARCE = """
import resource
import numpy as np
from h2o import ops

Q = 1 << 26
keys = np.broadcast_to(np.float32(1), (1, 1, Q, 2))
slots = ops.new_slots(np.zeros((1, 1, 1, 2), np.float32), 8, heavy=4, recent=4)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), -1))
try:
    ops.evict(keys, keys, keys[..., 0], slots)
except MemoryError as error:
    print(error)
assert slots.seen_tokens == 0
assert (slots.positions == -1).all()
"""


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="ASan aborts instead")
def test_no_memory_for_the_workspace():
    done = subprocess.run(
        [sys.executable, "-c", SCARCE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("evict: no memory for a workspace of ")


# ---- The level ---------------------------------------------------------------------------------


def test_unknown_level():
    done = subprocess.run(
        [sys.executable, "-c", "import h2o._core"],
        env={**os.environ, "H2O_CPU": "nonsense", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "ValueError" in done.stderr
    assert "nonsense" in done.stderr
    assert "generic" in done.stderr, "it does not say which levels there are"


def test_a_shape_is_told_in_full(refused):
    call = make("attend")
    B, G, Q, D = call.get("keys").shape
    message = (
        f"^keys: has shape \\[{B}, {G}, {Q}, {D - 1}\\], wanted \\[B, G, Q, D\\] with B = {B}, "
    )
    refused(call.put("keys", call.get("keys")[..., 1:]), ValueError, message)


def test_angles_that_do_not_fit(refused):
    """The table may have neither more angles than a key has pairs, nor fewer ranks than a row holds
    with its new token."""
    call = make("step rolled")
    many = np.zeros((calls.S, 2, 5), np.float32)
    refused(call.put("rotary.table", many), ValueError, "^rotary.table: has 5 angles, .*have 8$")
    few = call.get("rotary.table")[:5]
    refused(call.put("rotary.table", few), ValueError, "^rotary.table: has angles for 5 ranks, ",
            "row 0 holds 5 tokens")  # fmt: skip
    call.put("rotary.table", call.get("rotary.table")[:6]).run()
