"""H2OCache driven the way transformers does it, layer by layer: keys kept, reports, failures."""

from __future__ import annotations

import gc
import json
import weakref

import numpy as np
import pytest
import torch

from h2o import H2OConfig, backends, ops
from h2o.config import UNLIMITED
from h2o.hf.attention.attention_call import AttentionCall
from h2o.hf.conversation.pass_guard import PassGuard
from tests.cases import checkered
from tests.hf.drive import Attention, feed, forward, new_cache, tensors
from tests.inputs import (
    CACHE_CASES,
    POLICIES,
    drifting,
    golden_cache,
    left,
    pad,
    right,
)
from tests.reference import operations as reference

CALLS = [20, 1, 1, 1, 6, *[1] * 12, 3, *[1] * 6]
N = sum(CALLS)


def state(cache, layer=0):
    """Everything a layer holds, as bytes."""
    slots = cache.layers[layer].slots
    return [None if x is None else x.numpy().tobytes() for x in slots], cache.get_seq_length(layer)


@pytest.mark.parametrize("name", CACHE_CASES)
def test_keeps_what_the_authors_code_keeps(name):
    case = golden_cache(name)
    cache = new_cache(heavy=case.heavy, recent=case.recent)
    column = 0
    for text, kept, scores in zip(case.pieces(), case.kept, case.scores, strict=True):
        out = forward(cache, text)
        stop = column + text.query.shape[2]
        np.testing.assert_allclose(out, case.out[:, column:stop], rtol=0, atol=1e-5)
        positions, received = cache.kept(0)
        assert positions.dtype == torch.int64
        assert received.dtype == torch.float32
        np.testing.assert_array_equal(positions, kept)
        np.testing.assert_allclose(received, scores, rtol=0, atol=5e-5)
        column = stop


