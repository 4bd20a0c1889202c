"""The fast cases of a product are those that cases.py promises."""

from __future__ import annotations

import itertools

import pytest

from tests.cases import checkered, pairs


@pytest.mark.parametrize("columns", [("abcdefg", "xy", "123"), ("abc", "xyz", "123"), ["ab"] * 4])
def test_every_two_values_meet(columns):
    cases = pairs(*columns)
    fast = [case.values for case in cases if not case.marks]
    assert len(fast) == len(cases) / min(map(len, columns))
    for i, j in itertools.combinations(range(len(columns)), 2):
        assert {(case[i], case[j]) for case in fast} == {*itertools.product(columns[i], columns[j])}


def test_each_value_meets_half_of_the_others():
    fast = [case.values for case in checkered("abcd", "wxyz") if not case.marks]
    for i in range(2):
        assert sorted(case[i] for case in fast) == sorted(2 * ["abcd", "wxyz"][i])


def test_values_with_marks_keep_them():
    skipped = pytest.param("w", marks=pytest.mark.skip)
    cases = checkered("ab", [skipped, "x"])
    assert [case.values for case in cases] == [("a", "w"), ("a", "x"), ("b", "w"), ("b", "x")]
    marks = [[mark.name for mark in case.marks] for case in cases]
    assert marks == [["skip"], ["slow"], ["skip", "slow"], []]
