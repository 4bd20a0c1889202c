"""P20: the torch backend on the CPU, which gives an idea of its cost on other devices.

`H2O_BACKEND=torch python -m benchmarks prefill memory decode evict simulate` runs those tables
with it too.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

import h2o.ops
from h2o import backends

from . import correctness, inputs
from .options import Options
from .peers import torch_peers
from .timing import Contender, Row, race


def portable(options: Options) -> Iterator[Row]:
    """P20: prefill with scores against eager attention, and a decode step against the core's."""
    yield from _prefill(options)
    yield from _step(options)


def _prefill(options: Options) -> Iterator[Row]:
    B, H, G, D, n = (1, 4, 2, 64, 96) if options.quick else (1, 32, 8, 128, 2048)
    for name, dtype in options.wanted("float32", "bfloat16"):
        query, keys, values = inputs.text(B, H, G, n, D, dtype)
        out, scores = query.new_empty(B, n, H, D), torch.empty(B, G, n)
        with backends.by_torch():
            error = correctness.check_attend(query, keys, values, torch_peers.eager_with_sums)

        def ours(x=(query, keys, values), out=out, scores=scores) -> None:
            with backends.by_torch():
                h2o.ops.attend(*x, out=out, scores=scores)

        def eager(x=(query, keys, values)) -> None:
            torch_peers.eager_with_sums(*x)

        times = race([Contender("torch backend", ours), Contender("eager", eager)], options.rounds)
        yield Row(
            "P20", "torch backend, prefill with scores / eager with",
            f"{name}, n={n}, H={H}, G={G}, D={D}",
            ours=times["torch backend"], peer=times["eager"], error=error,
        )  # fmt: skip


def _step(options: Options) -> Iterator[Row]:
    shapes = [(2, 4, 2, 64, 12)] if options.quick else [(8, 32, 8, 128, 820), (1, 9, 3, 64, 409)]
    for (B, H, G, D, k), (name, dtype) in (
        (shape, chosen) for shape in shapes for chosen in options.wanted("float32", "bfloat16")
    ):
        query, keys, values = inputs.text(B, H, G, 2 * k + 8, D, dtype)
        prompt = (x[:, :, : 2 * k].contiguous() for x in (keys, values, query))
        first = inputs.filled_slots(*prompt, k - k // 2, k // 2)
        tokens = [
            tuple(x[:, :, i : i + 1].contiguous() for x in (query, keys, values))
            for i in range(2 * k, 2 * k + 8)
        ]
        with backends.by_torch():
            error = correctness.check_steps(first, tokens)
        stores = inputs.copy_slots(first), inputs.copy_slots(first)
        out = query.new_empty(B, 1, H, D)

        def core(token=tokens[0], slots=stores[0], out=out) -> None:
            h2o.ops.step(*token, slots, out=out)

        def ours(token=tokens[0], slots=stores[1], out=out) -> None:
            with backends.by_torch():
                h2o.ops.step(*token, slots, out=out)

        times = race([Contender("torch backend", ours), Contender("core", core)], options.rounds)
        yield Row(
            "P20", "torch backend, decode step / the core's",
            f"{name}, B={B}, H={H}, G={G}, D={D}, {k} keys",
            ours=times["torch backend"], peer=times["core"], error=error,
        )  # fmt: skip
