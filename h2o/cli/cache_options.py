"""Options that several commands have: the model, its dtype and device, what a cache keeps, and
lists of settings to compare.

What a cache keeps is a preset or the fields of H2OConfig. Those of the policy come from
`h2o.policy.FIELDS`, so a new field of the policy is an option too.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from h2o.budgets import parse_amount
from h2o.config import PRESETS, H2OConfig
from h2o.config.profile import Profile
from h2o.evaluation.setting import Setting, from_config, load_shares, parse_all, with_profile
from h2o.kv_dtype import QUANTIZED
from h2o.policy import FIELDS, Field
from h2o.spans import parse_spans


def parse_by(parse: Callable[[str], Any], text: str) -> Any:
    """Parse an option's text by a function whose ValueError argparse is to show."""
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


AMOUNT = partial(parse_by, parse_amount)
PINS = partial(parse_by, parse_spans)

OPTIONS: dict[str, Field] = {
    "heavy": Field(
        AMOUNT, None, "K",
        "keys kept for their score: an integer counts tokens, a number with a point is a fraction "
        "of the prompt or text (%(default)s)",
    ),
    "recent": Field(AMOUNT, None, "K", "newest keys (%(default)s)"),
    "budget_unit": Field(
        str, ("keys", "bytes"), None,
        "unit of fractions: keys of the text, or bytes of a full cache (%(default)s)",
    ),
    **FIELDS,
    "positions": Field(
        str, ("original", "cache_relative"), None,
        "position of a key: that of its token in the text, or its rank in the cache (%(default)s)",
    ),
    "kv_dtype": Field(
        str, ("auto", *QUANTIZED), None,
        "store keys in eight bits, and values in eight or four; auto: values in four bits where "
        "the model's head dimension allows",
    ),
    "head_shares": Field(
        str, None, "FILE",
        "share the budget among heads as `h2o calibrate` found it; shipped: the profile that "
        "comes with h2o for the model; echo: by the echo of each prompt, with --score-by mean-echo",
    ),
    "min_tokens": Field(
        int, None, "N",
        "keys that each head keeps at least where an amount is a fraction; 0: no such limit "
        "(%(default)s)",
    ),
}  # fmt: skip
"""The options of a cache, by the names of H2OConfig's fields."""

DEFAULTS = {field.name: field.default for field in dataclasses.fields(H2OConfig)}

FIFTH = 0.2
"""The budget of a preset that is given none."""


def option_name(field: str) -> str:
    """The option of a field, such as --score-by of score_by."""
    return "--profile" if field == "head_shares" else f"--{field.replace('_', '-')}"


def add_model(add: Callable[..., Any], more: str = "") -> None:
    """Add --model, --dtype and --device. `add` is the add_argument of a parser or group, `more` is
    added to the help of --dtype."""
    add(
        "--model",
        type=parse_name,
        metavar="NAME",
        help="hub name, folder or .gguf file; default: the embedded SmolLM2-135M-Instruct",
    )
    add_dtype(add, more)
    add_device(add)


def parse_name(text: str) -> str:
    """Parse the name of a model. An empty one, such as that of a variable of the shell which is not
    set, does not stand for the default model."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty: name a model, or leave --model out")
    return text


def add_dtype(add: Callable[..., Any], more: str = "") -> None:
    """Add --dtype, with the dtypes that h2o computes in. `more` is added to the help."""
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help=f"auto: the dtype in which the model was saved{more}",
    )


def add_device(add: Callable[..., Any]) -> None:
    """Add --device."""
    add("--device", default="cpu", metavar="NAME",
        help="where the model runs: cpu, cuda, cuda:1, mps, ... (%(default)s)")  # fmt: skip


def add_pin(add: Callable[..., Any]) -> None:
    """Add --pin and --system."""
    add("--system", metavar="TEXT", help="text of a chat's system message (with --chat)")
    add("--pin", type=PINS, metavar="WHAT", help="keys that are never evicted and count in "
        "the budget: system, for a chat's system turn; prompt, for all of the prompt; or spans of "
        "its tokens, such as 0:40,100:120")  # fmt: skip


def parse_count(text: str) -> int:
    """Parse a number that is at least 1."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def add_compare(add: Callable[..., Any], default: str | None = None, more: str = "") -> None:
    """Add --compare, a list of settings for `make_settings`. `more` is added to its help."""
    shown = "" if default is None else f" ({default})"
    add("--compare", metavar="SETTINGS", help="settings separated by commas, as "
        f"h2o eval --help lists them{more}{shown}")  # fmt: skip


