"""The machine of tools/ptx on hand-written PTX, whose counts are known independently."""

import csv
import ctypes
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = "build/ptx/libmachine.so"

HEADER = """
.version 7.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 dynamic_shared[];
"""
ENTRY = """
.visible .entry test(
    .param .align 8 .b8 test_param_0[8],
    .param .u64 test_param_1
)
{
    .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .f32 %f<33>; .reg .b32 %r<33>; .reg .b64 %rd<33>;
    ld.param.u64 %rd1, [test_param_0];  // what the test passes
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd2, %rd3;           // the thread's word
BODY
    ret;
}
"""


def tool(name: str) -> ModuleType:
    path = ROOT / "tools" / f"{name}.py"
    if not path.exists():
        pytest.skip("needs the sources")
    if str(path.parent) not in sys.path:  # the tools import one another
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    if not (ROOT / "Makefile").exists() or not shutil.which("make") or not shutil.which("g++"):
        pytest.skip("needs the sources, make and g++")
    subprocess.run(["make", "--silent", LIBRARY], cwd=ROOT, check=True, capture_output=True)
    machine = ctypes.CDLL(str(ROOT / LIBRARY))
    machine.shim_error.restype = ctypes.c_char_p
    return machine


@pytest.fixture
def launch(library, tmp_path, monkeypatch):
    """launch(body, array, threads=32, shared=0, seed=0) runs the body and returns its counts."""
    counts = tmp_path / "counts"
    monkeypatch.setenv("H2O_PTX_COUNTS", str(counts))
    number = iter(range(100))

    def run(body: str, array: np.ndarray, threads: int = 32, shared: int = 0, seed: int = 0):
        program = tmp_path / f"{next(number)}.program"
        text = HEADER + ENTRY.replace("BODY", body)
        program.write_text(tool("ptx_program").program(text))
        monkeypatch.setenv("H2O_PTX", str(program))
        counts.unlink(missing_ok=True)
        library.shim_seed(ctypes.c_uint64(seed))
        parameters = ctypes.c_uint64(array.ctypes.data)
        code = library.shim_launch(
            b"test", ctypes.byref(parameters), ctypes.c_size_t(8), None,
            (ctypes.c_uint * 3)(1, 1, 1), threads, shared,
        )  # fmt: skip
        if code:
            raise RuntimeError(library.shim_error().decode())
        return json.loads(counts.read_text())

    return run


def words(count: int, dtype: type = np.float32) -> np.ndarray:
    """Numbers 0, 1, ... beginning at a multiple of 256 bytes."""
    room = np.zeros(count * 4 + 256, np.uint8)
    aligned = room[-room.ctypes.data % 256 :][: count * 4].view(dtype)
    aligned[:] = np.arange(count)
    return aligned


def test_a_warp_that_adds(launch):
    x = words(64)
    body = "ld.global.f32 %f1, [%rd4]; add.f32 %f1, %f1, 0f3F800000; st.global.f32 [%rd4], %f1;"
    found = launch(body, x, threads=64)
    assert np.array_equal(x, np.arange(64) + 1)
    # For each of the two warps: mul.wide, add.s64 of two slots, load, add, store, ret.
    assert found["kinds"] == {"int64": 4, "int32": 2, "global": 4, "float": 2, "branch": 2}
    assert found["issued"] == 14
    assert (found["sectors"], found["bytes"], found["distinct"]) == (2 * 8, 2 * 256, 8)
    assert found["trips"] == [1, 1]
    assert found["wavefronts"] == 0


def test_lanes_that_part_issue_both_ways(launch):
    x = words(32, np.int32)
    body = """
    and.b32 %r2, %r1, 1; setp.eq.s32 %p1, %r2, 0; mov.u32 %r3, 0;
    @%p1 bra $even;
    add.s32 %r3, %r1, 100;
    bra.uni $met;
$even:
    mov.u32 %r4, 0;
$again:
    add.s32 %r3, %r3, 1; add.s32 %r4, %r4, 1; setp.lt.s32 %p2, %r4, 5;
    @%p2 bra $again;
$met:
    st.global.u32 [%rd4], %r3;
"""
    found = launch(body, x)
    lanes = np.arange(32)
    assert np.array_equal(x, np.where(lanes % 2, lanes + 100, 5))
    # mul.wide, and, setp; one addition of the odd lanes; five rounds of three by the even ones.
    assert found["kinds"]["int32"] == 1 + 1 + 10
    assert found["kinds"]["logic"] == 2 + 5
    assert found["kinds"]["branch"] == 1 + 1 + 5 + 1
    assert found["kinds"]["global"] == 1  # both halves store together


