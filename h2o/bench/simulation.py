"""P7: eviction simulated over a whole text."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import h2o.ops
from h2o import reference

from . import inputs, rivals
from .measure import Contender, Row, race
from .options import Options


def simulate(options: Options) -> Iterator[Row]:
    """P7: a budget of 20% from the first token on, against the authors' way and dense attention."""
    B, H, G, D, n = (1, 4, 2, 64, 96) if options.quick else (1, 32, 8, 128, 4096)
    heavy = int(0.1 * n)
    recent = int(0.2 * n) - heavy
    prompt = torch.ones(B, dtype=torch.int32)
    budget = torch.tensor([[heavy, recent]], dtype=torch.int32).expand(B, 2).contiguous()
    for name, dtype in options.wanted("float32", "bfloat16"):
        text = inputs.text(B, H, G, n, D, dtype)
        error = check(dtype, min(n, 512))
        out = text[0].new_empty(B, n, H, D)
        way, sdpa = rivals.fastest(rivals.sdpa(*text, causal=True))

        def ours(text=text, out=out) -> None:
            h2o.ops.simulate(*text, prompt, budget, out=out)

        def attend(text=text, out=out) -> None:
            h2o.ops.attend(*text, out=out)

        def masked(text=text) -> None:
            rivals.masked_simulation(*text, heavy, recent)

        def authors(text=text) -> None:
            rivals.authors_simulation(*text, heavy, recent)

        contenders = [
            Contender("h2o simulate", ours),
            Contender("the authors' Python loop", authors),
            Contender("the same in a Python loop", masked),
            Contender(f"SDPA {way}, dense", sdpa),
            Contender("h2o attend, dense", attend),
        ]
        times = race(contenders, options.rounds)
        for peer in contenders[1:]:
            yield Row(
                "P7", f"simulation / {peer.name}",
                f"{name}, n={n}, k={heavy + recent}, H={H}, G={G}, D={D}",
                ours=times["h2o simulate"], peer=times[peer.name], error=error,
            )  # fmt: skip


def check(dtype: torch.dtype, n: int) -> str:
    """A shorter text, two groups of two heads, against the reference: outputs and evictions."""
    query, keys, values = inputs.text(1, 4, 2, n, 64, dtype)
    heavy = recent = n // 10
    prompt, budget = torch.ones(1, dtype=torch.int32), torch.tensor([[heavy, recent]]).int()
    out, evicted_at, _ = h2o.ops.simulate(query, keys, values, prompt, budget)
    wide = (x.double() for x in (query, keys, values))
    true, true_evicted_at, _ = reference.simulate(*wide, prompt, budget)
    naive, _ = rivals.masked_simulation(query, keys, values, heavy, recent)
    differ = (evicted_at != true_evicted_at).sum().item()
    evictions = (true_evicted_at < n).sum().item()
    told = f"{differ} of {evictions} evictions differ"
    if differ:
        raise inputs.WrongResult(told)
    return f"{inputs.compare('out', out, naive.transpose(1, 2), true)}, {told}"
