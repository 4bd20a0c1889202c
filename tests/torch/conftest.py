"""Fixtures of the torch tests, and of the core's that they use too."""

import pytest

from tests.core.conftest import refused
from tests.torch.engines import one_thread

__all__ = ["refused"]


@pytest.fixture
def on_one_thread():
    with one_thread():
        yield
