"""How much Python of h2o a forward pass runs. Bounds of a count, which no machine changes."""

from __future__ import annotations

import pytest

from h2o.hf.layers import layer
from tools.count_calls import passes

BOUNDS = {
    "prompt, heavy, recent": (130, 20),
    "step, heavy, recent": (39, 8),
    "prompt, budget=0.2": (203, 26),
    "step, budget=0.2": (39, 8),
}


@pytest.fixture(scope="module")
def found():
    checks, layer.CHECKS_SLOTS = layer.CHECKS_SLOTS, False
    yield passes()
    layer.CHECKS_SLOTS = checks


@pytest.mark.parametrize("name", BOUNDS)
def test_calls(found, name):
    """A pass must not ask more than it did when the bounds were set."""
    calls, files = BOUNDS[name]
    assert found[name].total <= calls
    assert found[name].files <= files
