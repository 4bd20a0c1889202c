"""Statistics of attention from the scores of keys, in plain NumPy and without a model.

Shape letters: n keys. Arrays of scores may have any leading axes.
"""

from __future__ import annotations

import dataclasses

import numpy as np

SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)


@dataclasses.dataclass(frozen=True)
class PowerLaw:
    """Distribution of attention over keys. Arrays have the leading axes of the scores."""

    slope: np.ndarray
    """Slope of log score against log rank: -1 is Zipf's law"""
    r2: np.ndarray
    """R2 of this straight line: 1 is a power law"""
    exponential_r2: np.ndarray
    """R2 of an exponential law, log score against rank"""
    keys: dict[float, np.ndarray]
    """Number of highest keys that carry a share of the attention, by share"""


def power_law(scores: np.ndarray) -> PowerLaw:
    """Fit sorted scores [..., n], n >= 3, by least squares.

    The ranks are evenly spaced on a logarithmic scale, so that the many small scores do not
    outweigh the few large ones. Both laws are fitted to the same points. Scores of 0 count as the
    smallest positive score.
    """
    n = scores.shape[-1]
    falling = -np.sort(-scores.astype(np.float64), axis=-1)
    ranks = np.unique(np.geomspace(1, n, min(n, 60)).round().astype(int))
    tiny = np.min(falling, where=falling > 0, initial=np.inf, axis=-1, keepdims=True)
    y = np.log(np.maximum(falling, np.where(np.isfinite(tiny), tiny, 1.0)))[..., ranks - 1]
    slope, r2 = _line(np.log(ranks), y)
    return PowerLaw(slope, r2, _line(ranks, y)[1], carriers(scores))


def _line(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(slope, R2) of y [..., m] against x [m]"""
    x = x - x.mean()
    y = y - y.mean(-1, keepdims=True)
    slope = (y @ x) / (x @ x)
    total = (y**2).sum(-1)
    residual = ((y - slope[..., None] * x) ** 2).sum(-1)
    return slope, 1 - residual / np.where(total > 0, total, 1.0)


def carriers(scores: np.ndarray, shares: tuple[float, ...] = SHARES) -> dict[float, np.ndarray]:
    """Number of highest scores [..., n] that add up to each share of their sum, as int arrays."""
    falling = -np.sort(-scores.astype(np.float64), axis=-1)
    sums = falling.cumsum(-1)
    # The sum of equal scores may miss its share by a rounding error.
    wanted = {share: share * sums[..., -1:] * (1 - 1e-12) for share in shares}
    return {share: (sums < least).sum(-1) + 1 for share, least in wanted.items()}


def top(scores: np.ndarray, k: int) -> np.ndarray:
    """Mark the k highest of scores [..., n] in a bool array. The first of equal ones are taken."""
    chosen = np.zeros(scores.shape, dtype=bool)
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    np.put_along_axis(chosen, order, True, axis=-1)
    return chosen


def jaccard(sets: np.ndarray) -> np.ndarray:
    """Jaccard index [..., x, x] of each pair of sets [..., x, n], none of them empty: the number of
    common members over the number of all members."""
    common = sets.astype(np.float64) @ sets.astype(np.float64).swapaxes(-1, -2)
    sizes = sets.sum(-1)
    return common / (sizes[..., None] + sizes[..., None, :] - common)


def per_type(ids: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts [t] and summed scores [..., t] of the t distinct tokens, by ascending id."""
    types, which, counts = np.unique(ids, return_inverse=True, return_counts=True)
    sums = np.zeros((*scores.shape[:-1], len(types)))
    np.add.at(sums, (..., which), scores)
    return counts, sums


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Rank correlation. Equal values get the mean of their ranks. NaN if an input is constant."""
    a, b = (_ranks(np.asarray(values)) for values in (x, y))
    a, b = a - a.mean(), b - b.mean()
    size = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / size) if size else float("nan")


def _ranks(values: np.ndarray) -> np.ndarray:
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return (last - (counts - 1) / 2)[which]
