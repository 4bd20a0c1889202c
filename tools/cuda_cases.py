"""Cases on which `tools/cuda_counts.py` counts the work of the kernels for GPUs: calls of the
operations, and the amount of work in each.

A case has one key/value head, and `heads` query heads that share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

KEPT = 0.2
CHUNK = 256
"""Tokens that are processed together after earlier ones: a chunk of a prompt, a turn of a chat."""
STORES = "int8", "int8-int4"
FLOATS = "float32", "float16", "bfloat16"
POLICIES: dict[str, dict[str, Any]] = {
    "sum": {},
    "max": {"score_by": "max"},
    "values": {"value_weighted": True},
}


class Case(NamedTuple):
    """A call of an operation."""

    operation: str
    """attend, known (attend with known log sums), chunk (attend to slots), evict, step or
    simulate"""
    tokens: int
    """tokens of the prompt, or keys held"""
    dtype: str = "float16"
    """dtype of queries and new tokens"""
    stored: str | None = None
    """dtype of the slots, if it differs"""
    head_dim: int = 128
    heads: int = 4
    policy: str = "sum"

    @property
    def kept(self) -> int:
        """Number of keys that an eviction keeps of the prompt."""
        return int(self.tokens * KEPT)

    @property
    def chunk(self) -> int:
        return CHUNK if self.operation == "chunk" else 0

    def facts(self) -> dict[str, Any]:
        """The fields of an output object that identify the case."""
        return {
            "dtype": self.stored or self.dtype,
            "queries": self.dtype,
            "head_dim": self.head_dim,
            "heads": self.heads,
            "policy": self.policy,
            "tokens": self.tokens,
            "chunk": self.chunk,
        }

    def launches(self, kernel: str) -> bool:
        """Whether the case is meant to count this kernel."""
        return self.operation not in ("simulate", "known") or self.operation in kernel


def cases(prompts: list[int], held: list[int], middle: list[int]) -> list[Case]:
    """List all cases. Those that are slow to count, or similar to others, have only the `middle`
    sizes."""
    both = [None, *STORES]
    listed = [Case("attend", n, dtype) for dtype in FLOATS[1:] for n in prompts]
    listed += [Case("attend", n, "float32") for n in middle]
    listed += [Case("attend", n, t, None, d) for t, d, n in product(FLOATS, (64, 256), middle)]
    listed += [Case("attend", n, policy="max") for n in middle]
    listed += [Case("known", n) for n in prompts]
    listed += [Case("simulate", n, "float16") for n in prompts]
    listed += [Case("simulate", n, t) for t, n in product(("float32", "bfloat16"), middle)]
    listed += [Case("evict", n, stored=s) for s, n in product(both, prompts)]
    listed += [Case("evict", n, policy="values") for n in middle]
    for s, n in product(both, held):
        listed += [Case("step", n, stored=s), Case("chunk", n, stored=s)]
    listed += [Case("step", n, t) for t, n in product(("bfloat16", "float32"), held)]
    listed += [Case("step", n, "bfloat16", s) for s, n in product(STORES, held)]
    listed += [Case("step", n, heads=r) for r, n in product((1, 8), held)]
    listed += [Case("step", n, t, None, d) for t, d, n in product(FLOATS[1:], (64, 256), held)]
    listed += [Case("step", min(held), "float32", "int8")]
    listed += [Case("step", min(held), t, "int8", d) for t, d in product(FLOATS[1:], (64, 256))]
    return listed + [Case("step", min(held), policy=p) for p in ("max", "values")]


def needs_new_products(case: Case) -> bool:
    """Whether devices before 8.0 have no kernels for the case."""
    return case.dtype == "bfloat16"


def run(case: Case) -> None:
    """Call the case's operation. For a step or a chunk, an `evict` fills the slots first."""
    import torch

    from h2o import backends, ops
    from h2o.policy import Policy

    dtype, depth = getattr(torch, case.dtype), case.head_dim
    fields = POLICIES[case.policy]

    def rows(tokens: int, heads: int = 1) -> Any:
        return torch.randn(1, heads, tokens, depth).to(dtype)

    def text(tokens: int) -> Iterator[Any]:
        return (rows(tokens, heads) for heads in (case.heads, 1, 1))

    if case.operation == "attend":
        ops.attend(*text(case.tokens), **fields)
        return
    if case.operation == "known":
        query, keys, values = text(case.tokens)
        out, scores = torch.empty_like(query).transpose(1, 2), torch.empty(1, 1, case.tokens)
        log_sums = torch.zeros(1, case.heads, case.tokens)
        backends.core.attend(
            query, keys, values, None, None, out, scores, depth**-0.5, 0.0, Policy(), None, None,
            log_sums,
        )  # fmt: skip
        return
    if case.operation == "simulate":
        budget = torch.tensor([[case.kept - case.kept // 2, case.kept // 2]], dtype=torch.int32)
        ops.simulate(*text(case.tokens), torch.ones(1, dtype=torch.int32), budget, **fields)
        return
    prunes = case.operation == "evict"
    keys, values = rows(case.tokens), rows(case.tokens)
    kept = case.kept if prunes else case.tokens - 1
    slots = ops.new_slots(
        keys, kept + 1, kept - kept // 2, kept // 2, kv_dtype=case.stored,
        value_weighted=case.policy == "values",
    )  # fmt: skip
    ops.evict(keys, values, torch.rand(1, 1, case.tokens) ** 8 * 10, slots, **fields)
    if prunes:
        return
    forget()
    new = text(case.chunk or 1)
    if case.operation == "chunk":
        ops.attend(*new, slots, **fields)
    else:
        ops.step(*new, slots, **fields)


def forget() -> None:
    """Discard the counts of all launches so far."""
    import os
    from pathlib import Path

    Path(os.environ["H2O_PTX_COUNTS"]).unlink(missing_ok=True)


def tiles(tokens: int, stored: int) -> int:
    """Number of 64 x 64 tiles of one head that contain a visible key."""
    rows = -(-tokens // 64)
    return rows * (rows + 1) // 2 + rows * -(-stored // 64)


def units(kernel: str, case: Case) -> tuple[str, int, int]:
    """The unit by which a kernel's counts are divided: its name, the number of units in the case,
    and the number of warps of a block that work on one unit together."""
    match kernel.removeprefix("h2o_cuda_").split("_")[0]:
        case "forward" | "sums":
            stored = case.tokens if case.chunk else 0
            return "tile", case.heads * tiles(case.chunk or case.tokens, stored), 4
        case "move":
            return "row", 2 * case.kept, 1
        case "step":
            return "slot", case.tokens, 1
        case _:
            return "token", case.chunk or case.tokens, 1
