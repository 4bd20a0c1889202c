"""Settings of the tests with models."""

import pytest

from h2o.hf import prompt_echo


@pytest.fixture(autouse=True)
def _few_heads_are_enough(monkeypatch):
    """To deal places over: tiny models have less than real ones need."""
    monkeypatch.setattr(prompt_echo, "FEWEST_HEADS", 1)
