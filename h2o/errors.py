"""The errors that are h2o's own. Imports nothing."""

from __future__ import annotations


class UserError(Exception):
    """Something that the user of a command can put right; its text, one line, says how."""


class UnsupportedError(ValueError):
    """A model asks for something that h2o cannot do; the message names it and a remedy."""
