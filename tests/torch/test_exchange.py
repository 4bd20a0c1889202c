"""Torch tensors at the border of the core: which are accepted, in which way, and which are
rejected."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from h2o import backends, ops
from tests.core.calls import EVERY_TENSOR, EVERY_WRITTEN, Call
from tests.core.calls import make as make_arrays
from tests.torch.calls import TABLE, make, plain_bytes

if backends.forced:
    pytest.skip("of the core's border", allow_module_level=True)

OPERATIONS = ["attend", "evict weighted", "step weighted", "simulate"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INPUTS = [
    pair
    for pair in EVERY_TENSOR
    if pair not in EVERY_WRITTEN and not pair[1].startswith(("slots.", "rotary."))
]


def left_in(call: Call) -> dict[str, bytes]:
    return {tensor: plain_bytes(call.get(tensor)) for tensor in call.written}


def answer(call: Call) -> dict[str, bytes]:
    call.run()
    return left_in(call)


class Dunder:
    """An object with `__dlpack__` only, as from a library without an exchange table."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.calls = 0

    def __dlpack__(self, **keywords):
        self.calls += 1
        return self.tensor.__dlpack__(**keywords)


# ---- Ways --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_both_ways_are_the_same(name, dtype):
    wanted = answer(make(name, dtype))
    call = plain = make(name, dtype)
    for tensor in call.tensors():
        call = call.put(tensor, Dunder(call.get(tensor)))
    call.run()
    assert left_in(plain) == wanted


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="torch before 2.10"
)
def test_the_table_is_used():
    class Silent(torch.Tensor):
        def __dlpack__(self, **keywords):
            raise AssertionError("called")

    wanted = answer(make("step"))
    call = make("step")
    assert answer(call.put("query", call.get("query").as_subclass(Silent))) == wanted


def test_without_the_table():
    class Older(torch.Tensor):
        __dlpack_c_exchange_api__ = None

        def __dlpack__(self, **keywords):
            nonlocal calls
            calls += 1
            return super().__dlpack__(**keywords)

    calls = 0
    wanted = answer(make("step"))
    call = make("step")
    assert answer(call.put("query", call.get("query").as_subclass(Older))) == wanted
    assert calls == (1 if TABLE else 2)  # before it had tables, torch did not know max_version


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("name", OPERATIONS)
def test_torch_and_numpy_are_the_same(name, dtype):
    arrays = make_arrays(name, dtype)
    call = arrays
    for tensor in call.tensors():
        call = call.put(tensor, torch.from_numpy(call.get(tensor).copy()))
    arrays.run()
    got = answer(call)
    assert got == {tensor: arrays.get(tensor).tobytes() for tensor in arrays.written}


def test_libraries_may_be_mixed():
    wanted = answer(make("step"))
    call = make("step")
    call = call.put("query", call.get("query").numpy()).put("value", call.get("value").numpy())
    assert answer(call) == wanted


# ---- Layouts -----------------------------------------------------------------------------------


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0)


