"""Choice of the backend for a CUDA device: the kernels if they are built, can be loaded and compute
the torch backend's answers, otherwise the torch backend."""

from __future__ import annotations

import json
import lzma
import warnings
from types import SimpleNamespace

import pytest
import torch

from h2o import H2OConfig, _core, backends, cli, ops
from h2o.backends import cuda, kernel_check, prompt_attention
from h2o.config.layer_plan import LayerPlan
from h2o.hf.attention.attention_call import NewTokens
from h2o.hf.cache_state.layer_snapshot import restore, take_snapshot
from h2o.hf.layers.layer import H2OLayer
from tests.cuda.device import IMAGE, carried
from tests.devices import forget_default_device, on_fake_device
from tests.inputs import drifting


@pytest.fixture
def device(driver, kernels, built, monkeypatch):
    """The fake driver's device as torch's CUDA device 0. Its tensors are CPU tensors, copied there
    and back."""
    make = cuda._kernels
    monkeypatch.setattr(cuda, "_kernels", lambda by_torch: carried(driver, make(by_torch)))
    monkeypatch.setattr(cuda, "_device", lambda index: "cpu")
    monkeypatch.setattr(cuda, "_is_capturing", lambda: False)
    monkeypatch.setattr(cuda, "_synchronize", driver.wait)
    monkeypatch.setattr(
        prompt_attention, "TORCH_ATTENTIONS", {}
    )  # tested in test_prompt_attention.py
    # test_launch.py runs all cases
    check_small(monkeypatch, kernel_check.Size(10, 3, 1, 4, 2))
    return driver


def check_small(monkeypatch, size: kernel_check.Size, simulated: bool = False) -> None:
    case = kernel_check.Case(16, torch.float32, size, simulated=simulated)
    monkeypatch.setattr(kernel_check, "CASES", (case,))


def serving(by_torch=None):
    """Backend of device 0: "C" or "torch"."""
    by_torch = by_torch or backends._torch_backend()
    operations = cuda.backend_for(0, by_torch)
    return "torch" if operations is by_torch else "C"


def forget() -> None:
    """Forget all verdicts, as a new process would."""
    cuda._backends.clear()
    cuda._reasons.clear()


def launches(driver) -> int:
    return driver.calls("cuLaunchKernel")


def test_kernels_that_answer_rightly_serve_and_are_checked_once(device, built):
    assert serving() == "C"
    checked = launches(device)
    assert serving() == "C"
    forget()
    assert serving() == "C"
    assert launches(device) == checked
    (file,) = (built.parent / "cache" / "h2o").iterdir()
    facts = json.loads(file.read_text())
    assert facts["mistakes"] == []
    assert facts["device"] == ["Fake GPU 0", 9, 0]
    assert ops.info()["backends"]["cuda"].startswith("C (Fake GPU 0, compute capability 9.0")

    built.write_bytes(IMAGE[:64] + b"another build" + IMAGE[64:])
    forget()
    assert serving() == "C"
    assert launches(device) > checked


WRONG = {
    "h2o_cuda_forward_64": "attend gets out wrong",
    "h2o_cuda_sums_64": "attend gets scores wrong",
    "h2o_cuda_evict": "evict gets slots.scores wrong",
    "h2o_cuda_move": "evict gets slots.keys wrong",
    "h2o_cuda_step": "step gets out wrong",
    "h2o_cuda_simulate_open": "simulate gets out wrong",
}


@pytest.mark.parametrize("kernel", WRONG)
def test_a_wrong_kernel_is_named_and_does_not_serve(device, kernel, monkeypatch):
    if kernel == "h2o_cuda_move":  # evict itself moves few rows
        check_small(monkeypatch, kernel_check.Size(40, 9, 1, 18, 12))
    if kernel == "h2o_cuda_simulate_open":
        check_small(monkeypatch, kernel_check.Size(10, 3, 1, 4, 2), simulated=True)
    device.flip(kernel)
    with pytest.warns(RuntimeWarning, match=rf"torch backend is used for cuda:0.*{WRONG[kernel]}"):
        assert serving() == "torch"
    assert WRONG[kernel] in ops.info()["backends"]["cuda"]


