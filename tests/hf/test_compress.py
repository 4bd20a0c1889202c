"""h2o.compress_document with one or two readings, compared with transformers' attention weights."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import h2o
from h2o import H2OCache, H2OConfig, UnsupportedError, backends
from h2o.compat import with_cache
from h2o.hf.document import compress
from h2o.hf.document.cut_cache import LATER_RECENT, RECENT
from h2o.hf.layers.layer import H2OLayer
from h2o.hf.model_traits.shared_keys import SHARES_KEYS
from tests.hf.program_models import model_of
from tests.hf.tiny import HYBRID, WITH_STATES, batch, greedy, model, prompts, shared

REQUEST = torch.tensor([5, 9, 2])
"""Token ids that request the repetition."""
BUDGET = H2OConfig(heavy=20, recent=10, sinks=2)


def weights_of(name, text):
    """Attention [layers, G, heads of a group, n, n] that transformers gives a text [1, n]."""
    theirs = shared(name, "eager")
    each = torch.stack(theirs(text, output_attentions=True).attentions)[:, 0]
    grouped = name != "gpt_neox"
    G = theirs.config.num_key_value_heads if grouped else theirs.config.num_attention_heads
    return each.unflatten(1, (G, -1))


def expected(name, document, budget, by_attention, chunk=compress.CHUNK):
    """Positions that each head of each layer keeps, as lists, and their scores [layers, G, n]."""
    n = document.shape[1]
    first = weights_of(name, document).sum((2, 3))
    pieces = [
        document[:, max(0, begin - compress.OVERLAP) : begin + chunk]
        for begin in range(0, n, chunk)
    ]
    largest = [
        weights_of(name, torch.cat([document, REQUEST[None], piece], 1))[..., n:, :n].amax((2, 3))
        for piece in pieces
    ]
    largest = torch.stack(largest).amax(0)
    return choice(first, largest, budget, by_attention, RECENT), largest


def choice(first, largest, budget, by_attention, recent):
    """Positions that each head of each layer keeps, as lists. `first` and `largest` are scores
    [layers, G, n] of the first reading and of the repetition."""
    L, G, n = largest.shape
    rest = budget.heavy + budget.recent - recent
    first_part = int(rest * by_attention)
    kept = torch.zeros(L, G, n, dtype=torch.bool)
    kept[..., : budget.sinks] = kept[..., n - recent :] = True
    among = first.masked_fill(kept, -1).topk(first_part).indices
    kept.scatter_(2, among, True)
    places = largest.masked_fill(kept, -1).flatten().topk((rest - first_part) * L * G).indices
    kept.view(-1)[places] = True
    return [[row.nonzero()[:, 0].tolist() for row in layer] for layer in kept]


def positions(cache, row=0):
    """Positions that each head of each H2O layer keeps, as lists."""
    return [
        [[p for p in head if p >= 0] for head in layer.kept().positions[row].tolist()]
        for layer in cache.layers
        if isinstance(layer, H2OLayer)
    ]


def positions_of_rows(cache):
    """`positions` of each row."""
    return [positions(cache, row) for row in range(cache.layers[0].kept().positions.shape[0])]


@pytest.mark.parametrize("by_attention", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox"])
def test_what_is_kept(name, by_attention):
    (document,) = prompts(70)
    cache = h2o.compress_document(
        shared(name), document, BUDGET, readings=2, repeat=REQUEST, by_attention=by_attention
    )  # fmt: skip
    kept, largest = expected(name, document, BUDGET, by_attention)
    assert positions(cache) == kept
    for layer, scores in zip(cache.layers, largest, strict=True):
        for g, (at, got) in enumerate(zip(*(x[0] for x in layer.kept()), strict=True)):
            real = at >= 0
            torch.testing.assert_close(got[real], scores[g, at[real]], rtol=1e-4, atol=1e-6)


def test_no_head_is_left_without_a_key():
    """Every head must keep a key, even when no part of the budget goes to sinks, recent keys or
    attention."""
    (document,) = prompts(70)
    how = {"readings": 2, "repeat": REQUEST, "by_attention": 0.0}
    cache = h2o.compress_document(shared("qwen3"), document, H2OConfig(heavy=2, recent=0), **how)
    heads = [len(head) for layer in positions(cache) for head in layer]
    assert min(heads) >= 1
    assert sum(heads) == 2 * len(heads)


@pytest.mark.parametrize("by_attention", [0.0, 0.5, 1.0])
def test_a_profile_shares_what_goes_by_attention(by_attention):
    """The part of the budget that goes by attention must follow the shares of heads. The rest goes
    to the largest scores of all heads."""
    (document,) = prompts(70)
    ours = shared("qwen3")
    heads = ours.config.num_hidden_layers, ours.config.num_key_value_heads
    shares = torch.linspace(0.5, 1.5, heads[0] * heads[1]).view(heads).tolist()
    config = H2OConfig(heavy=20, recent=10, sinks=2, head_shares=shares)
    alone = H2OCache(ours.config, config)
    ours(document, **with_cache(alone))
    cache = h2o.compress_document(
        ours, document, config, readings=2, repeat=REQUEST, by_attention=by_attention
    )
    had = [n for layer in alone.report().layers for n in layer.budget_by_head[0]]
    has = [n for layer in cache.report().layers for n in layer.budget_by_head[0]]
    assert sum(has) == sum(had)
    assert len(set(had)) > 1
    first = [2 + RECENT + int((n - 2 - RECENT) * by_attention) for n in had]
    assert all(x >= y for x, y in zip(has, first, strict=True))
    assert (has == first) == (by_attention == 1.0)


def test_long_documents_are_read_and_repeated_in_pieces(monkeypatch):
    monkeypatch.setattr(compress, "CHUNK", 32)
    (document,) = prompts(70)
    progress = []
    cache = h2o.compress_document(
        shared("llama"),
        document,
        BUDGET,
        readings=2,
        repeat=REQUEST,
        progress=lambda *x: progress.append(x),
    )
    assert positions(cache) == expected("llama", document, BUDGET, 0.5, chunk=32)[0]
    assert progress == [(32, 140), (64, 140), (70, 140), (102, 140), (134, 140), (140, 140)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "config",
    [
        H2OConfig(heavy=0.3, recent=0.2, min_tokens=0, kv_dtype="int8"),
        H2OConfig(heavy=0.3, recent=0.2, min_tokens=0, kv_dtype="int8-int4"),
        H2OConfig(heavy=0.3, recent=0.2, min_tokens=0, score_by="mean-echo"),
        H2OConfig(budget=0.5, min_tokens=0),
    ],
    ids=["bits", "few bits", "echo", "shared budget"],
)
def test_rows_of_a_batch_are_readings_of_their_own(side, config):
    """With documents of several lengths and fractional budgets, each row must keep the keys that it
    keeps alone, and answer a question like it. Padding on the right is then between tokens."""
    ours = model_of("llama, wide" if config.kv_dtype == "int8-int4" else "llama")
    documents, (question,) = prompts(70, 41, 58), prompts(3, seed=3)
    padded = batch(documents, side)
    together = h2o.compress_document(
        ours,
        padded["input_ids"],
        config,
        attention_mask=padded["attention_mask"],
        readings=2,
        repeat=REQUEST,
    )
    before, B = positions_of_rows(together), len(documents)
    mask = torch.cat([padded["attention_mask"], torch.ones(B, 3, dtype=torch.long)], 1)
    at = (mask.cumsum(1) - 1).clamp(min=0)[:, -3:]
    inputs = {"input_ids": question.expand(B, -1), "attention_mask": mask, "position_ids": at}
    logits = ours(**inputs, **with_cache(together)).logits
    for row, document in enumerate(documents):
        alone = h2o.compress_document(ours, document, config, readings=2, repeat=REQUEST)
        assert before[row] == positions(alone)
        answer = ours(question, position_ids=at[row : row + 1], **with_cache(alone)).logits
        torch.testing.assert_close(logits[row : row + 1], answer, atol=1e-4, rtol=1e-4)
        assert positions(together, row) == positions(alone)


def test_by_the_torch_backend_it_keeps_the_same_keys():
    ours, (document,) = shared("llama"), prompts(70)
    kept = positions(h2o.compress_document(ours, document, BUDGET, readings=2, repeat=REQUEST))
    with backends.by_torch():
        again = h2o.compress_document(ours, document, BUDGET, readings=2, repeat=REQUEST)
    assert positions(again) == kept


def test_pins_are_kept():
    (document,) = prompts(70)
    cache = h2o.compress_document(
        shared("llama"), document, BUDGET, readings=2, repeat=REQUEST, pinned=[(20, 29)]
    )
    assert all({*range(20, 29)} <= {*head} for layer in positions(cache) for head in layer)


@pytest.mark.parametrize("readings", [1, 2])
def test_the_report_says_that_min_tokens_raised_the_budget(readings):
    """A tenth of 70 tokens is less than 16 keys."""
    (document,) = prompts(70)
    repeat = {"repeat": REQUEST} if readings == 2 else {}
    for least, is_floored in ((16, True), (0, False)):
        config = H2OConfig(heavy=0.05, recent=0.05, sinks=2, min_tokens=least, ratio_of="prompt")
        cache = h2o.compress_document(
            shared("llama"), document, config, readings=readings, **repeat
        )
        assert cache.report().total.floored == is_floored


@pytest.mark.parametrize("readings", [1, 2])
@pytest.mark.parametrize("name", HYBRID[:1] + WITH_STATES[:1])
def test_windows_and_states_of_a_row_know_no_padding(name, readings):
    ours, documents = shared(name), prompts(33, 40)
    config = H2OConfig(heavy=0.3, recent=0.2, min_tokens=0)
    how = {"readings": readings, "repeat": REQUEST if readings == 2 else None}
    padded, right = batch(documents), batch(documents, "right")
    ids, mask = padded["input_ids"], padded["attention_mask"]
    together = h2o.compress_document(ours, ids, config, attention_mask=mask, **how)
    for row, document in enumerate(documents):
        alone = h2o.compress_document(ours, document, config, **how)
        assert positions(together, row) == positions(alone)
    with pytest.raises(ValueError, match="Pad on the left"):
        h2o.compress_document(
            ours, right["input_ids"], config, attention_mask=right["attention_mask"], **how
        )


def test_it_goes_on_as_any_other_cache(tmp_path):
    """A compressed document must keep its budgets and its ranking by the largest attention, and
    answer the same from a fork, repeated rows or a file, and after a turn that was taken back."""
    ours = model("llama")
    (document,) = prompts(70)
    cache = h2o.compress_document(ours, document, BUDGET, readings=2, repeat=REQUEST)
    assert cache.layers[0].policy.score_by == "max"
    question = {"input_ids": torch.cat([document, *prompts(5, seed=3)], 1)}
    fork = cache.fork()
    answer = greedy(ours, question, **with_cache(fork))
    budget = BUDGET.heavy + BUDGET.recent + BUDGET.sinks
    heads = [n for layer in fork.report().layers for n in layer.kept_by_head[0]]
    assert sum(heads) == budget * len(heads)
    assert len(set(heads)) > 1
    assert fork.get_seq_length() == 70 + 5 + 15
    cache.save(tmp_path / "read.safetensors", ours)
    loaded = H2OCache.load(tmp_path / "read.safetensors", ours)
    assert torch.equal(greedy(ours, question, **with_cache(loaded)), answer)
    again = cache.fork()
    again.activate_past_recording()
    ours(*prompts(4, seed=5), **with_cache(again))
    again.crop(-4)
    assert torch.equal(greedy(ours, question, **with_cache(again)), answer)
    twice = {"input_ids": question["input_ids"].repeat(2, 1)}
    rows = greedy(ours, twice, **with_cache(cache.fork(rows=2)))
    assert torch.equal(rows, answer.repeat(2, 1))
    assert torch.equal(greedy(ours, question, **with_cache(cache)), answer)


@pytest.mark.parametrize("recent", [2, 6, 30])
@pytest.mark.parametrize("by_attention", [0.0, 0.5])
def test_recent_keys_after_the_cut(recent, by_attention):
    """The cut keeps up to RECENT keys of the document's end. Later, heads must keep up to
    LATER_RECENT recent keys within the same budget."""
    ours, (document,) = shared("llama"), prompts(70)
    config = H2OConfig(heavy=34 - recent, recent=recent, sinks=2)
    cache = h2o.compress_document(
        ours, document, config, readings=2, repeat=REQUEST, by_attention=by_attention
    )
    budgets = [n for layer in cache.report().layers for n in layer.budget_by_head[0]]
    assert sum(budgets) == 36 * len(budgets)
    cut, later = min(recent, RECENT), min(recent, LATER_RECENT)
    held = [head for layer in positions(cache) for head in layer]
    assert all(head[-cut:] == list(range(70 - cut, 70)) for head in held)
    assert any(head[-1 - cut] != 69 - cut for head in held)
    for token in prompts(40, seed=3)[0].T:
        ours(token[None], **with_cache(cache))
    held = [head for layer in positions(cache) for head in layer]
    assert [len(head) for head in held] == budgets
    assert all(head[-later:] == list(range(110 - later, 110)) for head in held)
    assert any(head[-1 - later] != 109 - later for head in held)


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "opt", "gemma3", "mistral-window"),
        "qwen3_next",
        "falcon_h1",
        "deepseek_v3",
        *["gemma3n_text"] * SHARES_KEYS,
    ],
)
def test_with_room_for_all_it_answers_as_the_full_cache(name):
    """Windows and states must be those after the document, not those after its repetition."""
    ours, (document,) = model(name), prompts(70)
    question = {"input_ids": torch.cat([document, *prompts(5, seed=3)], 1)}
    cache = h2o.compress_document(ours, document, H2OConfig.full(), readings=2, repeat=REQUEST)
    theirs = DynamicCache(config=ours.config)
    wanted = greedy(model(name, "eager"), question, **with_cache(theirs))
    assert torch.equal(greedy(ours, question, **with_cache(cache)), wanted)


def test_under_autocast_it_keeps_what_it_attended_to():
    """Keys are stored in autocast's dtype, and what follows attends to them in autocast or not.
    Logits differ by at most twice as much as those of the model itself, which differ by CPU."""
    ours, (document,), (question,) = shared("llama"), prompts(70), prompts(5, seed=3)
    whole, how = torch.cat([document, question], 1), {"readings": 2, "repeat": REQUEST}
    wanted = ours(whole, use_cache=False).logits[:, -5:]
    with torch.autocast("cpu", torch.bfloat16):
        rounded = ours(whole, use_cache=False).logits[:, -5:].float()
    close = {"atol": 2 * (rounded - wanted).abs().max().item(), "rtol": 0}
    answers, at = [], torch.arange(70, 75)[None]
    for config in (BUDGET, H2OConfig.full()):
        with torch.autocast("cpu", torch.bfloat16):
            cache = h2o.compress_document(ours, document, config, **how)
            assert {layer.slots.keys.dtype for layer in cache.layers} == {torch.bfloat16}
            within = ours(question, position_ids=at, **with_cache(cache.fork())).logits.float()
        after = ours(question, position_ids=at, **with_cache(cache)).logits
        torch.testing.assert_close(within, after, **close)
        answers.append(after)
    torch.testing.assert_close(answers[1], wanted, **close)


def test_room_that_a_short_document_leaves_is_for_what_follows():
    ours, (document,) = model("llama"), prompts(12)
    cache = h2o.compress_document(ours, document, BUDGET, readings=2, repeat=REQUEST)
    assert all(x == list(range(12)) for layer in positions(cache) for x in layer)
    question = {"input_ids": torch.cat([document, *prompts(50, seed=3)], 1)}
    greedy(ours, question, **with_cache(cache))
    heads = [n for layer in cache.report().layers for n in layer.kept_by_head[0]]
    assert heads == [BUDGET.heavy + BUDGET.recent + BUDGET.sinks] * len(heads)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"readings": 2}, ValueError, "needs the tokenizer"),
        (
            {"readings": 2, "repeat": REQUEST, "by_attention": 1.5},
            ValueError,
            "by_attention is 1.5; expected",
        ),
        (
            {"readings": 2, "repeat": REQUEST, "by_attention": True},
            TypeError,
            "by_attention is True; expected",
        ),
        ({"readings": True}, ValueError, "readings is True; expected 1 or 2"),
        (
            {"readings": 2, "repeat": REQUEST, "attention_mask": torch.ones(1, 3)},
            ValueError,
            r"shape \[1, 3\]; expected a mask \[1, 20\]",
        ),
        (
            {"readings": 2, "repeat": REQUEST, "positions": "cache_relative"},
            UnsupportedError,
            'positions="cache_relative"',
        ),
    ],
)
def test_refusals(arguments, error, message):
    with pytest.raises(error, match=message):
        h2o.compress_document(shared("llama"), prompts(20)[0], heavy=4, recent=4, **arguments)


def test_one_reading_is_the_prompt_of_a_cache():
    """A single reading must be the prefill of generate(), for padded rows too."""
    ours, padded = shared("llama"), batch(prompts(30, 40))
    cache = H2OCache(ours.config, budget=0.4, min_tokens=0)
    ids = padded["attention_mask"].cumsum(1) - 1
    ours(**padded, position_ids=ids.clamp(min=0), **with_cache(cache))
    read = h2o.compress_document(
        ours, padded["input_ids"], attention_mask=padded["attention_mask"], budget=0.4, min_tokens=0
    )
    for layer, other in zip(cache.layers, read.layers, strict=True):
        assert torch.equal(layer.slots.positions, other.slots.positions)
        assert torch.equal(layer.slots.scores, other.slots.scores)


def test_arguments_of_a_second_reading_need_one():
    ours, (document,) = shared("llama"), prompts(20)
    for name, value in {"repeat": REQUEST, "by_attention": 0.5}.items():
        with pytest.raises(ValueError, match=f"{name} needs a second reading: pass readings=2"):
            h2o.compress_document(ours, document, **{name: value}, heavy=4, recent=4)
    with pytest.raises(ValueError, match="readings is 3; expected 1 or 2"):
        h2o.compress_document(ours, document, readings=3, heavy=4, recent=4)


def test_what_is_no_document():
    ours = shared("llama")
    with pytest.raises(
        TypeError, match=r"input_ids is 'a text'; expected token ids .* tokenizer\("
    ):
        h2o.compress_document(ours, "a text", heavy=4, recent=4)
    with pytest.raises(ValueError, match="input_ids has 0 tokens"):
        h2o.compress_document(ours, torch.ones(1, 0, dtype=torch.long), heavy=4, recent=4)
