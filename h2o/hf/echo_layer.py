"""A layer of an `H2OCache` with `rank_by="echo"`: its keys get their scores when they come.

Attention gives none. `h2o.hf.echo_scores` makes them from the queries, of which the layer
remembers the last few of each row, and `h2o.ops.evict` ranks by them as they are. So a decode step
is attention and eviction instead of the one operation that does both, and attention once more for
the score of the new key.

Shape letters: B batch rows, H query heads, Q new tokens, D head dimension.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from h2o import ops
from h2o.errors import Unsupported
from h2o.hf.attention_call import NewTokens
from h2o.hf.echo_scores import EchoScores
from h2o.hf.layer import H2OLayer
from h2o.hf.layer_contents import LayerContents
from h2o.hf.report import LayerReport
from h2o.hf.slot_layout import writable

__all__ = ["EchoLayer"]


class EchoLayer(H2OLayer):
    """An `H2OLayer` that ranks by echo."""

    def __init__(self, *args: Any, echo: EchoScores, **kwargs: Any) -> None:
        self.echo = echo
        super().__init__(*args, **kwargs)

    def empty(self) -> None:
        """As `reset`; of a layer that has states beside its keys, these stay."""
        super().empty()
        self.asked: Tensor | None = None

    def take_over(self, keys: Tensor, values: Tensor | None, mask: Tensor | None) -> None:
        """Raises Unsupported: a DynamicCache has no queries."""
        raise Unsupported(
            'rank_by="echo" cannot go on from a DynamicCache, which has no queries: read the text '
            'with an H2OCache instead, or use rank_by="max"'
        )

    def take_row(self, row: int, source: LayerContents, rows: int, longest: int) -> None:
        """Row `row` of `rows` becomes what the one row of another layer is, in place."""
        super().take_row(row, source, rows, longest)
        assert source.asked is not None
        if self.asked is None:
            self.asked = source.asked.repeat(rows, 1, 1, 1)
        self.asked = writable(self.asked)
        self.asked[row].copy_(source.asked[0])

    def row_bytes(self) -> int:
        """Bytes of all tensors that a row takes once its budget is full."""
        return super().row_bytes() + (0 if self.asked is None else self.asked[0].nbytes)

    def report(self) -> LayerReport:
        """Numbers of this layer, the queries that it remembers among the bookkeeping."""
        report = super().report()
        bookkeeping = report.bytes_bookkeeping + self._bytes_asked()
        return dataclasses.replace(report, bytes_bookkeeping=bookkeeping)

    def _bytes_asked(self) -> int:
        return 0 if self.asked is None else self.asked.numel() * self.asked.element_size()

    def forward(self, tokens: NewTokens) -> Tensor:
        """As `H2OLayer.forward`."""
        asked = self.asked
        try:
            return super().forward(tokens)
        except Exception:
            self.asked = asked
            raise

    def _attend_and_score(
        self, tokens: NewTokens, slots: ops.Slots | None
    ) -> tuple[Tensor, Tensor]:
        if slots is None:
            out, scores, self.asked = self.echo.prompt(tokens)
        else:
            assert self.asked is not None
            out, scores, self.asked = self.echo.chunk(
                tokens, self.asked, slots, self.capacity.sizes
            )
        return out, scores

    def _step(
        self, tokens: NewTokens, slots: ops.Slots, out: Tensor | None, **rotary: ops.Rotary
    ) -> Tensor:
        assert self.asked is not None
        rows = slice(None) if slots.rows is None else slots.rows.long()
        out, scores, asked = self.echo.step(tokens, self.asked[rows], slots)
        if slots.rows is None:
            self.asked = asked
        else:
            self.asked = writable(self.asked)
            self.asked[rows] = asked.to(self.asked.dtype)
        ops.evict(tokens.key, tokens.value, scores, slots, mask=tokens.mask, policy=self.policy)
        return out
