"""The answers of a cache, computed with whole-text matrices in NumPy and float64.

This is a second reference, independent of `tests.reference`. It neither stores nor moves keys:
every key of the text keeps its column, and a boolean says whether it is still held. The core's
tests use it because they run without torch, and `tests.reference` is tested against it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tests.inputs import Policy, Text


@dataclasses.dataclass
class Answers:
    out: np.ndarray
    """[B, N, H, D] float64, 0 at padding"""
    held: list[np.ndarray]
    """after each call, [B, G, N] bool"""
    scores: list[np.ndarray]
    """after each call, [B, G, N] float64, 0 where not held"""
    evicted_score: np.ndarray
    """[B, G] float64"""
    position: np.ndarray
    """[B, N] int64: position of a column's token in its row, without padding"""
    evicted_at: np.ndarray
    """[B, G, N]: number of columns fed when the key had been evicted; N if it never was, 0 for
    padding"""
    last_scores: np.ndarray
    """[B, G, N] float64: scores at the end, or at eviction"""
    visible: np.ndarray
    """[B, G, N, N] bool: the keys that each query attends to"""
    gap: float
    """smallest relative difference between the lowest rank kept and the highest rank evicted"""

    def kept(self, call: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions [B, G, K] and scores, in the form of `tests.inputs.kept`."""
        held, scores = self.held[call], self.scores[call]
        K = int(held.sum(-1).max())
        order = np.argsort(~held, axis=-1, kind="stable")[..., :K]
        real = np.take_along_axis(held, order, -1)
        position = np.take_along_axis(
            np.broadcast_to(self.position[:, None], held.shape), order, -1
        )
        return np.where(real, position, -1), np.take_along_axis(scores, order, -1) * real


def answers(
    text: Text,
    calls: list[int],
    policy: Policy,
    *,
    mask: np.ndarray | None = None,
    budget: np.ndarray | None = None,
    softcap: float = 0.0,
    sink_logits: np.ndarray | None = None,
    scale: float | None = None,
) -> Answers:
    """Answers to the text, fed in calls of these lengths. `budget` [B, 2] replaces the policy's
    heavy and recent."""
    query, keys, values = (x.astype(np.float64) for x in text)
    B, H, N, D = query.shape
    G = keys.shape[1]
    real = np.ones((B, N), bool) if mask is None else mask.astype(bool)
    query, keys, values = (np.where(real[:, None, :, None], x, 0) for x in (query, keys, values))
    if budget is None:
        budget = np.broadcast_to([policy.heavy, policy.recent], (B, 2))
    logits = np.einsum("bgrid,bgjd->bgrij", query.reshape(B, G, H // G, N, D), keys)
    logits *= D**-0.5 if scale is None else scale
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    norm = np.sqrt((values**2).sum(-1)) if policy.value_weighted else np.ones((B, G, N))
    position = np.cumsum(real, axis=1) - 1
    causal = np.tri(N, dtype=bool)
    sinks = np.full(H, -np.inf) if sink_logits is None else sink_logits.astype(np.float64)
    sinks = sinks.reshape(G, H // G, 1, 1)

    out = np.zeros((B, G, H // G, N, D))
    held, score = np.zeros((B, G, N), bool), np.zeros((B, G, N))
    done = Answers(
        out=out,
        held=[],
        scores=[],
        evicted_score=np.zeros((B, G)),
        position=position,
        evicted_at=np.where(real[:, None], N, 0).repeat(G, 1),
        last_scores=score,
        visible=np.zeros((B, G, N, N), bool),
        gap=np.inf,
    )
    start = 0
    for columns in calls:
        new = slice(start, start + columns)
        fresh = np.zeros((B, 1, N), bool)
        fresh[:, 0, new] = real[:, new]
        held = held | fresh
        visible = held[:, :, None] & causal[new] & real[:, None, new, None]
        done.visible[:, :, new] = visible
        p = _softmax(logits[..., new, :], visible[:, :, None], sinks)
        out[..., new, :] = p @ values[:, :, None]
        tokens = real[:, new].sum(1)
        age = real[:, new][:, ::-1].cumsum(1)[:, ::-1] - 1
        score = score * np.where(held, policy.decay ** tokens[:, None, None], 1.0)
        decayed = p * (policy.decay ** np.maximum(age, 0.0))[:, None, None, :, None]
        if policy.score_by == "max":
            score = np.maximum(score, decayed.max((2, 3)))
        else:
            score = score + decayed.sum((2, 3))
        start += columns
        seen = position[:, start - 1] + 1
        done.last_scores = np.where(held, score, done.last_scores)
        for b in np.flatnonzero(tokens):
            for g in range(G):
                stay = _stay(b, g, held, score, norm, position, seen, policy, budget[b], done)
                gone = held[b, g] & ~stay
                done.evicted_score[b, g] += score[b, g, gone].sum()
                done.evicted_at[b, g, gone] = start
                held[b, g] = stay
        done.held.append(held.copy())
        done.scores.append(np.where(held, score, 0.0))
    done.out = out.transpose(0, 3, 1, 2, 4).reshape(B, N, H, D)
    return done


def _softmax(logits: np.ndarray, visible: np.ndarray, sinks: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, of the visible logits and the sinks [..., 1]; 0 where not
    visible."""
    top = np.maximum(np.where(visible, logits, -np.inf).max(-1, keepdims=True), sinks)
    top = np.where(np.isfinite(top), top, 0)
    p = np.exp(np.where(visible, logits, -np.inf) - top)
    return p / np.maximum(p.sum(-1, keepdims=True) + np.exp(sinks - top), np.finfo(float).tiny)


def _stay(b, g, held, score, norm, position, seen, policy, budget, done):
    """[N] bool: the keys that row b and head g keep. Also updates `done.gap`."""
    heavy, recent = budget
    here = held[b, g]
    if here.sum() <= heavy + recent + policy.sinks:
        return here.copy()
    age = seen[b] - 1 - position[b]
    rank = score[b, g] * norm[b, g]
    if policy.score_by == "mean":
        ages = np.maximum(age, 0)
        rank = rank / np.cumsum(policy.decay ** np.arange(ages.max() + 1.0))[ages]
    protected = here & ((position[b] < policy.sinks) | (age < recent))
    candidates = np.flatnonzero(here & ~protected)
    order = candidates[np.lexsort((candidates, -rank[candidates]))]
    stay = protected.copy()
    stay[order[:heavy]] = True
    if 0 < heavy < len(order):
        lowest, highest = rank[order[heavy - 1]], rank[order[heavy]]
        done.gap = min(done.gap, (lowest - highest) / max(abs(lowest), np.finfo(np.float32).tiny))
    return stay
