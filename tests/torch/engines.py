"""Both implementations of the operations, on torch tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import torch

from h2o import ops, reference
from tests.conversation import Engine


def _engine(name: str, module, dtype: torch.dtype) -> Engine:
    def tensor(x: np.ndarray) -> torch.Tensor:
        y = torch.from_numpy(np.array(x))
        return y.to(dtype) if y.is_floating_point() else y

    return Engine(name, module, tensor, lambda x: tensor(x).float().numpy())


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """On tiny products torch's threads cost twenty times what they save."""
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


def oracle(dtype: torch.dtype = torch.float32) -> Engine:
    """`h2o.reference`."""
    return _engine("oracle", _REFERENCE, dtype)


def core(dtype: torch.dtype = torch.float32) -> Engine:
    """`h2o.ops`, that is, the C core."""
    return _engine("core", ops, dtype)
