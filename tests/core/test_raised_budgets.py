"""A budget that a caller raises between two calls: evicted keys do not come back, and new keys fill
the difference, whatever slots they leave empty meanwhile."""

import numpy as np
import pytest

from h2o import ops

B, G, R, D, SLOTS = 2, 2, 2, 8, 24


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def held(slots, b, g):
    """Positions of the keys of a head, by slot."""
    positions = slots.positions[b]
    if slots.starts is not None:
        positions = positions[slots.starts[g] : slots.starts[g + 1]]
        return positions[positions >= 0].tolist()
    return positions[g][positions[g] >= 0].tolist()


class Text:
    """Slots, and all keys and values that they have seen."""

    def __init__(self, uneven):
        self.keys = self.values = np.zeros((B, G, 0, D), np.float32)
        sizes = [SLOTS, SLOTS] if uneven else SLOTS
        self.slots = ops.new_slots(draw(0, B, G, 1, D), sizes, heavy=4, recent=2)

    def add(self, Q):
        """New queries, keys and values."""
        seed = self.keys.shape[2]
        key, value = draw(seed + 1, B, G, Q, D), draw(seed + 2, B, G, Q, D)
        self.keys = np.concatenate([self.keys, key], 2)
        self.values = np.concatenate([self.values, value], 2)
        return draw(seed + 3, B, G * R, Q, D), key, value

    def read(self, Q):
        query, key, value = self.add(Q)
        _, scores = ops.attend(query, key, value, self.slots)
        ops.evict(key, value, scores, self.slots)

    def step(self):
        """A step, whose output must be attention to the held keys and its own."""
        n = self.keys.shape[2]
        before = [[held(self.slots, b, g) for g in range(G)] for b in range(B)]
        query, key, value = self.add(1)
        out = ops.step(query, key, value, self.slots)
        for b in range(B):
            for head in range(G * R):
                seen = [*before[b][head // R], n]
                keys, values = (x[b, head // R, seen] for x in (self.keys, self.values))
                logits = keys @ query[b, head, 0] / np.sqrt(D)
                p = np.exp(logits - logits.max())
                np.testing.assert_allclose(out[b, 0, head], p / p.sum() @ values, atol=1e-5)
        for b in range(B):
            for g in range(G):
                after = held(self.slots, b, g)
                assert {*after} <= {*before[b][g], n}
                assert len({*after}) == len(after)
                assert len(after) >= len(before[b][g])

    def numbers(self):
        return [[len(held(self.slots, b, g)) for g in range(G)] for b in range(B)]


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 7])
def test_steps_fill_what_a_budget_gains(uneven, steps):
    text = Text(uneven)
    text.read(20)
    for _ in range(steps):  # each leaves a gap somewhere among the filled slots
        text.step()
    assert text.numbers() == [[6, 6], [6, 6]]
    text.slots.budget[..., 0] += 3
    text.slots.budget[0, ..., 1] += 1
    for gained in range(1, 7):
        text.step()
        most = [4, 3]
        assert text.numbers() == [[6 + min(gained, most[b])] * G for b in range(B)]
    lost = text.slots.evicted_score.copy()
    text.step()
    assert (text.slots.evicted_score > lost).all()


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_chunk_fills_what_a_budget_gains(uneven, steps):
    """Also in the middle of the steps that fill it, and up to the last slot."""
    text = Text(uneven)
    text.read(20)
    text.step()
    text.slots.budget[..., 0] += SLOTS - 7
    for _ in range(steps):
        text.step()
    text.read(5)
    assert text.numbers() == [[6 + steps + 5] * G] * B
    text.read(30)
    assert text.numbers() == [[SLOTS - 1] * G] * B
    text.step()
    assert text.numbers() == [[SLOTS - 1] * G] * B