@pytest.mark.parametrize(("first", "count"), [(3, 5), (0, 32), (28, 9), (31, 0)])
def test_bits_are_inserted(launch, first, count):
    x, narrow = words(32, np.uint32), words(32, np.uint32)
    launch(f"mov.u32 %r2, 0x81234567; bfi.b32 %r3, %r1, %r2, {first}, {count}; "
           "st.global.u32 [%rd4], %r3;", narrow)  # fmt: skip
    launch(f"mov.u64 %rd5, 0x8123456789ABCDEF; cvt.u64.u32 %rd6, %r1; "
           f"bfi.b64 %rd7, %rd6, %rd5, {first + 25}, {count}; shr.u64 %rd7, %rd7, {first + 20}; "
           "cvt.u32.u64 %r2, %rd7; st.global.u32 [%rd4], %r2;", x)  # fmt: skip

    def inserted(into: int, bits: int, at: int, width: int) -> int:
        field = ((1 << count) - 1) << at
        return (into & ~field | (bits << at) & field) & ((1 << width) - 1)

    wide = [inserted(0x8123456789ABCDEF, i, first + 25, 64) >> (first + 20) for i in range(32)]
    assert narrow.tolist() == [inserted(0x81234567, i, first, 32) for i in range(32)]
    assert x.tolist() == [value & 0xFFFFFFFF for value in wide]


@pytest.mark.parametrize(("stride", "passes"), [(4, 1), (8, 2), (128, 32), (132, 1), (0, 1)])
def test_banks_of_shared_memory(launch, stride, passes):
    body = f"""
    mov.u32 %r5, dynamic_shared; mul.lo.s32 %r6, %r1, {stride}; add.s32 %r7, %r5, %r6;
    st.shared.u32 [%r7], %r1;
"""
    assert launch(body, words(32), shared=8192)["wavefronts"] == passes


@pytest.mark.parametrize(("row", "passes"), [(16, 4), (128, 32), (144, 4), (256, 32), (272, 4)])
def test_banks_of_matrices(launch, row, passes):
    body = f"""
    mov.u32 %r5, dynamic_shared; mul.lo.s32 %r6, %r1, {row}; add.s32 %r7, %r5, %r6;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r8, %r9, %r10, %r11}}, [%r7];
"""
    found = launch(body, words(32), shared=16384)
    assert (found["wavefronts"], found["kinds"]["ldmatrix"]) == (passes, 1)


@pytest.mark.parametrize(("stride", "sectors"), [(4, 4), (16, 16), (32, 32), (64, 32), (0, 1)])
def test_sectors_of_global_memory(launch, stride, sectors):
    body = f"""
    mul.wide.u32 %rd5, %r1, {stride}; add.s64 %rd6, %rd2, %rd5; ld.global.f32 %f1, [%rd6];
"""
    found = launch(body, words(1024))
    assert found["sectors"] == found["distinct"] == sectors
    assert found["bytes"] == (4 if stride == 0 else 128)


def test_round_trips_follow_one_another_or_not(launch):
    at = words(32, np.int32)
    chase = "add.s64 %rd5, %rd2, %rd6; ld.global.s32 %rd6, [%rd5]; shl.b64 %rd6, %rd6, 2;"
    at[:] = 7
    assert launch(f"mov.u64 %rd6, 0; {chase * 3}", at)["trips"] == [3, 3]
    beside = "".join(f"ld.global.f32 %f{i}, [%rd4];" for i in (1, 2, 3))
    use = "add.f32 %f4, %f1, %f2; add.f32 %f4, %f4, %f3; st.global.f32 [%rd4], %f4;"
    assert launch(beside + use, words(32))["trips"] == [1, 1]
    after = "ld.global.f32 %f1, [%rd4]; st.shared.f32 [dynamic_shared], %f1; bar.sync 0;"
    assert launch(after * 2, words(32), shared=16)["trips"] == [2, 2]


