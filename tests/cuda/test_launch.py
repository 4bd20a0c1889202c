"""How the core launches operations: device, context, stream and workspace of each launch, and the
errors when the driver refuses one. The driver is the fake of tests/cuda/fake."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading

import pytest
import torch

from h2o import _core, backends
from h2o.backends import kernel_check
from h2o.policy import Policy
from h2o.slots import new_slots
from tests.core.producers import DLTensor, ExchangeAPI, capsule_new
from tests.cuda.carry import tensors
from tests.cuda.device import CUDA, IMAGE, DeviceTensor, carried, to_device

pytestmark = pytest.mark.filterwarnings("error")


def step_arguments(D: int = 32, seed: int = 0, held: int = 6) -> list:
    """Arguments of a step on the CPU, into slots whose budget is full."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    keys = normal(1, 2, held, D)
    slots = new_slots(keys, held + 1, held // 2, held - held // 2)
    text = (keys, normal(1, 2, held, D), normal(1, 2, held).abs())
    policy = Policy()
    _core.call("evict", "run", *text, None, slots, policy)
    query, key, value = normal(1, 4, 1, D), normal(1, 2, 1, D), normal(1, 2, 1, D)
    out = torch.zeros(1, 1, 4, D)
    return [query, key, value, None, slots, out, D**-0.5, 0.0, policy, None, None, None]


def workspace_of(driver, arguments, stream=1, device: int = 0) -> DeviceTensor:
    size = _core.call("step", "measure", *arguments, stream)
    return DeviceTensor(driver, torch.full((size,), 255, dtype=torch.uint8), device)


def same(carried_arguments, arguments) -> None:
    for actual, expected in zip(tensors(carried_arguments), tensors(arguments), strict=True):
        torch.testing.assert_close(actual.read(), expected, rtol=1e-5, atol=1e-5)


# ---- What there is -----------------------------------------------------------------------------


def run(code: str, **variables: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join(sys.path)
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


LOAD = f"from h2o import _core\n_core.load('cuda', {IMAGE!r}, 0)"


def test_a_machine_without_a_driver_says_so(tmp_path):
    (tmp_path / "libcuda.so.1").write_bytes(b"no library")  # found before any real driver
    done = run(LOAD, LD_LIBRARY_PATH=str(tmp_path))
    assert "RuntimeError: no driver (" in done.stderr


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"FAKE_CUDA_DEVICES": "0"}, ["cuInit", "no CUDA-capable device"]),
        ({"FAKE_CUDA_CAPABILITY": "70"}, ["cuModuleLoadData", "209", "capability 7.5"]),
        ({"FAKE_CUDA_VERSION": "11080", "FAKE_CUDA_CAPABILITY": "70"}, ["CUDA 11.8", "525"]),
    ],
)
def test_what_cannot_be_used_is_explained(library, variables, words):
    done = run(LOAD, LD_LIBRARY_PATH=os.path.dirname(library), **variables)
    assert done.returncode == 1
    for word in words:
        assert word in done.stderr


def test_the_import_opens_no_driver(library):
    code = "import h2o; print('libcuda' in open('/proc/self/maps').read())"
    assert run(code, LD_LIBRARY_PATH=os.path.dirname(library)).stdout == "False\n"


def test_devices_are_described(driver):
    version, devices = _core.devices("cuda")
    assert version == 13000
    assert devices == [("Fake GPU 0", 9, 0), ("Fake GPU 1", 9, 0)]


# ---- Answers -----------------------------------------------------------------------------------


def test_every_operation_answers_as_the_torch_backend_does(driver, kernels):
    operations = carried(driver, kernels, device=1)
    assert kernel_check.mistakes(operations, backends._torch_backend(), "cpu") == []
    assert {*operations.unserved} == {("attend", 576)}
    # Every kernel has run, and some with as many blocks as only large calls have.
    blocks = driver.widest()
    assert min(blocks.values()) > 0, [name for name, most in blocks.items() if most == 0]
    steps = [most for name, most in blocks.items() if name.startswith("h2o_cuda_step")]
    assert max(steps) >= 9  # several blocks that combine their results
    for name in ("bf16_128", "f16_64"):  # of 64 queries; of 128 keys including stored ones
        assert blocks[f"h2o_cuda_forward_{name}"] >= 4
        assert blocks[f"h2o_cuda_sums_{name}"] >= 3
    # Every counted branch was taken, except those for infinities, for thousands of cells and for
    # hundreds of heads.
    taken = driver.taken()
    assert {branch for branch, times in taken.items() if times == 0} == {
        "matrix_forward_nonfinite", "matrix_values_clipped", "matrix_step_of_several_parts",
        "window_without_cache",
    }  # fmt: skip


