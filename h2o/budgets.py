"""Budgets in tokens or in fractions of the prompt: checks, and the amounts of layers and heads.

This module works on plain numbers, without torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

from h2o.arguments.plain_values import (
    check_count,
    check_fraction,
    check_numbers,
    is_integer,
    is_list,
    nested,
    plain,
    refuse_meta,
)
from h2o.kv_dtype import TokenBytes, count_fitting

DEFAULT_BUDGET = 0.2
"""`budget` of a config without `budget`, `heavy` and `recent`: a fifth of a full cache's bytes."""

FEWEST_KEYS = 32
"""Number of keys per head below which an int budget is usually meant as a percentage."""

UNLIMITED = 2**31 - 1
"""A `heavy` or `recent` budget that no text exceeds."""

Amount = int | float
"""An int is a number of tokens; a float in [0, 1] is a fraction of the row's text (`RatioOf`)."""

OfLayer = Amount | Sequence[Amount]
"""One amount for the layer, or one for each of its key/value heads."""

Budget = Amount | Sequence[OfLayer] | Callable[[int, int], OfLayer]
"""One amount for all layers, one for each layer, or a function (layer, layers) -> amount."""


BudgetUnit = Literal["keys", "bytes"]
"""Unit of fractions: keys of the text, or bytes that it takes in a full cache."""

RatioOf = Literal["seen", "prompt"]
"""What fractions are fractions of: the row's text so far (`count_text`), or its prompt."""


def count_text(prompt: int, seen: int) -> int:
    """The number of tokens that a budget with `ratio_of="seen"` is a fraction of.

    It is `prompt` at first. As the text grows it follows the number of tokens, `seen`, in steps of
    at most 64 tokens or a twentieth of the text, so that slots are rarely copied. It never falls.
    """
    return max(prompt, seen - seen % _step_at(seen))


def next_growth(counted: int) -> int:
    """The lowest number of tokens at which `count_text` is more than `counted`."""
    step = _step_at(counted)
    return counted - counted % step + step