def test_barriers_join_warps(launch):
    x = words(64, np.int32)
    body = """
    setp.lt.u32 %p1, %r1, 32; mov.u32 %r5, dynamic_shared; shl.b32 %r6, %r1, 2;
    add.s32 %r7, %r5, %r6; st.shared.u32 [%r7], %r1; bar.sync 0;
    xor.b32 %r8, %r6, 128; add.s32 %r8, %r5, %r8; ld.shared.u32 %r9, [%r8];
    setp.eq.s32 %p2, %r1, 40; bar.red.or.pred %p3, 0, %p2; selp.b32 %r10, 1000, 0, %p3;
    add.s32 %r9, %r9, %r10; mov.u32 %r11, 1; mov.u32 %r12, 31; mov.u32 %r13, -1;
    shfl.sync.bfly.b32 %r14|%p4, %r9, %r11, %r12, %r13;
    st.global.u32 [%rd4], %r14;
"""
    launch(body, x, threads=64, shared=256, seed=3)
    assert np.array_equal(x, (np.arange(64) ^ 32 ^ 1) + 1000)


def test_registers_of_a_block_are_its_own(launch):
    """CUDA's compiler writes a barrier with a predicate in a block of its own. Its %p1 must not
    change the %p1 outside."""
    x = words(32, np.int32)
    body = """
    setp.lt.u32 %p1, %r1, 8;
    { .reg .pred %p1; .reg .pred %p2; setp.ne.u32 %p1, %r1, 99; bar.red.or.pred %p2, 0, %p1;
    selp.u32 %r5, 1, 0, %p2; }
    selp.u32 %r6, 10, 0, %p1; add.s32 %r6, %r6, %r5; st.global.u32 [%rd4], %r6;
"""
    launch(body, x)
    assert np.array_equal(x, np.where(np.arange(32) < 8, 11, 1))


COPY = """
    mov.u32 %r5, dynamic_shared; shl.b32 %r6, %r1, 2; add.s32 %r7, %r5, %r6;
    cp.async.ca.shared.global [%r7], [%rd4], 4; cp.async.commit_group;
    WAIT
    ld.shared.u32 %r8, [%r7]; st.global.u32 [%rd4+128], %r8;
"""


def test_copies_arrive_at_their_wait(launch):
    x = words(64, np.int32)
    found = launch(COPY.replace("WAIT", "cp.async.wait_group 0;"), x, shared=128, seed=1)
    assert np.array_equal(x[32:], np.arange(32))
    assert found["kinds"]["cp.async"] == 3
    assert found["trips"] == [1, 1]
    x = words(64, np.int32)
    launch(COPY.replace("WAIT", "cp.async.wait_group 1;"), x, shared=128, seed=1)
    assert -1 in x[32:]


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_products_of_matrices(launch, dtype):
    """A is all ones, and column n of B is n + 1. Lane l holds columns 2 (l % 4) and the next."""
    one = {"f16": 0x3C003C00, "bf16": 0x3F803F80}[dtype]
    body = f"""
    shr.u32 %r2, %r1, 2; add.s32 %r2, %r2, 1; cvt.rn.f32.s32 %f1, %r2;
    cvt.rn.{dtype}x2.f32 %r3, %f1, %f1; mov.u32 %r4, {one}; mov.f32 %f2, 0f3F800000;
    mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32
      {{%f3, %f4, %f5, %f6}}, {{%r4, %r4, %r4, %r4}}, {{%r3, %r3}}, {{%f2, %f2, %f2, %f2}};
    mul.wide.u32 %rd5, %r1, 16; add.s64 %rd6, %rd2, %rd5;
    st.global.v4.f32 [%rd6], {{%f3, %f4, %f5, %f6}};
"""
    x = words(128)
    launch(body, x)
    column = np.arange(32)[:, None] % 4 * 2 + np.array([0, 1, 0, 1])
    assert np.array_equal(x.reshape(32, 4), 16 * (column + 1) + 1)


def test_lanes_that_wait_for_one_whose_code_is_further_down(launch):
    """Compilers move rare code behind the barrier that the other lanes have reached."""
    x = words(32)
    launch(
        "setp.ne.s32 %p1, %r1, 3; @%p1 bra $wait; bra $rare; "
        "$back: st.global.u32 [%rd2], %r1; "
        "$wait: bar.sync 0; ld.global.u32 %r2, [%rd2]; st.global.u32 [%rd4], %r2; ret; "
        "$rare: setp.eq.s32 %p1, %r1, 3; @%p1 bra $back; bra $back;",
        x,
    )  # fmt: skip
    assert np.array_equal(x.view(np.int32), np.full(32, 3))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("ld.global.u32 %r2, [%rd2+2];", "misaligned"),
        ("st.shared.u32 [dynamic_shared+64], %r1;", "beyond the block's shared memory"),
        ("setp.eq.s32 %p1, %r1, 3; @%p1 ret; bar.sync 0;", "some lanes have returned"),
        (
            "setp.eq.s32 %p1, %r1, 3; @%p1 bra $one; bar.warp.sync -1; ret; "
            "$one: bar.warp.sync -1;",
            "lanes wait in different places",
        ),
        ("rol.b32 %r2, %r1, 3;", "no instruction rol"),
    ],
)
def test_what_fails_on_a_gpu_fails_here(launch, body, text):
    with pytest.raises(RuntimeError, match=text):
        launch(body, words(32), shared=64)


