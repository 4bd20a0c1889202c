"""The options that say what a cache keeps: fields of H2OConfig and presets, declared once for all
commands.

Those of the policy come from `h2o.policy.FIELDS`, so that a new field has its option without more.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from h2o.budgets import Amount, parse_amount
from h2o.config import PRESETS, H2OConfig
from h2o.head_budgets import BY_RANK
from h2o.kv_dtype import QUANTISED
from h2o.policy import FIELDS, Field
from h2o.profile import Profile

__all__ = [
    "OPTIONS",
    "add_cache_options",
    "asked",
    "config_from",
    "preset_setting",
    "spelled",
]

OPTIONS: dict[str, Field] = {
    "heavy": Field(
        parse_amount, None, "K",
        "heavy hitters: an integer counts tokens, a number with a point is a fraction of the "
        "prompt or text (%(default)s)",
    ),
    "recent": Field(parse_amount, None, "K", "newest tokens (%(default)s)"),
    "of": Field(
        str, ("keys", "bytes"), None,
        "what fractions are of: the text's keys, or the bytes of a full cache (%(default)s)",
    ),
    **FIELDS,
    "positions": Field(
        str, ("original", "rolled"), None,
        "of keys: where they stood in the text, or their rank in the cache (%(default)s)",
    ),
    "kv_dtype": Field(
        str, ("auto", *QUANTISED), None,
        "store keys in eight bits, and values in eight or four; auto: in four where they go with "
        "the model",
    ),
    "shares": Field(
        str, None, "FILE",
        "share the budget among heads as `h2o calibrate` found it; shipped: the profile that "
        "comes with h2o for the model; scores: as the prompt's highest ranks lie among all layers "
        "and heads; layer: among the heads of each layer",
    ),
}  # fmt: skip
"""By the names of H2OConfig's fields."""

SPELLED = {"shares": "profile"}
"""Options that are not called as their field is."""

DEFAULTS = {field.name: field.default for field in dataclasses.fields(H2OConfig)}


FIFTH = 0.2
"""The budget of a preset that is given none."""


def spelled(name: str) -> str:
    """The option of a field: --rank-by of rank_by."""
    return f"--{SPELLED.get(name, name).replace('_', '-')}"


def add_cache_options(
    group: Any, names: Sequence[str] = tuple(OPTIONS), budget: Amount = FIFTH, **defaults: Any
) -> None:
    """Adds presets and the options of these fields to a parser or a group of one.

    An option that is left out is None, so that it can be told what was asked for, and its help has
    H2OConfig's default. But for `defaults`, and `budget`, that of a preset that is given none.
    """
    add_preset_options(group, budget)
    for name in names:
        add_option(group, name, defaults.get(name))


def add_option(group: Any, name: str, default: Any = None) -> None:
    field = OPTIONS[name]
    kind: dict[str, Any] = {"action": "store_true"}
    if not field.flag:
        kind = {"type": field.parse, "choices": field.choices, "metavar": field.metavar}
    shown = DEFAULTS[name] if default is None else default
    text = field.help.replace("%(default)s", f"{shown}")
    group.add_argument(spelled(name), dest=name, default=default, help=text, **kind)


def add_preset_options(group: Any, default: Amount) -> None:
    """--preset and --budget, whose help has this default."""
    group.add_argument(
        "--preset", choices=PRESETS, help="a config by name, instead of --heavy and --recent"
    )
    group.add_argument(
        "--budget", type=parse_amount, metavar="B",
        help="of the preset: tokens, or a fraction of the keys, or with --of bytes of the bytes "
        f"({default})",
    )  # fmt: skip


def config_from(options: argparse.Namespace) -> H2OConfig:
    """The config that the options of a command describe, those that it has.

    Raises: TypeError and ValueError for what H2OConfig does not take, and for options that do not
    go together, OSError for a profile that cannot be read.
    """
    fields = asked(options)
    if fields.get("shares", "shipped") not in ("shipped", *BY_RANK):
        fields["shares"] = Profile.load(fields["shares"])
    if not has_preset(options):
        return H2OConfig(**fields)
    for name in ("heavy", "recent"):
        if name in fields:
            raise ValueError(f"--preset has a --budget, and no {spelled(name)}")
    budget = FIFTH if options.budget is None else options.budget
    shares = fields.pop("shares", None)
    if shares in BY_RANK:
        if options.preset == "calibrated":
            raise ValueError(f"--preset calibrated shares by a profile, not by --profile {shares}")
        fields["shares"], shares = shares, None
    if shares is not None and options.preset != "calibrated":
        raise ValueError(f"--profile goes with --preset calibrated, not with {options.preset}")
    profile = None if shares == "shipped" else shares
    config = H2OConfig.preset(options.preset, budget, fields.pop("of", "keys"), profile)
    return dataclasses.replace(config, **fields)


def preset_setting(options: argparse.Namespace, default: Amount = FIFTH) -> str | None:
    """The preset as `h2o.evaluate.setting` writes it, None where none was asked for.

    Raises: ValueError for a budget without a preset.
    """
    if not has_preset(options):
        return None
    in_bytes = "-bytes" if options.of == "bytes" else ""
    return f"{options.preset}{in_bytes}:{default if options.budget is None else options.budget}"


def has_preset(options: argparse.Namespace) -> bool:
    if options.preset is None and options.budget is not None:
        raise ValueError("--budget goes with --preset; without one give --heavy and --recent")
    return options.preset is not None


def asked(options: argparse.Namespace, names: Sequence[str] = tuple(OPTIONS)) -> dict[str, Any]:
    """Options that have a value, by name."""
    values = {name: getattr(options, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}
