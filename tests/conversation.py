"""Feed a text in chunks to any module with the functions of `h2o.ops`. Needs NumPy only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from h2o import ops
from h2o.slots import PER_ROW
from tests.inputs import Policy, Text, heads, kept


class Engine(NamedTuple):
    """A module with attend, evict, step and simulate, and a way to make tensors for it."""

    name: str
    module: Any
    tensor: Callable[[np.ndarray], Any]
    """converts a NumPy array; may change the dtype of a text"""
    exact: Callable[[np.ndarray], np.ndarray] = np.asarray
    """a float32 text after the rounding by `tensor`, as float32 again"""


numpy_core = Engine("numpy", ops, np.ascontiguousarray)


class Conversation:
    """Feeds a text in chunks to one engine, and records the keys that it holds after each chunk.

    Chunks of one column go through `step`, longer ones through `attend` and `evict`. After each
    chunk the slots are checked against the description of `h2o.ops.Slots`.

    Args:
        stepwise: if False, chunks of one column go through `attend` and `evict` as well.
        shared: pass no values, so that the keys are also the values.
        place: moves the rows of the slots to other memory (`Pages`).
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
            sinks = engine.tensor(sink_logits)  # in torch: in the text's dtype
            self.logits["sink_logits"] = sinks.float() if hasattr(sinks, "float") else sinks
        N = self.query.shape[2]
        rows = np.array([[policy.heavy, policy.recent]]) if budget is None else budget
        if capacity is None:
            most = rows.sum(-1).max(0) + policy.sinks + 1  # one number per head if they differ
            capacity = np.minimum(most, N).tolist()
        self.slots = ops.new_slots(
            self.keys, capacity, value_weighted=policy.value_weighted, kv_dtype=kv_dtype,
            shared=shared,
        )  # fmt: skip
        self.slots.budget[:] = engine.tensor(rows)
        self.slots = place(self.slots)
        self.column = 0
        self.out: list[np.ndarray] = []
        """output of each chunk, [B, Q, H, D] float64"""
        self.kept: list[tuple[np.ndarray, np.ndarray]] = []
        """positions and scores after each chunk"""

    def feed(self, columns: int) -> None:
        """Feed the next columns of the text as one chunk."""
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
        """Output [B, N, H, D] for all columns that were fed."""
        return np.concatenate(self.out, axis=1)


def own_rows(slots: Any) -> Any:
    """The slots with only those rows that `rows` selects."""
    if slots.rows is None:
        return slots
    rows = slots.rows.tolist()
    own = {name: x[rows] for name in PER_ROW if (x := getattr(slots, name)) is not None}
    return slots._replace(**own, rows=None)


class Pages:
    """Rows of slots scattered over a larger memory, uint8 [Z, bytes] of NumPy or torch. All fields
    of a row are next to each other. The rest of the memory is filled with garbage."""

    def __init__(self, memory: Any, numbers: Any) -> None:
        """`numbers`: [B] int32, the row of the memory for each batch row."""
        self.memory, self.numbers = memory, numbers
        memory[:] = 0x7F
        self.before = self.others()

    @staticmethod
    def bytes_of(slots: Any) -> int:
        """Bytes of a row, rounded up so that each row is aligned."""
        fields = (x for name in PER_ROW if (x := getattr(slots, name)) is not None)
        return -(-sum(x[:1].nbytes for x in fields) // 16) * 16

    def __call__(self, slots: Any) -> Any:
        """Copy `slots` into the rows `numbers` of the memory. Returns slots [Z, ...] there."""
        fields = {name: x for name in PER_ROW if (x := getattr(slots, name)) is not None}
        parts, begin = {}, 0
        for name, x in sorted(fields.items(), key=lambda field: -field[1].dtype.itemsize):
            end = begin + x[:1].nbytes
            part = self.memory[:, begin:end].view(x.dtype).reshape(len(self.memory), *x.shape[1:])
            part[self.numbers.tolist()] = x
            parts[name], begin = part, end
        return slots._replace(**parts, rows=self.numbers)

    def others(self) -> bytes:
        """Contents of all other rows."""
        left = sorted({*range(len(self.memory))} - {*self.numbers.tolist()})
        return np.asarray(self.memory)[left].tobytes()


def check_as_rows_in_sequence(
    engine: Engine, text: Text, policy: Policy, calls: list[int], memory: Any, numbers: Any,
    **settings: Any,
) -> None:  # fmt: skip
    """Check that a text has the same answers and slots, bit for bit, in rows of `Pages`, and that
    no other row of the pages changes."""
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
    """A copy of a NumPy array or a CPU torch tensor. (NumPy cannot read bfloat16 tensors.)"""
    return np.array(tensor if isinstance(tensor, np.ndarray) else tensor.double().numpy(), float)


def check_slots(slots: Any, sinks: int) -> None:
    """Check that the filled slots are where `h2o.ops.Slots` says, and `next_slot` is the one to
    fill next."""
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