@pytest.mark.parametrize(("name", "padding"), checkered(POLICIES, [None, left, right]))
def test_equals_the_oracle(name, padding):
    policy = POLICIES[name]
    text = drifting(3, B=3, N=N)
    mask = None
    if padding:
        mask = np.concatenate([padding([7, 20, 13], 20), np.ones((3, N - 20), bool)], axis=1)
        text = pad(text, mask)
    cache = new_cache(heavy=policy.heavy, recent=policy.recent, **policy.ranking)
    out = feed(cache, text, CALLS, mask)
    slots = oracle_slots(text, policy)
    stop = 0
    for columns in CALLS:
        start, stop = stop, stop + columns
        query, key, value = tensors(text.cut(start, stop))
        piece = None if mask is None else torch.from_numpy(mask[:, start:stop])
        expected, scores = reference.attend(query, key, value, slots, mask=piece, **policy.ranking)
        reference.evict(key, value, scores, slots, mask=piece, **policy.ranking)
        np.testing.assert_allclose(out[:, start:stop], expected, rtol=0, atol=2e-5)
    for ours, theirs in zip(cache.kept(0), reference.kept(slots), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def oracle_slots(text, policy):
    keys = torch.from_numpy(text.keys)
    slots = ops.new_slots(keys, N + 1, value_weighted=policy.value_weighted)
    slots.budget[:] = torch.tensor([policy.heavy, policy.recent])
    return slots


def test_fractions_are_of_each_rows_own_prompt():
    lengths = [9, 20, 14]
    text = drifting(5, B=3, N=30)
    mask = np.concatenate([left(lengths, 20), np.ones((3, 10), bool)], axis=1)
    padded = pad(text, mask)
    cache = new_cache(heavy=0.29, recent=0.5, min_tokens=0, ratio_of="prompt")
    out = feed(cache, padded, [20, *[1] * 10], mask)
    budgets = [int(0.29 * n) + int(0.5 * n) for n in lengths]
    assert cache.report().layers[0].budget == budgets
    assert len(set(budgets)) == 3
    for b, n in enumerate(lengths):
        alone = new_cache(heavy=0.29, recent=0.5, min_tokens=0, ratio_of="prompt")
        row = type(text)(*(x[b : b + 1, :, : n + 10] for x in text))
        expected = feed(alone, row, [n, *[1] * 10])
        np.testing.assert_allclose(out[b : b + 1, 20 - n :], expected, rtol=0, atol=1e-5)
        held = cache.kept(0)[0][b : b + 1]
        np.testing.assert_array_equal(held[held >= 0], alone.kept(0)[0].flatten())


def test_memory_follows_what_is_held():
    text = drifting(1, B=1, N=400)
    cache = new_cache(heavy=UNLIMITED, recent=UNLIMITED, sinks=UNLIMITED)
    forward(cache, text.cut(0, 100))
    assert cache.layers[0].slots.keys.shape[2] == 101
    capacities = set()
    for i in range(100, 400):
        forward(cache, text.cut(i, i + 1))
        capacities.add(cache.layers[0].slots.keys.shape[2])
        assert cache.layers[0].slots.keys.shape[2] <= i + 2 + 48
    assert len(capacities) <= 8  # slots grow in strides, not with every token
    assert cache.kept(0)[0][0, 0].tolist() == list(range(400))
    small = new_cache(heavy=5, recent=5)
    forward(small, text.cut(0, 100))
    assert small.layers[0].slots.keys.shape[2] == 11


def test_short_prompt_grows_to_the_budget_and_no_further():
    text = drifting(2, B=1, N=60)
    cache = new_cache(heavy=8, recent=8)
    feed(cache, text, [3, *[1] * 57])
    assert cache.layers[0].slots.keys.shape[2] == 17


def test_kept_before_the_prompt_is_empty():
    positions, scores = new_cache(heavy=1, recent=1).kept(0)
    assert positions.shape == scores.shape == (0, 0, 0)
    cache = new_cache(heavy=1, recent=1)
    with pytest.raises(IndexError, match=f"no layer 7: expected 0 to {len(cache) - 1}"):
        cache.kept(7)


def test_report_adds_up():
    lengths = [7, 20]
    mask = np.concatenate([right(lengths, 20), np.ones((2, 15), bool)], axis=1)
    text = pad(drifting(7, B=2, N=35), mask)
    cache = new_cache(layers=2, heavy=4, recent=4, sinks=1)
    stop = 0
    for columns in [20, *[1] * 15]:
        start, stop = stop, stop + columns
        piece = torch.from_numpy(mask[:, start:stop])
        for layer in range(2):
            query, key, value = tensors(text.cut(start, stop))
            key, value = cache.update(key, value, layer)
            cache.layers[layer].attend(AttentionCall(Attention(layer), query, key, value, piece))
    report = cache.report()
    for layer in report.layers:
        assert layer.seen == [22, 35]
        assert layer.kept == [9, 9]
        assert layer.evicted == [13, 26]
        assert layer.budget == [9, 9]
        assert layer.bytes_full == 2 * 2 * 2 * 35 * 16 * 4  # K and V, B, G, columns, D, fp32
        assert layer.bytes_held == 2 * 2 * 2 * 10 * 16 * 4  # k + 1 slots
        # the attention of every query of every head adds up to 1
        np.testing.assert_allclose(layer.mass_evicted + layer.mass_kept, (22 + 35) * 4, rtol=1e-5)
        assert 0 < layer.share_evicted < 1
    total = report.total
    assert (total.seen, total.kept, total.evicted) == ([114], [36], [78])
    assert total.bytes_held == sum(layer.bytes_held for layer in report.layers)
    text_form = str(report)
    assert "The cache holds 31.6% of the tokens" in text_form
    assert "22 to 35" in text_form
    data = json.loads(json.dumps(report.as_dict()))
    assert data["total"]["evicted"] == [78]
    assert data["layers"][1]["layer"] == 1
    assert data["note"] in text_form


def test_report_says_when_the_budget_never_bites_and_when_empty():
    cache = new_cache(heavy=50, recent=4)
    assert "The cache is empty." in str(cache.report())
    assert cache.report().total.share_evicted == 0.0
    feed(cache, drifting(7, B=1, N=12), [10, 1, 1])
    assert "budget was never reached" in str(cache.report())
    full = new_cache(h2o_config=H2OConfig.full())
    feed(full, drifting(7, B=1, N=12), [10, 1, 1])
    assert "unlimited" in str(full.report())


@pytest.mark.parametrize("name", ["h2o", "heavy-only", "everything", "last-query"])
def test_trace_tells_who_was_visible_when(name):
    policy = POLICIES[name]
    mask = np.concatenate([left([9, 20], 20), np.ones((2, 30), bool)], axis=1)
    text = pad(drifting(9, B=2, N=50), mask)
    cache = new_cache(heavy=policy.heavy, recent=policy.recent, **policy.ranking, trace=True)
    feed(cache, text, [20, *[1] * 30], mask)
    query, keys, values = tensors(text)
    _, evicted_at, _ = reference.simulate(
        query,
        keys,
        values,
        torch.tensor([9, 20], dtype=torch.int32),
        torch.tensor([[policy.heavy, policy.recent]] * 2, dtype=torch.int32),
        mask=torch.from_numpy(mask),
        **policy.ranking,
    )
    assert cache.evicted_at(0).dtype == torch.int32
    np.testing.assert_array_equal(cache.evicted_at(0), evicted_at)
    # keys that are still held were never evicted
    positions, _ = cache.kept(0)
    held = [set(positions[1, g].tolist()) for g in range(2)]
    assert all(evicted_at[1, g, j] == 50 for g in range(2) for j in held[g])


def test_trace_through_chunks():
    text = drifting(11, B=2, N=N)
    cache = new_cache(heavy=4, recent=4, trace=True)
    stop = 0
    history = []
    for columns in CALLS:
        start, stop = stop, stop + columns
        forward(cache, text.cut(start, stop))
        history.append((stop, cache.kept(0)[0]))
    evicted_at = cache.evicted_at(0)
    for stop, positions in history:
        for b in range(2):
            for g in range(2):
                alive = [
                    j for j in range(stop) if evicted_at[b, g, j] > stop or evicted_at[b, g, j] == N
                ]
                held = positions[b, g].tolist()
                assert set(held) <= set(alive)
                if stop < N:
                    assert held == alive


def test_trace_costs_a_word_to_have():
    cache = new_cache(heavy=4, recent=4)
    with pytest.raises(ValueError, match="trace=True"):
        cache.evicted_at(0)
    assert new_cache(heavy=4, recent=4, trace=True).evicted_at(0).shape == (0, 0, 0)


def rows(text, index):
    return type(text)(*(x[index] for x in text))


@pytest.mark.parametrize(
    ("change", "index"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 2])), [2, 0, 2]),
        (lambda cache: cache.batch_select_indices(torch.tensor([2, 1])), [2, 1]),
        (
            lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])),
            [0, 2],
        ),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ],
)
def test_rows_move_with_their_state(change, index):
    """Rows must keep their budgets, scores and traces when they are permuted, selected or
    repeated."""
    lengths = [9, 20, 14]
    mask = np.concatenate([left(lengths, 20), np.ones((3, 20), bool)], axis=1)
    text = pad(drifting(8, B=3, N=40), mask)
    parameters = {"heavy": 0.3, "recent": 0.2, "min_tokens": 0, "score_by": "mean", "trace": True}
    cache = new_cache(**parameters)
    feed(cache, text.cut(0, 28), [20, *[1] * 8], mask)
    change(cache)
    out = feed(cache, rows(text.cut(28, 40), index), [1] * 12, mask[index])
    straight = new_cache(**parameters)
    expected = feed(straight, rows(text, index), [20, *[1] * 20], mask[index])
    torch.testing.assert_close(out, expected[:, 28:], rtol=0, atol=0)
    torch.testing.assert_close(cache.kept(0), straight.kept(0), rtol=0, atol=0)
    torch.testing.assert_close(cache.evicted_at(0), straight.evicted_at(0), rtol=0, atol=0)
    assert cache.report().layers[0].budget == straight.report().layers[0].budget


