"""P14, P16: stores with fewer bits, and heads with uneven budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor

import h2o.ops
from h2o.kv_dtype import stored_bytes
from tests.reference import operations as reference

from . import correctness, inputs
from .options import Options
from .timing import Contender, Row, race

KV_DTYPES = ("int8", "int8-int4")
"""Quantized dtypes, the one with the fewest bits last"""


def bits(options: Options) -> Iterator[Row]:
    """P14: a decode step over quantized keys and values against bfloat16 ones, with as many keys
    and with as many bytes; for several layers in turn, and for one that fits into the CPU's caches.
    """
    B, H, G, D = (2, 4, 2, 64) if options.quick else (1, 32, 8, 128)
    sizes = ((12, 2),) if options.quick else ((512, 1), (8192, 16))
    for (name, dtype), (k, layers) in product(options.wanted("bfloat16"), sizes):
        text = inputs.text(B, H, G, k + 33, D, dtype)
        out = text[0].new_empty(B, 1, H, D)
        contenders = [Contender(name, steps(text, k, k, out, layers))]
        for kind in KV_DTYPES:
            more = k * 2 * D * dtype.itemsize // sum(stored_bytes(kind, D))
            longer = inputs.text(B, H, G, more + 33, D, dtype)
            contenders.append(Contender(kind, steps(text, k, k, out, layers, kv_dtype=kind)))
            ours = steps(longer, more, more, out, layers, kv_dtype=kind)
            contenders.append(Contender(f"{kind}, {more} keys", ours))
        error = check(longer, k, k, kv_dtype=KV_DTYPES[-1])
        times = race(contenders, options.rounds)
        case = f"B={B}, H={H}, G={G}, D={D}, {layers} layers in turn"
        for ours in contenders[1:]:
            yield Row(
                "P14", f"decode step, {ours.name} / {name}", f"{k} keys of {name}, {case}",
                ours=times[ours.name], peer=times[name], error=error,
            )  # fmt: skip


def uneven(options: Options) -> Iterator[Row]:
    """P16: a decode step over heads with 0.3 to 1.7 times the mean budget, against even ones."""
    B, H, G, D, k = (1, 4, 2, 64, 24) if options.quick else (1, 32, 8, 128, 1024)
    multiples = torch.linspace(0.3, 1.7, G)
    multiples[-1] = G - multiples[:-1].sum()
    budgets = (multiples * k).int().tolist()
    for name, dtype in options.wanted("float32", "bfloat16"):
        text = inputs.text(B, H, G, 4 * k + 33, D, dtype)
        out = text[0].new_empty(B, 1, H, D)
        contenders = [
            Contender("even", steps(text, 4 * k, k, out, 1)),
            Contender("uneven", steps(text, 4 * k, budgets, out, 1)),
        ]
        times = race(contenders, options.rounds)
        yield Row(
            "P16", "decode step, uneven heads / even",
            f"{name}, H={H}, G={G}, D={D}, {budgets} keys",
            ours=times["uneven"], peer=times["even"], error=check(text, 4 * k, budgets),
        )  # fmt: skip


def steps(
    text: Sequence[Tensor], n: int, budget: int | list[int], out: Tensor, layers: int,
    *, kv_dtype: str | None = None,
) -> Callable[[], None]:  # fmt: skip
    """Make a function that runs a decode step on one of `layers` stores in turn, after a prompt of
    n tokens with random scores."""
    slots = filled(text, n, budget, kv_dtype)
    stores = cycle([slots, *(inputs.copy_slots(slots) for _ in range(layers - 1))])
    tokens = cycle([token(text, i) for i in range(n, n + 32)])

    def run() -> None:
        h2o.ops.step(*next(tokens), next(stores), out=out)

    return run


def filled(
    text: Sequence[Tensor], n: int, budget: int | list[int], kv_dtype: str | None
) -> Any:  # fmt: skip
    """Make slots after a prompt of n tokens. `budget`: keys of all heads, or of each head."""
    _, keys, values = text
    each = [budget] if isinstance(budget, int) else budget
    slots = h2o.ops.new_slots(
        keys, budget + 1 if isinstance(budget, int) else [x + 1 for x in each],
        kv_dtype=kv_dtype,
    )  # fmt: skip
    slots.budget.copy_(torch.tensor([[x - x // 2, x // 2] for x in each], dtype=torch.int32))
    scores = torch.rand(keys[:, :, :n, 0].shape, generator=torch.Generator().manual_seed(1))
    h2o.ops.evict(keys[:, :, :n], values[:, :, :n], scores, slots)
    return slots


def token(text: Sequence[Tensor], i: int) -> list[Tensor]:
    return [x[:, :, i : i + 1].contiguous() for x in text]


def check(
    text: Sequence[Tensor], n: int, budget: int | list[int], *,
    kv_dtype: str | None = None,
) -> str:  # fmt: skip
    """Check some decode steps against the reference."""
    ours = filled(text, n, budget, kv_dtype)
    truth = inputs.copy_slots(ours)
    error = 0.0
    for i in range(n, n + 4):
        out = h2o.ops.step(*token(text, i), ours)
        true = reference.step(*token(text, i), truth).double()
        error = max(error, ((out.double() - true).norm() / true.norm()).item())
        if not error < (1e-4 if out.dtype == torch.float32 else 1e-2):
            raise correctness.WrongResult(f"out differs by {error:.1e}")
    return f"out differs by {error:.0e}, {correctness.check_kept(ours, truth, 4)}"
