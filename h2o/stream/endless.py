"""Caches for a text, or a chat, that has no end. Imports neither torch nor transformers."""

from __future__ import annotations

import dataclasses

from h2o.config import H2OConfig
from h2o.config_fields import Positions
from h2o.errors import UserError
from h2o.evaluate.setting import Setting

__all__ = ["endless"]


def endless(setting: Setting, positions: Positions = "rolled") -> H2OConfig:
    """The config of a setting for a text without end.

    Raises: UserError for what is no cache, and for fractions: there is no length to take them of;
    ValueError for what does not go with these positions.
    """
    if not setting.dropping:
        raise UserError(setting.why_not_dropping)
    config = dataclasses.replace(setting.config, positions=positions)
    if config.needs_prompt_length:
        raise UserError(f"{setting.name}: give numbers of tokens; a stream has no length")
    return config