def test_host_code_cannot_touch_the_fakes_memory(library):
    code = (
        "import ctypes, torch\n"
        "from tests.cuda.device import *\n"
        f"x = DeviceTensor(Driver({library!r}), torch.ones(4))\n"
        "assert x.read().tolist() == [1, 1, 1, 1]\n"
        "ctypes.string_at(x.address.value, 1)\n"
    )
    assert run(code).returncode == -11


# ---- Streams, contexts, graphs -----------------------------------------------------------------

WAITING = ("cuCtxSynchronize", "cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2")
ALLOCATING = ("cuMemAlloc_v2", "cuMemFree_v2", "cuModuleLoadData")


def test_a_kernel_that_breaks_off_leaves_no_counts_behind(driver):
    """Blocks that finished before the kernel failed must not be counted. A later step over the same
    slots would add to their counts."""
    arguments = step_arguments(held=300)
    there = to_device(driver, arguments)
    workspace = workspace_of(driver, there)
    slots = arguments[4]
    driver.library.fake_stop_after(2)
    _core.call("step", "launch", *there, 1, workspace)
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        driver.wait()
    driver.library.fake_forgive()
    assert torch.equal(there[4].next_slot.read(), slots.next_slot)
    assert torch.equal(there[4].seen_tokens.read(), slots.seen_tokens)
    _core.call("step", "launch", *there, 1, workspace)
    _core.call("step", "run", *arguments)
    same(there, arguments)


def test_a_call_queues_its_work_and_waits_for_nothing(driver):
    arguments = step_arguments()
    there = to_device(driver, arguments)
    workspace = workspace_of(driver, there)
    before = [driver.calls(entry) for entry in WAITING + ALLOCATING]
    _core.call("step", "launch", *there, 1, workspace)
    assert driver.library.fake_waiting() == 2  # clearing the counters, and the kernel
    assert [driver.calls(entry) for entry in WAITING + ALLOCATING] == before
    _core.call("step", "run", *arguments)
    same(there, arguments)


def test_kernels_are_loaded_once_for_each_context(driver):
    def calls() -> int:
        return driver.calls("cuModuleLoadData")

    arguments = [to_device(driver, step_arguments(), device) for device in (0, 1)]
    workspaces = [workspace_of(driver, arguments[device], device=device) for device in (0, 1)]
    for _ in range(2):
        for device in (0, 1):
            _core.call("step", "launch", *arguments[device], 1, workspaces[device])
    before = calls()
    context = ctypes.c_void_p()
    driver.call("cuCtxCreate_v2", ctypes.byref(context), 0, 0)  # current, but not a primary context
    try:
        pushes = driver.calls("cuCtxPushCurrent_v2")
        for _ in range(2):
            _core.call("step", "launch", *arguments[0], 1, workspaces[0])
        assert driver.calls("cuCtxPushCurrent_v2") == pushes
        assert driver.current() == context.value
        assert calls() == before + 1
        _core.call("step", "launch", *arguments[1], 1, workspaces[1])  # a call on another device
        assert driver.calls("cuCtxPushCurrent_v2") == pushes + 1
        assert driver.current() == context.value
    finally:
        driver.call("cuCtxPopCurrent_v2", ctypes.byref(context))
    assert driver.current() is None
    assert calls() == before + 1


@pytest.mark.parametrize("first", [False, True], ids=["loaded", "first-use"])
def test_a_graph_captures_a_step_and_replays_it(driver, first):
    arguments = step_arguments()
    there = to_device(driver, arguments)
    workspace = workspace_of(driver, there)
    stream, graph, context = driver.stream(), ctypes.c_void_p(), ctypes.c_void_p()
    if first:  # a context without loaded kernels
        driver.call("cuCtxCreate_v2", ctypes.byref(context), 0, 0)
        driver.call("cuStreamCreate", ctypes.byref(stream), 0)
    driver.call("cuStreamBeginCapture_v2", stream, 0)
    _core.call("step", "launch", *there, stream.value, workspace)
    driver.call("cuStreamEndCapture", stream, ctypes.byref(graph))
    if first:
        driver.call("cuCtxPopCurrent_v2", ctypes.byref(context))
    assert driver.library.fake_waiting() == 0
    for _ in range(3):
        with driver.context(0):
            driver.call("cuGraphLaunch", graph, None)
        _core.call("step", "run", *arguments)
    same(there, arguments)


