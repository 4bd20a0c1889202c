"""Fixtures that the tests with torch share with those of the core."""

from tests.core.conftest import refused

__all__ = ["refused"]
