"""Options that several commands share: the model, its dtype and device, the config of the cache,
and lists of settings to compare.

A cache is described by a preset or by the fields of H2OConfig. The options of the policy come from
`h2o.policy.FIELDS`, so a new field of the policy becomes an option without further changes.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from h2o import models
from h2o.budgets import DEFAULT_BUDGET, parse_amount
from h2o.config import PRESETS, H2OConfig
from h2o.config.profile import Profile
from h2o.evaluation.model_fit import check_fit
from h2o.evaluation.setting import Setting, from_config, load_shares, parse_all, with_profile
from h2o.kv_dtype import QUANTIZED
from h2o.policy import FIELDS, Field
from h2o.spans import parse_spans


def parse_by(parse: Callable[[str], Any], text: str) -> Any:
    """Parse the text of an option, and have argparse show the message of a ValueError."""
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


AMOUNT = partial(parse_by, parse_amount)
PINS = partial(parse_by, parse_spans)

OPTIONS: dict[str, Field] = {
    "heavy": Field(
        AMOUNT, None, "K",
        "keys kept for their scores: an integer is a number of tokens, a number with a point a "
        "fraction of the text (%(default)s if only --recent is given)",
    ),
    "recent": Field(
        AMOUNT, None, "K", "newest keys that are kept (%(default)s if only --heavy is given)"
    ),
    "budget_unit": Field(
        str, ("keys", "bytes"), None,
        "what fractions are taken of: the keys of the text, or the bytes of a full cache "
        "(%(default)s)",
    ),
    "ratio_of": Field(
        str, ("seen", "prompt"), None,
        "what fractions are fractions of: the text so far, with which the budget grows, or the "
        "prompt (%(default)s)",
    ),
    **FIELDS,
    "positions": Field(
        str, ("original", "cache_relative"), None,
        "position of a key: of its token in the text, or its rank within the cache (%(default)s)",
    ),
    "kv_dtype": Field(
        str, ("auto", *QUANTIZED), None,
        "store keys and values in eight or four bits: int8-int4 has keys in eight and values in "
        "four; auto: int8 if the model's head dimension is no multiple of 32, otherwise int4 if "
        "less than a quarter of the keys would fit in eight bits, and int8-int4 if not",
    ),
    "head_shares": Field(
        str, None, "FILE",
        "divide the budget among heads by a profile from `h2o calibrate`; shipped: by the profile "
        "that comes with h2o for the model; echo: by the echo of each prompt, with --score-by "
        "mean-echo",
    ),
    "min_tokens": Field(
        int, None, "N",
        "minimum number of keys for each head if the budget is a fraction; 0: no minimum "
        "(%(default)s)",
    ),
}  # fmt: skip
"""The options of a cache, by the names of H2OConfig's fields."""

DEFAULTS = {field.name: field.default for field in dataclasses.fields(H2OConfig)}
"""Defaults beside --heavy and --recent. Those beside --budget are the recommended preset's."""


def option_name(field: str) -> str:
    """The name of a field's option, such as --score-by for score_by."""
    return "--profile" if field == "head_shares" else f"--{field.replace('_', '-')}"


def add_model(add: Callable[..., Any], more: str = "") -> None:
    """Add --model, --dtype and --device. `add` is the `add_argument` of a parser or group. `more`
    is appended to the help of --dtype."""
    add(
        "--model",
        type=parse_name,
        metavar="NAME",
        help="hub name, folder or .gguf file; default: smollm2, the embedded SmolLM2-135M-Instruct",
    )
    add_dtype(add, more)
    add_device(add)