def test_the_stream_is_what_the_caller_says(driver):
    there = to_device(driver, step_arguments())
    workspace = workspace_of(driver, there)
    stream = driver.stream()
    _core.call("step", "launch", *there, stream.value, workspace)
    # The tensors' library uses the same stream, so it need not record an event for each tensor.
    assert all(tensor.calls[-1]["stream"] == -1 for tensor in tensors(there))
    with pytest.raises(RuntimeError, match=r"cuMemsetD8Async.*: CUDA error 400"):
        _core.call("step", "launch", *there, stream.value + 8, workspace)
    with pytest.raises(RuntimeError, match="query: a DeviceTensor has no current stream"):
        _core.call("step", "launch", *there, None, workspace)


def with_table(tensor: DeviceTensor, stream: ctypes.c_void_p):
    """Pass a tensor through DLPack's exchange table, which reports the stream."""
    requests = []

    @ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))
    def tensor_from(_object, to):
        ctypes.memmove(to, ctypes.byref(tensor._managed.tensor), ctypes.sizeof(DLTensor))
        return 0

    @ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
    def current_stream(kind, device, to):
        requests.append((kind, device))
        to[0] = stream.value
        return 0

    api = ExchangeAPI(major=1, minor=3)
    api.tensor_from = ctypes.cast(tensor_from, ctypes.c_void_p)
    api.stream = ctypes.cast(current_stream, ctypes.c_void_p)
    capsule = capsule_new(ctypes.addressof(api), b"dlpack_exchange_api", None)
    members = {
        "__dlpack_c_exchange_api__": capsule,
        "alive": (api, tensor_from, current_stream, tensor),
    }
    return type("Tensor", (), members)(), requests


def test_the_exchange_table_tells_the_stream(driver):
    arguments = step_arguments()
    there = to_device(driver, arguments)
    workspace = workspace_of(driver, there)
    leader, requests = with_table(there[0], driver.stream())
    calls = driver.calls("cuLaunchKernel")
    _core.call("step", "launch", leader, *there[1:], None, workspace)
    assert requests == [(CUDA, 0)]
    assert driver.calls("cuLaunchKernel") == calls + 1
    _core.call("step", "run", *arguments)
    same(there, arguments)


def test_threads_share_devices(driver):
    wanted = step_arguments()
    _core.call("step", "run", *wanted)
    failed = []

    def work(device: int) -> None:
        try:
            for _ in range(5):
                there = to_device(driver, step_arguments(), device)
                workspace = workspace_of(driver, there, device=device)
                _core.call("step", "launch", *there, 1, workspace)
                same(there, wanted)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


# ---- Refusals ----------------------------------------------------------------------------------

ENTRIES = (
    "cuDeviceGet", "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxGetId", "cuMemsetD8Async",
    "cuLaunchKernel",
)  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_the_driver_refuses_is_an_error_with_its_name(driver, entry):
    arguments = step_arguments()
    there = to_device(driver, arguments)
    workspace = workspace_of(driver, there)
    driver.fault(entry, 719)
    text = rf"{entry}.*: CUDA error 719 \(CUDA_ERROR_LAUNCH_FAILED\): unspecified launch failure"
    with pytest.raises(RuntimeError, match=text):
        _core.call("step", "launch", *there, 1, workspace)
    driver.fault(entry, 2)
    with pytest.raises(MemoryError, match=f"{entry}.*out of memory"):
        _core.call("step", "launch", *there, 1, workspace)
    assert driver.current() is None
    driver.library.fake_forgive()
    _core.call("step", "launch", *there, 1, workspace)
    _core.call("step", "run", *arguments)
    same(there, arguments)


LOADING = (
    "cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuFuncLoad",
    "cuDeviceGetAttribute",
)  # fmt: skip


