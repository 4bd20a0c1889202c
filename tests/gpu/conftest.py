"""Passes on a GPU read no slots, as they would wait for it and could not be captured."""

from __future__ import annotations

import pytest

from h2o.hf.layers import layer


@pytest.fixture(autouse=True)
def _slots_are_not_checked(monkeypatch):
    monkeypatch.setattr(layer, "CHECKS_SLOTS", False)