def test_row_operations_of_a_layer_alone_raise():
    """The methods that a layer inherits from transformers replace its keys, which would leave the
    slots as they were."""
    cache = new_cache(heavy=4, recent=4)
    feed(cache, drifting(1, B=2, N=12), [10, 1, 1])
    with pytest.raises(AttributeError, match=r"call the methods of the H2OCache"):
        cache.layers[0].reorder_cache(torch.tensor([1, 0]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda cache: cache.batch_select_indices(0), "such as .0, 2., or a bool mask"),
        (lambda cache: cache.batch_select_indices([0.7]), "such as .0, 2., or a bool mask"),
        (lambda cache: cache.batch_select_indices([[0], [1]]), "such as .0, 2., or a bool mask"),
        (lambda cache: cache.reorder_cache(torch.tensor(1)), "such as .0, 2., or a bool mask"),
        (lambda cache: cache.batch_select_indices([]), "indices selects no row"),
        (lambda cache: cache.batch_select_indices([False] * 3), "indices selects no row"),
        (lambda cache: cache.batch_select_indices([True]), "shape of the mask .1."),
        (lambda cache: cache.batch_select_indices([False, True, False]), "shape of the mask .3."),
        (lambda cache: cache.batch_repeat_interleave(0), "repeats is 0; expected an integer"),
        (lambda cache: cache.batch_repeat_interleave("2"), "repeats is '2'; expected an integer"),
    ],
)
def test_wrong_rows_leave_the_cache_as_it_was(change, words):
    text = drifting(1, B=2, N=24)
    cache, straight = (new_cache(heavy=4, recent=4) for _ in range(2))
    feed(cache, text.cut(0, 20), [20])
    with pytest.raises((TypeError, ValueError, IndexError), match=words):
        change(cache)
    out = feed(cache, text.cut(20, 24), [1] * 4)
    expected = feed(straight, text, [20, *[1] * 4])
    torch.testing.assert_close(out, expected[:, 20:], rtol=0, atol=0)