def add_cache_options(group: Any, names: Sequence[str] = tuple(OPTIONS), **defaults: Any) -> None:
    """Add presets and the options of these fields to a parser or a group of one.

    An option that is left out is None. `make_config` then takes the value of `defaults`, or else
    H2OConfig's default.
    """
    group.set_defaults(cache_fields=tuple(names), cache_defaults=defaults)
    group.add_argument(
        "--preset", choices=PRESETS, help="a config by name, instead of --heavy and --recent"
    )
    group.add_argument(
        "--budget", type=AMOUNT, metavar="B",
        help="alone: for the recommended policy, a number of tokens or a share of a full cache's "
        "bytes; with --preset: a number of tokens or a fraction of the keys (of the bytes with "
        f"--budget-unit bytes; {FIFTH})",
    )  # fmt: skip
    for name in names:
        field = OPTIONS[name]
        kind: dict[str, Any] = {"action": "store_true"}
        if not field.flag:
            kind = {"type": field.parse, "choices": field.choices, "metavar": field.metavar}
        text = field.help.replace("%(default)s", f"{(DEFAULTS | defaults)[name]}")
        group.add_argument(option_name(name), dest=name, default=None, help=text, **kind)


def make_config(options: argparse.Namespace) -> H2OConfig:
    """The config that the options of a command describe. Raises: as `make_setting`."""
    return make_setting(options).config


def make_setting(options: argparse.Namespace) -> Setting:
    """The config of the options, with a name for tables.

    Raises: TypeError and ValueError for what H2OConfig does not take and for options that do not
    go together, OSError for a profile that cannot be read.
    """
    given = get_given(options, options.cache_fields)
    fields = options.cache_defaults | given
    if "head_shares" in fields:
        fields["head_shares"] = load_shares(fields["head_shares"])
    if not has_budget(options):
        return from_config(H2OConfig(**fields))
    for name in ("heavy", "recent"):
        if name in fields:
            raise ValueError(f"give a --budget or {option_name(name)}, not both")
    if options.preset is None:
        if "budget_unit" in fields:
            raise ValueError("--budget-unit goes with --preset, or with --heavy and --recent")
        return from_config(H2OConfig(budget=options.budget, **fields))
    profile = None
    if fields.get("head_shares") != "echo":
        profile = fields.pop("head_shares", None)
    elif options.preset == "calibrated":
        raise ValueError("--preset calibrated shares by a profile, not by --profile echo")
    unit = fields.pop("budget_unit", "keys")
    budget = FIFTH if options.budget is None else options.budget
    config = H2OConfig.preset(options.preset, budget, unit, profile)
    kind = options.preset + "-bytes" * (unit == "bytes")
    parts = [f"{kind}:{budget}", *(f"{x}={given[x]}" for x in given if x in fields)]
    return Setting("/".join(parts), "h2o", dataclasses.replace(config, **fields))


def make_settings(
    options: argparse.Namespace, default: str = "", budgets: str | None = None
) -> list[Setting]:
    """The settings of --compare, with `budgets` for those that have none, and after them the
    preset. Without --compare the one that options describe, or else those of `default`.

    Raises: as `make_setting`, and ValueError for options of one cache beside --compare.
    """
    given = get_given(options, options.cache_fields)
    if options.compare is None:
        is_one = given or has_budget(options)
        return [make_setting(options)] if is_one else parse_all(default, budgets)
    settings = parse_all(options.compare, budgets)
    profile = None if options.head_shares is None else load_shares(options.head_shares)
    if isinstance(profile, Profile):  # for all calibrated settings
        options = argparse.Namespace(**vars(options) | {"head_shares": None})
        del given["head_shares"]
    if has_budget(options):
        settings.append(make_setting(options))
    elif given:
        first = option_name(next(iter(given)))
        raise ValueError(f"{first} is for one setting; write it into --compare")
    return with_profile(settings, profile) if isinstance(profile, Profile) else settings


def load_model(
    options: argparse.Namespace, settings: Iterable[Setting], say: Callable[[str], None]
) -> tuple[Any, Any]:
    """The model of --model and its tokenizer. `say` gets a line before each part.

    Raises: UserError for a model that cannot be loaded or does not go with one of the settings.
    """
    from h2o import models
    from h2o.evaluation.model_fit import check_fit

    return models.load_model(
        options.model,
        dtype=options.dtype,
        device=options.device,
        attn_implementation=None,
        say=say,
        check=check_fit(settings),
    )


def has_budget(options: argparse.Namespace) -> bool:
    """Whether one number is the budget: of a preset, or of the recommended one."""
    return options.preset is not None or options.budget is not None


def get_given(options: argparse.Namespace, names: Sequence[str] = tuple(OPTIONS)) -> dict[str, Any]:
    """The options that have a value, by name."""
    values = {name: getattr(options, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}
