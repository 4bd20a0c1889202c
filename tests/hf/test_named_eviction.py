"""Removing named tokens: `H2OCache.evict`.

The oracle is plain transformers over the whole text, with its true positions, and masks that hide
the removed tokens from all later ones.
"""

from __future__ import annotations

import pytest
import torch

from h2o import H2OCache, H2OConfig, UnsupportedError, compress_document
from h2o.compat import with_cache
from h2o.hf.cache_state import slot_layout
from h2o.hf.layers.layer import H2OLayer
from tests.hf.hidden import logits_without
from tests.hf.modes import POLICIES, policy
from tests.hf.program_models import model_of
from tests.hf.tiny import FAMILIES, WITH_STATES, batch, greedy, llama, prompts, shared, slow_if

pytestmark = pytest.mark.timeout(120)

ROTARY = [
    name
    for name, family in FAMILIES.items()
    if name not in ("opt", "gpt2", *WITH_STATES) and not family.weights
]
FEW = ("llama", "gpt_neox", "cohere", "smollm3", "gemma3", "gemma3n_text", "llava", "qwen2_vl")
SPANS = [(3, 6), (7, 9)]
SMALL = {"heavy": 6, "recent": 5}


def read(model, cache, ids, **more):
    return model(ids, **more, **with_cache(cache)).logits


def held(cache):
    return [x for x in cache.layers if isinstance(x, H2OLayer) and x.slots is not None]


# ---- The answers are those of the text whose removed tokens are hidden ---------------------------


@pytest.mark.filterwarnings("ignore:nothing is evicted")
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", [slow_if(x not in FEW, x) for x in ROTARY])
def test_what_stays_answers_as_if_the_rest_were_hidden(name, size):
    ours, plain = shared(name), shared(name, "eager")
    (text,) = prompts(48)
    cache = H2OCache(ours, H2OConfig.full())
    read(ours, cache, text[:, :30])
    cache.evict(SPANS, ids=text[:, :30])
    got = [read(ours, cache, x) for x in text[:, 30:40].split(size, 1)]
    # The second call counts in the text without the first spans: 12 is token 17.
    cache.evict([(12, 14)])
    got += [read(ours, cache, x) for x in text[:, 40:].split(size, 1)]
    removed = [(30, *span) for span in SPANS] + [(40, 17, 19)]
    want = logits_without(plain, text, removed)[30:]
    torch.testing.assert_close(torch.cat(got, 1)[0], want, rtol=1e-3, atol=1e-3)
    assert cache.get_seq_length() == 48 - 7


def test_rows_of_a_batch_lose_what_they_name():
    """Rows are padded, lose different numbers of tokens, and are then padded differently."""
    ours, plain = shared("llama"), shared("llama", "eager")
    texts = prompts(30, 24)
    given = batch([x[:, :-10] for x in texts])
    mask, cache = given["attention_mask"], H2OCache(ours, H2OConfig.full())
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    read(ours, cache, **{"ids": given["input_ids"]}, attention_mask=mask, position_ids=positions)
    spans = [[(2, 5)], [(0, 1), (8, 12)]]
    cache.evict(spans, ids=given["input_ids"], attention_mask=mask)
    assert cache.get_seq_length() == 20 - 3
    left = [
        torch.cat([text[:, i : i + 1] for i in range(n) if not any(a <= i < b for a, b in row)], 1)
        for text, n, row in zip(texts, (20, 14), spans, strict=True)
    ]
    shorter = batch(left)
    new = torch.cat([text[:, -10:] for text in texts])
    whole = torch.cat([shorter["attention_mask"], torch.ones_like(new)], 1)
    positions = (whole.cumsum(1) - 1)[:, -10:]
    got = read(ours, cache, new, attention_mask=whole, position_ids=positions)
    for row, text in enumerate(texts):
        n = text.shape[1] - 10
        want = logits_without(plain, text, [(n, *span) for span in spans[row]])[n:]
        torch.testing.assert_close(got[row], want, rtol=1e-3, atol=1e-3)


