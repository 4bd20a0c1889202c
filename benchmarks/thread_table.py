"""Whether h2o's threads slow down torch's.

torch's OpenMP threads spin for a while after each operator. If there are as many threads as
processors, a second pool that also spins, or that wakes while they do, makes both slow. h2o
therefore uses torch's own threads if it finds them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import linear

import h2o.ops

from . import inputs
from .options import Options
from .peers import torch_peers
from .timing import Contender, Row, race


def threads(options: Options) -> Iterator[Row]:
    """Time of torch's matrix products alone, and between calls of h2o's or torch's attention.

    Only the products are timed. They are those of one SmolLM2 layer (hidden size 576, MLP 1536) for
    one token. A ratio of 1 means that the calls between them do not slow them down.
    """
    sizes = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]
    query, keys, values = inputs.text(1, 9, 3, 1700, 64, torch.float32)
    slots = inputs.filled_slots(
        *(x[:, :, :1600].contiguous() for x in (keys, values, query)), 750, 750
    )
    token = [x[:, :, 1600:1601].contiguous() for x in (query, keys, values)]
    out = query.new_empty(1, 1, 9, 64)
    kept = slots.keys[:, :, :1500], slots.values[:, :, :1500]
    _, sdpa = torch_peers.fastest(torch_peers.sdpa(token[0], *kept, causal=False))

    def step() -> None:
        h2o.ops.step(*token, slots, out=out)

    turns = 2 if options.quick else 100
    for name, dtype in options.wanted("float32", "bfloat16"):
        weights = [torch.randn(size).to(dtype) for size in sizes]
        vectors = {size: torch.randn(1, size).to(dtype) for size in (576, 1536)}

        def products(weights=weights, vectors=vectors) -> None:
            for weight in weights:
                linear(vectors[weight.shape[1]], weight)

        contenders = [
            Contender("alone", timed(products, lambda: None, turns), own_clock=True),
            Contender("h2o", timed(products, step, turns), own_clock=True),
            Contender("SDPA", timed(products, sdpa, turns), own_clock=True),
        ]
        times = race(contenders, options.rounds)
        for between in ("h2o", "SDPA"):
            yield Row(
                "threads", f"torch's products with {between} between them / alone",
                f"{name}, one layer of SmolLM2, one token, 1500 keys",
                ours=times[between], peer=times["alone"],
                facts={"thread source": h2o.ops.info()["thread_source"]},
            )  # fmt: skip


def timed(
    products: Callable[[], None], between: Callable[[], object], turns: int
) -> Callable[[], float]:
    """Make a function that returns the mean seconds of the products alone."""

    def run() -> float:
        spent = 0.0
        for _ in range(turns):
            between()
            start = time.perf_counter()
            products()
            spent += time.perf_counter() - start
        return spent / turns

    return run
