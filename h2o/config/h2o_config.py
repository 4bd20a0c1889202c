"""`H2OConfig`: budgets and policy of a cache, as one immutable record."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, get_args

from h2o.arguments.plain_values import check_choice, check_count, check_index
from h2o.budgets import (
    DEFAULT_BUDGET,
    Amount,
    Budget,
    BudgetUnit,
    RatioOf,
    check_budget,
    check_tokens,
    check_total,
    check_whole_budget,
    count_pair,
    count_text,
    flatten,
    is_whole_text,
    layer_amount,
    mean_pair,
    pair_amounts,
)
from h2o.config.fields import ConfigFields, Positions
from h2o.config.head_budgets import NAMED, SHARED_TWICE, check_table
from h2o.config.presets import Presets, echo_fields, recommended_unit, warn_of_few_keys
from h2o.config.profile import Profile
from h2o.kv_dtype import KvDtype, TokenBytes, bytes_per_token, choose_bits
from h2o.model_identity import config_of, describe, key_size, latent_row
from h2o.policy import OPERATIONS_SCORE_BY, Policy, ScoreBy, check_names, check_policy

CHOICES: dict[str, tuple[str | None, ...]] = {
    "kv_dtype": (None, *get_args(KvDtype)),
    "budget_unit": ("keys", "bytes"),
    "ratio_of": ("seen", "prompt"),
    "positions": ("original", "cache_relative"),
}
"""Allowed values of the fields that have only a few."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class H2OConfig(Presets):
    """Number of keys that each row, layer and key/value head may keep, and how they are chosen.

    The budget is k = sinks + heavy + recent. The cache keeps the first `sinks` tokens of a row, its
    `recent` newest tokens, and the `heavy` highest-ranked of the others. Without `budget`, `heavy`
    and `recent` the budget is `DEFAULT_BUDGET`: H2OConfig() is the same as H2OConfig(budget=0.2).
    The setting of the paper is `H2OConfig.authors(0.2)`, a tenth of the prompt for heavy hitters
    and a tenth for recent tokens (Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative
    Inference of Large Language Models", NeurIPS 2023).

    All fields are keyword-only. An int budget of fewer than `FEWEST_KEYS` keys is usually meant as
    a percentage, so making such a config gives a UserWarning.

    Raises: TypeError for a value that is not a number (a bool does not count as one) and for a
    positional argument, ValueError for a number out of range and for a total budget of 0.
    """

    budget: Amount | None = dataclasses.field(default=None, compare=False)
    """One number instead of `heavy` and `recent`: a float in (0, 1] is a share of the bytes that
    the text takes in a full cache, an int is a number of tokens. It selects the recommended
    preset (`H2OConfig.recommended`); other fields that you give override the preset's. It is
    `DEFAULT_BUDGET` if neither `heavy` nor `recent` is given, and None if one of them is. Equality
    ignores it, because `heavy` and `recent` hold its two parts."""
    heavy: Budget = 0.1
    """Number of tokens kept for the attention that they have received. An int is a number of
    tokens. A float in [0, 1] is a fraction of the row's own text (`ratio_of`): `int(fraction * n)`
    tokens of n, but at least one unless the fraction is 0. So 1 is one token, and 1.0 is the
    whole text. A list has one amount for each layer of the model; a function
    `(layer, layers) -> amount` computes them. A layer's amount may itself be a list with one amount
    for each key/value head. 0.1 if only `recent` is given."""
    recent: Budget = 0.1
    """Number of newest tokens kept regardless of their rank, given like `heavy`. 0.1 if only
    `heavy` is given."""
    sinks: int = 0
    """Number of initial tokens of each row that are never evicted (Xiao et al., "Efficient
    Streaming Language Models with Attention Sinks", ICLR 2024)."""
    score_by: ScoreBy = "sum"
    """"sum": accumulated attention. "mean": accumulated attention divided by the number of queries
    that have seen the key, so that older keys have no advantage. "max": the largest attention from
    any one query and head. "mean-echo": the mean, with most of a prompt's attention redistributed
    to the keys that the prompt's own queries find at later positions (the plain mean where
    positions are not rotary or are cache-relative; the report then says so). "random": a hash of
    layer, head and position, a baseline that is only simulated."""
    decay: float = 1.0
    """Factor in [0, 1] by which a score shrinks with each further token. 1 is H2O; 0 ranks by the
    last query alone."""
    value_weighted: bool = False
    """Multiply the rank by the L2 norm of the key's value."""
    kv_dtype: KvDtype | None = None
    """Format of stored keys and values. None: the model's dtype. "int8": 8 bits, one 16-bit scale
    per key and value. "int8-int4": the same for keys, and 4-bit values in groups of 32, each with a
    scale and a minimum. "int4": 4-bit keys too, one scale per key. "auto": "int8-int4"; "int4" if
    that holds less than a quarter of the keys; "int8" if the head dimension is no multiple of 32.
    New tokens of one pass see each other unquantized."""
    head_shares: Any = None
    """How the key/value heads share the budget. The mean over all heads stays what `heavy` and
    `recent` say, and every head gets at least 8 tokens. None: equal shares. Numbers
    [layers, heads]: only their ratios matter. An `h2o.Profile`: made by `h2o calibrate`. "shipped":
    the profile that comes with h2o for this model. "echo" (requires `score_by="mean-echo"`): the
    prompt's heavy hitters are the keys with the highest echo (times the norm of the value if
    `value_weighted`) in any head. During prefill the cache then holds 1.125 times the budget plus
    one whole layer, or the whole prompt if `decay` is below 1 or layers differ in their heads."""
    budget_unit: BudgetUnit = "keys"
    """Unit of fractions. "keys": tokens of the text. "bytes": heavy + recent is a share of the
    bytes that the text takes in a full cache in the model's dtype. The share must pay for the
    sinks and all per-slot bookkeeping too, and the cache keeps as many keys as fit."""
    ratio_of: RatioOf = "seen"
    """What fractions are fractions of. "seen": the tokens that the row has seen so far. The budget
    grows with the row's text, in steps of at most 64 tokens or a twentieth of the text
    (`h2o.budgets.count_text`), and evicted keys do not come back. "prompt": the tokens of the row's
    prompt. The budget then stays what it was after the prompt, as in the paper."""
    min_tokens: int = 128
    """Minimum number of keys per head if `heavy` or `recent` is a fraction. Sinks count toward it,
    and at least a quarter of it is recent keys. A shorter prompt is kept whole. 0: no minimum."""
    positions: Positions = "original"
    """"original": a key keeps the position of its own token, as in the paper. "cache_relative": a
    key's rotary position is its rank among the keys held, and a query's is the number of keys held
    before it, so that no position exceeds the budget. Rotary models only."""
    _token_bytes: TokenBytes | None = dataclasses.field(default=None, repr=False)
    """Bytes of a token in a full cache and in a slot, filled in by `for_model` if `budget_unit` is
    "bytes"."""

    def __new__(cls, *amounts: Any, **fields: Any) -> H2OConfig:
        if amounts:
            raise TypeError(
                f"H2OConfig({amounts[0]!r}): amounts are keyword-only. Write budget=... for the "
                "whole budget, or heavy=..., recent=... for its two parts"
            )
        check_names(fields.keys() - {x.name for x in dataclasses.fields(cls)}, PARAMETERS)
        self = super().__new__(cls)
        if fields:  # pickle and copy pass none, and restore the fields themselves
            object.__setattr__(self, "_given", frozenset(fields))
        return self

    def __post_init__(self) -> None:
        put = object.__setattr__  # frozen; the fields become plain Python numbers
        given = self.__dict__.pop("_given", frozenset())
        if self.budget is None and not given & {"heavy", "recent"}:
            put(self, "budget", DEFAULT_BUDGET)
        if self.budget is not None:
            self._take_preset(given)
        for name in ("heavy", "recent"):
            put(self, name, check_budget(name, getattr(self, name)))
        put(self, "min_tokens", check_tokens("min_tokens", self.min_tokens))
        policy = Policy(*(getattr(self, name) for name in Policy._fields))
        for name, value in check_policy(policy, get_args(ScoreBy))._asdict().items():
            put(self, name, value)
        if self.score_by == "random" and policy != Policy(self.sinks, "random"):
            raise ValueError(
                'score_by="random" can be combined with sinks only: remove the other fields of '
                f"{policy}"
            )
        for name, choices in CHOICES.items():
            put(self, name, check_choice(name, getattr(self, name), choices))
        if self.budget_unit == "keys":
            put(self, "_token_bytes", None)  # left by dataclasses.replace
        elif not all(isinstance(x, float) for x in (self.heavy, self.recent)):
            raise ValueError(
                'budget_unit="bytes" needs one fraction each for heavy and recent, for all layers '
                f"and heads, not heavy={self.heavy!r} and recent={self.recent!r}"
            )
        named = isinstance(self.head_shares, str) and self.head_shares in NAMED
        if not named and self.head_shares is not None:
            put(self, "head_shares", check_table(self.head_shares))
        if self.shares_by_echo and self.score_by != "mean-echo":
            raise ValueError(
                f'head_shares="echo" requires score_by="mean-echo", not {self.score_by!r}. The '
                'preset echo sets head_shares="echo": give score_by="mean-echo", or use the preset '
                "robust"
            )
        by_head = any(isinstance(x, tuple) for x in (*_each(self.heavy), *_each(self.recent)))
        if self.head_shares is not None and by_head:
            raise ValueError(SHARED_TWICE)
        check_total(self.heavy, self.recent, self.sinks)
        is_copy = "_token_bytes" in given  # from a preset, dataclasses.replace or a file
        if not is_copy:
            warn_of_few_keys(
                {"heavy": self.heavy, "recent": self.recent}
                if self.budget is None
                else {"budget": self.budget}
            )

    def __getattr__(self, name: str) -> Any:
        """Called for an attribute that does not exist, such as a method of caches."""
        raise AttributeError(
            f"an H2OConfig has no attribute {name!r}. If a model asked for it, pass "
            "cache=h2o.H2OCache(model, config) instead of the config"
        )

    def __eq__(self, other: object) -> bool:
        """Whether all fields except `budget` are equal. One token is not 1.0 of the prompt,
        although 1 == 1.0."""
        if not isinstance(other, H2OConfig):
            return NotImplemented

        def compared(config: H2OConfig) -> tuple[list[Any], list[type]]:
            amounts = flatten((config.heavy, config.recent))
            values = [getattr(config, x.name) for x in dataclasses.fields(config) if x.compare]
            return values, list(map(type, amounts))

        return compared(self) == compared(other)

    def __deepcopy__(self, memo: Any) -> H2OConfig:
        """Return the config itself: it is immutable."""
        return self

    @classmethod
    def recommended(cls, budget: Amount) -> H2OConfig:
        """The preset that `budget=` alone selects: `echo`. A float is a share of a full cache's
        bytes, an int a number of tokens."""
        budget = check_whole_budget(budget)
        return cls.preset("echo", budget, recommended_unit(budget))

    @property
    def policy(self) -> Policy:
        """The policy for the operations of `h2o.ops`."""
        policy = Policy(*(getattr(self, name) for name in Policy._fields))
        return policy._replace(score_by=OPERATIONS_SCORE_BY.get(self.score_by, policy.score_by))

    @property
    def shares_by_echo(self) -> bool:
        """Whether heads share the budget by the echo of the prompt's keys."""
        return isinstance(self.head_shares, str) and self.head_shares == "echo"

    @property
    def after_reading(self) -> H2OConfig:
        """The config of a cache that `h2o.compress_document` has filled with `readings=2`."""
        shares = None if self.shares_by_echo else self.head_shares  # the repetition decided
        return dataclasses.replace(
            self, score_by="max", decay=1.0, value_weighted=False, head_shares=shares
        )

    @property
    def described_budget(self) -> str:
        """The budget in the words of the user, "budget=0.2" or "heavy=0.1, recent=0.1", for
        messages. "the budget" if it differs by layer."""
        amounts = {"heavy": self.heavy, "recent": self.recent}
        if self.budget is not None:
            amounts = {"budget": self.budget}
        if not all(isinstance(x, int | float) for x in amounts.values()):
            return "the budget"
        return ", ".join(f"{name}={amount}" for name, amount in amounts.items())

    @property
    def with_defaults(self) -> H2OConfig:
        """The defaults of all other fields beside this config's `budget`, or beside `heavy` and
        `recent`. Repr and names of settings leave these out."""
        amounts = {"heavy": 0.1, "recent": 0.1} if self.budget is None else {"budget": self.budget}
        return H2OConfig(**amounts, _token_bytes=None)

    @property
    def needs_prompt_length(self) -> bool:
        """Whether the budget of any layer is a fraction."""
        return any(isinstance(x, float) for x in flatten((self.heavy, self.recent)))

    @property
    def grows(self) -> bool:
        """Whether the budget of any layer grows with the text. Functions are not called."""
        amounts = flatten((self.heavy, self.recent))
        return self.ratio_of == "seen" and any(isinstance(x, float) and x for x in amounts)

    def for_model(self, model: Any) -> H2OConfig:
        """Fill in what depends on a model (or its config): profile, bits, and bytes of a token.

        Raises: ValueError for a profile of another model or of none; TypeError for other objects.
        """
        config = config_of(model)
        shares, kv_dtype, token_bytes = self.head_shares, self.kv_dtype, self._token_bytes
        if isinstance(shares, str) and shares == "shipped":
            shares = Profile.shipped(model)
            if shares is None:
                raise ValueError(
                    "no profile for this model comes with h2o: make one with h2o calibrate and "
                    "pass H2OConfig.calibrated(budget, h2o.Profile.load(path))"
                )
        elif isinstance(shares, Profile):
            shares.check(model)
        size = key_size(config) if self.budget_unit == "bytes" else None
        if kv_dtype == "auto":
            D = None if latent_row(config) else describe(config).get("head_dim")
            amounts = self.heavy, self.recent
            kv_dtype = choose_bits(D, size and size[1], amounts, self.value_weighted)
        if size:
            token_bytes = bytes_per_token(*size, kv_dtype, self.value_weighted)
        return dataclasses.replace(
            self, head_shares=shares, kv_dtype=kv_dtype, _token_bytes=token_bytes
        )

    def tokens(self, n: int) -> tuple[int, int]:
        """(heavy, recent) in tokens if fractions are of n tokens, not counting padding.

        All layers must have the same budget. If heads differ, this is their mean, rounded down.
        """
        return mean_pair(self._tokens_by_head(check_count("n", n, 0)))

    def _tokens_by_head(self, n: int) -> list[tuple[int, int]]:
        more = n, self.sinks, self._token_bytes, self.min_tokens, False
        pairs = pair_amounts(self.layer_amounts(0, 1), "key/value head")
        return [count_pair(pair, *more) for pair in pairs]

    def count_held(self, n: int, prompt: int | None = None) -> int:
        """Tokens that a row of n tokens holds at its end, without pins (mean over heads, rounded
        down). Its prompt had `prompt` tokens, or n if `prompt` is None."""
        n, given = check_count("n", n, 0), n if prompt is None else check_count("prompt", prompt, 0)
        counted = count_text(given, n) if self.ratio_of == "seen" else given
        pairs = pair_amounts(self.layer_amounts(0, 1), "key/value head")
        of_keys = self.ratio_of == "seen" and self.budget_unit == "keys"
        if of_keys and all(map(is_whole_text, pairs)):
            return n
        held = [min(n, self.sinks + sum(pair)) for pair in self._tokens_by_head(counted)]
        return sum(held) // len(held)

    def layer_amounts(self, layer: int, layers: int) -> tuple[Any, Any]:
        """(heavy, recent) of one layer, each a single amount or one for each key/value head."""
        if self.budget_unit == "bytes" and self._token_bytes is None:
            raise ValueError(
                'budget_unit="bytes" depends on the model: call config.for_model(model) first'
            )
        layers = check_count("layers", layers)
        layer = check_index("layer", layer, layers, "layer")
        heavy, recent = (
            layer_amount(name, getattr(self, name), layer, layers) for name in ("heavy", "recent")
        )
        check_total((heavy,), (recent,), self.sinks)
        return heavy, recent

    def _take_preset(self, given: frozenset[str]) -> None:
        """Fill in the preset selected by `budget`, except for the fields that were given."""
        put = object.__setattr__
        put(self, "budget", check_whole_budget(self.budget))
        if not self.budget:
            raise ValueError(f"budget={self.budget} keeps nothing: give more than 0")
        if isinstance(self.budget, int) and self.budget_unit == "bytes":
            raise ValueError(
                f'budget={self.budget} is a number of tokens, but budget_unit="bytes" needs a '
                "share: write a float, such as budget=0.2, or leave out budget_unit"
            )
        preset = echo_fields(self.budget, recommended_unit(self.budget))
        for name in preset.keys() - given:
            put(self, name, preset[name])
        if self.score_by != preset["score_by"] and "head_shares" not in given:
            put(self, "head_shares", None)  # sharing by echo requires ranking by echo
        if (self.heavy, self.recent) != (preset["heavy"], preset["recent"]):
            raise ValueError(
                f"budget={self.budget} already determines heavy and recent: give either budget, or "
                "heavy and recent. To change the budget of a config, make a new config"
            )


