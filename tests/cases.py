"""Which cases of a product are run by each `make test`, and which by `make test-all` alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def pairs(*values: Iterable[Any]) -> list[Any]:
    """Cases of all values, of three parameters or more. Marked as slow are those without which
    every two values of two parameters still meet."""
    columns = [list(column) for column in values]
    shortest = min(map(len, columns))
    cases = itertools.product(*map(enumerate, columns))
    places_and_cases = [zip(*case, strict=True) for case in cases]
    return [
        pytest.param(*case, marks=[pytest.mark.slow] * (sum(places) % shortest > 0))
        for places, case in places_and_cases
    ]


def checkered(one: Iterable[Any], other: Iterable[Any]) -> list[Any]:
    """Cases of two parameters that no branch knows both of. As on a chess board every second one is
    marked as slow, so that each value still meets half of the other parameter's."""
    return [
        _case(a, b, is_slow=(i + j) % 2 > 0) for i, a in enumerate(one) for j, b in enumerate(other)
    ]


def _case(*values: Any, is_slow: bool) -> Any:
    """A case of values that may be pytest.param with marks of their own."""
    sets = [x if isinstance(x, _PARAM) else pytest.param(x) for x in values]
    marks = [mark for each in sets for mark in each.marks]
    plain = [value for each in sets for value in each.values]
    return pytest.param(*plain, marks=[*marks, *[pytest.mark.slow] * is_slow])


_PARAM = type(pytest.param())
