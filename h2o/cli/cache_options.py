"""Options that several commands have, each spelled here once: the model, its dtype and device, what
a cache keeps, which are fields of H2OConfig and presets, and lists of settings to compare.

Those of the policy come from `h2o.policy.FIELDS`, so that a new field has its option without more.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from h2o.budgets import Amount, parse_amount
from h2o.config import PRESETS, H2OConfig
from h2o.evaluation.setting import Setting, from_config, parse_all, shares_of, with_profile
from h2o.kv_dtype import QUANTIZED
from h2o.policy import FIELDS, Field
from h2o.profile import Profile
from h2o.spans import Row, parse_spans

__all__ = [
    "OPTIONS",
    "add_cache_options",
    "add_compare",
    "add_device",
    "add_dtype",
    "add_model",
    "add_option",
    "add_pin",
    "asked",
    "config_from",
    "described",
    "has_budget",
    "settings_from",
    "spelled",
]

OPTIONS: dict[str, Field] = {
    "heavy": Field(
        parse_amount, None, "K",
        "heavy hitters: an integer counts tokens, a number with a point is a fraction of the "
        "prompt or text (%(default)s)",
    ),
    "recent": Field(parse_amount, None, "K", "newest tokens (%(default)s)"),
    "budget_unit": Field(
        str, ("keys", "bytes"), None,
        "what fractions are of: the text's keys, or the bytes of a full cache (%(default)s)",
    ),
    **FIELDS,
    "positions": Field(
        str, ("original", "cache_relative"), None,
        "of keys: where they stood in the text, or their rank in the cache (%(default)s)",
    ),
    "kv_dtype": Field(
        str, ("auto", *QUANTIZED), None,
        "store keys in eight bits, and values in eight or four; auto: in four where they go with "
        "the model",
    ),
    "head_shares": Field(
        str, None, "FILE",
        "share the budget among heads as `h2o calibrate` found it; shipped: the profile that "
        "comes with h2o for the model; echo: as a prompt's echo says, "
        "with --score-by mean-echo",
    ),
    "min_tokens": Field(
        int, None, "N",
        "where an amount is a fraction no head keeps fewer keys than this; 0: no such limit "
        "(%(default)s)",
    ),
}  # fmt: skip
"""By the names of H2OConfig's fields."""

SPELLED = {"head_shares": "profile"}
"""Options that are not called as their field is."""

DEFAULTS = {field.name: field.default for field in dataclasses.fields(H2OConfig)}


FIFTH = 0.2
"""The budget of a preset that is given none."""


def spelled(name: str) -> str:
    """The option of a field: --score-by of score_by."""
    return f"--{SPELLED.get(name, name).replace('_', '-')}"


def add_model(add: Callable[..., Any]) -> None:
    """--model, where one is embedded; `add` is the add_argument of a parser or group."""
    add(
        "--model",
        metavar="NAME",
        help="hub name, folder or .gguf file; default: the embedded SmolLM2-135M-Instruct",
    )


def add_dtype(add: Callable[..., Any], more: str = "") -> None:
    """--dtype, one that h2o computes in; `more` is added to the help."""
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help=f"auto: as the model was saved{more}",
    )


def add_device(add: Callable[..., Any]) -> None:
    """--device."""
    add("--device", default="cpu", metavar="NAME",
        help="where the model runs: cpu, cuda, cuda:1, mps, ... (%(default)s)")  # fmt: skip


def add_pin(add: Callable[..., Any]) -> None:
    """--pin and --system, which chats begin with."""
    add("--system", metavar="TEXT", help="what a chat's system message says (with --chat)")
    add("--pin", type=parse_pins, metavar="WHAT", help="keys that are never evicted and count in "
        "the budget: system, a chat's system turn; prompt, all of it; or spans of its tokens, "
        "such as 0:40,100:120")  # fmt: skip


