"""Choose which cases of a product of parameters run in `make test`, and which only in `make
test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def pairs(*values: Iterable[Any]) -> list[Any]:
    """All combinations of the values of three or more parameters. The cases that are not slow
    suffice for every value to meet every value of each other parameter."""
    columns = [list(column) for column in values]
    shortest = min(map(len, columns))
    cases = itertools.product(*map(enumerate, columns))
    places_and_cases = [zip(*case, strict=True) for case in cases]
    return [
        pytest.param(*case, marks=[pytest.mark.slow] * (sum(places) % shortest > 0))
        for places, case in places_and_cases
    ]


def checkered(one: Iterable[Any], other: Iterable[Any]) -> list[Any]:
    """All combinations of the values of two parameters, for code in which no branch depends on
    both. Every second case is slow, as on a chess board, so that each value still meets half of the
    other parameter's values."""
    return [
        _case(a, b, is_slow=(i + j) % 2 > 0) for i, a in enumerate(one) for j, b in enumerate(other)
    ]


def _case(*values: Any, is_slow: bool) -> Any:
    """A case whose values may be pytest.param with their own marks."""
    sets = [x if isinstance(x, _PARAM) else pytest.param(x) for x in values]
    marks = [mark for each in sets for mark in each.marks]
    plain = [value for each in sets for value in each.values]
    return pytest.param(*plain, marks=[*marks, *[pytest.mark.slow] * is_slow])


_PARAM = type(pytest.param())
