"""Settings of the tests with models."""

import pytest
import torch

from h2o.hf.cache import cache_plan
from h2o.hf.prompt import echo_scorer


@pytest.fixture(autouse=True, scope="module")
def _no_gradients():
    """Run all tests of a module without gradients, as generate() does."""
    with torch.no_grad():
        yield


@pytest.fixture
def gradients():
    with torch.enable_grad():
        yield


@pytest.fixture(autouse=True)
def _few_heads_are_enough(monkeypatch):
    """Let heads share one budget, although tiny models have fewer heads than that requires."""
    monkeypatch.setattr(echo_scorer, "FEWEST_HEADS", 1)
    monkeypatch.setattr(cache_plan, "_recent", [])  # plans made with another FEWEST_HEADS
