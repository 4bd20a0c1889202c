"""lm-eval's generate_until in rows: the texts that HFLM gives each request alone."""

from __future__ import annotations

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from h2o.evaluation import generate_until
from h2o.evaluation.lm import H2OLM
from h2o.evaluation.setting import parse
from h2o.models import embedded_folder
from tests.evaluation import conftest

WORDS = "it had not rained since spring and the wells ran dry the farmers who had seen".split()
CONTEXTS = [" ".join(WORDS[i % 9 : i % 9 + 1 + i % 7]) * (1 + i % 3) for i in range(14)]
LONG = "one two three four five six " * 40
SETTINGS = ["h2o:3+3", "h2o:0.1+0.1", "robust:0.2", "echo:0.3", "h2o:4+4/kv_dtype=int8",
            "h2o:4+4/positions=cache_relative", "h2o:0.1+0.1/score_by=mean-echo/head_shares=echo",
            "local:6"]  # fmt: skip


@pytest.fixture(scope="module")
def pairs():
    """A tokenizer whose tokens are bytes and, in the place of some, pairs of letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "abcdefghijklmnopqrstuvwxyz"
    merges = [(a, b) for a in letters[::2] for b in letters[1:16:2]]
    ascii_first = sorted(alphabet, key=lambda x: not x.isascii())
    tokens = ascii_first[: 256 - len(merges)] + [a + b for a, b in merges]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    vocabulary |= {"<end>": conftest.ENDED, "<pad>": conftest.PADDED}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<end>", pad_token="<pad>",
        model_max_length=conftest.POSITIONS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def lm(pairs):
    return H2OLM(conftest.build(), tokenizer=pairs, batch_size=4)


def asked(context, **how):
    return Instance("generate_until", {}, (context, how), 0, ("task", 0, 1))


def alone(lm, requests):
    """Of HFLM, each in a batch of its own, with the cache of the setting."""
    lm.batch_size_per_gpu = 1
    return [HFLM.generate_until(lm, [request], True)[0] for request in requests]


def in_rows(lm, requests, rows=4):
    lm.batch_size_per_gpu = rows
    return lm.generate_until(requests, True)


@pytest.mark.parametrize("name", SETTINGS)
def test_texts_are_those_of_each_request_alone(lm, passes, name):
    """Mixed lengths, and a prompt that is cut to what the model takes."""
    lm.use(parse(name), "drop")
    contexts = [*CONTEXTS[:5], LONG, *CONTEXTS[5:8]]
    requests = [asked(x, until=["e", "a", "o"], max_gen_toks=40) for x in contexts]
    want = alone(lm, requests)
    assert len(set(want)) > 7
    for rows in (1, 4):
        passes.clear()
        assert in_rows(lm, requests, rows) == want
        assert max(passes) == rows
    steps = len(passes)
    passes.clear()
    HFLM.generate_until(lm, requests, True)
    assert steps < 0.75 * len(passes)


def test_stop_strings(lm, passes):
    """At the beginning, amid and at the end of a token, and over several: a text ends before the
    first of them."""
    lm.use(parse("h2o:3+3"), "drop")
    whole = alone(lm, [asked(context, max_gen_toks=40) for context in CONTEXTS])
    unstopped = len(passes)
    requests, want = [], []
    for i, (context, text) in enumerate(zip(CONTEXTS, whole, strict=True)):
        starts = [k for k in range(2, len(text) - 2) if text[k : k + 3].isascii()]
        k = starts[i * len(starts) // len(CONTEXTS)]
        stop = text[k : k + 1 + i % 3]
        requests.append(asked(context, until=[stop, "<never>"], max_gen_toks=40))
        want.append(text.partition(stop)[0])
    passes.clear()
    assert in_rows(lm, requests, 1) == want
    assert len(passes) < 0.6 * unstopped
    assert in_rows(lm, requests) == want


def test_a_stop_string_that_the_prompt_begins_is_none(lm):
    lm.use(parse("h2o:3+3"), "drop")
    whole = alone(lm, [asked(context, max_gen_toks=9) for context in CONTEXTS])
    requests = [
        asked(context, until=context[-1] + text[0], max_gen_toks=9)
        for context, text in zip(CONTEXTS, whole, strict=True)
    ]
    assert in_rows(lm, requests) == alone(lm, requests)
    assert sum(map(str.__eq__, in_rows(lm, requests), whole)) > 10


@pytest.mark.parametrize(
    "how",
    [
        {"max_length": 60},
        {"max_new_tokens": 5, "until": None},
        {"until": ""},
        {"until": ["e", ""], "max_tokens": 6},
        {"repetition_penalty": 1.5, "max_gen_toks": 20},
        {"min_new_tokens": 8, "until": [], "max_gen_toks": 20},
        {"do_sample": False, "temperature": 0.7, "max_gen_toks": 4},
        {"num_beams": 2, "max_gen_toks": 6},
        {"prefill_chunk_size": 5, "max_gen_toks": 6},
    ],
)
def test_arguments(lm, how):
    """As HFLM reads them; beams go HFLM's way."""
    lm.use(parse("h2o:3+3"), "drop")
    how = {name: value for name, value in how.items() if value is not None}
    requests = [asked(context, **how) for context in CONTEXTS[:6]]
    assert in_rows(lm, requests, 3) == alone(lm, requests)


