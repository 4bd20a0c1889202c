"""Queries, keys and values that behave like a text, and the checks before anything is timed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import h2o.ops
from h2o import reference

TOPICS = 8


def text(
    B: int, H: int, G: int, n: int, D: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """(query [B,H,n,D], keys [B,G,n,D], values [B,G,n,D]) of a text whose subject changes.

    Each key belongs to one of a few topics, some with much more weight than others; the queries
    turn from topic to topic. So some keys are heavy hitters, and which ones they are changes as
    the text goes on. (Independent Gaussian vectors would freeze the heavy set early.)
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    topics = normal(B, G, TOPICS, D)
    topic = torch.randint(TOPICS, (B, G, n), generator=generator)
    weight = torch.rand(B, G, n, 1, generator=generator) ** 3
    at = topic[..., None].expand(-1, -1, -1, D)
    keys = 0.6 * normal(B, G, n, D) + 1.5 * weight * topics.gather(2, at)
    values = normal(B, G, n, D)
    turn = torch.linspace(0, 3, n)[:, None] + torch.arange(TOPICS) / TOPICS
    interest = (2 * math.pi * turn).cos().clamp(min=0)  # [n, TOPICS]
    toward = (interest @ topics).repeat_interleave(H // G, dim=1)
    query = 0.6 * normal(B, H, n, D) + 1.2 * toward
    return query.to(dtype), keys.to(dtype), values.to(dtype)


def filled_slots(keys: Tensor, values: Tensor, query: Tensor, heavy: int, recent: int) -> Any:
    """Slots after a prompt, ready for `h2o.ops.step`."""
    slots = h2o.ops.new_slots(keys, heavy + recent + 1, heavy, recent)
    _, scores = h2o.ops.attend(query, keys, values)
    h2o.ops.evict(keys, values, scores, slots)
    return slots


def copy_slots(slots: Any) -> Any:
    return type(slots)(*(None if x is None else x.clone() for x in slots))


class WrongResult(AssertionError):
    """A contender does not compute what it is timed for."""


def compare(name: str, ours: Tensor, naive: Tensor, truth: Tensor) -> str:
    """Both errors against the float64 truth; ours may be at most twice that of naive torch.

    Plain torch of the same dtype is the measure, because how large an error may be depends on
    the dtype and the shape. Errors are root mean squares: the largest one is a matter of luck.
    """
    error = (ours.double() - truth.double()).square().mean().sqrt().item()
    allowed = (naive.double() - truth.double()).square().mean().sqrt().item()
    told = f"{name} RMS error {error:.1e} (torch {allowed:.1e})"
    if not error <= 2 * allowed + 1e-7:
        raise WrongResult(told)
    return told


def check_attend(query: Tensor, keys: Tensor, values: Tensor, eager: Any) -> str:
    """`h2o.ops.attend` at full length, its first key/value head against the reference.

    eager: the naive torch function (query, keys, values) -> (out [B,H,n,D], scores).
    """
    R = query.shape[1] // keys.shape[1]
    out, scores = h2o.ops.attend(query, keys, values)
    head = (query[:1, :R], keys[:1, :1], values[:1, :1])
    wide = (x.double() for x in head)
    true_out, true_scores = reference.attend(*wide)
    plain_out, plain_scores = eager(*head)
    told = [
        compare("out", out[:1, :, :R], plain_out.transpose(1, 2), true_out),
        compare("scores", scores[:1, :1], plain_scores, true_scores),
    ]
    return ", ".join(told)


def check_kept(ours: Any, truth: Any, evictions: int) -> str:
    """The kept sets of two stores after the same number of evictions in each row and head.

    Sums of probabilities in another order differ in the last bits, so two keys of nearly equal
    rank may change places; anything beyond that is an error.
    """
    mine, _ = reference.kept(ours)
    theirs, _ = reference.kept(truth)
    heads = [
        (set(a.tolist()), set(b.tolist()))
        for a, b in zip(mine.flatten(0, 1), theirs.flatten(0, 1), strict=True)
    ]
    differ = sum(len(b - a) for a, b in heads)
    told = f"{differ} of {evictions * len(heads)} evictions differ"
    if differ * 100 > evictions * len(heads):
        raise WrongResult(told)
    return told
