"""Fixtures of the core's tests, which need only NumPy and run under sanitizers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.core.calls import Call


@pytest.fixture
def refused() -> Callable[..., None]:
    """refused(call, error, *texts): the call raises exactly this error, and its arguments do not
    change."""

    @contextmanager
    def untouched(call: Call) -> Iterator[None]:
        before = call.snapshot()
        yield
        for name, value in call.snapshot().items():
            assert value == before[name], f"{name} was written by a call that failed"

    def check(call: Call, error: type[Exception], *texts: str) -> None:
        with untouched(call), pytest.raises(error) as raised:
            call.run()
        assert raised.type is error
        for text in texts:
            assert re.search(text, str(raised.value)), str(raised.value)

    return check
