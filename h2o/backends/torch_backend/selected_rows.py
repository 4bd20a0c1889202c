"""Slots with `rows`: the selected rows are copied to new slots, and copied back afterwards.

Shape letters: Z rows of the slots.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from h2o.slots import KINDS, PER_ROW


def with_selected_rows(operation: Callable[..., Any], *written: str) -> Callable[..., Any]:
    """Make an operation support slots with `rows`, which select the rows of the call.

    `written`: the slot fields that the operation writes, by default all that any operation writes.
    An invalid number selects the nearest row, because the host cannot check it.
    """
    names = tuple(inspect.signature(operation).parameters)
    fields = written or tuple(name for name in PER_ROW if KINDS[name].written)

    @functools.wraps(operation)
    def run(*operands: Any) -> Any:
        named = dict(zip(names, operands, strict=True))
        slots = named.get("slots")
        if slots is None or slots.rows is None:
            return operation(*operands)
        rows = slots.rows.long().clamp(0, len(slots.scores) - 1)
        whole = {name: x for name in PER_ROW if (x := getattr(slots, name)) is not None}
        if slots.starts is not None and slots.starts.ndim == 2:
            whole["starts"] = slots.starts
        own = {name: x.index_select(0, rows) for name, x in whole.items()}
        named["slots"] = slots._replace(**own, rows=None)
        if named.get("ranks") is not None:  # operand of step, [Z, G, S] like the scores
            whole["ranks"], own["ranks"] = named["ranks"], named["ranks"].index_select(0, rows)
            named["ranks"] = own["ranks"]
        result = operation(*named.values())
        for name in (*fields, "ranks"):
            if name in whole:
                whole[name].index_copy_(0, rows, own[name])
        return result

    return run
