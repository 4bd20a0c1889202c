"""Allocation of keys to heads from the cost of eviction in each head alone.

Assuming that costs add up, an allocation is optimal if one more key would save the same in every
head. So the steepest steps along the lower convex hulls of the heads' costs are taken first until
the total is spent (Fox, "Discrete Optimization via Marginal Analysis", Management Science 1966).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np


def hull(budgets: Sequence[float], costs: Sequence[float]) -> list[tuple[float, float]]:
    """The corners (budget, cost) of the lower convex hull, from the smallest budget on.

    The hull ends at the first budget with the lowest cost, because larger budgets save nothing.
    """
    corners: list[tuple[float, float]] = []
    last = int(np.argmin(costs))
    for x, y in list(zip(budgets, costs, strict=True))[: last + 1]:
        while len(corners) > 1 and _slope(corners[-2], (x, y)) <= _slope(*corners[-2:]):
            corners.pop()
        if len(corners) == 1 and y >= corners[0][1]:
            continue
        corners.append((x, y))
    return corners


def allocate(budgets: Sequence[float], costs: np.ndarray, total: float) -> np.ndarray:
    """Allocate keys to heads at the lowest total cost.

    Args:
        budgets: ascending. Every head gets at least the first and at most the last of them.
        costs: [heads, budgets].
        total: number of keys for all heads together.

    Returns:
        float64 [heads] with the sum `total`, or the nearest sum within the limits of `budgets`.
    """
    least, most = float(budgets[0]), float(budgets[-1])
    keys = np.full(len(costs), least)
    steps = []
    for head, row in enumerate(costs):
        corners = hull(budgets, row)
        for a, b in itertools.pairwise(corners):
            steps.append((_slope(a, b), head, b[0] - a[0]))
    remaining = total - keys.sum()
    for _, head, width in sorted(steps):
        taken = max(0.0, min(width, remaining))
        keys[head] += taken
        remaining -= taken
    if remaining > 0:  # no head is known to need more: divide the rest in proportion to room
        room = most - keys
        keys += room * min(1.0, remaining / max(room.sum(), 1e-9))
    return keys


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])
