"""`ops.log_sums`, the logarithms of the softmax denominators, by the core and by torch."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from h2o import backends, ops
from tests import inputs


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [0, 90])
@pytest.mark.parametrize("how", [{}, {"softcap": 3.0, "scale": -0.2, "sinks": True, "pads": True}])
def test_against_a_sum_in_double_precision(how, stored, dtype, by_torch):
    """Log sums must be right with and without stored keys, and the slots must not change."""
    B, H, G, Q = 2, 6, 2, 70
    how = dict(how)
    text = inputs.drifting(3, B=B, H=H, G=G, N=stored + Q, D=32, sink=True)
    query, keys, _ = (torch.from_numpy(x).to(dtype) for x in text)
    new, slots = keys[:, :, stored:], None
    if stored:
        slots = ops.new_slots(keys, stored + 3, 40, stored)
        ops.evict(keys[:, :, :stored], keys[:, :, :stored], torch.ones(B, G, stored), slots)
    mask = torch.ones(B, Q, dtype=torch.bool)
    if how.pop("pads", False):
        mask[0, [3, 20, 21]] = mask[1, :9] = False
        how["mask"] = mask
    sinks = torch.randn(H, generator=torch.Generator().manual_seed(1)) * 4
    if how.pop("sinks", False):
        how["sink_logits"] = sinks
    before = None if slots is None else [None if x is None else x.clone() for x in slots]
    with backends.by_torch() if by_torch else nullcontext():
        got = ops.log_sums(query[:, :, stored:], new, slots, **how)

    scale, cap = how.get("scale", 32**-0.5), how.get("softcap", 0.0)
    shared = keys.double().repeat_interleave(H // G, 1)
    logits = query[:, :, stored:].double() @ shared.mT * scale
    logits = cap * torch.tanh(logits / cap) if cap else logits
    visible = torch.ones(Q, stored + Q, dtype=torch.bool).tril(stored).expand(B, 1, -1, -1).clone()
    visible[..., stored:] &= mask[:, None, None]
    wanted = logits.masked_fill(~visible, -torch.inf).logsumexp(-1)
    if "sink_logits" in how:
        wanted = torch.logaddexp(wanted, sinks.double()[None, :, None])
    wanted = wanted.masked_fill(~mask[:, None], 0)
    np.testing.assert_allclose(got.double(), wanted, rtol=2e-5, atol=2e-5)
    for was, now in zip(before or [], slots or [], strict=True):
        assert was is None or torch.equal(was, now)
