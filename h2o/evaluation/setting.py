"""Settings of comparisons, such as "full", "h2o:0.1+0.1", "local:0.2" and "sink:4+0.2"."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any

from h2o.arguments.plain_values import check_choice
from h2o.budgets import BudgetUnit, parse_amount
from h2o.config import PRESETS, H2OConfig, check_config
from h2o.config.head_budgets import NAMED
from h2o.config.profile import Profile
from h2o.policy import FIELDS
from h2o.result_file import fingerprint

OPTIONS = (*FIELDS, "positions", "kv_dtype", "budget_unit", "head_shares", "ratio_of", "min_tokens")
"""Fields of H2OConfig that may follow after slashes. Budgets come before the slashes, and the kind
of a setting determines whether it has a profile."""

VARIANTS = ("local", "global", "flexgen")
"""Names of the published masks (`h2o.evaluation.published_masks`)"""

GRAMMAR = f"""\
full                    every key is kept
budget:BUDGET           H2OConfig(budget=BUDGET), the preset recommended for the model; like
                        robust-bytes without a prompt, as in the default protocol of --tasks and
                        --perplexity (robust if BUDGET is a number of tokens)
h2o:HEAVY+RECENT        heavy hitters and recent keys; h2o:0.2+0 is heavy hitters only
h2o:BUDGET              the same, with half of the budget for each
local:RECENT            only the recent keys, a sliding window
sink:SINKS+RECENT       the first keys and the recent ones (StreamingLLM)
authors:BUDGET          H2OConfig.authors(BUDGET)
robust:BUDGET           H2OConfig.robust(BUDGET)
echo:BUDGET             H2OConfig.echo(BUDGET)
calibrated:BUDGET       H2OConfig.calibrated(BUDGET), with --profile or the one that comes with h2o
reread:BUDGET           H2OConfig.robust(BUDGET) after two readings of the document (needles, tasks)
random:BUDGET           sinks and recent keys as in robust, the others at random: a baseline,
                        always simulated
authors-bytes:BUDGET    H2OConfig.authors(BUDGET, budget_unit="bytes"); likewise for each preset,
                        reread and random
mask-local:HEAVY+RECENT   the authors' lm-eval masks for OPT and GPT-NeoX (simulation only)
mask-global:HEAVY+RECENT  the authors' later masks for LLaMA; they see the future (simulation only)
mask-flexgen:HEAVY+RECENT the authors' FlexGen code (simulation only); for each mask a single
                        BUDGET is divided in halves
A number with a point is a fraction of the text, one without is a number of tokens. Options
follow after slashes, as in h2o:0.1+0.1/sinks=4/score_by=mean/value_weighted=true; there are
{", ".join(OPTIONS)}.
Only real caches can have positions=cache_relative. head_shares must be echo, and needs
score_by=mean-echo. By default min_tokens is 0, and ratio_of is prompt: a budget is constant.
Without a prompt, fractions of a simulated text are always of the whole text."""

CONSTANT: dict[str, Any] = {"min_tokens": 0, "ratio_of": "prompt"}
"""Fields of settings that differ from H2OConfig's defaults, so that the budget of a measurement is
the fraction itself"""

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
"""The kinds that errors list: all except those in bytes"""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One column of a comparison: a policy, or a variant of the simulation."""

    name: str
    """The setting as the user wrote it."""
    variant: str
    """"full", "h2o", "reread", or a name in `h2o.evaluation.published_masks.MASKS`."""
    config: H2OConfig
    """H2OConfig.full() for "full"."""

    @property
    def is_cache(self) -> bool:
        """Whether the setting is a cache that reads the text once."""
        return self.variant in ("full", "h2o")

    @property
    def ratio_of(self) -> str:
        """What the fractions of its budget are fractions of; "prompt" if it has none. The budgets
        of masks and of random keys are constant."""
        is_constant = self.is_mask or self.is_random or not self.config.needs_prompt_length
        return "prompt" if is_constant else self.config.ratio_of

    @property
    def reads_twice(self) -> bool:
        """Whether the cache reads the document twice, by `h2o.compress_document`."""
        return self.variant == "reread"

    @property
    def is_mask(self) -> bool:
        """Whether the setting is a mask, which only a simulation can apply."""
        return not self.is_cache and not self.reads_twice

    @property
    def answering_config(self) -> H2OConfig:
        """The config of the cache that answers, after all readings."""
        return self.config.after_reading if self.reads_twice else self.config

    @property
    def why_no_cache(self) -> str:
        """Error text for commands that need `is_cache`."""
        why = "reads twice, for needles and tasks" if self.reads_twice else "a mask, not a cache"
        return f"{self.name}: {why}"

    @property
    def is_random(self) -> bool:
        """Whether the setting evicts keys at random, a baseline that no cache has. It is simulated
        in every protocol."""
        return self.config.score_by == "random"

    @property
    def sees_future(self) -> bool:
        """Whether rows see which tokens will matter later, which no cache can. Tables mark the
        numbers, since they are too good."""
        return self.variant == "global"

    def describe(self) -> dict[str, Any]:
        """The setting as plain values, for result files."""
        budget = {} if self.variant == "full" else dataclasses.asdict(self.config)
        if isinstance(self.config.head_shares, Profile):
            budget["head_shares"] = fingerprint(self.config.head_shares.as_dict())
        future = {"sees_future": True} if self.sees_future else {}
        return {"setting": self.name, "variant": self.variant, **future, **budget}


