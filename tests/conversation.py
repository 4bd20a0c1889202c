"""Feeding a text, piece by piece, to anything with the functions of `h2o.ops`. NumPy only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from h2o import ops
from h2o.slots import PER_ROW
from tests.inputs import Policy, Text, heads, kept


class Engine(NamedTuple):
    """A module with attend, evict, step and simulate, and the tensors that it is given."""

    name: str
    module: Any
    tensor: Callable[[np.ndarray], Any]
    """from NumPy; texts may change dtype"""
    exact: Callable[[np.ndarray], np.ndarray] = np.asarray
    """what `tensor` makes of a float32 text, as float32"""


numpy_core = Engine("numpy", ops, np.ascontiguousarray)


class Conversation:
    """A text fed piece by piece to one engine, with what it held after each piece.

    Pieces of one column go through `step`, longer ones through `attend` and `evict`;
    `stepwise=False` sends those of one column the long way too, `shared` gives no values, so that
    the keys stand for them, `place` makes slots of the same rows that lie elsewhere (`Pages`).
    After each piece the slots must be as `h2o.ops.Slots` promises.
    """

    def __init__(
        self,
        engine: Engine,
        text: Text,
        policy: Policy,
        *,
        mask: np.ndarray | None = None,
        softcap: float = 0.0,
        sink_logits: np.ndarray | None = None,
        budget: np.ndarray | None = None,
        capacity: int | list[int] | None = None,
        stepwise: bool = True,
        kv_dtype: str | None = None,
        shared: bool = False,
        place: Callable[[Any], Any] = lambda slots: slots,
    ):
        self.do, self.policy, self.stepwise = engine.module, policy, stepwise
        self.query, self.keys, self.values = (engine.tensor(x) for x in text)
        self.values = None if shared else self.values
        self.mask = None if mask is None else engine.tensor(mask)
        self.logits = {"softcap": softcap}
        if sink_logits is not None:
            sinks = engine.tensor(sink_logits)  # of torch in the text's dtype
            self.logits["sink_logits"] = sinks.float() if hasattr(sinks, "float") else sinks
        N = self.query.shape[2]
        rows = np.array([[policy.heavy, policy.recent]]) if budget is None else budget
        if capacity is None:
            most = rows.sum(-1).max(0) + policy.sinks + 1  # of each head where they differ
            capacity = np.minimum(most, N).tolist()
        self.slots = ops.new_slots(
            self.keys, capacity, value_weighted=policy.value_weighted, kv_dtype=kv_dtype,
            shared=shared,
        )  # fmt: skip
        self.slots.budget[:] = engine.tensor(rows)
        self.slots = place(self.slots)
        self.column = 0
        self.out: list[np.ndarray] = []
        """[B, Q, H, D] float64 of each piece"""
        self.kept: list[tuple[np.ndarray, np.ndarray]] = []
        """positions and scores after each piece"""

    def feed(self, columns: int) -> None:
        """Goes on with the next columns of the text."""
        new = slice(self.column, self.column + columns)
        self.column += columns
        q, k = (x[:, :, new] for x in (self.query, self.keys))
        v = None if self.values is None else self.values[:, :, new]
        mask = None if self.mask is None else self.mask[:, new]
        ranking = self.policy.ranking
        if columns == 1 and self.stepwise:
            out = self.do.step(q, k, v, self.slots, mask=mask, **self.logits, **ranking)
        else:
            out, scores = self.do.attend(q, k, v, self.slots, mask=mask, **self.logits, **ranking)
            self.do.evict(k, v, scores, self.slots, mask=mask, **ranking)
        self.out.append(as_float64(out))
        own = own_rows(self.slots)
        self.kept.append(kept(own))
        check_slots(own, self.policy.sinks)

    def feed_all(self, calls: list[int]) -> Conversation:
        for columns in calls:
            self.feed(columns)
        return self

    @property
    def answer(self) -> np.ndarray:
        """[B, N, H, D] of all that was fed."""
        return np.concatenate(self.out, axis=1)


def own_rows(slots: Any) -> Any:
    """Slots of the rows that these are about, and no others."""
    if slots.rows is None:
        return slots
    rows = slots.rows.tolist()
    own = {name: x[rows] for name in PER_ROW if (x := getattr(slots, name)) is not None}
    return slots._replace(**own, rows=None)


class Pages:
    """Rows that lie apart in one memory, uint8 [Z, bytes] of NumPy or torch, each with all its
    fields side by side; what no row of a batch has is rubbish."""

    def __init__(self, memory: Any, numbers: Any) -> None:
        """`numbers`: [B] int32, the rows of a batch."""
        self.memory, self.numbers = memory, numbers
        memory[:] = 0x7F
        self.before = self.others()

    @staticmethod
    def bytes_of(slots: Any) -> int:
        """Of a row, rounded up, so that each begins where elements may."""
        fields = (x for name in PER_ROW if (x := getattr(slots, name)) is not None)
        return -(-sum(x[:1].nbytes for x in fields) // 16) * 16

    def __call__(self, slots: Any) -> Any:
        """Slots [Z, ...] in the memory, whose rows of these numbers are those of `slots`."""
        fields = {name: x for name in PER_ROW if (x := getattr(slots, name)) is not None}
        parts, begin = {}, 0
        for name, x in sorted(fields.items(), key=lambda field: -field[1].dtype.itemsize):
            end = begin + x[:1].nbytes
            part = self.memory[:, begin:end].view(x.dtype).reshape(len(self.memory), *x.shape[1:])
            part[self.numbers.tolist()] = x
            parts[name], begin = part, end
        return slots._replace(**parts, rows=self.numbers)

    def others(self) -> bytes:
        """What lies in all other rows."""
        left = sorted({*range(len(self.memory))} - {*self.numbers.tolist()})
        return np.asarray(self.memory)[left].tobytes()


def check_as_rows_in_sequence(
    engine: Engine, text: Text, policy: Policy, calls: list[int], memory: Any, numbers: Any,
    **settings: Any,
) -> None:  # fmt: skip
    """A text's answers and slots are the same, to the bit, in rows of `Pages`, and no other row of
    these is touched."""
    plain = Conversation(engine, text, policy, **settings)
    placed = Pages(memory(Pages.bytes_of(plain.slots)), numbers)
    numbered = Conversation(engine, text, policy, place=placed, **settings)
    plain.feed_all(calls)
    numbered.feed_all(calls)
    np.testing.assert_array_equal(numbered.answer, plain.answer)
    for got, wanted in zip(own_rows(numbered.slots), plain.slots, strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert placed.others() == placed.before


def as_float64(tensor: Any) -> np.ndarray:
    """A copy of a NumPy array or a CPU torch tensor (which NumPy cannot read when bfloat16)."""
    return np.array(tensor if isinstance(tensor, np.ndarray) else tensor.double().numpy(), float)


def check_slots(slots: Any, sinks: int) -> None:
    """Held slots are where `h2o.ops.Slots` says, and `next_slot` is the one to fill."""
    positions = heads(slots, "positions", -1)
    free, lengths, budget = (
        np.asarray(x) for x in (slots.next_slot, slots.seen_tokens, slots.budget)
    )
    S = positions.shape[-1]
    for b, length in enumerate(lengths.tolist()):
        for g, (row, hole) in enumerate(zip(positions[b], free[b].tolist(), strict=True)):
            head_budget = budget[b] if budget.ndim == 2 else budget[b, g]
            held = min(length, int(head_budget.astype(np.int64).sum()) + sinks)
            filled = np.flatnonzero(row >= 0)
            assert len(filled) == held
            assert np.isin(np.delete(np.arange(held + 1), hole), filled).all(), (filled, hole)
            assert 0 <= hole <= held <= S
            assert len(set(row[filled].tolist())) == held
            assert (row[filled] < length).all()
            assert (np.delete(row, filled) == -1).all()