def _step_at(seen: int) -> int:
    """The step of `count_text`: a power of two, so that the end of a step begins a longer one."""
    widest = max(min(seen // 10, 64), seen // 20, 4)
    return 1 << (widest.bit_length() - 1)


def parse_amount(text: str) -> Amount:
    """Parse an amount: "256" is a number of tokens, "0.1" and "1.0" are fractions.

    Raises: ValueError for a text that is not a number.
    """
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    share = 0.2
    with contextlib.suppress(ValueError):
        percent = float(text.strip().removesuffix("%"))
        share = percent / 100 if 0 < percent <= 100 else share
    raise ValueError(
        f"{text!r} is not an amount: write a number of tokens, such as 512, or a fraction, such as "
        f"{share:g}"
    )


def split_heavy_recent(budget: Amount, heavy: float) -> tuple[Amount, Amount]:
    """Split a budget into (heavy, recent). The parameter `heavy` is the share of heavy hitters.

    Fractions are rounded to 12 digits, so that 0.2 is split into 0.15 and 0.05.
    """
    if isinstance(budget, float):
        return round(budget * heavy, 12), round(budget * (1 - heavy), 12)
    return int(budget * heavy), budget - int(budget * heavy)


def recent_part(min_tokens: int) -> int:
    """Minimum number of recent keys among `min_tokens`: a quarter, rounded up."""
    return -(-min_tokens // 4)


def is_whole_text(pair: tuple[Amount, Amount]) -> bool:
    """Whether the fractions of a head, of keys, add up to the whole text."""
    return sum(x for x in pair if isinstance(x, float)) >= 1


def truncate_pair(
    pair: tuple[Amount, Amount], n: int, sinks: int, token_bytes: TokenBytes | None, grows: bool
) -> tuple[int, int]:
    """(heavy, recent) of one head in tokens, if fractions are of n tokens. A fraction may round
    down to 0 tokens.

    Args:
        token_bytes: bytes of a token in a full cache and in a slot, if heavy + recent is a share of
            a full cache's bytes. None: each fraction is one of the tokens.
        grows: whether fractions follow the text (`count_text`). If they are the whole text, there
            is room for all tokens until the budget grows again, so that none is ever evicted.
    """
    if token_bytes is None:
        if grows and is_whole_text(pair):
            n = next_growth(n)
        heavy, recent = (int(x * n) if isinstance(x, float) else x for x in pair)
        return heavy, recent
    part = sum(pair)
    if part == 0:  # only sinks are kept
        return 0, 0
    rest = count_fitting(int(part * n * token_bytes[0]), token_bytes, sinks)
    recent = int(rest * pair[1] / part)
    return rest - recent, recent


def count_pair(
    pair: tuple[Amount, Amount],
    n: int,
    sinks: int,
    token_bytes: TokenBytes | None,
    min_tokens: int,
    grows: bool,
) -> tuple[int, int]:
    """Like `truncate_pair`, but a fraction above 0 is at least one token. If an
    amount is a fraction, the head gets at least `min_tokens` keys, sinks included, of which
    `recent_part` are recent. Missing tokens are divided between the fractions in their ratio.
    """
    heavy, recent = truncate_pair(pair, n, sinks, token_bytes, grows)
    of_heavy = pair[0] if isinstance(pair[0], float) else 0.0
    of_recent = pair[1] if isinstance(pair[1], float) else 0.0
    if not of_heavy + of_recent:
        return heavy, recent
    if token_bytes is None:
        heavy, recent = max(heavy, int(of_heavy > 0)), max(recent, int(of_recent > 0))
    least = min_tokens - sinks
    total = max(heavy + recent, least)
    recent += int((total - heavy - recent) * of_recent / (of_heavy + of_recent))
    recent = max(recent, min(recent_part(min_tokens), least))
    return max(total - recent, 0 if of_heavy else heavy), recent


def flatten(amounts: Any) -> list[Any]:
    """List all amounts of nested tuples."""
    if not isinstance(amounts, tuple):
        return [amounts]
    return [x for part in amounts for x in flatten(part)]


def pair_amounts(amounts: tuple[Any, Any], what: str) -> list[tuple[Any, Any]]:
    """Pair heavy with recent amounts, repeating a single amount. Errors call an entry `what`."""
    count = max(len(x) if isinstance(x, tuple) else 1 for x in amounts)
    heavy, recent = (x if isinstance(x, tuple) else (x,) * count for x in amounts)
    if len(heavy) != len(recent):
        raise ValueError(
            f"heavy has {len(heavy)} amounts and recent {len(recent)}: each needs one per {what}"
        )
    return list(zip(heavy, recent, strict=True))


def mean_pair(pairs: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The mean (heavy, recent), rounded down."""
    heavy, recent = (sum(part) // len(pairs) for part in zip(*pairs, strict=True))
    return heavy, recent


def check_budget(name: str, value: Any) -> Any:
    """Check a budget. Return an amount, a function, or a tuple with one entry for each layer: an
    amount, or a tuple with an amount for each head."""
    if callable(value):
        return value
    return _check_list(name, value, "layer of the model", check_head_amounts)


def check_head_amounts(name: str, value: Any) -> Any:
    """Check the budget of one layer: a single amount, or a list with one for each head."""
    return _check_list(name, value, "key/value head", check_amount)


def _check_list(name: str, value: Any, what: str, check: Callable[[str, Any], Any]) -> Any:
    """Check a single amount, or each entry of a list, which has one entry per `what`."""
    refuse_meta(name, value)
    rows = nested(value)
    if not is_list(rows):
        return check_amount(name, rows)
    if not rows:
        raise ValueError(f"{name} is an empty list: give one amount per {what}")
    return tuple(check(f"{name}[{i}]", amount) for i, amount in enumerate(rows))


def check_amount(name: str, value: Any) -> Amount:
    """Check a number of tokens, or a fraction of the prompt, which is a float even if it is 1.0."""
    if is_integer(plain(value)):
        return check_tokens(name, value)
    expected = "a number of tokens (an int, such as 512) or a fraction (a float in [0, 1])"
    hint = "for a number of tokens give an int"
    return check_fraction(name, value, expected=expected, hint=hint)


def check_whole_budget(value: Any) -> Amount:
    """Check the amount of a `budget`. An int of 1 is refused, because it is usually meant as all
    keys, and a cache of one key answers nothing."""
    amount = check_amount("budget", value)
    if isinstance(amount, int) and amount == 1:
        raise ValueError(
            "budget=1 would keep one key in each head: write budget=1.0 for the bytes of a full "
            "cache, or heavy=1, recent=0 for a single key"
        )
    return amount


def explain_few_keys(amounts: dict[str, Any]) -> str:
    """Explain what a budget of fewer than `FEWEST_KEYS` keys means. Empty for any other budget, and
    if one of its parts is 0 or differs by layer.

    Args:
        amounts: the parts of the budget by name, {"budget": 20} or {"heavy": 10, "recent": 10}.
    """
    if not all(isinstance(x, int) and x > 0 for x in amounts.values()):
        return ""
    keys = sum(amounts.values())
    if keys >= FEWEST_KEYS:
        return ""
    shares = {name: x / 100 for name, x in amounts.items()}
    given, wanted = (", ".join(f"{x}={y}" for x, y in one.items()) for one in (amounts, shares))
    return (
        f"{given}: an int is a number of keys, so each head keeps {keys} keys. For {keys}% write "
        f"{wanted}"
    )


def check_tokens(name: str, value: Any) -> int:
    """Check a number of tokens that may be 0."""
    return check_count(name, value, 0, UNLIMITED)


def check_prompt_length(value: Any) -> int | list[int]:
    """Check the length of a prompt, and return an int, or a list with one for each row."""
    name = "prompt_length"
    refuse_meta(name, value)
    if not is_list(nested(value)):
        return check_count(name, value, 1, UNLIMITED)
    return [check_count(name, x, 1, UNLIMITED) for x in check_numbers(name, value)]


def layer_amount(name: str, budget: Any, layer: int, layers: int) -> Any:
    """One layer's amount, or a tuple with one amount for each of its heads."""
    if callable(budget):
        return check_head_amounts(f"{name}({layer}, {layers})", budget(layer, layers))
    if isinstance(budget, tuple):
        if len(budget) != layers:
            raise ValueError(
                f"{name} has {len(budget)} amounts, but the model has {layers} layers: "
                "give one amount per layer"
            )
        return budget[layer]
    return budget


def check_total(heavy: Any, recent: Any, sinks: int) -> None:
    """Raise ValueError for a budget that is 0 in any layer or head for every prompt."""
    if sinks or callable(heavy) or callable(recent):
        return
    rows = pair_amounts((heavy, recent), "layer of the model")
    pairs = [pair for row in rows for pair in pair_amounts(row, "key/value head of a layer")]
    if any(pair == (0, 0) for pair in pairs):
        raise ValueError(
            "a budget of 0 tokens keeps nothing: one of heavy, recent and sinks must be more "
            f"than 0 (heavy={heavy}, recent={recent}, sinks=0)"
        )
