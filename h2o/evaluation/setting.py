"""Settings to compare: "full", "h2o:0.1+0.1", "local:0.2", "sink:4+0.2" and their like."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any

from h2o.budgets import BudgetUnit, parse_amount
from h2o.config import PRESETS, H2OConfig
from h2o.config.head_budgets import NAMED
from h2o.config.profile import Profile
from h2o.policy import FIELDS
from h2o.result_cells import fingerprint

OPTIONS = (*FIELDS, "positions", "kv_dtype", "budget_unit", "head_shares", "min_tokens")
"""Fields of H2OConfig that may follow after slashes. Budgets stand before the slashes, and the kind
of a setting says whether it has a profile."""

VARIANTS = ("local", "global", "flexgen")
"""The published masks (`h2o.evaluation.published_masks`), by name."""

GRAMMAR = f"""\
full                    every key is kept
budget:BUDGET           H2OConfig(budget=BUDGET), the preset that is recommended for the model
h2o:HEAVY+RECENT        heavy hitters and recent keys; h2o:0.2+0 is heavy hitters only
h2o:BUDGET              the same with half of the budget each
local:RECENT            the recent keys only, a sliding window
sink:SINKS+RECENT       the first keys and the recent ones (StreamingLLM)
authors:BUDGET          H2OConfig.authors(BUDGET)
robust:BUDGET           H2OConfig.robust(BUDGET)
echo:BUDGET             H2OConfig.echo(BUDGET)
calibrated:BUDGET       H2OConfig.calibrated(BUDGET), with --profile or the one that comes with h2o
reread:BUDGET           H2OConfig.robust(BUDGET) after two readings of the document (needles, tasks)
random:BUDGET           sinks and recent keys of robust, the others drawn at random: a baseline
authors-bytes:BUDGET    H2OConfig.authors(BUDGET, budget_unit="bytes"); so with each preset, reread
                        and random
mask-local:HEAVY+RECENT   the authors' lm-eval masks for OPT and GPT-NeoX (simulation only)
mask-global:HEAVY+RECENT  the authors' later masks for LLaMA; they see the future (simulation only)
mask-flexgen:HEAVY+RECENT the authors' FlexGen code (simulation only); a mask's BUDGET alone is
                        half of each
A number with a point is a fraction of the text, one without is a number of tokens. Options
follow after slashes, as in h2o:0.1+0.1/sinks=4/score_by=mean/value_weighted=true; there are
{", ".join(OPTIONS)}.
Only real caches can have positions=cache_relative. head_shares is echo, with score_by=mean-echo.
min_tokens is 0 unless it is given."""

KINDS = (
    "full",
    "budget",
    "h2o",
    "local",
    "sink",
    *(f"{name}{of}" for name in (*PRESETS, "reread", "random") for of in ("", "-bytes")),
    *(f"mask-{x}" for x in VARIANTS),
)
LISTED = ", ".join(kind for kind in KINDS if not kind.endswith("-bytes"))
"""The kinds that errors name. -bytes is left out."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One column of a comparison: a policy, or a variant of the simulation."""

    name: str
    """The setting as the user wrote it."""
    variant: str
    """"full", "h2o", "reread", or one of `VARIANTS`."""
    config: H2OConfig
    """H2OConfig.full() for "full"."""

    @property
    def is_cache(self) -> bool:
        """Whether a cache that reads the text once does it."""
        return self.variant in ("full", "h2o")

    @property
    def reads_twice(self) -> bool:
        """Whether the cache reads the document twice, by `h2o.compress_document`."""
        return self.variant == "reread"

    @property
    def is_mask(self) -> bool:
        """Whether only a simulation does it."""
        return self.variant in VARIANTS

    @property
    def answering_config(self) -> H2OConfig:
        """The config of the cache that answers, after all readings."""
        return self.config.after_reading if self.reads_twice else self.config

    @property
    def why_no_cache(self) -> str:
        """Text of an error where `is_cache` is needed."""
        why = "two readings, for needles and tasks" if self.reads_twice else "a mask, no cache"
        return f"{self.name}: {why}"

    @property
    def sees_future(self) -> bool:
        """Whether rows see which tokens will matter later, as no cache can. The numbers are then
        too good, and tables mark them."""
        return self.variant == "global"

    def describe(self) -> dict[str, Any]:
        """The setting for result files, in plain values."""
        budget = {} if self.variant == "full" else dataclasses.asdict(self.config)
        if isinstance(self.config.head_shares, Profile):
            budget["head_shares"] = fingerprint(self.config.head_shares.as_dict())
        future = {"sees_future": True} if self.sees_future else {}
        return {"setting": self.name, "variant": self.variant, **future, **budget}


def parse_all(text: str, budgets: str | None = None) -> list[Setting]:
    """The settings of a comma-separated list.

    With `budgets` ("0.04,0.1,0.2"), a name without numbers (h2o, local, sink, ...) stands for
    itself at each of these.
    """
    amounts = [parse_amount(part) for part in (budgets or "").split(",") if part.strip()]
    settings: dict[str, Setting] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        head, *options = part.split("/")
        names = [part]
        if ":" not in head and head != "full":
            if head not in KINDS:
                raise ValueError(f"setting {part!r}: {explain_unknown(head)}")
            if not amounts:
                raise ValueError(f"{part!r} has no budget: write {head}:BUDGET, or add --budgets")
            first = "sink:4+" if head == "sink" else f"{head}:"
            names = ["/".join([f"{first}{amount}", *options]) for amount in amounts]
        for name in names:
            settings[name] = parse(name)
    if not settings:
        raise ValueError(f"no settings to compare: there are {LISTED}")
    return list(settings.values())


