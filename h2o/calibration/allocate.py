"""Allocation of keys to heads from the cost of eviction in each head alone.

Assuming that costs add up, an allocation is optimal if one more key would save the same in every
head. So the steepest steps along the lower convex hulls of the heads' costs are taken first until
the total is spent (Fox, "Discrete Optimization via Marginal Analysis", Management Science 1966).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np


def hull_edges(budgets: np.ndarray, costs: np.ndarray) -> Iterator[tuple[float, float]]:
    """Yield the (slope, width) of each edge of the lower convex hull, from the smallest budget on.

    The hull ends at the first budget with the lowest cost, because larger budgets save nothing.
    """
    here, last = 0, int(np.argmin(costs))
    while here < last:
        after = slice(here + 1, last + 1)
        slopes = (costs[after] - costs[here]) / (budgets[after] - budgets[here])
        steepest = int(np.argmin(slopes))
        yield slopes[steepest], budgets[after][steepest] - budgets[here]
        here += steepest + 1


def allocate(budgets: Sequence[float], costs: np.ndarray, total: float) -> np.ndarray:
    """Allocate keys to heads at the lowest total cost.

    Args:
        budgets: ascending. Every head gets at least the first and at most the last of them.
        costs: [heads, budgets].
        total: number of keys for all heads together.

    Returns:
        float64 [heads] with the sum `total`, or the nearest sum within the limits of `budgets`.
    """
    grid = np.array(budgets, dtype=np.float64)
    keys = np.full(len(costs), grid[0])
    steps = [
        (slope, head, width)
        for head, row in enumerate(costs)
        for slope, width in hull_edges(grid, row)
    ]
    remaining = total - keys.sum()
    for _, head, width in sorted(steps):
        taken = max(0.0, min(width, remaining))
        keys[head] += taken
        remaining -= taken
    if remaining > 0:  # no head is known to need more: divide the rest in proportion to room
        room = grid[-1] - keys
        keys += room * min(1.0, remaining / max(room.sum(), 1e-9))
    return keys
