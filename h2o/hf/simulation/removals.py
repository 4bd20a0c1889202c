"""Removal of named tokens in a simulation, as `H2OCache.evict` removes them from a cache.

Shape letters as in `h2o.hf`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from h2o import ops
from h2o.arguments.plain_values import check_count, wrong
from h2o.hf.cache_state import slot_layout
from h2o.hf.cache_state.slot_removal import remove_tokens
from h2o.hf.cache_state.trace import find_evicted
from h2o.hf.layers.named_eviction import Rotaries
from h2o.hf.model_traits.layer_kinds import kind_of
from h2o.policy import Policy
from h2o.spans import Row, check_spans, merge_spans, overlap, size, subtract, without

Removals = Mapping[int, Row]
"""Spans of the whole text, which leave once a row has that many tokens"""


def check_removals(evict: Any, prompts: int | Sequence[int]) -> Removals:
    """Check the argument `evict` of `simulated`. Tokens that are removed twice leave once.

    Args:
        prompts: lengths of the prompts, which are read at once.

    Raises: TypeError, ValueError for anything else than spans of earlier tokens.
    """
    if evict is None:
        return {}
    if not isinstance(evict, Mapping):
        raise TypeError(wrong("evict", evict, "spans by number of tokens, {768: [(120, 480)]}"))
    longest = prompts if isinstance(prompts, int) else max(prompts)
    removals: dict[int, Row] = {}
    gone: Row = []
    given = {check_count("evict", n): check_spans("evict", spans) for n, spans in evict.items()}
    for n, spans in sorted(given.items()):
        if n < longest:
            raise ValueError(
                f"evict removes tokens once {n} were read, but a prompt of {longest} is read at "
                f"once (prompt_length). Remove them after {longest} tokens or more"
            )
        if spans and spans[-1][1] > n:
            raise ValueError(f"evict removes token {spans[-1][1] - 1} once only {n} were read")
        removals[n] = subtract(spans, gone)
        gone = merge_spans([*gone, *spans])
        if size(gone) == n:
            raise ValueError(f"evict leaves nothing of the first {n} tokens")
    return {n: spans for n, spans in removals.items() if spans}


def check_layers(removals: Removals, config: Any, layers: Sequence[Any]) -> None:
    """Raise an error if a cache of these layers could not remove the tokens.

    Raises:
        ValueError: a sliding window still holds some of them.
        UnsupportedError: the rotation of the model's keys is not known.
    """
    rotaries = Rotaries(config)
    for index, layer in enumerate(layers):
        if (kind := kind_of(layer)) in ("h2o", "sliding"):
            rotaries.of(layer, index)
        held = layer.sliding_window - 1 if kind == "sliding" else 0
        for n, spans in removals.items():
            if held and spans[-1][1] > n - held:
                raise ValueError(
                    f"evict: after {n} tokens the sliding windows of this model still hold the "
                    f"last {held}, and a span ends at {spans[-1][1]}. Remove it once "
                    f"{spans[-1][1] + held} tokens were read"
                )


def check_pins(removals: Removals, pinned: Sequence[Row]) -> None:
    """Raise ValueError if pinned tokens of a row are removed."""
    for spans in removals.values():
        for row in pinned:
            if shared := overlap(spans, row):
                raise ValueError(
                    f"evict: the tokens {shared[0][0]} to {shared[0][1] - 1} are pinned "
                    f"(pinned={row}). Leave them out of the spans"
                )


class Remaining:
    """The tokens of a layer's rows that were not removed, as the slots count them."""

    def __init__(self, removals: Removals, B: int, N: int, device: torch.device) -> None:
        self.removals = removals
        self._gone: list[Row] = [[] for _ in range(B)]
        self._order = torch.arange(N + 1, device=device).repeat(B, 1)
        """[B, N + 1]: the tokens that the positions of the slots are, N for others"""

    def length(self, row: int, tokens: int) -> int:
        """Number of tokens that are left of the first `tokens` of a row."""
        return tokens - size(self._gone[row])

    def orders(self, slots: ops.Slots, sizes: list[int]) -> Tensor:
        """int64 [B, G, S]: which token of its row each key in the slots is; N in empty slots."""
        positions = slot_layout.by_head(slots, sizes, "positions", -1).long()
        table = self._order[:, None].expand(-1, positions.shape[1], -1)
        return table.gather(2, positions % table.shape[2])

    def evicted(self, slots: ops.Slots, sizes: list[int]) -> Tensor:
        """[B, G, N] bool, by token: keys that a row has seen but its slots do not hold."""
        seen = slots.seen_tokens + slots.seen_tokens.new_tensor([size(x) for x in self._gone])
        return find_evicted(self.orders(slots, sizes), seen, self._order.shape[1] - 1)

    def remove(
        self, slots: ops.Slots, sizes: list[int], tokens: Sequence[int], policy: Policy
    ) -> ops.Slots:
        """Slots without the tokens that leave in rows that have so many `tokens`, -1 for none."""
        due = [self.removals.get(n, []) for n in tokens]
        if not any(due):
            return slots
        rows = [without(spans, gone) for spans, gone in zip(due, self._gone, strict=True)]
        for row, spans in enumerate(due):
            self._gone[row] = gone = merge_spans([*self._gone[row], *spans])
            N = self._order.shape[1] - 1
            left = [i for start, stop in subtract([(0, N)], gone) for i in range(start, stop)]
            self._order[row, : len(left)] = self._order.new_tensor(left)
        return remove_tokens(slots, sizes, sizes, rows, policy)