def parse_all(text: str, budgets: str | None = "") -> list[Setting]:
    """Parse a comma-separated list of settings.

    A name without numbers (h2o, local, sink, ...) stands for one setting at each of `budgets`
    ("0.04,0.1,0.2"). None: the command has no option --budgets.
    """
    amounts = [parse_amount(part) for part in (budgets or "").split(",") if part.strip()]
    settings: dict[str, Setting] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        head, *options = part.split("/")
        names = [part]
        if ":" not in head and head != "full":
            if head not in KINDS:
                raise ValueError(f"setting {part!r}: {explain_unknown(head)}")
            first = "sink:4+" if head == "sink" else f"{head}:"
            if not amounts:
                more = "" if budgets is None else ", or add --budgets 0.2"
                raise ValueError(f"{part!r} has no budget: write {first}0.2{more}")
            names = ["/".join([f"{first}{amount}", *options]) for amount in amounts]
        for name in names:
            settings[name] = parse(name)
    if not settings:
        raise ValueError(f"no settings to compare: choose from {LISTED}")
    return list(settings.values())


def with_profile(settings: Iterable[Setting], profile: Profile) -> list[Setting]:
    """The settings, with this profile instead of the one that comes with h2o."""
    chosen = list(settings)
    calibrated = [i for i, x in enumerate(chosen) if x.config.head_shares == "shipped"]
    if not calibrated:
        raise ValueError("--profile requires a calibrated setting in --compare")
    for i in calibrated:
        config = dataclasses.replace(chosen[i].config, head_shares=profile)
        chosen[i] = dataclasses.replace(chosen[i], config=config)
    return chosen


def parse(text: str) -> Setting:
    """Parse one setting. Raises: ValueError for any other text."""
    head, *options = text.strip().split("/")
    kind, colon, numbers = head.partition(":")
    try:
        if kind == "full" and not colon and not options:
            return Setting(text, "full", H2OConfig.full())
        amounts = [parse_amount(part) for part in numbers.split("+")] if colon else []
        config, variant = _build(kind, amounts)
        fields = dict(CONSTANT)
        if options:
            if variant not in ("h2o", "reread"):
                raise ValueError(f"{kind} has no options")
            given = [_parse_option(option) for option in options]
            names = [name for name, _ in given]
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise ValueError(f"{twice} is given twice: remove one of the two")
            fields |= given
        config = dataclasses.replace(config, **fields)
        if config.score_by == "random" and config.ratio_of == "seen":
            raise ValueError("random keys need a constant budget: leave out ratio_of=seen")
    except (TypeError, ValueError) as error:
        raise ValueError(f"setting {text!r}: {error} (h2o eval --help lists all)") from None
    return Setting(text, variant, config)


def load_shares(text: str) -> str | Profile:
    """Convert an option's text, a name or the path of a profile, to `H2OConfig.head_shares`.

    Raises: OSError and ValueError for a profile that cannot be read.
    """
    return text if text in NAMED else Profile.load(text)


def from_options(variant: str = "h2o", **policy: Any) -> Setting:
    """The setting of a variant and fields of H2OConfig. A text for `head_shares` is converted by
    `load_shares`."""
    if variant == "full":
        if policy:
            raise ValueError(f"variant full keeps every key: {next(iter(policy))} has no meaning")
        return parse("full")
    check_choice("variant", variant, ("full", "h2o", *VARIANTS))
    if isinstance(policy.get("head_shares"), str):
        policy["head_shares"] = load_shares(policy["head_shares"])
    return from_config(H2OConfig(**CONSTANT | policy), variant)


def from_config(config: H2OConfig, variant: str = "h2o") -> Setting:
    """The setting of a config, unchanged. Raises: TypeError for anything but an H2OConfig."""
    check_config(config)
    plain = dataclasses.asdict(config.with_defaults) | CONSTANT
    fields = dataclasses.asdict(config)
    if not config.shares_by_echo:
        fields["head_shares"] = plain["head_shares"]
    if not config.needs_prompt_length:  # they have no effect
        fields |= CONSTANT
    options = "".join(f"/{name}={fields[name]}" for name in OPTIONS if fields[name] != plain[name])
    kind = "h2o" if variant == "h2o" else f"mask-{variant}"
    amounts = f"{config.heavy}+{config.recent}"
    if config.budget is not None:
        if variant != "h2o":
            raise ValueError(
                f"variant {variant} needs heavy and recent, such as heavy=0.1, recent=0.1, not "
                f"budget={config.budget}"
            )
        kind, amounts = "budget", f"{config.budget}"
    return Setting(f"{kind}:{amounts}{options}", variant, config)


def _build(kind: str, amounts: list[int | float]) -> tuple[H2OConfig, str]:
    """Config and variant of a kind. `min_tokens` is H2OConfig's default."""
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
    raise ValueError(f"wrong numbers: write {' or '.join(takes) or kind}")


def explain_unknown(kind: str) -> str:
    """Say what is wrong with a kind that does not exist, for an error."""
    close = difflib.get_close_matches(kind, KINDS, 1)
    return f"unknown; did you mean {close[0]}?" if close else f"unknown; choose from {LISTED}"


def _parse_option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    if name not in OPTIONS:
        raise ValueError(f"unknown option {name!r}: choose from {', '.join(OPTIONS)}")
    if name == "head_shares" and value != "echo":
        raise ValueError(f"head_shares must be echo here, not {value!r}")
    parsers = {"min_tokens": int} | {x: field.parse for x, field in FIELDS.items()}
    try:
        return name, parsers.get(name, str)(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
