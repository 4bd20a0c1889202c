"""Fixtures of the core's tests that the torch tests use too."""

from tests.core.conftest import refused

__all__ = ["refused"]
