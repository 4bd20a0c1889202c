"""The operations on arrays and tensors of the CPU, carried out by those of a device.

With H2O_TEST_DEVICE=cuda in the environment the whole suite has them so: texts, stores and answers
stay what the tests know, and torch's first CUDA device computes. "fake" stands for the device of
tests/cuda/fake, "cpu" for copies that stay here; these two try the switch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from h2o import _core, backends
from h2o.backends import cuda
from h2o.slots import Slots

__all__ = ["DEVICES", "carry", "mapped", "switch", "tensors"]


def mapped(arguments: Any, function: Callable[[Any], Any]) -> list[Any]:
    """Arguments of a call with other tensors."""
    kinds = torch.Tensor | np.ndarray
    changed = [function(x) if isinstance(x, kinds) else x for x in arguments]
    return [Slots(*mapped(x, function)) if isinstance(x, Slots) else x for x in changed]


def tensors(arguments: Any) -> Iterator[Any]:
    """Those of a call, one after the other."""
    for x in arguments:
        if isinstance(x, Slots):
            yield from tensors(x)
        elif isinstance(x, torch.Tensor) or hasattr(x, "__dlpack__"):
            yield x


def carry(
    operations: SimpleNamespace,
    there: Callable[[torch.Tensor], Any],
    back: Callable[[Any], torch.Tensor],
) -> SimpleNamespace:
    """Operations on tensors and arrays of the CPU, by those on what `there` makes of a copy of
    each; what came `back` is written to where it has changed. The core checks the arguments as
    they are first: a device's numbers are not read, so errors in them would not be raised."""

    def make(name: str) -> Any:
        def run(*arguments: Any) -> None:
            _core.call(name, "check", *arguments)
            sent = mapped(arguments, _copy)
            away = mapped(sent, there)
            getattr(operations, name)(*away)
            for mine, before, after in zip(
                tensors(arguments), tensors(sent), tensors(away), strict=True
            ):
                _write(mine, before, back(after))

        return run

    return SimpleNamespace(**{name: make(name) for name in backends.OPERATIONS})


def _copy(x: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(x)) if isinstance(x, np.ndarray) else x.detach().clone()


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _write(mine: Any, before: torch.Tensor, after: torch.Tensor) -> None:
    if torch.equal(_bytes(before), _bytes(after)):  # also where nobody may write
        return
    if isinstance(mine, np.ndarray):
        np.copyto(mine, after.numpy())
    else:
        mine.copy_(after)


# ---- The switch --------------------------------------------------------------------------------


def switch(device: str) -> None:
    """From now on `h2o.ops` has what is on the CPU computed on this device.

    Errors: RuntimeError where it is not there, or where h2o's kernels do not serve it, as tests
    would be of something else then.
    """
    if device not in DEVICES:
        raise RuntimeError(f"wanted one of {', '.join(DEVICES)}")
    serving, carried = backends.serving, DEVICES[device]()

    def chosen(tensor: Any) -> Any:
        on_cpu = getattr(tensor, "is_cpu", isinstance(tensor, np.ndarray))
        return carried if on_cpu and not backends.forced else serving(tensor)

    backends.serving = chosen


def _cuda() -> SimpleNamespace:
    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no CUDA device here")
    torch.cuda.init()
    index = torch.cuda.current_device()
    operations = cuda.serving(index, backends._portable())
    if operations is backends._portable():
        raise RuntimeError(f"h2o's kernels do not serve cuda:{index}: {cuda.describe()}")
    return carry(operations, lambda x: x.to(f"cuda:{index}"), torch.Tensor.cpu)


def _cpu() -> SimpleNamespace:
    return carry(backends.core, torch.Tensor.clone, torch.Tensor.clone)


def _fake() -> SimpleNamespace:
    from tests.cuda import device

    path = device.build()
    if path is None:
        raise RuntimeError("the fake driver needs the sources, make and g++")
    driver = device.load(path)
    return device.carried(driver, device.operations(driver, setattr))


DEVICES = {"cuda": _cuda, "cpu": _cpu, "fake": _fake}
"""H2O_TEST_DEVICE -> the operations by that device."""