def parse_name(text: str) -> str:
    """Parse the name of a model. An empty name, as from an unset shell variable, is an error rather
    than the default model."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty: name a model, or leave --model out")
    return text


def add_dtype(add: Callable[..., Any], more: str = "") -> None:
    """Add --dtype, with the dtypes that h2o computes in. `more` is appended to the help."""
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
    """Add --compare, a list of settings for `make_settings`. `more` is appended to its help."""
    shown = "" if default is None else f" ({default})"
    add("--compare", metavar="SETTINGS", help="settings separated by commas (h2o eval --help "
        f"lists them){more}{shown}")  # fmt: skip


def add_cache_options(group: Any, names: Sequence[str] = tuple(OPTIONS), **defaults: Any) -> None:
    """Add --preset, --budget and the options of the fields `names` to a parser or group.

    An option that is left out is None. `make_setting` then uses the value in `defaults` if there is
    one, and H2OConfig's default otherwise, which depends on the budget.
    """
    group.set_defaults(cache_fields=tuple(names), cache_defaults=defaults)
    group.add_argument(
        "--preset", choices=PRESETS, help="a named config, instead of --heavy and --recent"
    )
    group.add_argument(
        "--budget", type=AMOUNT, metavar="B",
        help="alone: budget of the recommended policy, a number of tokens or a fraction of a full "
        f"cache's bytes (default {DEFAULT_BUDGET}, unless --heavy or --recent is given). With "
        "--preset: a number of tokens or a fraction of the keys, or of the bytes if --budget-unit "
        "is bytes",
    )  # fmt: skip
    for name in names:
        field = OPTIONS[name]
        kind: dict[str, Any] = {"action": "store_true"}
        if not field.flag:
            kind = {"type": field.parse, "choices": field.choices, "metavar": field.metavar}
        text = field.help.replace("%(default)s", describe_default(name, defaults))
        group.add_argument(option_name(name), dest=name, default=None, help=text, **kind)


def describe_default(name: str, defaults: dict[str, Any]) -> str:
    """A field's default for the help: what the default budget has, and what other budgets have."""
    plain = (DEFAULTS | defaults)[name]
    chosen = getattr(H2OConfig(), name)
    if name in ("heavy", "recent") or name in defaults or chosen == plain:
        return f"{plain}"
    return f"{chosen}; {plain} with --heavy or --recent"


def make_setting(options: argparse.Namespace) -> Setting:
    """The config that a command's options describe, with a name for tables.

    Raises: TypeError and ValueError for values that H2OConfig does not accept and for options that
    do not go together, OSError for a profile that cannot be read.
    """
    given = get_given(options, options.cache_fields)
    fields = options.cache_defaults | given
    if "head_shares" in fields:
        fields["head_shares"] = load_shares(fields["head_shares"])
    parts = [name for name in ("heavy", "recent") if name in fields]
    if parts and has_budget(options):
        raise ValueError(f"pass either a budget or {option_name(parts[0])}, not both")
    if options.preset is None:
        if "budget_unit" in fields and not parts:
            raise ValueError("--budget-unit requires --preset, or --heavy and --recent")
        return from_config(H2OConfig(budget=options.budget, **fields))
    profile = None
    if fields.get("head_shares") != "echo":
        profile = fields.pop("head_shares", None)
    elif options.preset == "calibrated":
        raise ValueError("--preset calibrated needs a profile: --profile FILE or shipped, not echo")
    unit = fields.pop("budget_unit", "keys")
    budget = DEFAULT_BUDGET if options.budget is None else options.budget
    config = H2OConfig.preset(options.preset, budget, unit, profile)
    kind = options.preset + "-bytes" * (unit == "bytes")
    named = [f"{kind}:{budget}", *(f"{x}={given[x]}" for x in given if x in fields)]
    return Setting("/".join(named), "h2o", dataclasses.replace(config, **fields))


def make_settings(
    options: argparse.Namespace, default: str = "", budgets: str | None = None
) -> list[Setting]:
    """The settings to compare.

    With --compare these are its settings, with `budgets` for those that have none (None: the
    command has no option --budgets). A profile applies to the calibrated ones. Without --compare it
    is the one setting that the other options describe, or the settings of `default` if there are no
    such options.

    Raises: the errors of `make_setting`, and ValueError for options of a single cache together with
    --compare.
    """
    given = get_given(options, ("preset", "budget", *options.cache_fields))
    if options.compare is None:
        return [make_setting(options)] if given else parse_all(default, budgets)
    settings = parse_all(options.compare, budgets)
    if isinstance(profile := load_shares(given.get("head_shares", "shipped")), Profile):
        settings = with_profile(settings, profile)
        del given["head_shares"]
    if given:
        first = option_name(next(iter(given)))
        raise ValueError(f"{first} is for one setting; write it into --compare")
    return settings


def load_model(
    options: argparse.Namespace, settings: Sequence[Setting], log: Callable[[str], None]
) -> tuple[Any, Any]:
    """Load the model of --model and its tokenizer. `log` is called with a line before each part.

    Raises: UserError for a model that cannot be loaded or does not support one of the settings.
    """
    return models.load_model(
        options.model,
        dtype=options.dtype,
        device=options.device,
        attn_implementation=None,
        log=log,
        check=partial(check_fit, settings),
    )


def has_budget(options: argparse.Namespace) -> bool:
    """Whether a single number is the budget: of --preset, or of the recommended policy."""
    return options.preset is not None or options.budget is not None


def get_given(options: argparse.Namespace, names: Sequence[str] = tuple(OPTIONS)) -> dict[str, Any]:
    """The options that were given, by name."""
    values = {name: getattr(options, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}
