"""Feed a text in chunks to any module with the functions of `h2o.ops`. Needs NumPy only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from h2o import ops
from h2o.slots import PER_ROW
from tests.inputs import GoldenCache, Policy, Text, heads, kept


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
        smoothing: a float16 tensor [B, G, D] of the engine, that of the slots.
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
        offsets: bool = False,
        smoothing: Any = None,
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
            shared=shared, offsets=offsets,
        )  # fmt: skip
        self.slots.budget[:] = engine.tensor(rows)
        if smoothing is not None:
            self.slots.smoothing[:] = smoothing
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


def assert_same_kept(
    got: Conversation, wanted: Conversation, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Check that both have the same keys after each call, with scores that differ by no more."""
    for (positions, scores), (wanted_positions, wanted_scores) in zip(
        got.kept, wanted.kept, strict=True
    ):
        np.testing.assert_array_equal(positions, wanted_positions)
        np.testing.assert_allclose(scores, wanted_scores, rtol=rtol, atol=atol)


def assert_golden(talk: Conversation, golden: GoldenCache) -> None:
    """Check that a golden text was answered, and its keys kept, as by the authors' code."""
    for call, (positions, scores) in enumerate(talk.kept):
        np.testing.assert_array_equal(positions, golden.kept[call])
        np.testing.assert_allclose(scores, golden.scores[call], rtol=0, atol=5e-5)
    np.testing.assert_allclose(talk.answer, golden.out, rtol=0, atol=1e-5)


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


def check_simulation(
    engine: Engine, text: Text, policy: Policy, prompt: list[int], *,
    budget: np.ndarray | None = None, mask: np.ndarray | None = None, kv_dtype: str | None = None,
    offsets: bool = False, smoothing: Any = None, tolerance: float = 2e-5,
    compares_evictions: bool = True,
) -> None:  # fmt: skip
    """Check that a simulated text has the outputs, the evictions after each column and the last
    scores of caches that are each fed one row: its `prompt` tokens at once, the others one by one.

    Args:
        budget: int [B, 2] or [B, G, 2]; None for the policy's.
        compares_evictions: False for 16 bits, whose rounding may choose another of two keys.
    """
    B, G, N = text.keys.shape[:3]
    rows = np.array([[policy.heavy, policy.recent]] * B) if budget is None else budget
    mask = np.ones((B, N), bool) if mask is None else mask
    counts = (engine.tensor(np.asarray(x, np.int32)) for x in (prompt, rows))
    simulated = engine.module.simulate(
        *map(engine.tensor, text), *counts, mask=engine.tensor(mask), kv_dtype=kv_dtype,
        offsets=offsets, smoothing=smoothing, **policy.ranking,
    )  # fmt: skip
    out, evicted_at, scores = map(as_float64, simulated)
    for b in range(B):
        one, columns = slice(b, b + 1), np.flatnonzero(mask[b])
        talk = Conversation(
            engine, Text(*(x[one] for x in text)), policy, mask=mask[one], budget=rows[one],
            kv_dtype=kv_dtype, offsets=offsets,
            smoothing=None if smoothing is None else smoothing[one],
            stepwise=False,  # a prompt of one token is no decode step
        )  # fmt: skip
        first = int(columns[prompt[b] - 1]) + 1
        talk.feed(first)
        talk.stepwise = True
        talk.feed_all([1] * (N - first))
        np.testing.assert_allclose(out[b], talk.answer[0], rtol=tolerance, atol=tolerance)
        for stop, (positions, sums) in enumerate(talk.kept if compares_evictions else (), first):
            for g in range(G):
                held = columns[positions[0, g][positions[0, g] >= 0]]
                if stop < N:
                    alive = np.flatnonzero(evicted_at[b, g, :stop] > stop)
                    np.testing.assert_array_equal(held, alive, err_msg=f"{b}, {g}, {stop}")
                else:  # what the last column evicts is not in evicted_at
                    assert (evicted_at[b, g, held] == N).all()
                    wanted = sums[0, g, : len(held)]
                    np.testing.assert_allclose(scores[b, g, held], wanted, rtol=2e-5, atol=1e-5)


def check_heads_alone(
    engine: Engine, text: Text, policy: Policy, calls: list[int], budgets: np.ndarray, *,
    mask: np.ndarray | None = None, kv_dtype: str | None = None, tolerance: float = 0.0,
) -> None:  # fmt: skip
    """Check that each head, with budgets [B, G, 2], has the answers and slots that it has alone."""
    more = {"mask": mask, "kv_dtype": kv_dtype}
    talk = Conversation(engine, text, policy, budget=budgets, **more).feed_all(calls)
    G = text.keys.shape[1]
    assert talk.slots.positions.shape == (len(budgets), int(talk.slots.starts[-1]))

    def assert_same(got: np.ndarray, wanted: np.ndarray, near: float) -> None:
        np.testing.assert_allclose(as_float64(got), as_float64(wanted), rtol=near, atol=near)

    R = text.query.shape[1] // G
    for g in range(G):
        heads_of_g = slice(g * R, (g + 1) * R)
        head = Text(text.query[:, heads_of_g], *(x[:, g : g + 1] for x in text[1:]))
        alone = Conversation(engine, head, policy, budget=budgets[:, g], **more).feed_all(calls)
        assert_same(talk.answer[:, :, heads_of_g], alone.answer, tolerance)
        near = min(tolerance, 1e-5)
        for (positions, scores), (wanted, wanted_scores) in zip(talk.kept, alone.kept, strict=True):
            K = wanted.shape[-1]
            np.testing.assert_array_equal(positions[:, g, :K], wanted[:, 0])
            assert_same(scores[:, g, :K], wanted_scores[:, 0], near)
            assert (positions[:, g, K:] == -1).all()
        assert_same(talk.slots.evicted_score[:, g], alone.slots.evicted_score[:, 0], near)


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
