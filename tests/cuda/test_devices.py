"""Differences between devices: the compute capability, and which of several is current."""

from __future__ import annotations

import contextlib

import pytest
import torch

from h2o import _core, backends
from h2o.policy import Policy
from tests.cuda.carry import mapped
from tests.cuda.device import DeviceTensor
from tests.cuda.test_launch import run, same, step_arguments


def attend_arguments(D: int, dtype: torch.dtype) -> list:
    """Arguments on the CPU of a prompt of ten tokens."""
    query, key, value = (torch.randn(1, heads, 10, D, dtype=dtype) for heads in (4, 2, 2))
    out, scores = torch.zeros(1, 10, 4, D, dtype=dtype), torch.zeros(1, 2, 10)
    return [query, key, value, None, None, out, scores, D**-0.5, 0.0, Policy(), None, None, None]


def test_what_a_device_before_8_0_lacks_is_the_torch_backends(library):
    """A device before 8.0 must leave prompts in bfloat16 and with head dimensions above 128 to the
    torch backend. It has no bfloat16, and no room for such tiles."""
    code = f"""
import torch
from h2o import _core
from tests.cuda.device import load, to_device
from tests.cuda.test_devices import attend_arguments
from tests.cuda.test_launch import step_arguments, workspace_of
driver = load({library!r})
for D, dtype in (64, "float16"), (128, "float32"), (64, "bfloat16"), (192, "float16"):
    arguments = to_device(driver, attend_arguments(D, getattr(torch, dtype)))
    print(D, dtype, _core.call("attend", "measure", *arguments, 1) is not None)
there = to_device(driver, step_arguments())
_core.call("step", "launch", *there, 1, workspace_of(driver, there))
driver.wait()
from h2o.backends import cuda
cuda._file_reason = lambda: None
print(cuda.describe())
"""
    done = run(code, FAKE_CUDA_CAPABILITY="75")
    *served, described = done.stdout.splitlines()
    assert "compute capability 7.5, torch for prompts in bfloat16" in described
    assert [line.split() for line in served] == [
        ["64", "float16", "True"], ["128", "float32", "True"],
        ["64", "bfloat16", "False"], ["192", "float16", "False"],
    ], done.stderr  # fmt: skip
    assert done.returncode == 0, done.stderr
    later = run(code, FAKE_CUDA_CAPABILITY="80")
    assert later.stdout.count("True") == 4, later.stderr
    assert "bfloat16" not in later.stdout.splitlines()[-1]


class OfCurrentDevice(DeviceTensor):
    """A tensor as torch before 2.10 has it: it exports memory of torch's current device only."""

    is_cuda, chosen = True, 0

    def __dlpack__(self, **arguments):
        if self.device != OfCurrentDevice.chosen:
            raise BufferError("Can't export tensors on a different CUDA device index")
        return super().__dlpack__(**arguments)


def test_tensors_of_a_device_that_is_not_current_are_served(driver, kernels, monkeypatch):
    """Without DLPack's exchange table the tensor's device must be current during the call, and the
    previous device afterwards."""

    @contextlib.contextmanager
    def device(index):
        monkeypatch.setattr(OfCurrentDevice, "chosen", index)
        yield
        monkeypatch.setattr(OfCurrentDevice, "chosen", 0)

    monkeypatch.setattr(torch.cuda, "device", device)
    arguments = step_arguments()
    there = mapped(arguments, lambda x: OfCurrentDevice(driver, x, 1))
    kernels.step(*there)
    assert OfCurrentDevice.chosen == 0
    _core.call("step", "run", *arguments)
    same(there, arguments)
    large = mapped(step_arguments(D=1032), lambda x: OfCurrentDevice(driver, x, 1))
    with pytest.raises(NotImplementedError):  # no kernel supports it, so torch would
        kernels.step(*large)
    with pytest.raises((AttributeError, TypeError)):  # it is no torch tensor, but was exported
        backends._torch_backend().step(*large)
