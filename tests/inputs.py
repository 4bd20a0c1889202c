"""Inputs that all tests share: texts whose heavy set keeps changing, masks, policies, golden data.

Needs NumPy only, so that the tests of the core run without torch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

GOLDEN = Path(__file__).parent / "golden"
ROLLED_CASES = ["d_rope_rolling"]
CACHE_CASES = sorted({path.stem for path in GOLDEN.glob("d_*.npz")} - set(ROLLED_CASES))
MASK_CASES = sorted(path.stem for path in GOLDEN.glob("bc_*.npz"))

# ---- Texts -------------------------------------------------------------------------------------


class Text(NamedTuple):
    """Rotated queries and keys, and values, of N tokens, float32."""

    query: np.ndarray
    """[B, H, N, D]"""
    keys: np.ndarray
    """[B, G, N, D]"""
    values: np.ndarray
    """[B, G, N, D]"""

    def cut(self, start: int, stop: int) -> Text:
        return Text(*(x[:, :, start:stop] for x in self))


def drifting(
    seed: int,
    B: int = 2,
    H: int = 4,
    G: int = 2,
    N: int = 64,
    D: int = 16,
    *,
    turn: float = 0.08,
    sharp: float = 1.5,
    sink: bool = False,
) -> Text:
    """Make a text whose heavy hitters change as it goes on.

    Queries point in a direction that turns by `turn` radians per token. Each key points near the
    direction of its own time, and the lengths of keys vary widely. Keys that were heavy therefore
    fade, and new ones overtake them. With plain Gaussian inputs the heavy set would never change.
    `sharp` scales the logits. `sink` gives token 0 as much attention as models give it.
    """
    rng = np.random.default_rng(seed)
    R = H // G
    axes = rng.standard_normal((B, G, 2, D))
    axes /= np.linalg.norm(axes, axis=-1, keepdims=True)

    def direction(angle: np.ndarray) -> np.ndarray:  # [B, G, N] -> [B, G, N, D]
        return np.cos(angle)[..., None] * axes[:, :, :1] + np.sin(angle)[..., None] * axes[:, :, 1:]

    angle = turn * np.arange(N) + rng.uniform(0, 2 * np.pi, (B, G, 1))
    importance = rng.exponential(1.0, (B, G, N, 1)) ** 1.5
    keys = importance * direction(angle + 0.5 * rng.standard_normal((B, G, N)))
    keys = keys + 0.3 * rng.standard_normal((B, G, N, D)) / D**0.5
    if sink:
        keys[:, :, 0] = 3.0 * axes.sum(2) / np.linalg.norm(axes.sum(2), axis=-1, keepdims=True)
    query = (
        np.repeat(direction(angle), R, axis=1) + 0.5 * rng.standard_normal((B, H, N, D)) / D**0.5
    )
    if sink:
        query = query + np.repeat(keys[:, :, :1], R, axis=1) / 2
    values = rng.standard_normal((B, G, N, D)) * rng.uniform(0.2, 2.0, (B, G, N, 1))
    query = query * (sharp * D**0.5)
    return Text(*(x.astype(np.float32) for x in (query, keys, values)))


def sink_logits(seed: int, H: int) -> np.ndarray:
    """Learned sinks [H] float32, as large as a text's logits. Every fifth head has none."""
    sinks = np.random.default_rng(seed).normal(1.0, 2.0, H)
    sinks[4::5] = -np.inf
    return sinks.astype(np.float32)


def swaps(kept: list[np.ndarray], k: int, recent: int) -> int:
    """Count how often a decode step evicted a heavy key in favor of the one that left the recent
    window.

    Args:
        kept: positions [B, G, K] after each decode step, padded with -1.
        k, recent: the whole budget and its recent part, which must be above 0.
    """
    count = 0
    for before, after in itertools.pairwise(kept):
        for b, g in np.ndindex(*after.shape[:2]):
            old, new = set(before[b, g].tolist()), set(after[b, g].tolist())
            if len(old - {-1}) == k and old != new:
                count += old - new != {max(new) - recent}
    return count


# ---- Masks -------------------------------------------------------------------------------------


def left(lengths: list[int], Q: int) -> np.ndarray:
    """Mask [B, Q] bool with padding on the left. Row b has its lengths[b] tokens at the end."""
    return np.arange(Q) >= Q - np.asarray(lengths)[:, None]


