"""Checks before timing that a contender computes what it is timed for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import h2o.ops
from tests.reference import operations as reference

from . import inputs


class WrongResult(AssertionError):
    """A contender does not compute what it is timed for."""


def compare(name: str, ours: Tensor, naive: Tensor, truth: Tensor) -> str:
    """Compare our error against float64 with that of naive torch. Ours may be at most twice as
    large.

    Plain torch in the same dtype sets the limit, because the size of errors depends on the dtype
    and the shape. Errors are root mean squares, since the largest error depends on chance.

    Raises:
        WrongResult: our error is above the limit.
    """
    error = (ours.double() - truth.double()).square().mean().sqrt().item()
    allowed = (naive.double() - truth.double()).square().mean().sqrt().item()
    errors = f"{name} RMS error {error:.1e} (torch {allowed:.1e})"
    if not error <= 2 * allowed + 1e-7:
        raise WrongResult(errors)
    return errors


def check_attend(query: Tensor, keys: Tensor, values: Tensor, eager: Any) -> str:
    """Check the first key/value head of `h2o.ops.attend` at full length against the reference.

    eager: the naive torch function (query, keys, values) -> (out [B,H,n,D], scores).
    """
    R = query.shape[1] // keys.shape[1]
    out, scores = h2o.ops.attend(query, keys, values)
    head = (query[:1, :R], keys[:1, :1], values[:1, :1])
    wide = (x.double() for x in head)
    true_out, true_scores = reference.attend(*wide)
    plain_out, plain_scores = eager(*head)
    errors = [
        compare("out", out[:1, :, :R], plain_out.transpose(1, 2), true_out),
        compare("scores", scores[:1, :1], plain_scores, true_scores),
    ]
    return ", ".join(errors)


def check_kept(ours: Any, truth: Any, evictions: int) -> str:
    """Compare the keys kept by two stores after the same number of evictions in each row and head.

    Sums of probabilities in different orders differ in the last bits, so two keys of nearly equal
    rank may be swapped. Up to 1% of the evictions may differ.
    """
    positions, _ = reference.kept(ours)
    true_positions, _ = reference.kept(truth)
    heads = [
        (set(a.tolist()), set(b.tolist()))
        for a, b in zip(positions.flatten(0, 1), true_positions.flatten(0, 1), strict=True)
    ]
    differ = sum(len(b - a) for a, b in heads)
    difference = f"{differ} of {evictions * len(heads)} evictions differ"
    if differ * 100 > evictions * len(heads):
        raise WrongResult(difference)
    return difference


def check_steps(slots: Any, steps: Sequence[Sequence[Tensor]]) -> str:
    """Check outputs and kept keys of a few decode steps against the reference."""
    ours, truth = inputs.copy_slots(slots), inputs.copy_slots(slots)
    errors = ""
    for query, key, value in steps:
        naive = plain_step(query, key, value, ours)
        out = h2o.ops.step(query, key, value, ours)
        true = reference.step(query, key, value, truth)
        errors = compare("out", out, naive, true)
    return f"{errors}, {check_kept(ours, truth, len(steps))}"


def plain_step(query: Tensor, key: Tensor, value: Tensor, slots: Any) -> Tensor:
    """Attention of one token in torch, in the dtype of the tensors. Returns out [B,1,H,D]."""
    R = query.shape[1] // key.shape[1]
    rows = []
    for b in range(query.shape[0]):
        heads = []
        for g in range(key.shape[1]):
            used = slots.positions[b, g] >= 0
            k = torch.cat([slots.keys[b, g, used], key[b, g]])
            v = torch.cat([slots.values[b, g, used], value[b, g]])
            logits = query[b, g * R : (g + 1) * R, 0] @ k.T * query.shape[-1] ** -0.5
            heads.append(logits.softmax(-1) @ v)
        rows.append(torch.cat(heads))
    return torch.stack(rows)[:, None]
