"""The options that say what a cache keeps: fields of H2OConfig, declared once for all commands.

Those of the policy come from `h2o.policy.FIELDS`, so that a new field has its option without more.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from h2o.budgets import parse_amount
from h2o.config import H2OConfig
from h2o.policy import FIELDS, Field
from h2o.profile import Profile

__all__ = ["OPTIONS", "add_cache_options", "asked", "config_from", "spelled"]

OPTIONS: dict[str, Field] = {
    "heavy": Field(
        parse_amount, None, "K",
        "heavy hitters: an integer counts tokens, a number with a point is a fraction of the "
        "prompt or text (%(default)s)",
    ),
    "recent": Field(parse_amount, None, "K", "newest tokens (%(default)s)"),
    **FIELDS,
    "positions": Field(
        str, ("original", "rolled"), None,
        "of keys: where they stood in the text, or their rank in the cache (%(default)s)",
    ),
    "kv_dtype": Field(
        str, ("auto", "int8", "int8-int4"), None,
        "store keys in eight bits, and values in eight or four; auto: in four where they go with "
        "the model",
    ),
    "shares": Field(
        str, None, "FILE",
        "share the budget among heads as `h2o calibrate` found it; shipped: the profile that "
        "comes with h2o for the model",
    ),
}  # fmt: skip
"""By the names of H2OConfig's fields."""

SPELLED = {"shares": "profile"}
"""Options that are not called as their field is."""

DEFAULTS = {field.name: field.default for field in dataclasses.fields(H2OConfig)}


def spelled(name: str) -> str:
    """The option of a field: --rank-by of rank_by."""
    return f"--{SPELLED.get(name, name).replace('_', '-')}"


def add_cache_options(
    group: Any, names: Sequence[str] = tuple(OPTIONS), *, optional: bool = False
) -> None:
    """Adds the options of these fields to a parser or a group of one.

    What an option leaves out has H2OConfig's default, or is None where all are `optional`, so that
    it can be told what was asked for.
    """
    for name in names:
        field, default = OPTIONS[name], DEFAULTS[name]
        text = field.help.replace("%(default)s", f"{default}") if optional else field.help
        kind: dict[str, Any] = {"action": "store_true"}
        if not field.flag:
            kind = {"type": field.parse, "choices": field.choices, "metavar": field.metavar}
        group.add_argument(
            spelled(name), dest=name, default=None if optional else default, help=text, **kind
        )


def config_from(options: argparse.Namespace) -> H2OConfig:
    """The config that the options of a command describe, those that it has.

    Raises: TypeError and ValueError for what H2OConfig does not take, OSError for a profile that
    cannot be read.
    """
    fields = asked(options)
    if fields.get("shares", "shipped") != "shipped":
        fields["shares"] = Profile.load(fields["shares"])
    return H2OConfig(**fields)


def asked(options: argparse.Namespace, names: Sequence[str] = tuple(OPTIONS)) -> dict[str, Any]:
    """Options that have a value, by name."""
    values = {name: getattr(options, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}