def right(lengths: list[int], Q: int) -> np.ndarray:
    """Mask [B, Q] bool with padding on the right. Row b has its lengths[b] tokens at the
    beginning."""
    return np.arange(Q) < np.asarray(lengths)[:, None]


def holes(seed: int, lengths: list[int], Q: int) -> np.ndarray:
    """Mask [B, Q] bool with padding anywhere. Row b has its lengths[b] tokens in random columns."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((len(lengths), Q), bool)
    for row, length in zip(mask, lengths, strict=True):
        row[rng.choice(Q, length, replace=False)] = True
    return mask


def pad(text: Text, mask: np.ndarray) -> Text:
    """Pad a text to [B, ., Q, D], with row b's first tokens where the mask is true.

    Padding is NaN and infinity, since its values must not matter, not even if multiplied by 0.
    """
    padded = []
    for x in text:
        y = np.full((*x.shape[:2], mask.shape[1], x.shape[3]), np.nan, x.dtype)
        y[:, :, ::3] = np.inf
        for b, row in enumerate(mask):
            y[b][:, row] = x[b, :, : row.sum()]
        padded.append(y)
    return Text(*padded)


# ---- Policies ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Policy:
    """The arguments of `evict` and `step` besides the slots, and the budgets of every row."""

    heavy: int = 4
    recent: int = 4
    sinks: int = 0
    score_by: str = "sum"
    decay: float = 1.0
    value_weighted: bool = False

    @property
    def k(self) -> int:
        return self.sinks + self.heavy + self.recent

    @property
    def ranking(self) -> dict[str, Any]:
        """Keyword arguments of `evict` and `step`."""
        return {
            "sinks": self.sinks,
            "score_by": self.score_by,
            "decay": self.decay,
            "value_weighted": self.value_weighted,
        }


POLICIES = {
    "h2o": Policy(10, 6),
    "sinks": Policy(8, 5, sinks=3),
    "local": Policy(0, 12),
    "heavy-only": Policy(12, 0),
    "streaming": Policy(0, 9, sinks=4),
    "one-heavy": Policy(1, 0),
    "one-recent": Policy(0, 1),
    "mean": Policy(10, 6, score_by="mean"),
    "decay": Policy(10, 6, decay=0.9),
    "last-query": Policy(10, 6, decay=0.0),
    "decayed-mean": Policy(9, 5, sinks=2, score_by="mean", decay=0.8),
    "value-weighted": Policy(10, 6, value_weighted=True),
    "everything": Policy(11, 3, sinks=1, score_by="mean", decay=0.95, value_weighted=True),
    "full": Policy(1000, 0),
    "max": Policy(10, 6, score_by="max"),
    "decayed-max": Policy(9, 5, sinks=2, score_by="max", decay=0.8, value_weighted=True),
}


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A conversation to test: shapes, chunks, padding and policy."""

    seed: int
    lengths: list[int]
    """tokens of each row's prompt without padding, [B]"""
    calls: list[int]
    """columns of each call; the first is the prompt, with at least max(lengths)"""
    G: int
    R: int
    D: int
    padding: str
    policy: Policy
    softcap: float
    learned_sinks: bool = False

    @property
    def B(self) -> int:
        return len(self.lengths)

    def text(self) -> Text:
        N = sum(self.calls)
        text = drifting(self.seed, self.B, self.G * self.R, self.G, N, self.D)
        return pad(text, self.mask())

    def sink_logits(self) -> np.ndarray | None:
        """Learned sinks [H] float32, some with much of the attention and some with little, or
        None."""
        if not self.learned_sinks:
            return None
        return sink_logits(self.seed, self.G * self.R)

    def mask(self) -> np.ndarray:
        """Mask [B, sum(calls)] bool. Only the prompt has padding."""
        Q = self.calls[0]
        prompt = {
            "left": lambda: left(self.lengths, Q),
            "right": lambda: right(self.lengths, Q),
            "holes": lambda: holes(self.seed, self.lengths, Q),
        }[self.padding]()
        return np.concatenate([prompt, np.ones((self.B, sum(self.calls[1:])), bool)], axis=1)


# ---- Golden data -------------------------------------------------------------------------------