def test_row_operations_on_an_empty_cache_do_nothing():
    cache = new_cache(heavy=4, recent=4)
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([0]))
    feed(cache, drifting(1, B=2, N=12), [10, 1, 1])


@pytest.mark.parametrize("columns", [1, 5])
@pytest.mark.parametrize("before", [[22], [20, 1, 1]], ids=str)
def test_a_failed_call_leaves_the_cache_as_it_was(columns, before):
    text = drifting(10, B=2, N=40)
    cache, calls = new_cache(heavy=4, recent=4), before
    feed(cache, text.cut(0, 22), calls)
    before = state(cache)
    piece = text.cut(22, 22 + columns)
    with pytest.raises(ValueError, match=r"has 3 heads|H = 3"):
        forward(cache, type(text)(piece.query[:, :3], piece.keys, piece.values))
    assert state(cache) == before
    with pytest.raises(TypeError, match=r"not in float64: call model\.float\(\)"):
        forward(cache, type(text)(*(x.astype(np.float64) for x in piece)))
    assert state(cache) == before
    with pytest.raises(ValueError, match="holds a batch of 2 rows and was given 1"):
        forward(cache, rows(piece, [0]))
    assert state(cache) == before
    straight = new_cache(heavy=4, recent=4)
    expected = feed(straight, text, [*calls, columns, *[1] * (18 - columns)])
    got = feed(cache, text.cut(22, 40), [columns, *[1] * (18 - columns)])
    torch.testing.assert_close(got, expected[:, 22:], rtol=0, atol=0)


