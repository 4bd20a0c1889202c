"""The implementations of the operations, for torch tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import torch

from h2o import backends, ops
from tests.conversation import Engine, as_float64
from tests.reference import operations as reference


def _engine(name: str, module, dtype: torch.dtype) -> Engine:
    def tensor(x: np.ndarray) -> torch.Tensor:
        y = torch.from_numpy(np.array(x))
        return y.to(dtype) if y.is_floating_point() else y

    return Engine(name, module, tensor, lambda x: tensor(x).float().numpy())


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """For tiny products torch's threads cost twenty times what they save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _on_one_thread(function):
    @functools.wraps(function)
    def run(*args, **kwargs):
        with one_thread():
            return function(*args, **kwargs)

    return run


_REFERENCE = SimpleNamespace(
    attend=_on_one_thread(reference.attend),
    evict=_on_one_thread(reference.evict),
    step=_on_one_thread(reference.step),
    simulate=_on_one_thread(reference.simulate),
)


def assert_same(got, wanted, rounding: float = 1e-5) -> None:
    """Answers of the core must be equal to the last bit. Those of the torch backend may differ by
    rounding, because torch splits and sums products differently for other shapes, strides and
    threads."""
    got, wanted = (as_float64(x) if isinstance(x, torch.Tensor) else x for x in (got, wanted))
    if not backends.forced:
        rounding = 0.0
    np.testing.assert_allclose(got, wanted, rtol=rounding, atol=rounding)


ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Tolerance of outputs in a dtype, which are rounded to it. Scores are float32 for every dtype."""


def oracle(dtype: torch.dtype = torch.float32) -> Engine:
    """`tests.reference.operations`."""
    return _engine("oracle", _REFERENCE, dtype)


def core(dtype: torch.dtype = torch.float32) -> Engine:
    """`h2o.ops`, which calls the C core."""
    return _engine("core", ops, dtype)


def _forced(function):
    @functools.wraps(function)
    def run(*args, **kwargs):
        with backends.by_torch(), one_thread():
            return function(*args, **kwargs)

    return run


_PORTABLE = SimpleNamespace(
    **{name: _forced(getattr(ops, name)) for name in ("attend", "evict", "step", "simulate")}
)


def portable(dtype: torch.dtype = torch.float32) -> Engine:
    """`h2o.ops` with the torch backend, `h2o.backends.torch_backend`."""
    return _engine("torch", _PORTABLE, dtype)