class GoldenCache(NamedTuple):
    """One `d_*.npz`, a batch of one row. Query and keys are rotated if the case has rotary keys
    that keep their original positions."""

    text: Text
    """[1, H, N, d] each; G = H"""
    calls: list[int]
    heavy: int
    recent: int
    kept: list[np.ndarray]
    """positions after each call, [1, H, K] int64, ascending"""
    scores: list[np.ndarray]
    """scores after each call, [1, H, K] float32"""
    out: np.ndarray
    """[1, N, H, d] float32"""
    swaps: int

    def pieces(self) -> Iterator[Text]:
        stop = 0
        for tokens in self.calls:
            start, stop = stop, stop + tokens
            yield self.text.cut(start, stop)


def golden_cache(name: str) -> GoldenCache:
    """A case of CACHE_CASES or ROLLED_CASES."""
    with np.load(GOLDEN / f"{name}.npz") as data:
        q, k, v = (data[x].astype(np.float32)[None] for x in "qkv")
        if data["rope"].item() == "original":
            q, k = (rotate(x, data["rope_base"].item()) for x in (q, k))
        lengths = data["kept_len"].tolist()
        return GoldenCache(
            text=Text(q, k, v),
            calls=data["calls"].tolist(),
            heavy=data["hh_size"].item(),
            recent=data["recent_size"].item(),
            kept=[
                x[None, :, :n].astype(np.int64) for x, n in zip(data["kept"], lengths, strict=True)
            ],
            scores=[x[None, :, :n] for x, n in zip(data["score"], lengths, strict=True)],
            out=data["out"].swapaxes(0, 1)[None],
            swaps=data["swaps"].item(),
        )


class GoldenMasks(NamedTuple):
    """One `bc_*.npz`. The budgets (heavy, recent) are given as fractions and as tokens."""

    logits: np.ndarray
    """[1, H, S, S] float32"""
    ratios: list[tuple[float, float]]
    tokens: list[tuple[int, int]]
    local: np.ndarray
    """[4, H, S, S] bool"""
    future: np.ndarray
    """[4, H, S, S] bool"""


def golden_masks(name: str) -> GoldenMasks:
    """A case of MASK_CASES."""
    with np.load(GOLDEN / f"{name}.npz") as data:
        return GoldenMasks(
            logits=data["logits"].astype(np.float32)[None],
            ratios=[(h, r) for h, r in data["ratios"].tolist()],
            tokens=list(zip(data["heavy"].tolist(), data["recent"].tolist(), strict=True)),
            local=data["b_mask"],
            future=data["c_mask"],
        )


def rotate(x: np.ndarray, base: float = 10000.0) -> np.ndarray:
    """Apply the rotary embedding to [..., N, d] at positions 0 to N - 1. Pairs the first half of
    the elements with the second.

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, section 3.
    """
    N, d = x.shape[-2:]
    angle = np.outer(np.arange(N), base ** (-np.arange(0, d, 2) / d)).astype(np.float32)
    cos, sin = (np.concatenate([y, y], axis=-1) for y in (np.cos(angle), np.sin(angle)))
    a, b = np.split(x, 2, axis=-1)
    return x * cos + np.concatenate([-b, a], axis=-1) * sin


def heads(slots: Any, field: str, empty: float) -> np.ndarray:
    """Positions, scores or norms of any store as [B, G, S]. Heads with fewer slots are padded."""
    tensor = np.asarray(getattr(slots, field))
    if slots.starts is None:
        return tensor
    starts = np.atleast_2d(np.asarray(slots.starts))
    rows = np.broadcast_to(starts, (len(tensor), starts.shape[1])).tolist()
    out = np.full((len(rows), len(rows[0]) - 1, np.diff(starts).max()), empty, tensor.dtype)
    for b, row in enumerate(rows):
        for g, (begin, end) in enumerate(itertools.pairwise(row)):
            out[b, g, : end - begin] = tensor[b, begin:end]
    return out


def kept(slots: Any) -> tuple[np.ndarray, np.ndarray]:
    """Positions [B, G, K] int64, ascending, and scores [B, G, K], padded with -1 and 0.

    The same as `cache.kept()`, for slots of NumPy arrays or CPU torch tensors.
    """
    positions, scores = heads(slots, "positions", -1).astype(np.int64), heads(slots, "scores", 0)
    K = int((positions >= 0).sum(-1).max())
    empty_last = np.where(positions < 0, np.iinfo(np.int64).max, positions)
    order = empty_last.argsort(axis=-1)[..., :K]
    position = np.take_along_axis(positions, order, -1)
    return position, np.where(position < 0, 0, np.take_along_axis(scores, order, -1))