def _refuse_change(config: object, name: str, value: Any) -> None:
    """Raise FrozenInstanceError in words, also for a config in place of a cache, which transformers
    marks as the user's."""
    raise dataclasses.FrozenInstanceError(
        f"an H2OConfig cannot be changed ({name}={value!r}): make a new one, such as "
        "dataclasses.replace(config, ...). To use it in generate(), pass "
        "cache=h2o.H2OCache(model, config) instead of the config"
    )


H2OConfig.__setattr__ = _refuse_change  # type: ignore[method-assign]


def _each(budget: Any) -> tuple[Any, ...]:
    """The amounts of a list of layers. Empty for a single amount or a function."""
    return budget if isinstance(budget, tuple) else ()


def check_config(config: Any) -> None:
    """Raise TypeError for anything but an H2OConfig."""
    if not isinstance(config, H2OConfig):
        is_short = config is None or isinstance(config, (int, float, str, dict))
        what = repr(config) if is_short else f"a {type(config).__name__}"  # a model fills pages
        raise TypeError(
            f"expected an H2OConfig, not {what}. Write budget=... for a share of the bytes "
            "or a number of tokens, or heavy=..., recent=... for its two parts"
        )


PARAMETERS = tuple(x.name for x in dataclasses.fields(H2OConfig) if not x.name.startswith("_"))
"""The public fields."""


def resolve_config(
    h2o_config: H2OConfig | None, parameters: ConfigFields, function: Any
) -> H2OConfig:
    """The config that a caller of `function` gave as an object or as keywords."""
    others = inspect.getfullargspec(inspect.unwrap(function)).kwonlyargs
    names = dict.fromkeys([*PARAMETERS, *others, "h2o_config"])
    check_names(parameters.keys() - {*PARAMETERS}, [*names])
    if h2o_config is None:
        return H2OConfig(**parameters)
    check_config(h2o_config)
    if parameters:
        raise TypeError(f"give an H2OConfig or keywords, not both: {', '.join(parameters)}")
    return h2o_config