def test_a_wrong_kernel_is_remembered(device):
    device.flip("h2o_cuda_evict")
    mistake = WRONG["h2o_cuda_evict"]
    with pytest.warns(RuntimeWarning, match=mistake):
        assert serving() == "torch"
    checked = launches(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert serving() == "torch"  # it warns once, ...
    forget()
    device.flip("")
    with pytest.warns(RuntimeWarning, match=mistake):
        assert serving() == "torch"  # ... in each process, ...
    assert launches(device) == checked
    assert cuda.check(0, backends._torch_backend()) == []  # ... until the next check
    forget()
    assert serving() == "C"


def test_a_kernel_that_fails_does_not_serve(device):
    device.fault("kernel", 719)
    with pytest.warns(RuntimeWarning, match="attend fails: .*719"):
        assert serving() == "torch"


def raising(error):
    """The torch backend, with an attention that raises this error."""

    def attend(*arguments):
        raise error

    return SimpleNamespace(**{**vars(backends._torch_backend()), "attend": attend})


NOTHING_SAID = {
    "no memory for torch": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    "no memory for a library": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"),
    "no memory": MemoryError(),
    "a tensor that cannot be lent": BufferError("Can't export tensors on a different CUDA device"),
    "a capture": RuntimeError("CUDA error: operation not permitted when stream is capturing"),
    "a setting": RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation"),
    "an operation torch has not": NotImplementedError("aten::searchsorted"),
}


@pytest.mark.parametrize("what", NOTHING_SAID)
def test_what_says_nothing_about_the_kernels_is_not_remembered(device, built, what):
    error = NOTHING_SAID[what]
    unusable = raising(error)
    with pytest.warns(RuntimeWarning, match=f"could not be checked.*{type(error).__name__}"):
        assert serving(unusable) == "torch"
    assert "could not be checked" in ops.info()["backends"]["cuda"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert serving(unusable) == "torch"  # in this process, without another attempt
    with pytest.raises(RuntimeError, match="could not be checked"):
        cuda.check(0, unusable)
    assert not (built.parent / "cache").exists()


@pytest.mark.parametrize(("entry", "code"), [("cuMemAlloc_v2", 2), ("cuLaunchKernel", 2)])
def test_a_device_without_memory_says_nothing_about_the_kernels(device, built, entry, code):
    device.fault(entry, code, nth=3)
    with pytest.warns(RuntimeWarning, match=r"could not be checked.*out of memory"):
        assert serving() == "torch"
    assert not (built.parent / "cache").exists()
    forget()
    assert serving() == "C"


def test_a_failure_of_what_the_program_queued_is_not_the_kernels(device, built, monkeypatch):
    def settle(index):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(cuda, "_synchronize", settle)
        with pytest.warns(RuntimeWarning, match="could not be checked.*illegal memory access"):
            assert serving() == "torch"
    assert not (built.parent / "cache").exists()
    forget()
    assert serving() == "C"


def test_a_file_of_kernels_that_cannot_be_read_is_explained(device, built, monkeypatch):
    monkeypatch.setattr(cuda, "_file_reason", lambda: None)
    built.unlink()
    built.mkdir()
    assert serving() == "torch"
    assert "Is a directory" in ops.info()["backends"]["cuda"]


def test_compressed_kernels_are_expanded(device, built):
    built.write_bytes(lzma.compress(IMAGE[:64]) + IMAGE[64:])
    assert cuda._image(built.read_bytes()) == IMAGE
    assert serving() == "C"
    for cut in (40, 60):  # inside the compressed stream, and before its end
        built.write_bytes(lzma.compress(bytes(1000) + IMAGE[:64])[:cut] + IMAGE[64:])
        forget()
        with pytest.warns(RuntimeWarning, match=r"kernels\.fatbin cannot be read"):
            assert serving() == "torch"


def test_the_programs_settings_of_torch_are_set_aside(device):
    """The check must not depend on the user's settings of torch: float64, deterministic algorithms,
    and another default device."""

    def strictly(name):
        def run(*arguments):
            assert not torch.are_deterministic_algorithms_enabled()
            assert torch.ones(1).dtype == torch.float32
            assert torch.ones(1).device.type == "cpu"
            assert not torch.is_grad_enabled()
            getattr(backends._torch_backend(), name)(*arguments)

        return run

    strict = SimpleNamespace(**{name: strictly(name) for name in backends.OPERATIONS})
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        assert serving(strict) == "C"
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        fresh = torch.ones(1)
        assert (fresh.dtype, fresh.device.type) == (torch.float64, "meta")
    finally:
        forget_default_device()
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("folder", ["", "file", "/proc/no/such"])
def test_a_cache_folder_is_not_needed(device, tmp_path, monkeypatch, folder):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setenv("XDG_CACHE_HOME", folder and str(tmp_path / folder))
    assert serving() == "C"


def test_a_spoilt_cache_is_checked_anew(device, built):
    assert serving() == "C"
    (file,) = (built.parent / "cache" / "h2o").iterdir()
    checked = launches(device)
    for text in ("", '{"mistakes": 3}'):
        file.write_text(text)
        forget()
        assert serving() == "C"
        assert launches(device) > checked
        checked = launches(device)


def test_what_cannot_be_loaded_is_explained_once(device):
    device.fault("cuDeviceGet", 101)
    with pytest.warns(RuntimeWarning, match="cuDeviceGet: CUDA error 101"):
        assert serving() == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert serving() == "torch"


def test_a_build_without_kernels_says_so_and_warns_nobody(built, monkeypatch):
    built.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert serving() == "torch"
    assert ops.info()["backends"]["cuda"] == "torch (kernels not built)"
    with pytest.raises(RuntimeError, match="not built"):
        cuda.check(0, backends._torch_backend())


@pytest.mark.parametrize("image", [IMAGE[:64], IMAGE[:-1] + b"?", b"", b"short"])
def test_kernels_of_other_sources_than_the_core_do_not_serve(device, built, image, monkeypatch):
    """Kernels of other sources would misread their parameters. They must be rejected before any
    call of the driver."""
    built.write_bytes(image)
    monkeypatch.setattr(_core, "load", None)
    monkeypatch.setattr(_core, "devices", None)
    with pytest.warns(RuntimeWarning, match="torch backend is used for cuda:0.*different sources"):
        assert serving() == "torch"
    assert "run `make cuda` again" in ops.info()["backends"]["cuda"]
    with pytest.raises(RuntimeError, match="from different sources"):
        cuda.check(0, backends._torch_backend())


def test_a_graph_that_is_captured_first_is_the_torch_backends(device, monkeypatch):
    monkeypatch.setattr(cuda, "_is_capturing", lambda: True)
    calls = launches(device)
    with pytest.warns(RuntimeWarning, match=r"while a CUDA graph is captured.*open_device\("):
        assert serving() == "torch"
    assert launches(device) == calls
    monkeypatch.setattr(cuda, "_is_capturing", lambda: False)
    assert serving() == "C"


def test_a_step_opens_no_device(device, built):
    """A step may use a known verdict, but must not load, launch or write anything to get one."""
    by_torch = backends._torch_backend()
    before = launches(device)
    with pytest.warns(RuntimeWarning, match=r"not open yet: call h2o.ops.open_device"):
        assert cuda.backend_if_open(0, by_torch) is by_torch
    assert launches(device) == before
    assert not (built.parent / "cache" / "h2o").exists()
    assert serving() == "C"
    checked = launches(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cuda.backend_if_open(0, by_torch) is cuda.backend_for(0, by_torch)
    assert launches(device) == checked


def test_a_layer_that_goes_on_elsewhere_opens_the_device_before_its_step(monkeypatch):
    opening = []
    serving = backends.backend_for
    monkeypatch.setattr(backends, "backend_for", lambda x: opening.append(x) or serving(x))
    text = [torch.from_numpy(x) for x in drifting(3, B=1, H=2, G=2, N=12, D=16)]
    prompt, token = ([x[:, :, i:j] for x in text] for i, j in ((0, 11), (11, 12)))
    read, moved = (H2OLayer(LayerPlan.of(H2OConfig(heavy=4, recent=4), 0, 1)) for _ in range(2))
    read.update(*prompt[1:])
    read.forward(NewTokens(*prompt, None, 0.25, 0.0))
    opening.clear()
    restore(moved, take_snapshot(read))
    assert len(opening) == 1
    moved.update(*token[1:])
    moved.forward(NewTokens(*token, None, 0.25, 0.0))
    assert len(opening) == 1, "a step opens none"


def test_fake_tensors_are_the_torch_backends_and_warn_nobody(device):
    """Fake tensors have no memory, so the torch backend serves them, even if the device is open."""
    by_torch = backends._torch_backend()
    for is_open in (False, True):
        with on_fake_device(), warnings.catch_warnings():
            warnings.simplefilter("error")
            tensor = torch.empty(2)
            assert tensor.is_cuda
            assert backends.backend_for(tensor) is by_torch
            assert backends.backend_if_open(tensor) is by_torch
        assert bool(cuda._backends) == is_open
        assert serving() == "C"


def test_tensors_go_by_their_device(device, monkeypatch):
    here = SimpleNamespace(is_cpu=False, is_cuda=True, device=SimpleNamespace(index=0))
    assert backends.backend_for(here).attend is not backends._torch_backend().attend
    with backends.by_torch():
        assert backends.backend_for(here) is backends._torch_backend()
    here.is_cuda = False
    assert backends.backend_for(here) is backends._torch_backend()
    here.is_cuda = True
    monkeypatch.setattr(torch.version, "hip", "6.0")  # AMD GPUs, which torch calls cuda
    assert backends.backend_for(here) is backends._torch_backend()


def test_info_checks_on_demand(device, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert cli.main(["info", "--check"]) == 0
    assert capsys.readouterr().out == "cuda:0  every operation answers as the torch backend does\n"
    device.flip("h2o_cuda_step")
    assert cli.main(["info", "--check"]) == 1
    assert "cuda:0  step gets out wrong (float32, D = 16)" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert cli.main(["info", "--check"]) == 1
    assert "no CUDA device" in capsys.readouterr().err