@pytest.mark.parametrize(
    ("context", "how", "words"),
    [
        ("it had", {"max_gen_toks": conftest.POSITIONS}, "maximum sequence length"),
        ("it had", {"max_gen_toks": 5, "speed": 3}, "speed"),
        ("it had", {"max_gen_toks": 0}, "max_length"),
        ("", {"max_gen_toks": 5}, "without tokens"),
    ],
)
def test_what_cannot_be_answered(lm, context, how, words):
    lm.use(parse("h2o:3+3"), "drop")
    requests = [asked(x, **how) for x in (CONTEXTS[0], context)]
    with pytest.raises((ValueError, AssertionError), match=words):
        in_rows(lm, requests)


def test_sampling(lm):
    """Does not depend on the batch size, but on torch's seed; no two requests are alike."""
    lm.use(parse("h2o:3+3"), "drop")
    how = {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "top_k": 40, "max_gen_toks": 9}
    requests = [asked(context, **how) for context in [*CONTEXTS[:4], CONTEXTS[0]]]
    results = []
    for rows in (1, 4):
        torch.manual_seed(5)
        results.append([in_rows(lm, requests, rows) for _ in range(2)])
    assert results[0] == results[1]
    first, again = results[0]
    assert first[0] != again[0]
    assert first[0] != first[-1]


def test_requests_with_different_arguments(lm, passes):
    """Have rows side by side; those that rows do not serve are answered too, in order."""
    lm.use(parse("h2o:3+3"), "drop")
    how = [{"max_gen_toks": 20}, {"num_beams": 2, "max_gen_toks": 6}, {"max_gen_toks": 5}]
    requests = [asked(context, **how[i % 3]) for i, context in enumerate(CONTEXTS)]
    want = alone(lm, requests)
    passes.clear()
    assert in_rows(lm, requests) == want


@pytest.mark.parametrize("end", ["e", 0])
def test_thoughts(pairs, end):
    """What precedes the end of thoughts, a text or the number of a token, is no answer."""
    lm = H2OLM(conftest.build(), tokenizer=pairs, batch_size=4, think_end_token="e")
    lm.use(parse("h2o:3+3"), "drop")
    requests = [asked(context, max_gen_toks=30) for context in CONTEXTS[:6]]
    if end == 0:
        lm.think_end_token = None
        whole = alone(lm, requests)
        lm.think_end_token = lm.tok_encode(whole[0])[9]
    want = alone(lm, requests)
    lm.think_end_token, end = None, lm.think_end_token
    assert alone(lm, requests) != want
    lm.think_end_token = end
    assert in_rows(lm, requests) == want


def test_a_beginning_of_texts(pairs):
    """Prompts that have it, and others, in one batch."""
    pairs.add_special_tokens({"bos_token": "<pad>"})
    lm = H2OLM(conftest.build(), tokenizer=pairs, batch_size=4, add_bos_token=True)
    lm.use(parse("h2o:3+3"), "drop")
    requests = [asked("<pad>" * (i % 2) + x, max_gen_toks=9) for i, x in enumerate(CONTEXTS)]
    assert in_rows(lm, requests) == alone(lm, requests)


def test_answers_are_remembered_at_once(lm, tmp_path, monkeypatch):
    """By lm-eval's --use_cache: an interrupted run goes on where it was."""
    lm.use(parse("h2o:3+3"), "drop")
    requests = [asked(x, max_gen_toks=(3, 20)[i % 2]) for i, x in enumerate(CONTEXTS)]
    want = alone(lm, requests)
    lm.batch_size_per_gpu = 4
    cut, count = generate_until._text, []

    def interrupted(*args):
        count.append(1)
        if len(count) == 6:
            raise KeyboardInterrupt
        return cut(*args)

    monkeypatch.setattr(generate_until, "_text", interrupted)
    hook = lm.cache_hook
    try:
        remembering = CachingLM(lm, str(tmp_path / "answers"))
        with pytest.raises(KeyboardInterrupt):
            remembering.generate_until(requests)
        assert remembering.generate_until(requests) == want
    finally:
        lm.set_cache_hook(hook)
    assert len(count) == 6 + len(CONTEXTS) - 5


@pytest.mark.parametrize(
    ("model_type", "setting", "protocol"),
    [("gemma2", "h2o:3+3", "drop"), ("llama", "full", "drop"), ("llama", "h2o:3+3", "read"),
     ("llama", "full", "simulate")],
)  # fmt: skip
def test_what_rows_do_not_serve_goes_in_batches(pairs, model_type, setting, protocol, monkeypatch):
    """Sliding windows, the full cache, documents: the texts of before."""
    lm = H2OLM(conftest.build(model_type), tokenizer=pairs, batch_size=4)
    lm.use(parse(setting), protocol)
    monkeypatch.setattr(generate_until, "generate_texts", None)
    requests = [asked(context, max_gen_toks=9) for context in CONTEXTS]
    assert in_rows(lm, requests) == alone(lm, requests)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["h2o:0.1+0.1", "robust:0.2"])
def test_the_default_model(setting):
    """A task of lm-eval's, with examples and a stop that stands amid tokens."""
    name = str(embedded_folder())
    ours = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    lm = H2OLM(ours, tokenizer=name, batch_size=4)
    lm.use(parse(setting), "drop")
    shots = "".join(f"Question: what is {i} plus {i}?\nAnswer: {2 * i}.\n\n" for i in range(3, 9))
    stops = [["\n\n"], ["ns"], [" th", "Q"], ["tio"]]
    requests = [
        asked(
            shots[60 * (i % 3) :] + f"Question: {x}\nAnswer:", until=stops[i % 4], max_gen_toks=24
        )
        for i, x in enumerate(
            ["what is the capital of France?", "why is the sky blue?", "how do plants eat?"] * 4
        )
    ]
    want = alone(lm, requests)
    assert len(set(want)) > 5
    assert in_rows(lm, requests) == want
