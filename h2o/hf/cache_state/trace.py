"""`Trace`: records when each key of a layer is evicted, and so which keys each token attended to.

In a cache made with `trace=True` each layer has a `Trace`, which `H2OCache.evicted_at` returns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from h2o import ops
from h2o.hf.cache_state.slot_layout import by_head


class Trace:
    """The evictions of one layer. One number per key suffices, as evicted keys never return."""

    def __init__(self) -> None:
        self.real: Tensor | None = None
        """[B, N] bool, False at padding"""
        self.evicted_after: Tensor | None = None
        """[B, G, N] int32, by position: columns seen when the key was evicted, -1 if it was not"""

    def record(self, slots: ops.Slots, sizes: list[int], Q: int, mask: Tensor | None) -> None:
        """Record, after a forward pass of Q columns, which keys are no longer in the slots."""
        B, earlier = len(slots.seen_tokens), 0 if self.real is None else self.real.shape[1]
        real = slots.seen_tokens.new_ones((B, Q), dtype=torch.bool)
        if mask is not None:
            real.copy_(mask)  # the mask belongs to the caller
        positions, N = by_head(slots, sizes, "positions", -1), earlier + Q
        evicted = find_evicted(positions, slots.seen_tokens, N)
        evicted_after = slots.positions.new_full((*evicted.shape[:2], Q), -1)
        if self.real is not None:
            real = torch.cat([self.real, real], dim=1)
            evicted_after = torch.cat([self.evicted_after, evicted_after], dim=2)
        evicted_after.masked_fill_(evicted & (evicted_after < 0), N)
        self.real, self.evicted_after = real, evicted_after

    def evicted_at(self) -> Tensor:
        """int32 [B, G, N]: see `h2o.H2OCache.evicted_at`."""
        if self.real is None or self.evicted_after is None:
            return torch.zeros(0, 0, 0, dtype=torch.int32, device="cpu")
        return by_column(self.evicted_after, self.real)

    def each(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a selection or repetition of batch rows."""
        if self.real is not None and self.evicted_after is not None:
            self.real, self.evicted_after = change(self.real), change(self.evicted_after)


def find_evicted(positions: Tensor, seen: Tensor, N: int) -> Tensor:
    """[B, G, N] bool, by position: keys that are not held at `positions` [B, G, S] (-1 or N in
    empty slots), of rows that have `seen` [B] tokens."""
    held = torch.zeros((*positions.shape[:2], N + 1), dtype=torch.bool, device=positions.device)
    held.scatter_(2, positions.long() % (N + 1), True)  # empty slots: -1 becomes N
    position = torch.arange(N, device=positions.device)
    return (position < seen[:, None, None]) & ~held[..., :N]


def by_column(evicted_after: Tensor, real: Tensor) -> Tensor:
    """Convert the fields of a `Trace` to the result of `h2o.H2OCache.evicted_at`."""
    position = (real.cumsum(1) - 1).clamp(min=0)[:, None].expand_as(evicted_after)
    columns = evicted_after.gather(2, position)
    columns[columns < 0] = real.shape[1]
    return columns * real[:, None]