def within(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the middle of a larger tensor."""
    larger = torch.full([size + 2 for size in tensor.shape], 9, dtype=tensor.dtype)
    inner = larger[tuple(slice(1, size + 1) for size in tensor.shape)]
    inner.copy_(tensor)
    return inner


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [transposed, within])
@pytest.mark.parametrize(("name", "tensor"), INPUTS)
def test_inputs_of_any_strides(name, tensor, layout, dtype):
    wanted = answer(make(name, dtype))
    call = make(name, dtype)
    assert answer(call.put(tensor, layout(call.get(tensor)))) == wanted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "tensor"), INPUTS)
def test_expanded_inputs(name, tensor, dtype):
    call = make(name, dtype)
    for axis in range(call.get(tensor).dim()):
        call, plain = make(name, dtype), make(name, dtype)
        expanded = call.get(tensor).narrow(axis, 0, 1).expand(call.get(tensor).shape)
        wanted = answer(plain.put(tensor, expanded.contiguous()))
        assert answer(call.put(tensor, expanded)) == wanted


def test_a_table_of_angles_is_read_by_rows(refused):
    call = make("step rolled")
    table = call.get("rotary.table")
    refused(call.put("rotary.table", transposed(table)), ValueError, "^rotary.table: the stride")
    one = table[:1].expand(table.shape)  # rows may share memory
    wanted = answer(make("step rolled").put("rotary.table", one.contiguous()))
    assert answer(make("step rolled").put("rotary.table", one)) == wanted


def test_expanded_outputs(refused):
    call = make("step")
    out = call.get("out")
    expanded = out[:, :, :1].expand(out.shape)
    refused(call.put("out", expanded), ValueError, "^out: is written, so its strides")


def test_outputs_are_made_like_the_query():
    for dtype in DTYPES:
        call = make("attend", dtype).put("out", None).put("scores", None)
        out, scores = call.run()
        assert (out.dtype, out.shape) == (dtype, (2, 3, 4, 8))
        assert (scores.dtype, scores.shape) == (torch.float32, (2, 2, 3))
        call = make("simulate", dtype).put("out", None).put("scores", None).put("evicted_at", None)
        out, evicted_at, scores = call.run()
        assert (out.dtype, evicted_at.dtype, scores.dtype) == (dtype, torch.int32, torch.float32)
        out = make("step", dtype).put("out", None).run()
        assert (out.dtype, out.shape) == (dtype, (2, 1, 4, 8))
        call_with_out = make("step", dtype)
        assert call_with_out.run() is call_with_out.get("out")
    weighted = ops.new_slots(call.get("keys"), 5, 2, 1, value_weighted=True)
    assert weighted.keys.dtype is DTYPES[-1]
    assert weighted.keys.shape == (2, 2, 5, 8)
    assert weighted.norms.dtype is torch.float32
    assert weighted.budget.tolist() == [[2, 1], [2, 1]]
    assert (weighted.positions == -1).all()


@pytest.mark.parametrize("tokens", [2**40, 2**56])
def test_no_memory_for_an_output(tokens):
    query = torch.ones(1).expand(1, 1, tokens, 64)
    with pytest.raises(MemoryError, match=rf"no memory for an output of shape \[1, {tokens}, 1"):
        ops.attend(query, query, query)


@pytest.mark.parametrize("capacity", [0, -1, -(2**40)])
@pytest.mark.parametrize("keys", [torch.zeros(1, 1, 1, 8), np.zeros((1, 1, 1, 8))])
def test_slots_for_nothing(keys, capacity):
    with pytest.raises(ValueError, match=rf"^capacity is {capacity}; expected .* 1: k \+ 1"):
        ops.new_slots(keys, capacity)


def test_only_want_of_memory_is_a_memory_error():
    """Any other error of making an output must propagate."""

    class Broken:
        shape = (1, 1, 1, 8)

        def new_empty(self, shape):
            raise RuntimeError("the device is on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        ops.step(Broken(), Broken(), Broken(), make("step").get("slots"))


# ---- Gradients ---------------------------------------------------------------------------------

FLOATS = [
    (name, tensor)
    for name, tensor in EVERY_TENSOR
    if name in OPERATIONS and make_arrays(name).get(tensor).dtype.kind == "f"
]


@pytest.mark.parametrize(("name", "tensor"), FLOATS)
def test_gradients_would_be_lost(name, tensor, refused):
    call = make(name)
    spoilt = call.put(tensor, call.get(tensor).requires_grad_())
    refused(spoilt, BufferError, f"^{tensor}: requires grad, .*no_grad.*detach")
    with torch.no_grad():
        if TABLE:
            spoilt.run()
        else:
            refused(spoilt, BufferError, f"^{tensor}: .*detach")
    call = make(name)
    leaf = call.get(tensor).requires_grad_()
    call.put(tensor, leaf.detach()).run()


@pytest.mark.skipif(not TABLE, reason="this torch lends no leaf that requires grad")
def test_inference_mode():
    wanted = answer(make("step"))
    with torch.inference_mode():
        call = make("step")
        call.put("query", torch.nn.Parameter(call.get("query"))).run()
        assert left_in(call) == wanted


# ---- Tensors without plain memory --------------------------------------------------------------


@pytest.mark.parametrize(("name", "tensor"), FLOATS)
def test_memory_with_the_opposite_numbers(name, tensor, refused):
    call = make(name)
    negated = call.put(tensor, torch._neg_view(call.get(tensor)))
    refused(negated, BufferError, f"^{tensor}: is a negative view .*resolve_neg")
    with torch.set_grad_enabled(name.startswith("step")):
        refused(negated, BufferError, f"^{tensor}: is a negative view .*resolve_neg")
    call.put(tensor, negated.get(tensor).resolve_neg()).run()


class Wrapper(torch.Tensor):
    """A tensor made of other tensors, like DTensor."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


def emptied(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


def quantized(tensor: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


def sparse(tensor: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):
        return tensor.flatten(0, -2).to_sparse_csr()


MEMORYLESS = {
    "meta": lambda tensor: tensor.to("meta"),
    "sparse": lambda tensor: tensor.to_sparse(),
    "sparse CSR": sparse,
    "mkldnn": lambda tensor: tensor.to_mkldnn(),
    "quantized": quantized,
    "wrapper": Wrapper,
    "emptied": emptied,
}
UNKNOWN_DTYPES = {
    "complex": lambda tensor: tensor.to(torch.complex64),
    "conjugate": lambda tensor: tensor.to(torch.complex64).conj(),
    "float8": lambda tensor: tensor.to(torch.float8_e4m3fn),
    "float64": lambda tensor: tensor.double(),
    "bits": lambda tensor: tensor.view(torch.uint32),
}


@pytest.mark.parametrize("tensor", ["query", "value", "out", "slots.keys", "slots.scores"])
@pytest.mark.parametrize("case", [*MEMORYLESS, *UNKNOWN_DTYPES])
def test_other_tensors(case, tensor, refused):
    call = make("step")
    spoilt = {**MEMORYLESS, **UNKNOWN_DTYPES}[case](call.get(tensor))
    unlent = MEMORYLESS if TABLE else {*MEMORYLESS, "conjugate", "float8"}
    error = BufferError if case in unlent else TypeError
    refused(call.put(tensor, spoilt), error, f"^{tensor}: [^\n]*$")
    # The output would be made like such a query, which must fail too.
    if tensor == "query":
        with pytest.raises(NotImplementedError if case == "wrapper" else error):
            call.put(tensor, spoilt).put("out", None).run()


def test_fake_tensors(refused, capfd):
    call = make("step")
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(call.get("query"))
    refused(
        call.put("query", fake),
        BufferError,
        "^query: this FakeTensor (has no|cannot share its) memory",
    )
    capfd.readouterr()  # torch prints a warning once


def test_nested_tensors(refused):
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    call = make("step")
    for layout in (torch.strided, torch.jagged):
        with warnings.catch_warnings(action="ignore"):
            nested = torch.nested.nested_tensor(parts, layout=layout)
        refused(call.put("query", nested), BufferError, "^query: [^\n]* cannot share its memory")


def test_inside_of_transforms():
    """vmap and grad pass tensors that stand for others and must be rejected."""

    def inside(tensor: torch.Tensor) -> torch.Tensor:
        call = make("step").put("query", tensor)
        with torch.no_grad(), pytest.raises(BufferError, match=r"^query: "):
            call.run()
        return tensor.sum()

    query = make("step").get("query")
    torch.vmap(inside)(query[None])
    torch.func.grad(inside)(query)


# ---- Threads -----------------------------------------------------------------------------------


def test_a_call_leaves_the_settings_of_the_processor_alone():
    """A call must not leave the processor flushing denormal numbers to zero."""
    make("attend").run()
    assert torch.tensor(1e-42).item() * 1.0 != 0.0
    assert (torch.full((64,), 1e-42) * 0.5).count_nonzero() == 64