def test_an_interrupted_chunk_leaves_the_scores_as_they_were(monkeypatch):
    """When memory runs out between attention and eviction, the scores that attention has already
    added to must be restored."""
    text = drifting(10, B=2, N=40)
    cache = new_cache(heavy=4, recent=4)
    feed(cache, text.cut(0, 22), [20, 1, 1])
    before = state(cache)

    def no_memory(*args, **kwargs):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(ops, "evict", no_memory)
        with pytest.raises(MemoryError):
            forward(cache, text.cut(22, 27))
    assert state(cache) == before
    forward(cache, text.cut(22, 27))


@pytest.mark.parametrize("columns", [1, 5])
def test_ctrl_c_in_a_forward_is_noticed(columns, monkeypatch):
    """Python may raise KeyboardInterrupt right after an operation has changed the slots. The cache
    must then refuse to continue before `reset()`."""
    text = drifting(10, B=2, N=40)
    cache = new_cache(heavy=4, recent=4)
    feed(cache, text.cut(0, 22), [20, 1, 1])
    place, name = ops, "evict"
    if columns == 1:
        place, name = backends.backend_if_open(cache.layers[0].slots.keys), "step"
    operation = getattr(place, name)

    def interrupted(*args, **kwargs):
        operation(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(place, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            forward(cache, text.cut(22, 22 + columns))
    with pytest.raises(RuntimeError, match=r"interrupted, call cache\.reset"):
        forward(cache, text.cut(22, 22 + columns))
    cache.reset()
    feed(cache, text, [20, 1, 1])


def test_ctrl_c_before_a_pass_is_committed_is_noticed(monkeypatch):
    """All layers have then stored the keys of the pass, and the state is that before it."""
    text = drifting(10, B=2, N=40)
    cache = new_cache(heavy=4, recent=4)
    feed(cache, text.cut(0, 22), [20, 1, 1])

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PassGuard, "_commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            forward(cache, text.cut(22, 23))
    with pytest.raises(RuntimeError, match=r"interrupted, call cache\.reset"):
        forward(cache, text.cut(22, 23))


@pytest.mark.parametrize(
    "length", [0, -100, [3, 0], [], "5", 2.0, True, [2.5], [None], torch.tensor([2.5])]
)
def test_a_prompt_length_is_at_least_one_token(length):
    with pytest.raises((TypeError, ValueError), match=r"prompt_length is .*; expected"):
        new_cache(heavy=0.5, recent=0.5, min_tokens=0, prompt_length=length)


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="at least one row"):
        forward(new_cache(heavy=4, recent=4), rows(drifting(10, B=2, N=10), []))


def test_a_row_of_pads_alone_takes_no_budget_from_the_others():
    text = drifting(10, B=2, N=30)
    mask = np.array([[1] * 30, [0] * 30], bool)
    cache = new_cache(heavy=0.2, recent=0.2, min_tokens=0)
    got = forward(cache, text, mask=mask)
    alone = new_cache(heavy=0.2, recent=0.2, min_tokens=0)
    torch.testing.assert_close(got[:1], forward(alone, rows(text, [0])), rtol=0, atol=0)
    assert cache.kept(0)[0][0].tolist() == alone.kept(0)[0][0].tolist()
    assert (cache.kept(0)[0][1] == -1).all()


def test_a_fraction_of_a_short_prompt_is_one_token():
    """A tenth of row 0's 3 tokens is truncated to 0, which must be raised to one token. Row 1 is
    long enough."""
    lengths = [3, 20]
    mask = np.concatenate([left(lengths, 20), np.ones((2, 10), bool)], axis=1)
    text = pad(drifting(5, B=2, N=30), mask)
    cache = new_cache(heavy=0.1, recent=0.1, min_tokens=0, ratio_of="prompt")
    feed(cache, text, [20, *[1] * 10], mask)
    report = cache.report()
    assert report.layers[0].budget == [2, 4]
    assert report.layers[0].kept == [2, 4]
    assert report.layers[0].raised
    assert report.as_dict()["total"]["raised"]
    assert "was rounded up to one token" in str(report)
    cache = new_cache(heavy=0.1, recent=0.1, min_tokens=0, ratio_of="prompt")
    feed(cache, drifting(5, B=1, N=20), [20])
    assert not cache.report().layers[0].raised
    assert "less than one token" not in str(cache.report())
    cache = new_cache(heavy=0.1, recent=0.1, min_tokens=0, ratio_of="prompt")
    feed(cache, drifting(5, B=1, N=9), [1] * 9)
    assert cache.report().layers[0].kept == [2]


def test_a_failed_prompt_leaves_the_cache_empty():
    text = drifting(10, B=2, N=10)
    cache = new_cache(heavy=0.05, recent=0.05, min_tokens=0, prompt_length=[10] * 3)
    with pytest.raises(ValueError, match="prompt_length has 3 entries for a batch of 2 rows"):
        forward(cache, text)
    assert cache.get_seq_length() == 0
    assert cache.layers[0].slots is None
    forward(cache, drifting(10, B=3, N=10))


def test_budgets_per_layer():
    text = drifting(12, B=1, N=24)
    recent = {"recent": lambda layer, layers: layers - layer}
    cache = new_cache(layers=3, heavy=[2, 0.5, 9], **recent, min_tokens=0)
    for columns in (slice(0, 20), *(slice(i, i + 1) for i in range(20, 24))):
        for layer in range(3):
            query, key, value = tensors(text.cut(columns.start, columns.stop))
            key, value = cache.update(key, value, layer)
            cache.layers[layer].attend(AttentionCall(Attention(layer), query, key, value))
    assert [layer.budget for layer in cache.report().layers] == [[5], [14], [10]]
    assert [cache.kept(layer)[0].shape[2] for layer in range(3)] == [5, 13, 10]
    with pytest.raises(ValueError, match="heavy has 2 amounts, but the model has 3 layers"):
        new_cache(layers=3, heavy=[1, 2], recent=2)


def test_prompt_length_for_prompts_in_pieces():
    text = drifting(13, B=2, N=30)
    budget = {"heavy": 0.3, "recent": 0.2, "min_tokens": 0, "ratio_of": "prompt"}
    at_once = new_cache(**budget)
    feed(at_once, text, [24, *[1] * 6])
    for prompt_length in (24, [24, 24], torch.tensor([24, 24]), torch.tensor(24), np.int64(24)):
        pieces = new_cache(**budget, prompt_length=prompt_length)
        feed(pieces, text, [7, 7, 7, 3, *[1] * 6])
        assert pieces.report().layers[0].budget == at_once.report().layers[0].budget == [11, 11]
    chat = new_cache(**budget)
    feed(chat, text, [20, 7, 3])  # a prompt and turns after it
    assert chat.report().layers[0].budget == [10, 10]
    # budgets in tokens do not need the prompt's length
    feed(new_cache(heavy=3, recent=2), text, [7, 7, 7, 3, *[1] * 6])


def test_chunks_equal_one_prompt_while_nothing_is_evicted():
    text = drifting(14, B=2, N=40)
    at_once, pieces = new_cache(heavy=30, recent=4), new_cache(heavy=30, recent=4)
    out = feed(at_once, text, [30, *[1] * 10])
    same = feed(pieces, text, [7, 7, 1, 15, *[1] * 10])
    torch.testing.assert_close(same, out, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(at_once.kept(0)[0], pieces.kept(0)[0])


def test_memory_is_returned_without_the_cyclic_collector():
    cache = new_cache(heavy=4, recent=4)
    feed(cache, drifting(1, B=1, N=12), [10, 1, 1])
    layer = weakref.ref(cache.layers[0])
    gc.disable()
    try:
        del cache
        assert layer() is None
    finally:
        gc.enable()