def with_profile(settings: Iterable[Setting], profile: Profile) -> list[Setting]:
    """The settings, with this profile instead of the one that comes with h2o."""
    chosen = [
        dataclasses.replace(
            setting, config=dataclasses.replace(setting.config, head_shares=profile)
        )
        if setting.config.head_shares == "shipped"
        else setting
        for setting in settings
    ]
    if not any(setting.config.head_shares is profile for setting in chosen):
        raise ValueError("--profile goes with calibrated settings in --compare")
    return chosen


def parse(text: str) -> Setting:
    """One setting; ValueError with the whole grammar if it is none."""
    head, *options = text.strip().split("/")
    kind, colon, numbers = head.partition(":")
    try:
        if kind == "full" and not colon and not options:
            return Setting(text, "full", H2OConfig.full())
        amounts = [parse_amount(part) for part in numbers.split("+")] if colon else []
        config, variant = _build(kind, amounts)
        fields: dict[str, Any] = {"min_tokens": 0}
        if options:
            if variant not in ("h2o", "reread"):
                raise ValueError(f"{kind} has no options")
            fields |= map(_parse_option, options)
        config = dataclasses.replace(config, **fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"setting {text!r}: {error} (h2o eval --help lists all)") from None
    return Setting(text, variant, config)


def load_shares(text: str) -> str | Profile:
    """`H2OConfig.head_shares` from an option: a name, or the path of a profile.

    Raises: OSError and ValueError for a profile that cannot be read.
    """
    return text if text in NAMED else Profile.load(text)


def from_options(variant: str = "h2o", **policy: Any) -> Setting:
    """The setting of a variant and fields of H2OConfig; `head_shares` as for `load_shares`."""
    if variant == "full":
        if policy:
            raise ValueError(f"variant full keeps every key: {next(iter(policy))} has no meaning")
        return parse("full")
    if variant not in ("h2o", *VARIANTS):
        raise ValueError(f"variant is full, h2o, {', '.join(VARIANTS)}, not {variant!r}")
    if isinstance(policy.get("head_shares"), str):
        policy["head_shares"] = load_shares(policy["head_shares"])
    return from_config(H2OConfig(**{"min_tokens": 0} | policy), variant)


def from_config(config: H2OConfig, variant: str = "h2o") -> Setting:
    """The setting of a config as it is; TypeError for another thing."""
    if not isinstance(config, H2OConfig):
        raise TypeError(f"expected an H2OConfig, not {config!r}")
    plain = dataclasses.asdict(H2OConfig(budget=config.budget, min_tokens=0))
    fields = dataclasses.asdict(config)
    if not config.shares_by_echo:
        fields["head_shares"] = plain["head_shares"]
    if not config.needs_prompt_length:  # min_tokens has no meaning
        fields["min_tokens"] = 0
    options = "".join(f"/{name}={fields[name]}" for name in OPTIONS if fields[name] != plain[name])
    kind = "h2o" if variant == "h2o" else f"mask-{variant}"
    amounts = f"{config.heavy}+{config.recent}"
    if config.budget is not None:
        if variant != "h2o":
            raise ValueError(f"variant {variant} takes heavy and recent, not a budget")
        kind, amounts = "budget", f"{config.budget}"
    return Setting(f"{kind}:{amounts}{options}", variant, config)


def _build(kind: str, amounts: list[int | float]) -> tuple[H2OConfig, str]:
    """Config and variant of a kind, with the `min_tokens` of H2OConfig."""
    name, variant = kind.removesuffix("-bytes"), kind.removeprefix("mask-")
    unit: BudgetUnit = "bytes" if kind.endswith("-bytes") else "keys"
    match kind, amounts:
        case "h2o" | "mask-local" | "mask-global" | "mask-flexgen", [heavy, recent]:
            return H2OConfig(heavy=heavy, recent=recent), variant
        case "h2o" | "mask-local" | "mask-global" | "mask-flexgen", [budget]:
            return H2OConfig.authors(budget), variant
        case "budget", [budget]:
            return H2OConfig(budget=budget), "h2o"
        case _, [budget] if name in PRESETS:
            return H2OConfig.preset(name, budget, unit), "h2o"
        case _, [budget] if name == "reread":
            return H2OConfig.robust(budget, unit), "reread"
        case _, [budget] if name == "random":
            robust = H2OConfig.robust(budget, unit)
            return dataclasses.replace(robust, score_by="random", value_weighted=False), "h2o"
        case "local", [recent]:
            return H2OConfig.local(recent), "h2o"
        case "sink", [int() as sinks, recent]:
            return H2OConfig.streaming(recent, sinks), "h2o"
    if kind not in KINDS:
        raise ValueError(explain_unknown(kind))
    takes = [line.split()[0] for line in GRAMMAR.splitlines() if line.startswith(f"{name}:")]
    raise ValueError(f"not the numbers that it takes: {' or '.join(takes) or kind}")


def explain_unknown(kind: str) -> str:
    """Say what is wrong with a kind that does not exist, for an error."""
    close = difflib.get_close_matches(kind, KINDS, 1)
    return f"unknown; did you mean {close[0]}?" if close else f"unknown; there are {LISTED}"


def _parse_option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    if name not in OPTIONS:
        raise ValueError(f"no option {name!r}: {', '.join(OPTIONS)}")
    if name == "head_shares" and value != "echo":
        raise ValueError(f"head_shares is echo here, not {value!r}")
    if name not in (*FIELDS, "min_tokens"):
        return name, value
    try:
        return name, int(value) if name == "min_tokens" else FIELDS[name].parse(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
