"""generate_all: each request gets the tokens it gets alone, whatever the other rows do."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    BatchEncoding,
    DynamicCache,
    GenerationConfig,
    PreTrainedTokenizerFast,
    StoppingCriteria,
)

import h2o
from h2o import H2OCache, H2OConfig, models
from h2o.compat import with_cache
from h2o.hf.batching import batch_scheduler
from tests.hf.tiny import FAMILIES, batch, greedy, model, prompts, shared, slow_if

PAGE = resource.getpagesize()
LENGTHS = (5, 17, 40, 9, 33, 21, 3, 28)
CONFIGS = {
    "h2o": H2OConfig(heavy=6, recent=6),
    "fractions": H2OConfig(heavy=0.2, recent=0.2, min_tokens=0),
    "mean, sinks": H2OConfig(heavy=6, recent=6, sinks=2, score_by="mean", decay=0.9),
    "cache_relative": H2OConfig(heavy=6, recent=6, positions="cache_relative"),
    "int8": H2OConfig(heavy=6, recent=6, kv_dtype="int8"),
    "value norms": H2OConfig(heavy=6, recent=6, value_weighted=True),
    "uneven heads": H2OConfig(heavy=6, recent=6, head_shares=[[1.4, 0.6], [0.5, 1.5]]),
    "everything": H2OConfig.full(),
    "echo": H2OConfig(heavy=6, recent=6, score_by="mean-echo", head_shares="echo", kv_dtype="int8"),
}


def texts(*lengths, seed=0):
    return [ids[0].tolist() for ids in prompts(*lengths, seed=seed)]


def alone(ours, text, config, **kwargs):
    """The new tokens that generate() gives a prompt alone."""
    cache = H2OCache(ours.config, config)
    ids = torch.tensor([text], device=ours.device)
    return ours.generate(ids, **with_cache(cache), **kwargs)[0, len(text) :].tolist()


@functools.cache
def each_alone(name):
    """Requests whose prompts and answers have many lengths, and the answer that each gets alone."""
    requests = [
        h2o.Request(text, max_new_tokens=3 + 7 * (i % 4)) for i, text in enumerate(texts(*LENGTHS))
    ]
    ours, config = shared("llama"), CONFIGS[name]
    return requests, [
        alone(ours, x.prompt, config, max_new_tokens=x.max_new_tokens, do_sample=False)
        for x in requests
    ]


# Which request gets which row does not depend on the config, so only two configs run with all
# numbers of rows.
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        slow_if(rows != 3 and name not in ("h2o", "echo"), name, rows)
        for name in CONFIGS
        for rows in (1, 3, 8)
    ],
)
def test_each_request_is_a_generation_of_its_own(name, rows):
    """Refilling a row while others still decode must not change any answer."""
    requests, expected = each_alone(name)
    results = list(h2o.generate_all(shared("llama"), requests, CONFIGS[name], rows=rows))
    assert [result.index for result in results] == list(range(len(LENGTHS)))
    assert [result.ids for result in results] == expected
    for request, result in zip(requests, results, strict=True):
        assert result.finish_reason == "length"
        assert result.report["seen"] == len(request.prompt) + request.max_new_tokens - 1


@contextlib.contextmanager
def passes(ours):
    """Yield a list that has, after the block, the shapes of the ids of all passes of several
    tokens."""
    shapes = []
    hook = ours.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        yield shapes
    finally:
        hook.remove()
        shapes[:] = [shape for shape in shapes if shape[1] > 1]


@pytest.mark.parametrize(
    ("family", "lengths", "read"),
    [
        ("llama", (9, 5, 20, 31, 7, 3), [(3, 20), (3, 31)]),  # a prompt adds at most 32 pads
        ("llama", (200, 198, 30, 190), [(2, 200), (1, 30), (1, 190)]),
        ("llama", (200, 200, 200), [(2, 200), (1, 200)]),  # a pass has at most 512 tokens
        ("bamba", (9, 9, 5), [(1, 9), (1, 9), (1, 5)]),  # its states do not support padding
    ],
)
def test_short_prompts_are_read_together(family, lengths, read):
    ours = shared(family)
    with passes(ours) as shapes:
        results = list(
            h2o.generate_all(ours, texts(*lengths), CONFIGS["h2o"], rows=8, max_new_tokens=6)
        )
    assert shapes == read
    for text, result in zip(texts(*lengths), results, strict=True):
        assert result.ids == alone(ours, text, CONFIGS["h2o"], max_new_tokens=6, do_sample=False)


def test_more_prompts_share_a_pass_on_a_gpu(monkeypatch):
    """On a GPU, where the host's time for a pass is worth many tokens, more prompts must share a
    pass than on a CPU."""
    monkeypatch.setattr(batch_scheduler, "input_device", lambda model: torch.device("cuda"))
    ours, some = shared("llama"), texts(200, 198, 30, 190)
    with passes(ours) as shapes:
        results = list(h2o.generate_all(ours, some, CONFIGS["h2o"], rows=8, max_new_tokens=3))
    assert shapes == [(4, 200)]
    for text, result in zip(some, results, strict=True):
        assert result.ids == alone(ours, text, CONFIGS["h2o"], max_new_tokens=3, do_sample=False)


@pytest.mark.parametrize("name", ["h2o", "echo"])
def test_read_together_into_rows_apart(name):
    """Prompts that are prefilled together must go to the right rows when the free rows are not
    adjacent, and when an answer ends with its first token."""
    new = (4, 9, 1, 9, 4, 5, 5, 5)
    some = [h2o.Request(x, max_new_tokens=n) for x, n in zip(texts(*[9] * 8), new, strict=True)]
    ours, config = shared("llama"), CONFIGS[name]
    with passes(ours) as shapes:
        results = list(h2o.generate_all(ours, some, config, rows=5))
    assert shapes == [(5, 9), (1, 9), (2, 9)]
    for request, result in zip(some, results, strict=True):
        n = request.max_new_tokens
        expected = alone(ours, request.prompt, config, max_new_tokens=n, do_sample=False)
        assert result.ids == expected


def test_prompts_with_settings_of_their_own_are_read_alone():
    ours = shared("llama")
    some = texts(9, 9, 9, 9, 9)
    requests = [
        some[0], h2o.Request(some[1], config=H2OConfig(heavy=3, recent=3)),
        h2o.Request(some[2], pinned=[(0, 4)]),
        h2o.Request(some[2], generation_config=GenerationConfig(prefill_chunk_size=9)),
        some[3], some[4],
    ]  # fmt: skip
    with passes(ours) as shapes:
        results = h2o.generate_all(ours, requests, CONFIGS["h2o"], rows=6, max_new_tokens=6)
        last = list(results)[-1]
    assert shapes == [(1, 9)] * 4 + [(2, 9)]
    assert last.ids == alone(ours, some[4], CONFIGS["h2o"], max_new_tokens=6, do_sample=False)


def test_a_prompt_that_cannot_be_read_beside_others():
    """A prompt that fails must not affect the prompts that are prefilled with it."""
    config = copy.deepcopy(shared("gpt2").config)
    config.n_positions = 64
    ours = AutoModelForCausalLM.from_config(config, attn_implementation="h2o").eval()
    fits, too_long = texts(60, 70)
    first, second, third = h2o.generate_all(
        ours, [fits, too_long, fits], CONFIGS["h2o"], rows=3, max_new_tokens=3
    )
    assert isinstance(second.error, IndexError)
    want = alone(ours, fits, CONFIGS["h2o"], max_new_tokens=3, do_sample=False)
    assert first.ids == third.ids == want


@pytest.mark.parametrize("family", ["opt", "gpt2", "gpt_neox", "qwen3", "granite"])
def test_families(family):
    ours = model(family)
    results = h2o.generate_all(ours, texts(*LENGTHS), heavy=6, recent=6, rows=3, max_new_tokens=9)
    for text, result in zip(texts(*LENGTHS), results, strict=True):
        assert result.ids == alone(ours, text, CONFIGS["h2o"], max_new_tokens=9, do_sample=False)


def test_a_step_is_of_the_rows_that_are_not_idle():
    """Idle rows must not be computed while a few long answers continue."""
    ours, batches = model("llama"), []
    hook = ours.register_forward_pre_hook(
        lambda _, args, kwargs: batches.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    requests = [
        h2o.Request(x, max_new_tokens=n) for x, n in zip(texts(9, 5, 7), (4, 12, 8), strict=True)
    ]
    try:
        results = list(h2o.generate_all(ours, requests, heavy=6, recent=6, rows=3))
    finally:
        hook.remove()
    assert [len(result.ids) for result in results] == [4, 12, 8]
    assert batches == [3] + [3] * 3 + [2] * 4 + [1] * 4  # the first pass prefills the prompts


def test_sampling_does_not_depend_on_neighbors():
    """A request's samples must depend only on its own seed and processors, as after
    torch.manual_seed alone."""
    ours = model("llama")
    settings = GenerationConfig(
        do_sample=True, temperature=1.5, top_k=20, repetition_penalty=1.3, max_new_tokens=12
    )
    some = texts(*LENGTHS)
    results = [
        list(h2o.generate_all(ours, some, CONFIGS["h2o"], rows=rows, generation_config=settings))
        for rows in (1, 5)
    ]
    for i, text in enumerate(some):
        torch.manual_seed(i)
        expected = alone(ours, text, CONFIGS["h2o"], generation_config=settings)
        assert results[0][i].ids == results[1][i].ids == expected
    seeded = h2o.Request(some[0], seed=3)
    (one,) = h2o.generate_all(ours, [seeded], CONFIGS["h2o"], rows=1, generation_config=settings)
    torch.manual_seed(3)
    assert one.ids == alone(ours, some[0], CONFIGS["h2o"], generation_config=settings)
    assert one.ids != results[0][0].ids


def test_end_tokens():
    ours = model("llama")
    some = texts(*LENGTHS)
    plain = [alone(ours, text, CONFIGS["h2o"], max_new_tokens=20, do_sample=False) for text in some]
    end = plain[1][5]
    settings = GenerationConfig(eos_token_id=[end, 96], max_new_tokens=20)
    results = h2o.generate_all(ours, some, CONFIGS["h2o"], rows=3, generation_config=settings)
    for answer, result in zip(plain, results, strict=True):
        stops = end in answer or 96 in answer
        first = min((answer.index(x) for x in (end, 96) if x in answer), default=19)
        assert result.ids == answer[: first + 1]
        assert result.finish_reason == ("stop" if stops else "length")


def test_lengths_of_their_own():
    """The number of tokens in a request's generation config must count before that of the call, and
    the number in the request itself before both."""
    ours, two = model("llama"), GenerationConfig(max_new_tokens=2)
    (text,) = texts(9)
    requests = [
        h2o.Request(text, generation_config=two),
        h2o.Request(text, generation_config=GenerationConfig(repetition_penalty=1.2)),
        h2o.Request(text, generation_config=two, max_new_tokens=4),
        h2o.Request(text),
    ]
    results = h2o.generate_all(ours, requests, CONFIGS["h2o"], rows=2, max_new_tokens=7)
    assert [len(result.ids) for result in results] == [2, 7, 4, 7]


def test_budgets_of_their_own():
    ours = model("llama")
    configs = [H2OConfig(heavy=n, recent=n) for n in (2, 20, 4, 30, 6, 3, 9, 5)]
    requests = [
        h2o.Request(text, config=config)
        for text, config in zip(texts(*LENGTHS), configs, strict=True)
    ]
    results = h2o.generate_all(ours, requests, CONFIGS["h2o"], rows=3, max_new_tokens=15)
    for request, result in zip(requests, results, strict=True):
        expected = alone(ours, request.prompt, request.config, max_new_tokens=15, do_sample=False)
        assert result.ids == expected


@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_chunks_of_a_prompt(family):
    """The chunks of a prompt must be those of generate(), and running rows must decode between
    them. Bamba itself would count the positions of each pass from 0."""
    ours = model(family)
    settings = GenerationConfig(prefill_chunk_size=7, max_new_tokens=10)
    order = []
    results = h2o.generate_all(
        ours, texts(*LENGTHS), CONFIGS["h2o"], rows=3, generation_config=settings,
        on_token=lambda index, token: order.append(index),
    )  # fmt: skip
    for text, result in zip(texts(*LENGTHS), results, strict=True):
        assert result.ids == alone(ours, text, CONFIGS["h2o"], generation_config=settings)
    before = order[: order.index(2)]  # prompt 2 has 40 tokens, so rows 0 and 1 decode five times
    assert before.count(0) >= 5
    assert [order.count(i) for i in range(len(LENGTHS))] == [10] * len(LENGTHS)


def test_rows_wait_for_so_many_tokens(monkeypatch):
    """Running rows must not wait for more than TOKENS_A_STEP prompt tokens before their next
    step."""
    ours = model("llama")

    def order():
        tokens = []
        results = h2o.generate_all(
            ours, texts(20, 60, 100), CONFIGS["h2o"], rows=3, max_new_tokens=4,
            on_token=lambda index, token: tokens.append(index),
        )  # fmt: skip
        assert len(list(results)) == 3
        return tokens

    assert order() == [0, 1, 2] * 4
    monkeypatch.setattr("h2o.hf.batching.batch_scheduler.TOKENS_A_STEP", 70)
    assert order() == [0, 0, 1, 0, 1, 2, 0, 1, 2, 1, 2, 2]


def test_prefix():
    """Requests that continue a document's cache must answer like a fork of it and leave it
    unchanged."""
    ours = model("llama")
    document, *questions = texts(40, 3, 9, 5, 6, seed=4)
    cache = H2OCache(ours.config, CONFIGS["h2o"])
    ours(torch.tensor([document], device=ours.device), **with_cache(cache))
    asked = [document + question for question in questions]
    results = list(
        h2o.generate_all(ours, asked, CONFIGS["h2o"], rows=2, prefix=cache, max_new_tokens=8)
    )
    for text, result in zip(asked, results, strict=True):
        ids = torch.tensor([text], device=ours.device)
        new = ours.generate(ids, **with_cache(cache.fork()), max_new_tokens=8, do_sample=False)
        assert result.ids == new[0, len(text) :].tolist()
    assert cache.get_seq_length() == len(document)
    goes_on = cache.fork()
    again = h2o.generate_all(ours, asked, CONFIGS["h2o"], rows=2, prefix=goes_on, max_new_tokens=8)
    ours.generate(
        torch.tensor([asked[0]], device=ours.device), **with_cache(goes_on), max_new_tokens=3
    )
    assert [result.ids for result in again] == [result.ids for result in results]
    without_config = h2o.generate_all(ours, asked, rows=2, prefix=cache, max_new_tokens=8)
    assert [result.ids for result in without_config] == [result.ids for result in results]


@pytest.mark.parametrize("way", ["model", "compress_document", "from_dynamic_cache"])
@pytest.mark.parametrize("name", ["llama", *["qwen3_next"] * ("qwen3_next" in FAMILIES)])
def test_a_prefix_from_a_padded_batch(name, way):
    """Its padding is no part of the prompts. None of their tokens may be skipped for it."""
    ours, config = shared(name), CONFIGS["h2o"]
    rows = [torch.tensor([text]) for text in texts(20, 31, seed=4)]
    (question,) = texts(6, seed=5)

    def read(inputs):
        mask = inputs["attention_mask"]
        if way == "compress_document":
            return h2o.compress_document(ours, inputs["input_ids"], config, attention_mask=mask)
        cache = DynamicCache(config=ours.config) if "dynamic" in way else H2OCache(ours, config)
        ours(**inputs, position_ids=(mask.cumsum(1) - 1).clamp(min=0), **with_cache(cache))
        if way == "model":
            return cache
        return H2OCache.from_dynamic_cache(cache, ours, config, attention_mask=mask)

    prefix, alone = read(batch(rows)), read(batch(rows[:1]))
    prefix.batch_select_indices([0])
    prompt = rows[0][0].tolist() + question
    (result,) = h2o.generate_all(ours, [prompt], rows=1, prefix=prefix, max_new_tokens=4)
    wanted = greedy(ours, {"input_ids": torch.tensor([prompt])}, 4, **with_cache(alone))
    assert result.ids == wanted[0].tolist()
    assert result.report["seen"] == len(prompt) + 3
    assert prefix.get_seq_length() == 31  # the caller's own still counts its padding


def test_the_padding_of_a_prefix_does_not_delay_its_growth():
    """A question is evicted down to a fraction of all tokens, of which padding is none."""
    ours, config = shared("llama"), CONFIGS["fractions"]
    rows = [torch.tensor([text]) for text in texts(40, 60)]
    caches, (question,) = [H2OCache(ours, config) for _ in range(2)], texts(60, seed=3)
    for cache, inputs in zip(caches, (batch(rows), batch(rows[:1])), strict=True):
        ours(**inputs, **with_cache(cache))
    caches[0].batch_select_indices([0])
    how = {"rows": 1, "max_new_tokens": 12}
    prompt = rows[0][0].tolist() + question
    padded, alone = (next(h2o.generate_all(ours, [prompt], prefix=x, **how)).ids for x in caches)
    assert padded == alone


@pytest.mark.parametrize(
    ("ids", "words"),
    [(slice(9), "has 9 tokens and the prefix 40"), (slice(1, 41), "first 40 tokens")],
)
def test_a_prompt_without_the_prefix(ids, words):
    """If the first prompt lacks the prefix, all do, so the call must raise. Another one concerns
    itself only."""
    ours, (document, question) = model("llama"), texts(40, 5, seed=4)
    cache = H2OCache(ours.config, CONFIGS["h2o"])
    ours(torch.tensor([document], device=ours.device), **with_cache(cache))
    wrong, how = (document + question)[ids], {"rows": 2, "prefix": cache, "max_new_tokens": 3}
    if len(wrong) == 40:
        wrong += question
    with pytest.raises(ValueError, match=f"{words}.*pass the document and the question"):
        next(h2o.generate_all(ours, [wrong], CONFIGS["h2o"], **how))
    kept, lost = h2o.generate_all(ours, [document + question, wrong], CONFIGS["h2o"], **how)
    assert len(kept.ids) == 3
    assert lost.finish_reason == "error"
    assert words in str(lost.error)


def test_a_checkpoint_that_names_a_cache():
    """The calls make their own caches, so the cache that a checkpoint's generation config names
    must not matter. One that the caller names must be refused."""
    ours, asked = model("llama"), texts(20)
    how = {"rows": 1, "max_new_tokens": 4}
    (expected,) = h2o.generate_all(ours, asked, CONFIGS["h2o"], **how)
    ours.generation_config.cache_implementation = "static"
    (result,) = h2o.generate_all(ours, asked, CONFIGS["h2o"], **how)
    assert result.ids == expected.ids
    own = GenerationConfig(cache_implementation="static")
    with pytest.raises(h2o.UnsupportedError, match=r"cache_implementation='static'.*leave it out"):
        h2o.generate_all(ours, asked, CONFIGS["h2o"], generation_config=own, **how)


def test_the_bytes_of_a_row():
    """A report must count all tensors of the cache."""
    held = []

    def look(index, token):
        engine = results.gi_frame.f_locals["results"].gi_frame.f_locals["self"]
        if engine.running:
            held.append(stored(engine.batch.cache) / 5)

    results = h2o.generate_all(
        model("llama"), texts(*LENGTHS), CONFIGS["h2o"], rows=5, max_new_tokens=20, on_token=look
    )
    assert {result.report["bytes"] for result in results} == {max(held)}


def stored(cache):
    return sum(
        x.numel() * x.element_size()
        for layer in cache.layers
        for name, x in layer.slots._asdict().items()
        if x is not None and name not in ("starts", "rows")
    )


def test_prompts_are_taken_as_rows_become_free():
    """An endless iterator of prompts must not be read far ahead. Results come in order, or as they
    finish."""
    ours = model("llama")
    taken = []

    def endless():
        for i in itertools.count():
            taken.append(i)
            yield h2o.Request(texts(6, seed=i)[0], max_new_tokens=20 if i % 3 == 0 else 2)

    results = h2o.generate_all(ours, endless(), CONFIGS["h2o"], rows=2, as_completed=True)
    first = [result.index for result in itertools.islice(results, 6)]
    assert sorted(first) != first
    assert len(taken) <= 9
    results.close()
    in_order = h2o.generate_all(ours, endless(), CONFIGS["h2o"], rows=2)
    assert [result.index for result in itertools.islice(in_order, 6)] == list(range(6))


def test_prompts_that_cannot_be_read():
    """A prompt that cannot be answered must not change other answers or end the call."""
    ours = model("llama")
    good = texts(9, 12)
    wrong = {
        "no tokens": ([], "has 0 tokens"),
        "a text": ("a text without a tokenizer", "tokenizer"),
        "texts": (["x"], "expected token ids"),
        "no such token": ([10**9], "0 to 96"),
        "negative": ([3, -1], "token ids -1 to 3"),
        "no ids": ([1.0, 2.0], "expected token ids"),
        "a mask": ([True, False, True], "expected token ids"),
        "a bool as a seed": (h2o.Request(good[0], seed=True), "seed is True"),
        "a bool as a length": (h2o.Request(good[0], max_new_tokens=True), "tokens is True"),
        "two prompts": ([[1, 2], [3, 4]], "expected token ids"),
        "an id": (7, "expected token ids"),
        "nothing": (None, "is None; expected token ids"),
        "all that a tokenizer gives": (BatchEncoding({"input_ids": [4, 5]}), "a text, a chat"),
        "no new tokens": (h2o.Request(good[0], max_new_tokens=0), "max_new_tokens is 0"),
    }
    asked = [good[0], *(prompt for prompt, _ in wrong.values()), h2o.Request(good[1])]
    first, *failed, last = h2o.generate_all(ours, asked, CONFIGS["h2o"], rows=2, max_new_tokens=5)
    for result, (_, words) in zip(failed, wrong.values(), strict=True):
        assert (result.finish_reason, result.ids) == ("error", [])
        assert words in str(result.error)
    for text, result in zip(good, (first, last), strict=True):
        assert result.ids == alone(ours, text, CONFIGS["h2o"], max_new_tokens=5, do_sample=False)


class Until(StoppingCriteria):
    """Gives `answer`, or raises it, once a row has `tokens` tokens."""

    def __init__(self, tokens, answer):
        self.tokens, self.answer = tokens, answer

    def __call__(self, ids, scores, **kwargs):
        if ids.shape[1] < self.tokens:
            return False
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_stopping_criteria():
    """The criteria of a request may return a bool or a tensor. Criteria that raise must end their
    own row only."""
    ours = model("llama")
    some = texts(9, 12, 20, 6)
    answers = [True, torch.tensor([True]), RuntimeError("broken"), None]
    requests = [
        h2o.Request(text, stopping_criteria=[] if x is None else [Until(len(text) + 4, x)])
        for text, x in zip(some, answers, strict=True)
    ]
    results = list(h2o.generate_all(ours, requests, CONFIGS["h2o"], rows=3, max_new_tokens=15))
    assert [x.finish_reason for x in results] == ["stop", "stop", "error", "length"]
    assert results[2].error is answers[2]
    for text, result, n in zip(some, results, (4, 4, 0, 15), strict=True):
        want = alone(ours, text, CONFIGS["h2o"], max_new_tokens=15, do_sample=False)
        assert result.ids == want[:n]


def test_stop_strings_of_the_model():
    """The model's stop strings must apply when the call's generation config has none, as in
    generate()."""
    ours = model("llama")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:97]
    core = Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    settings = GenerationConfig(max_new_tokens=20)
    plain = alone(ours, texts(9)[0], CONFIGS["h2o"], generation_config=settings)
    ours.generation_config.stop_strings = [letters[plain[6]]]
    how = {"generation_config": settings, "tokenizer": tokenizer}
    want = alone(ours, texts(9)[0], CONFIGS["h2o"], **how)
    (result,) = h2o.generate_all(ours, texts(9), CONFIGS["h2o"], rows=1, **how)
    assert result.error is None
    assert result.ids == want
    assert len(want) < 20


def test_a_prompt_beyond_the_positions_of_the_model():
    """It is answered, with a warning: minutes of prefill can end in gibberish."""
    ours = model("llama")
    most = ours.config.max_position_embeddings
    some = texts(most, most + 1)
    with pytest.warns(UserWarning, match=f"prompt 1 has {most + 1} tokens.* {most} positions") as w:
        results = list(h2o.generate_all(ours, some, CONFIGS["h2o"], rows=2, max_new_tokens=2))
    assert len(w) == 1
    assert [result.error for result in results] == [None, None]


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_a_table_of_positions_that_comes_to_its_end(family):
    """A row that runs out of positions, in its prompt or later, must end alone."""
    ours = model(family)
    most = ours.config.max_position_embeddings
    some = texts(9, most - 3, 12, most + 1, 7, most - 9)
    results = list(h2o.generate_all(ours, some, CONFIGS["h2o"], rows=3, max_new_tokens=9))
    reasons = [result.finish_reason for result in results]
    assert reasons == ["length", "error", "length", "error", "length", "length"]
    for text, result in zip(some, results, strict=True):
        if result.error is None:
            want = alone(ours, text, CONFIGS["h2o"], max_new_tokens=9, do_sample=False)
            assert result.ids == want
        else:
            assert isinstance(result.error, IndexError)


@pytest.mark.parametrize("call", [1, 2, 5])
def test_what_the_caller_raises_is_raised(call):
    """Exceptions from `on_token`, at a first or later token, and from the prompts must propagate
    instead of becoming the error of a request."""
    ours = model("llama", attention="sdpa")
    count = []

    def called(*args):
        count.append(args)
        if len(count) == call:
            raise KeyError("of the caller")

    def from_file():
        for text in texts(*LENGTHS):
            called()
            yield text

    for asked, how in ((texts(*LENGTHS), {"on_token": called}), (from_file(), {})):
        count.clear()
        with pytest.raises(KeyError, match="of the caller"):
            list(h2o.generate_all(ours, asked, CONFIGS["h2o"], rows=2, max_new_tokens=4, **how))
        assert ours.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("is_patched", [False, True])
def test_threads_that_share_a_model(is_patched):
    """Calls in several threads must not mix up their rows, and a simulation of the same model must
    be refused during them."""
    ours = model("llama", attention="sdpa")
    names = ["h2o", "int8", "mean, sinks"]
    here = threading.Barrier(len(names) + 1)
    answers, some = {}, texts(*LENGTHS)

    def answer(name):
        waits = iter([True])

        def at_work(*_):
            if next(waits, False):
                here.wait(60)
                here.wait(60)

        how = {"rows": 3, "max_new_tokens": 12, "on_token": at_work}
        results = h2o.generate_all(ours, some, CONFIGS[name], **how)
        answers[name] = [result.ids for result in results]

    threads = [threading.Thread(target=answer, args=(name,)) for name in names]
    with h2o.patched(ours, CONFIGS["h2o"]) if is_patched else contextlib.nullcontext():
        for thread in threads:
            thread.start()
        here.wait()
        with (
            pytest.raises(RuntimeError, match="by another thread"),
            h2o.simulated(ours, CONFIGS["h2o"]),
        ):
            pass
        here.wait()
        for thread in threads:
            thread.join()
    assert ours.config._attn_implementation == "sdpa"
    ours.set_attn_implementation("h2o")
    for name in names:
        for text, ids in zip(some, answers[name], strict=True):
            assert ids == alone(ours, text, CONFIGS[name], max_new_tokens=12, do_sample=False)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({}, TypeError, "rows"),
        ({"rows": 0}, ValueError, "at least 1"),
        ({"rows": 2.5}, TypeError, "rows is 2.5; expected an integer"),
        ({"rows": 2, "max_new_tokens": 0}, ValueError, "max_new_tokens is 0"),
        ({"rows": 2, "prompts": "a text"}, ValueError, "a single str; pass a list"),
        ({"rows": 2, "prompts": {"input_ids": [[1, 2]]}}, ValueError, "a single dict"),
        ({"rows": 2, "prefix": DynamicCache()}, TypeError, "prefix is a DynamicCache"),
        (
            {"rows": 2, "generation_config": GenerationConfig(num_beams=3)},
            h2o.UnsupportedError,
            "beam",
        ),
        (
            {"rows": 2, "generation_config": GenerationConfig(use_cache=False)},
            h2o.UnsupportedError,
            "use_cache=False, but generate_all always uses an H2OCache",
        ),
        (
            {"rows": 2, "generation_config": GenerationConfig(output_attentions=True)},
            h2o.UnsupportedError,
            "output_attentions=True, but a Result has tokens only",
        ),
        (
            {"rows": 2, "generation_config": GenerationConfig(token_healing=True)},
            h2o.UnsupportedError,
            "token_healing=True, which generate_all does not support",
        ),
        ({"rows": 2, "seed": "x"}, TypeError, "seed is 'x'; expected an integer"),
        ({"rows": 2, "seed": True}, TypeError, "seed is True; expected an integer"),
        ({"rows": 2, "seed": 2**63}, ValueError, r"expected an integer from .* to 2\*\*63 - 1"),
        ({"rows": True}, TypeError, "rows is True; expected an integer"),
        ({"rows": 2, "max_new_tokens": True}, TypeError, "max_new_tokens is True; expected"),
    ],
)
def test_refused(how, error, words):
    how = {"prompts": texts(5), "max_new_tokens": 3, **how}
    with pytest.raises(error, match=words):
        list(h2o.generate_all(model("llama"), h2o_config=CONFIGS["h2o"], **how))


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"prompts": ["A text", "Another"]}, ValueError, "need a tokenizer: pass tokenizer="),
        ({"prompts": (h2o.Request("A text"),)}, ValueError, "need a tokenizer"),
        ({"prompts": [[{"role": "user", "content": "A chat"}]]}, ValueError, "need a tokenizer"),
        ({"tokenizer": "llama"}, TypeError, "tokenizer is 'llama'; expected a tokenizer of"),
        ({"generation_config": {"top_k": 2}}, TypeError, "generation_config is .*; expected"),
    ],
)
def test_what_concerns_all_prompts_is_refused_at_once(how, error, words):
    how = {"prompts": [[2, 3]], "rows": 2, **how}
    with pytest.raises(error, match=words):
        h2o.generate_all(model("llama"), h2o_config=CONFIGS["h2o"], **how)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"seed": "x"}, "seed is 'x'; expected an integer"),  # though nothing is sampled
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5; expected an integer"),
        ({"generation_config": {"do_sample": True}}, "expected a transformers.GenerationConfig"),
    ],
)
def test_a_wrong_setting_of_a_request(setting, words):
    requests = [h2o.Request(texts(5)[0], **setting), texts(5)[0]]
    wrong, right = h2o.generate_all(
        model("llama"), requests, CONFIGS["h2o"], rows=2, max_new_tokens=3
    )
    assert words in str(wrong.error)
    assert right.error is None


@pytest.mark.parametrize(
    ("rows", "config", "words"),
    [
        (1, H2OConfig(heavy=6, recent=6, score_by="mean"), "score_by='mean'.*'sum'"),
        (1, H2OConfig(heavy=5, recent=6), "heavy=5, but this call has 6"),
        (1, H2OConfig(heavy=6, recent=6, kv_dtype="int8"), "kv_dtype='int8'"),
        (2, CONFIGS["h2o"], "one row; this one has 2"),
    ],
)
def test_a_prefix_that_was_read_otherwise(rows, config, words):
    ours = model("llama")
    cache = H2OCache(ours.config, config)
    ours(torch.tensor(texts(20) * rows, device=ours.device), **with_cache(cache))
    with pytest.raises(ValueError, match=words):
        h2o.generate_all(ours, [], CONFIGS["h2o"], rows=2, prefix=cache)


@pytest.mark.parametrize("config", [H2OConfig(budget=16), H2OConfig(heavy=lambda i, n: 4 + i)])
def test_settings_that_a_model_changes(config):
    """OPT has no echo, so its caches replace `budget=` by other settings. A prefix, a request and
    the call with the same settings must still agree, and short prompts must share a pass."""
    ours = model("opt")
    document, *questions = texts(40, 3, 4, seed=4)
    prefix = H2OCache(ours, config)
    ours(torch.tensor([document], device=ours.device), **with_cache(prefix))
    asked = [document + question for question in questions]
    for text, result in zip(
        asked,
        h2o.generate_all(ours, asked, config, rows=2, prefix=prefix, max_new_tokens=8),
        strict=True,
    ):
        ids = torch.tensor([text], device=ours.device)
        new = ours.generate(ids, **with_cache(prefix.fork()), max_new_tokens=8, do_sample=False)
        assert result.ids == new[0, len(text) :].tolist()
    passes = []
    ours.register_forward_pre_hook(
        lambda module, args, kwargs: passes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    own = [h2o.Request(x, config=config) for x in asked]
    results = list(h2o.generate_all(ours, own, config, rows=2, max_new_tokens=3))
    assert [x.error for x in results] == [None, None]
    assert passes == [2, 2, 2]


def test_sliding_windows_are_refused():
    with pytest.raises(h2o.UnsupportedError, match=r"generate_all cannot be .* sliding windows"):
        h2o.generate_all(model("gemma2"), texts(5), CONFIGS["h2o"], rows=2)
    cache = H2OCache(model("gemma2").config, CONFIGS["h2o"])
    with pytest.raises(h2o.UnsupportedError, match=r"generate_all cannot be .* sliding windows"):
        h2o.generate_all(model("gemma2"), texts(5), CONFIGS["h2o"], rows=2, prefix=cache)


def test_token_ids_of_any_integers():
    ours, (ids,) = model("llama"), prompts(9)
    kinds = [ids[0].numpy().astype(kind) for kind in (np.uint16, np.int32, np.int64)]
    results = h2o.generate_all(ours, kinds, CONFIGS["h2o"], rows=2, max_new_tokens=3)
    assert len({tuple(result.ids) for result in results}) == 1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_is_constant_over_a_thousand_requests():
    """Memory must not grow with the number of requests, of which every tenth fails."""
    ours = model("llama")
    long = texts(*range(5, 45))
    requests = (
        h2o.Request([] if i % 10 == 9 else long[i % 40], max_new_tokens=1 + i % 7)
        for i in range(1000)
    )
    held, errors = [], 0
    for i, result in enumerate(h2o.generate_all(ours, requests, CONFIGS["int8"], rows=8)):
        assert result.index == i
        errors += result.finish_reason == "error"
        if i in (299, 999):
            held.append(int(Path("/proc/self/statm").read_text().split()[1]) * PAGE)
    assert errors == 100
    assert held[1] - held[0] < 4 << 20


@pytest.mark.slow
def test_the_default_model():
    """With the default model, texts, chats and stop strings must give the tokens of generate()."""
    ours, tokenizer = models.load_model(attn_implementation="h2o")
    ours.set_attn_implementation("h2o")
    asked = ["The capital of France is", [{"role": "user", "content": "Say hello."}]]
    settings = GenerationConfig(stop_strings=["."], max_new_tokens=30, eos_token_id=2)
    config = H2OConfig(heavy=8, recent=8)
    results = list(
        h2o.generate_all(
            ours, asked, config, rows=2, generation_config=settings, tokenizer=tokenizer
        )
    )
    chat = tokenizer.apply_chat_template(
        asked[1], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    for ids, result in zip([tokenizer(asked[0])["input_ids"], chat], results, strict=True):
        expected = alone(ours, ids, config, generation_config=settings, tokenizer=tokenizer)
        assert result.ids == expected
        assert result.text == tokenizer.decode(expected, skip_special_tokens=True)
    assert results[0].finish_reason == "stop"
    assert "." in results[0].text


def test_a_prompt_with_the_pad_id():
    """The padding id in a prompt is a token like any other. It must not be masked."""
    ours, text = shared("llama"), [0, 0, 5, 9]
    settings = GenerationConfig(
        pad_token_id=0, eos_token_id=7, repetition_penalty=1.3, max_new_tokens=12
    )
    ids = torch.tensor([text], device=ours.device)
    how = {"generation_config": settings, **with_cache(H2OCache(ours.config, CONFIGS["h2o"]))}
    expected = ours.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, 4:].tolist()
    (result,) = h2o.generate_all(ours, [text], CONFIGS["h2o"], rows=1, generation_config=settings)
    assert result.ids == expected