def parse_pins(text: str) -> str | Row:
    """Parse spans of an option's text, by `h2o.spans.parse_spans`."""
    try:
        return parse_spans(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_compare(add: Callable[..., Any], default: str | None = None, more: str = "") -> None:
    """Add --compare, a list of settings for `settings_from`. `more` is added to its help."""
    shown = "" if default is None else f" ({default})"
    add("--compare", metavar="SETTINGS", help="caches, with commas between, as "
        f"h2o eval --help lists them{more}{shown}")  # fmt: skip


def add_cache_options(
    group: Any, names: Sequence[str] = tuple(OPTIONS), budget: Amount = FIFTH, **defaults: Any
) -> None:
    """Adds presets and the options of these fields to a parser or a group of one.

    An option that is left out is None, so that it can be told what was asked for. What holds then
    is H2OConfig's default or that of `defaults`, and `budget` where a preset is given none.
    """
    group.set_defaults(cache_fields=tuple(names), cache_defaults=defaults, preset_budget=budget)
    add_preset_options(group, budget)
    for name in names:
        add_option(group, name, (DEFAULTS | defaults)[name])


def add_option(group: Any, name: str, shown: Any) -> None:
    """The option of a field, whose help has this default."""
    field = OPTIONS[name]
    kind: dict[str, Any] = {"action": "store_true"}
    if not field.flag:
        kind = {"type": field.parse, "choices": field.choices, "metavar": field.metavar}
    text = field.help.replace("%(default)s", f"{shown}")
    group.add_argument(spelled(name), dest=name, default=None, help=text, **kind)


def add_preset_options(group: Any, shown: Amount) -> None:
    """--preset and --budget, whose help has this default."""
    group.add_argument(
        "--preset", choices=PRESETS, help="a config by name, instead of --heavy and --recent"
    )
    group.add_argument(
        "--budget", type=parse_amount, metavar="B",
        help="alone: one number for the preset that is recommended for the model, tokens or a "
        "share of a full cache's bytes; of --preset: tokens, or a fraction of the keys, or with "
        f"--budget-unit bytes of the bytes ({shown})",
    )  # fmt: skip


def config_from(options: argparse.Namespace) -> H2OConfig:
    """The config that the options of a command describe, those that it has.

    Raises: TypeError and ValueError for what H2OConfig does not take, and for options that do not
    go together, OSError for a profile that cannot be read.
    """
    fields = asked(options, options.cache_fields)
    if "head_shares" in fields:
        fields["head_shares"] = shares_of(fields["head_shares"])
    if not has_budget(options):
        return H2OConfig(**options.cache_defaults | fields)
    for name in ("heavy", "recent"):
        if name in fields:
            raise ValueError(f"give a --budget or {spelled(name)}, not both")
    fields = {x: y for x, y in options.cache_defaults.items() if x == "min_tokens"} | fields
    if options.preset is None:
        if "budget_unit" in fields:
            raise ValueError("--budget-unit goes with --preset, or with --heavy and --recent")
        return H2OConfig(budget=options.budget, **fields)
    shares = fields.pop("head_shares", None)
    if shares == "echo":
        if options.preset == "calibrated":
            raise ValueError(f"--preset calibrated shares by a profile, not by --profile {shares}")
        fields["head_shares"], shares = shares, None
    if shares is not None and options.preset != "calibrated":
        raise ValueError(f"--profile goes with --preset calibrated, not with {options.preset}")
    profile = None if shares == "shipped" else shares
    config = H2OConfig.preset(
        options.preset, budget_of(options), fields.pop("budget_unit", "keys"), profile
    )
    return dataclasses.replace(config, **fields)


def described(options: argparse.Namespace) -> Setting | None:
    """The config as a setting, None where no option says anything of a cache.

    Raises: as `config_from`.
    """
    config, fields = config_from(options), asked(options, options.cache_fields)
    if options.preset is None:
        return from_config(config) if fields or has_budget(options) else None
    kind = (
        f"{options.preset}-bytes"
        if fields.pop("budget_unit", "keys") == "bytes"
        else options.preset
    )
    if fields.get("head_shares") != "echo":
        fields.pop("head_shares", None)
    name = "/".join([f"{kind}:{budget_of(options)}", *(f"{x}={y}" for x, y in fields.items())])
    return Setting(name, kind, "h2o", config)


def settings_from(
    options: argparse.Namespace, default: str = "", budgets: str | None = None
) -> list[Setting]:
    """Those of --compare, with `budgets` where they have none, and after them the preset. Without
    --compare the one that options describe or, where none does, those of `default`.

    Raises: as `config_from`, and ValueError for options of one cache beside --compare.
    """
    if options.compare is None:
        one = described(options)
        return [one] if one is not None else parse_all(default, budgets)
    settings = parse_all(options.compare, budgets)
    profile = None if options.head_shares is None else shares_of(options.head_shares)
    if isinstance(profile, Profile):  # of all that are calibrated
        options = argparse.Namespace(**vars(options) | {"head_shares": None})
    one = described(options)
    if one is not None and not has_budget(options):
        first = spelled(next(iter(asked(options, options.cache_fields))))
        raise ValueError(f"{first} is for one setting; write it into --compare")
    settings += [] if one is None else [one]
    return with_profile(settings, profile) if isinstance(profile, Profile) else settings


def budget_of(options: argparse.Namespace) -> Amount:
    """Of the preset."""
    return options.preset_budget if options.budget is None else options.budget


def has_budget(options: argparse.Namespace) -> bool:
    """Whether one number says how much is kept: of a preset, or of the recommended one."""
    return options.preset is not None or options.budget is not None


def asked(options: argparse.Namespace, names: Sequence[str] = tuple(OPTIONS)) -> dict[str, Any]:
    """Options that have a value, by name."""
    values = {name: getattr(options, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}
