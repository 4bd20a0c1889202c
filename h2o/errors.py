"""Exceptions of h2o. This module imports nothing."""

from __future__ import annotations


class UserError(Exception):
    """An error that the user of a command can fix. Its message, one line, says how."""


class UnsupportedError(ValueError):
    """A model needs something that h2o does not support. The message names it and a remedy."""