def test_generate_goes_on_with_the_shorter_text():
    """It gets the ids without the span, and reads only those that the cache has not seen."""
    ours, plain = shared("llama"), shared("llama", "eager")
    (text,) = prompts(40)
    cache = H2OCache(ours, H2OConfig.full())
    out = ours.generate(text[:, :20], max_new_tokens=4, do_sample=False, **with_cache(cache))
    cache.evict([(5, 9)], ids=out)
    shorter = torch.cat([out[:, :5], out[:, 9:], text[:, 24:]], 1)
    passes = []
    hook = ours.register_forward_pre_hook(
        lambda _module, _args, given: passes.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    got = greedy(ours, {"input_ids": shorter}, 4, **with_cache(cache))
    hook.remove()
    assert passes == [17, 1, 1, 1]
    whole = torch.cat([out, text[:, 24:]], 1)
    for _ in range(4):
        best = logits_without(plain, whole, [(23, 5, 9)])[-1].argmax()
        whole = torch.cat([whole, best.view(1, 1)], 1)
    assert got.tolist() == whole[:, -4:].tolist()


def test_other_ids_than_those_that_stay_are_rejected():
    ours, (text,) = shared("llama"), prompts(30)
    cache = H2OCache(ours, H2OConfig.full())
    read(ours, cache, text[:, :20])
    cache.evict([(5, 9)], ids=text)
    with pytest.raises(ValueError, match="are not the ones that the cache has seen"):
        ours.generate(text, max_new_tokens=1, **with_cache(cache))
    with pytest.raises(ValueError, match="are not those that the cache has seen, so the spans"):
        cache.evict([(5, 9)], ids=text)


# ---- Caches that evict ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_rows_and_copies_hold_what_a_row_alone_holds(name):
    """Rows of a batch, a fork, a file and a row that was moved are equal to a row alone, while the
    room is filled and afterwards."""
    ours = shared("llama")
    texts, config = prompts(40, 40), policy(name, ours)
    spans = [[(2, 9)], [(10, 17)]]

    def run(text, spans):
        cache = H2OCache(ours, config)
        read(ours, cache, text[:, :20])
        cache.evict(spans)
        return cache

    together = run(torch.cat(texts), spans).fork()
    together.reorder_cache(torch.tensor([1, 0]))
    alone = [run(text, [row]) for text, row in zip(texts, spans, strict=True)]
    for part in (slice(20, 21), slice(21, 24), slice(24, 25), slice(25, 40)):
        got = read(ours, together, torch.cat([texts[1][:, part], texts[0][:, part]]))
        for row, number in enumerate((1, 0)):
            want = read(ours, alone[number], texts[number][:, part])
            torch.testing.assert_close(got[row], want[0], rtol=1e-3, atol=1e-3)
            for layer, other in zip(held(together), held(alone[number]), strict=True):
                positions, wanted = layer.kept().positions[row], other.kept().positions[0]
                for a, b in zip(positions, wanted, strict=True):
                    assert a[a >= 0].tolist() == b[b >= 0].tolist()


def test_freed_slots_are_used_again():
    """The next tokens are kept beside all that stayed, until the budget is full again."""
    ours, (text,) = shared("llama"), prompts(40)
    cache = H2OCache(ours, **SMALL)
    read(ours, cache, text[:, :30])
    cache.evict([(0, 25)])
    (layer, _) = held(cache)
    before = layer.kept().positions[0]
    assert (before[:, -1] == 4).all()  # the five recent ones stay
    for token in text[:, 30:36].split(1, 1):
        read(ours, cache, token)
    after = layer.kept().positions[0]
    assert after.shape == (2, 11)
    assert after.tolist() == [[*range(11)]] * 2


def test_slots_are_given_back():
    ours, (text,) = shared("llama"), prompts(200)
    cache = H2OCache(ours, H2OConfig.full())
    read(ours, cache, text)
    full = cache.report().total.bytes_held
    cache.evict([(10, 190)])
    assert cache.report().total.bytes_held < full / 8


def test_a_mean_score_stays_what_it_was():
    """Removed tokens have given attention, and a key's mean is over them too."""
    ours, (text,) = shared("llama"), prompts(30)
    cache = H2OCache(ours, heavy=300, recent=5, score_by="mean")
    read(ours, cache, text)
    layer = held(cache)[0]
    before, then = layer.kept().scores, layer.kept().positions
    cache.evict([(10, 20)])
    after, now = layer.kept().scores, layer.kept().positions
    stays = [i for i in range(30) if not 10 <= i < 20]
    means = before / (30 - then)
    torch.testing.assert_close(after / (20 - now), means[..., stays])


@pytest.mark.parametrize(
    ("kv_dtype", "autocast", "most"),
    [
        (None, False, 1e-5),
        ("int8", False, 0.1),
        ("int8-int4", False, 0.4),
        ("int4", False, 0.8),
        (None, True, 0.1),
    ],
)
def test_keys_stay_as_stored(kv_dtype, autocast, most):
    """The answers stay close to those of full keys, and do not depend on the number of calls, each
    of which would otherwise round keys once more."""
    name = "llama, wide"
    ours, plain = model_of(name), model_of(name, "eager")
    (text,) = prompts(40)
    cache = H2OCache(ours, heavy=300, recent=5, kv_dtype=kv_dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        read(ours, cache, text[:, :30])
        one_by_one = cache.fork()
        cache.evict(SPANS)
        for start, stop in reversed(SPANS):
            for i in reversed(range(start, stop)):
                one_by_one.evict([(i, i + 1)])
        again = read(ours, one_by_one, text[:, 30:])[0].float()
        got = read(ours, cache, text[:, 30:])[0].float()
    assert torch.equal(got, again)
    want = logits_without(plain, text, [(30, *span) for span in SPANS])[30:]
    assert (got - want).abs().mean() < most * want.abs().mean()


def test_a_compressed_document():
    ours, (text,) = shared("llama"), prompts(40)
    cache = compress_document(ours, text, readings=2, repeat=text[0, :2], **SMALL)
    cache.evict([(2, 30)], ids=text)
    (layer, _) = held(cache)
    before = (layer.kept().positions[0] >= 0).sum(1)
    read(ours, cache, prompts(8, seed=1)[0])
    assert cache.get_seq_length() == 20
    after = (layer.kept().positions[0] >= 0).sum(1)
    budget = layer.slots.budget[0].sum(-1)
    assert after.tolist() == torch.minimum(before + 8, budget).tolist()


# ---- What is refused, before anything changes ----------------------------------------------------


@pytest.fixture
def pinned():
    ours, (text,) = shared("llama"), prompts(20)
    cache = H2OCache(ours, pinned=[(0, 4), (30, 32)], heavy=12, recent=4)
    read(ours, cache, text)
    return cache


@pytest.mark.parametrize(
    ("spans", "error", "message"),
    [
        ([(2, 6)], ValueError, r"tokens 2 to 3 of row 0 are pinned \(pinned=\[\(0, 4\)"),
        ([(10, 21)], ValueError, "ends at 21, but the cache has seen 20 tokens of row 0"),
        ([(5, 5)], ValueError, r"spans has the span \(5, 5\)"),
        ([[(5, 6)], [(5, 6)]], ValueError, "spans for 2 rows, but the cache holds 1"),
        ([[True] * 19], ValueError, "the mask has 19 columns"),
        ("prompt", TypeError, "spans is 'prompt'; expected spans"),
        (7, TypeError, "spans is 7; expected spans"),
    ],
)
def test_spans_that_cannot_be_removed(pinned, spans, error, message):
    before = [x.clone() for layer in held(pinned) for x in layer.slots if x is not None]
    with pytest.raises(error, match=message):
        pinned.evict(spans)
    after = [x for layer in held(pinned) for x in layer.slots if x is not None]
    assert all(map(torch.equal, before, after))
    assert pinned.get_seq_length() == 20


def test_padded_rows_need_their_mask():
    """A mask of spans counts padding, and ids are compared without it."""
    ours = shared("llama")
    given = batch(prompts(20, 14))
    ids, mask = given["input_ids"], given["attention_mask"]
    cache = H2OCache(ours, **SMALL)
    read(ours, cache, ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    columns = torch.zeros_like(mask, dtype=torch.bool)
    columns[:, 8:10] = True
    for more in ({"ids": ids}, {}):
        with pytest.raises(ValueError, match=r"rows are padded.*Pass attention_mask"):
            cache.evict(columns, **more)
    with pytest.raises(ValueError, match=r"has \[20, 20\] tokens per row, .* counted \[20, 14\]"):
        cache.evict(columns, attention_mask=torch.ones_like(mask))
    want = cache.fork()
    cache.evict(columns, ids=ids, attention_mask=mask)
    want.evict([[(8, 10)], [(2, 4)]])
    for layer, other in zip(held(cache), held(want), strict=True):
        assert torch.equal(layer.kept().positions, other.kept().positions)


def test_all_tokens_of_a_row():
    cache = H2OCache(ours := shared("llama"), **SMALL)
    read(ours, cache, *prompts(20))
    with pytest.raises(ValueError, match=r"leave nothing of row 0.*cache.reset"):
        cache.evict([(0, 20)])
    with pytest.raises(ValueError, match="has seen 0 tokens"):
        H2OCache(ours, **SMALL).evict([(0, 1)])


def test_nothing_to_remove(pinned):
    before = pinned.guard.state
    for spans in ([], [[]], torch.zeros(1, 20, dtype=torch.bool)):
        pinned.evict(spans)
    assert pinned.guard.state is before


def test_pins_move_with_their_tokens(pinned):
    """Pinned tokens that are still to come are pinned as they arrive."""
    ours = shared("llama")
    pinned.evict([(6, 10)])
    (layer, _) = held(pinned)
    positions, scores = layer.kept()
    assert positions[0, 0][scores[0, 0].isinf()].tolist() == [0, 1, 2, 3]
    read(ours, pinned, *prompts(18))
    positions, scores = layer.kept()
    assert positions[0, 0][scores[0, 0].isinf()].tolist() == [0, 1, 2, 3, 26, 27]


def test_a_span_within_a_window():
    ours, (text,) = shared("gemma3"), prompts(30)
    cache = H2OCache(ours, **SMALL)
    read(ours, cache, text)
    with pytest.raises(ValueError, match=r"still hold the last 9 tokens.*End it at 21"):
        cache.evict([(18, 22)])
    assert cache.get_seq_length() == 30
    cache.evict([(18, 21)])
    assert cache.get_seq_length() == 27


@pytest.mark.parametrize(("name", "reason"), [("gpt2", "no rotary position"), ("opt", "no rotary")])
def test_learned_positions(name, reason):
    ours, (text,) = shared(name), prompts(20)
    cache = H2OCache(ours, **SMALL)
    read(ours, cache, text)
    with pytest.raises(UnsupportedError, match=f"evict does not support {name}.*{reason}"):
        cache.evict([(2, 3)])
    read(ours, cache, text[:, :2])
    assert cache.get_seq_length() == 22


def test_angles_that_depend_on_the_length():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    ours, (text,) = llama(1, rope_parameters=rope), prompts(20)
    cache = H2OCache(ours, **SMALL)
    read(ours, cache, text)
    with pytest.raises(UnsupportedError, match="rotary angles depend on the length"):
        cache.evict([(2, 3)])


def test_an_error_in_the_middle_leaves_all_layers_as_they_were(monkeypatch):
    ours, (text,) = shared("gemma3"), prompts(30)
    cache = H2OCache(ours, **SMALL)
    read(ours, cache, text)
    want = cache.fork()
    renumber, calls = slot_layout.renumber, []

    def fails_in_the_second_layer(*given):
        calls.append(given)
        if len(calls) == 2:
            raise MemoryError
        return renumber(*given)

    monkeypatch.setattr(slot_layout, "renumber", fails_in_the_second_layer)
    with pytest.raises(MemoryError):
        cache.evict([(2, 9)])
    got, want = (read(ours, x, text[:, :5]) for x in (cache, want))
    assert torch.equal(got, want)


def test_the_original_of_a_fork_keeps_what_the_fork_forgets():
    ours, (text,) = shared("gemma3"), prompts(40)
    cache = H2OCache(ours, **SMALL)
    read(ours, cache, text[:, :30])
    want = cache.fork()
    cache.fork().evict([(2, 15)])
    got, want = (read(ours, x, text[:, 30:]) for x in (cache, want))
    assert torch.equal(got, want)


# ---- Other ways to use a cache -------------------------------------------------------------------


def test_a_report_counts_what_was_removed():
    cache = H2OCache(ours := shared("llama"), **SMALL)
    read(ours, cache, *prompts(30))
    cache.evict([(2, 9)])
    cache.evict([(1, 2)])
    report = cache.report()
    assert report.layers[0].removed == [8]
    assert (report.layers[0].seen, report.layers[0].evicted) == (
        [22],
        [22 - report.layers[0].kept[0]],
    )
    assert report.as_dict()["layers"][0]["removed"] == [8]
    assert "removed" in str(report).splitlines()[0]
    assert "evict() has removed 8 tokens" in report.note


def test_a_file_keeps_what_was_removed(tmp_path):
    ours, (text,) = shared("llama"), prompts(40)
    cache = H2OCache(ours, **SMALL)
    read(ours, cache, text[:, :30])
    cache.evict([(2, 20)], ids=text)
    cache.save(tmp_path / "cache", ours)
    loaded = H2OCache.load(tmp_path / "cache", ours)
    assert loaded.report().layers[0].removed == [18]
    got, want = (read(ours, x, text[:, 30:]) for x in (loaded, cache))
    assert torch.equal(got, want)


def test_a_pass_after_it_can_be_cropped():
    ours, (text,) = shared("llama"), prompts(40)
    cache = H2OCache(ours, **SMALL)
    cache.activate_past_recording()
    read(ours, cache, text[:, :30])
    cache.evict([(2, 20)])
    with pytest.raises(NotImplementedError, match="not recorded"):
        cache.crop(-1)
    want = cache.fork()
    read(ours, cache, text[:, 30:36])
    cache.crop(-2)
    read(ours, want, text[:, 30:34])
    got, want = (read(ours, x, text[:, 36:]) for x in (cache, want))
    torch.testing.assert_close(got, want)