@pytest.mark.parametrize("entry", LOADING)
def test_kernels_that_cannot_be_loaded_are_asked_for_again(driver, entry):
    context = ctypes.c_void_p()
    driver.call("cuCtxCreate_v2", ctypes.byref(context), 0, 0)
    try:
        nth = 3 if entry.startswith("cuFunc") else 1
        driver.fault(entry, 200, nth)
        with pytest.raises(RuntimeError, match=f"{entry}.*CUDA error 200"):
            _core.load("cuda", IMAGE, 0)
        unloaded = driver.calls("cuModuleUnload")
        _core.load("cuda", IMAGE, 0)
        assert driver.calls("cuModuleUnload") == unloaded
    finally:
        driver.call("cuCtxPopCurrent_v2", ctypes.byref(context))


def test_a_kernel_that_fails_shows_when_the_host_waits(driver):
    there = to_device(driver, step_arguments())
    workspace = workspace_of(driver, there)
    driver.fault("kernel", 719)
    _core.call("step", "launch", *there, 1, workspace)
    with driver.context(0):
        assert driver.library.cuCtxSynchronize() == 719
    with pytest.raises(RuntimeError, match=r"CUDA error 719"):  # every later call fails as well
        _core.call("step", "launch", *there, 1, workspace)
    assert driver.current() is None


def test_workspace_is_checked(driver):
    there = to_device(driver, step_arguments())
    workspace = workspace_of(driver, there)
    size = workspace.like.numel()
    calls = driver.calls("cuLaunchKernel")
    small = DeviceTensor(driver, torch.zeros(size - 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match=f"workspace: has {size - 1} bytes, step needs {size}"):
        _core.call("step", "launch", *there, 1, small)
    with pytest.raises(ValueError, match=f"workspace: has 0 bytes, step needs {size}"):
        _core.call("step", "launch", *there, 1, None)
    floats = DeviceTensor(driver, torch.zeros(size))
    askew = DeviceTensor(driver, torch.zeros(size + 16, dtype=torch.uint8), byte_offset=16)
    for wrong in (floats, askew):
        with pytest.raises(ValueError, match="workspace: wanted contiguous bytes"):
            _core.call("step", "launch", *there, 1, wrong)
    elsewhere = DeviceTensor(driver, torch.zeros(size, dtype=torch.uint8), 1)
    with pytest.raises(ValueError, match="workspace: is on a different device from query"):
        _core.call("step", "launch", *there, 1, elsewhere)
    assert driver.calls("cuLaunchKernel") == calls


def test_other_devices_tensors_are_refused(driver):
    arguments = step_arguments()
    with pytest.raises(RuntimeError, match="query: is on CPU device 0"):
        _core.call("step", "measure", *arguments, 1)
    there = to_device(driver, arguments)
    with pytest.raises(RuntimeError, match=r"query: is on CUDA device 0.*no kernels"):
        _core.call("step", "run", *there)  # without a stream there are no kernels for them
    mixed = [*there[:5], DeviceTensor(driver, arguments[5], 1), *there[6:]]
    with pytest.raises(ValueError, match="out: is on CUDA device 1"):
        _core.call("step", "measure", *mixed, 1)
    _core.call("step", "check", *there)


@pytest.mark.parametrize("D", [264, 1024])
def test_rows_as_wide_as_latents_are_served_in_steps(driver, kernels, D):
    arguments = step_arguments(D)
    there = to_device(driver, arguments)
    kernels.step(*there)
    _core.call("step", "run", *arguments)
    same(there, arguments)


def test_what_no_kernel_serves_goes_elsewhere(driver, kernels):
    there = to_device(driver, step_arguments(D=1032))
    assert _core.call("step", "measure", *there, 1) is None
    with pytest.raises(NotImplementedError):
        kernels.step(*there)
    with pytest.raises(RuntimeError, match="step: no kernel"):
        _core.call("step", "launch", *there, 1, None)
    narrow = to_device(driver, step_arguments())
    lost = DeviceTensor(driver, narrow[4].evicted_score.like.float())
    narrow[4] = narrow[4]._replace(evicted_score=lost)
    assert _core.call("step", "measure", *narrow, 1) is None
    fake = to_device(driver, step_arguments())
    fake[0]._managed.tensor.data = None
    assert _core.call("step", "measure", *fake, 1) is None
