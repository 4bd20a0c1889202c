"""Division of a budget among key/value heads.

Heads differ in how much they lose by eviction, and the differences depend more on the model than
on the text (compare Feng et al., "Ada-KV", 2024, which divides each layer's budget at run time).
`H2OConfig(..., head_shares=...)` gives each head its own part of the same total. This module works
on plain numbers, without torch.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from typing import Any

from h2o.arguments.plain_values import is_list, is_number, nested, plain, refuse_meta, wrong

NAMED = ("shipped", "echo")
"""Names that `head_shares` accepts: the profile that comes with h2o, and the echo of each prompt
(`h2o.hf.prompt.cross_head_budget`)."""

LEAST = 8
"""Minimum number of tokens per head, sinks included, if the budget allows it. `min_tokens` of
`H2OConfig` may require more."""

SHARED_TWICE = (
    "head_shares divide the budget of a layer among its key/value heads, but heavy or recent give "
    "amounts by head: give one of the two"
)
"""Error message for `head_shares` together with amounts by head."""

Table = tuple[tuple[float, ...], ...]
"""[layers][key/value heads], positive; only the ratios matter."""


def check_table(shares: Any) -> Any:
    """Check `head_shares` as given by users: lists, an array or a Profile. Return a Profile or a
    `Table`.

    Raises: TypeError for anything else, ValueError for a number that is not positive and for layers
    with different numbers of heads.
    """
    if hasattr(shares, "shares_for"):  # a Profile
        return shares
    refuse_meta("head_shares", shares)
    rows = nested(shares)
    rows = [nested(row) for row in rows] if is_list(rows) else rows
    if not is_list(rows) or not all(map(is_list, rows)):
        expected = (
            "numbers [layers, key/value heads] (lists or an array), an h2o.Profile "
            '(h2o.Profile.load(path)), "shipped" or "echo"'
        )
        raise TypeError(wrong("head_shares", shares, expected))
    if not rows or len({len(row) for row in rows}) != 1 or not rows[0]:
        raise ValueError(
            "head_shares must have the same number of heads, at least one, in each layer"
        )
    return tuple(
        tuple(check_share(f"head_shares[{layer}][{head}]", x) for head, x in enumerate(row))
        for layer, row in enumerate(rows)
    )


def check_share(name: str, value: Any) -> float:
    """Check a positive number, such as a head's share, and return a float."""
    share = plain(value)
    if not is_number(share):
        refuse_meta(name, value)
        raise TypeError(wrong(name, value, "a positive number"))
    if not 0 < share <= sys.float_info.max:
        raise ValueError(wrong(name, value, "a positive number"))
    return float(share)


def check_shares(shares: Any, layers: int) -> None:
    """Raise ValueError unless a table or Profile has one row for each layer of the model."""
    rows = shares if isinstance(shares, tuple) else shares.shares_for(1.0)
    if len(rows) != layers:
        raise ValueError(
            f"head_shares has {len(rows)} rows, but the model has {layers} layers: give one row "
            "for each layer, with a number for every key/value head"
        )


@functools.lru_cache(maxsize=4096)
def allocate_tokens(k: int, shares: Table, least: int) -> tuple[tuple[int, ...], ...]:
    """Allocate tokens to heads in proportion to the shares, k on average and at least `least` each.

    The sum is exactly k times the number of heads. Tokens left after rounding down go to the heads
    with the largest remainders, and among equal remainders to the first.
    """
    if k <= least:
        return tuple((k,) * len(row) for row in shares)
    flat = [share for row in shares for share in row]
    total = k * len(flat)
    raised: set[int] = set()
    while True:  # raising a head to the minimum leaves less for the others
        rest = sum(share for i, share in enumerate(flat) if i not in raised)
        left = total - least * len(raised)
        exact = [least if i in raised else left * x / rest for i, x in enumerate(flat)]
        below = {i for i, x in enumerate(exact) if x < least}
        if not below:
            break
        raised |= below
    tokens = [int(x) for x in exact]
    by_remainder = sorted(range(len(flat)), key=lambda i: (tokens[i] - exact[i], i))
    for i in by_remainder[: total - sum(tokens)]:
        tokens[i] += 1
    heads = len(shares[0])
    return tuple(tuple(tokens[i : i + heads]) for i in range(0, len(flat), heads))


def make_room(heads: list[tuple[int, int]], pinned: int, sinks: int) -> list[tuple[int, int]]:
    """Adjust (heavy, recent) of the heads of a row so that each has room for its pinned keys.

    `pinned` does not count the sinks. Heads with room to spare give to those with too little, so
    the total stays the same.

    Raises: ValueError if all heads together have too little.
    """
    lacking = sum(max(0, pinned - heavy) for heavy, _ in heads)
    if not lacking:
        return heads
    spare = [max(0, heavy - pinned) for heavy, _ in heads]
    if lacking > sum(spare):
        heavy, recent = min(heads)
        at_least = sinks + pinned + recent
        if heavy:  # the recent part grows with the budget
            at_least = sinks + math.ceil(pinned * (heavy + recent) / heavy)
        raise ValueError(
            f"{pinned} pinned keys do not fit in a budget of {sinks + heavy + recent} keys per "
            f"head. Sinks take {sinks} of them and recent keys {recent}, which leaves {heavy} for "
            f"pinned keys. Pin fewer tokens, or give budget={at_least} or more (heavy={pinned} or "
            "more if you give heavy and recent)"
        )
    ends = [0, *itertools.accumulate(spare)]
    given = [lacking * end // ends[-1] for end in ends]
    return [
        (max(heavy, pinned) - (after - before), recent)
        for (heavy, recent), before, after in zip(heads, given, given[1:], strict=False)
    ]