def test_blocks_of_a_multiprocessor():
    model = tool("cuda_model")
    l4, h100 = model.DEVICES["L4"], model.DEVICES["H100"]
    assert model.blocks_per_sm(l4, 128, 53504, 128) == 1  # 102,400 bytes, less each block's reserve
    assert model.blocks_per_sm(l4, 128, 50176, 128) == 2
    assert model.blocks_per_sm(h100, 128, 53504, 128) == 4
    assert model.blocks_per_sm(h100, 128, 1024, 255) == 2
    assert model.blocks_per_sm(h100, 1024, 0, 32) == 2


def test_the_model_takes_the_slowest():
    model = tool("cuda_model")
    launch = {
        "grid": [4, 1, 1], "issued": 4e6, "wavefronts": 0,
        "kinds": {"mma": 1e6, "float": 1e5, "logic": 1e4, "convert": 1e3, "ex2": 1e3},
        "sectors": 200, "fetched": 100, "distinct": 100, "trips": [2, 2],
    }  # fmt: skip
    times = model.times(launch, 1, model.DEVICES["A100"], 1)
    assert max(times, key=times.get) == "tensor"
    assert times["float"] == pytest.approx(1e5 / 4 / 2 / 1.41e3)
    assert times["special"] == pytest.approx(2e3 / 4 * 2 / 1.41e3)
    assert times["L2"] == pytest.approx(100 / 4 * 32 / 64 / 1.41e3)
    assert times["tensor"] > model.floor(launch, 1, model.DEVICES["A100"])  # which uses all
    # A quarter of the products on each of four multiprocessors, at 2048 / 1024 clocks each.
    assert times["tensor"] == pytest.approx(1e6 / 4 * 2 / 1.41e3)
    assert times["issue"] == pytest.approx(1e6 / 4 / 1.41e3)
    assert times["latency"] == pytest.approx(2 * 466 / 1.41e3)


def test_a_count_that_grows_is_found():
    counts = tool("cuda_counts")
    before = {
        "kernel": "k", "dtype": "float16", "queries": "float16", "head_dim": 128, "heads": 4,
        "policy": "sum", "tokens": 256, "chunk": 0, "issued": 100.0, "wavefronts": 0.0,
        "sectors_per_byte": 0.05, "round_trips": 0.1, "block_trips": 4.0,
    }  # fmt: skip
    assert counts.checked([before | {"issued": 109.0}], [before]) == []
    (grown,) = counts.checked([before | {"issued": 111.0}], [before])
    assert "issued 100.0 -> 111.0" in grown
    (unknown,) = counts.checked([before | {"kernel": "new"}], [before])
    assert "--write" in unknown


def test_a_kernel_that_no_case_launches_is_found(tmp_path):
    program = tmp_path / "x.program"
    program.write_text("kernel one 8 3\ni ret branch 1 0 0 0 0 -1\nkernel two 8 3\n")
    counts = tool("cuda_counts")
    assert counts.uncounted([{"kernel": "one"}], program) == ["no case launches two"]


def test_counts_before_are_those_of_the_same_work(tmp_path, monkeypatch):
    """Counts are compared by work, even if another kernel did it before."""
    counts = tool("cuda_counts")
    monkeypatch.setattr(counts, "TABLE", tmp_path / "table.csv")
    row = {
        "kernel": "h2o_cuda_forward_f16_128", "dtype": "int8", "queries": "float16",
        "head_dim": 128, "heads": 4, "policy": "sum", "tokens": 820, "chunk": 256,
        "device": "A100", "batch": 1, "issued": 700.0,
    }  # fmt: skip
    others = {"kernel": "h2o_cuda_sums_f16_128"}, {"device": "L4"}, {"dtype": "int8-int4"}
    before = row | {"kernel": "h2o_cuda_forward_128", "issued": 4000.0}
    counts.write_table([row, *(row | x for x in others)], [before])
    with counts.TABLE.open() as file:
        found = [(x["issued"], x["issued_before"]) for x in csv.DictReader(file)]
    assert found == [("700.0", "4000.0"), *[("700.0", "")] * 3]
