"""`--protocol read`: documents are cut before the question, which is asked afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from lm_eval.api.instance import Instance

from h2o import H2OCache
from h2o.compat import with_cache
from h2o.evaluation.questions import question_tokens
from h2o.evaluation.setting import parse
from h2o.hf.document.compress import compress_document
from tests.evaluation.conftest import measured, table_of
from tests.evaluation.test_lm import close, make, numbers

DOCUMENT = "The gate of the farm is blue.\nIt was painted in May, when the wells were dry.\n"
CONTEXTS = [
    DOCUMENT + "Question: What colour is the gate?\nAnswer:",
    DOCUMENT * 2 + "When was it painted?",
    "Question: is it?\nAnswer: no\n\n" + DOCUMENT + "Q: were the wells dry in May, or not?\n\nA:",
    "One line, and therefore",
]
QUESTIONS = [
    "Question: What colour is the gate?\nAnswer:",
    "When was it painted?",
    "Q: were the wells dry in May, or not?\n\nA:",
    None,
]
RULER = {
    "niah_single_1": (
        "A special magic number is hidden within the following text.\nThe grass is green.\n"
        "One of the special magic numbers for wry-yak is: 61.\nThere and back again.\n",
        "What is the special magic number for wry-yak mentioned in the provided text? The special "
        "magic number for wry-yak mentioned in the provided text is",
    ),
    "niah_multikey_2": (
        "One of the special magic numbers for odd-ox is: 38.\n"
        "One of the special magic numbers for wry-yak is: 61.\n",
        "What is the special magic number for odd-ox mentioned in the provided text? The special "
        "magic number for odd-ox mentioned in the provided text is",
    ),
    "niah_multikey_3": (
        "One of the special magic uuids for 2f-70 is: 9c-b1.\n"
        "One of the special magic uuids for 55-a4 is: 07-d3.\n",
        "What is the special magic uuid for 55-a4 mentioned in the provided text? The special "
        "magic uuid for 55-a4 mentioned in the provided text is",
    ),
    "ruler_vt": (
        "The sky is blue. VAR A = 12\nQuestion: Find all variables that are assigned the value "
        "12. Answer: they are: A\n\nHere we go. VAR B = 97 The sun is yellow. VAR C = VAR B\n",
        "Question: Find all variables that are assigned the value 97 in the text above. Answer: "
        "2 variables are assgined the value 97, they are:",
    ),
    "ruler_cwe": (
        "Below is a numbered list of words.\n1. tree 2. boat 3. tree 4. tree 5. boat 6. ant\n",
        "Question: What are the 10 most common words in the above list?\n\nAnswer: The top 10 "
        "words that appear most often in the list are:",
    ),
    "ruler_fwe": (
        "Find the three most frequently appeared coded words. ... dkwq ... dkwq ... pzva\n",
        "Question: Please ignore the dots '....'. What are the three most frequently appeared "
        "words? Answer: the three most frequently appeared words are:",
    ),
}
"""Abridged rows of RULER's tasks: document and question."""
ANSWERS = [" blue, as I said", " May"]
PAIRS = [(context, answer) for context in CONTEXTS for answer in ANSWERS]
SETTINGS = ["h2o:4+4", "robust:0.4", "sink:2+5", "echo:0.2", "reread:0.2"]


@pytest.fixture(scope="module")
def lm(tokenizer):
    return make(tokenizer)


def alone(lm, setting, context, new):
    """A cache driven by hand that has read the document, and the tokens after it, ending with
    `new`, a tensor [1, n]."""
    ids = torch.tensor([lm.tok_encode(context)])
    n = ids.shape[1] - question_tokens(ids[0].tolist(), lm.tokenizer)
    if setting.reads_twice:
        cache = compress_document(
            lm.model, ids[:, :n], setting.config, readings=2, tokenizer=lm.tokenizer
        )
    else:
        cache = H2OCache(lm.model.config, setting.config, prompt_length=n)
        with torch.no_grad():
            lm.model(ids[:, :n], **with_cache(cache))
    return cache, torch.cat([ids[:, n:], new], 1)


# ---- Where it begins ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context", "question"),
    [*zip(CONTEXTS, QUESTIONS, strict=True), *(("".join(row), row[1]) for row in RULER.values())],
)
def test_where_a_question_begins(tokenizer, context, question):
    tokens = tokenizer(context, add_special_tokens=False)["input_ids"]
    n = question_tokens(tokens, tokenizer)
    if question is None:
        assert n == 1
    else:
        assert tokenizer.decode(tokens[-n:]).strip() == question
        assert question not in tokenizer.decode(tokens[1 - n :])


def test_a_token_is_no_document(tokenizer, lm):
    assert question_tokens([5, 6], tokenizer) == 1
    with pytest.raises(ValueError, match=r"use protocol=drop"):
        question_tokens([5], tokenizer)
    lm.use(parse("full"), "read")
    with pytest.raises(ValueError, match=r"use protocol=drop"):
        lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("abc",), 0)], True)


# ---- What is answered --------------------------------------------------------------------------


def test_a_budget_that_never_bites_is_the_protocol_drop(lm):
    lm.use(parse("full"), "drop")
    want = numbers(lm, PAIRS)
    for name in ("full", "h2o:500+0", "echo:500"):
        lm.use(parse(name), "read")
        got = numbers(lm, PAIRS)
        close(got[0], want[0])
        assert got[1] == want[1]


@pytest.mark.parametrize("name", SETTINGS)
def test_log_likelihoods(lm, name):
    """Log-likelihoods in a batch must equal those of single caches driven by hand, and differ from
    those of the whole context."""
    setting = parse(name)
    lm.use(setting, "read")
    lm.batch_size_per_gpu = 5
    together = numbers(lm, PAIRS)[0]
    for (context, answer), got in zip(PAIRS, together, strict=True):
        tokens = torch.tensor([lm.tok_encode(answer)])
        cache, rest = alone(lm, setting, context, tokens)
        logits = stepped(lm.model, rest, tokens.shape[1], cache)
        want = logits.log_softmax(-1).gather(-1, tokens[0, :, None]).sum()
        close(got, want.double())
    if setting.is_cache:
        lm.use(setting, "drop")
        assert (numbers(lm, PAIRS)[0] - together).abs().max() > 0.01


def stepped(model, ids, n, cache):
    """Logits [n, vocabulary] of the last n tokens: everything before them at once, then one by
    one."""
    pieces = [ids[:, :-n], *ids[:, -n:-1].split(1, dim=1)]
    with torch.no_grad():
        logits = [model(x, **with_cache(cache)).logits[0, -1] for x in pieces]
    return torch.stack(logits)


@pytest.mark.parametrize("name", SETTINGS)
def test_texts(lm, name):
    """Generation with padding before documents and before questions, and a different end for each
    row."""
    setting = parse(name)
    lm.use(setting, "read")
    lm.batch_size_per_gpu = 3
    how = {"until": ["\n\n"], "max_gen_toks": 9}
    requests = [Instance("generate_until", {}, (x, how), i) for i, x in enumerate(CONTEXTS)]
    texts = lm.generate_until(requests, True)
    for context, text in zip(CONTEXTS, texts, strict=True):
        assert lm.tokenizer.decode(written(lm, setting, context, 9)).startswith(text)
        assert text


def written(lm, setting, context, n):
    """The first n tokens of an answer, from a cache driven by hand."""
    cache, rest = alone(lm, setting, context, torch.empty(1, 0, dtype=torch.long))
    tokens = []
    with torch.no_grad():
        for _ in range(n):
            rest = lm.model(rest, **with_cache(cache)).logits[:, -1:].argmax(-1)
            tokens.append(rest.item())
    return tokens


def test_beams_continue_the_documents(lm):
    """With --gen_kwargs num_beams=3, generate() repeats each question for three beams, and the
    cache of the documents must follow."""
    how = {"until": ["\n\n"], "max_gen_toks": 9, "num_beams": 3}
    requests = [Instance("generate_until", {}, (x, how), i) for i, x in enumerate(CONTEXTS)]
    lm.batch_size_per_gpu = 3
    texts = {}
    for protocol in ("drop", "read"):
        for name in ("full", "h2o:4+2"):
            lm.use(parse(name), protocol)
            texts[protocol, name] = lm.generate_until(requests, True)
    assert texts["read", "full"] == texts["drop", "full"]
    assert texts["read", "h2o:4+2"] not in (texts["drop", "h2o:4+2"], texts["read", "full"])


def test_what_is_said_of_it(lm):
    lm.use(parse("h2o:0.5+0"), "read")
    numbers(lm, PAIRS[:1])
    n = len(lm.tok_encode(CONTEXTS[0]))
    said = lm.describe()
    assert (said["protocol"], said["ratio_of"], said["prompt_len"]) == (
        "read",
        "prompt",
        "document",
    )
    document = n - question_tokens(lm.tok_encode(CONTEXTS[0]), lm.tokenizer)
    assert (said["tokens_seen"], said["tokens_kept"]) == (document, document // 2)


def test_generated_texts_are_counted(lm):
    prompts = [lm.tok_encode(x) for x in CONTEXTS]
    documents = [len(x) - question_tokens(x, lm.tokenizer) for x in prompts]
    requests = [Instance("generate_until", {}, (x, {"max_gen_toks": 2}), 0) for x in CONTEXTS]
    for protocol, lengths in (("drop", list(map(len, prompts))), ("read", documents)):
        lm.use(parse("local:8"), protocol)
        lm.generate_until(requests, True)
        tally = lm.tally
        assert (tally.requests, tally.tokens_seen) == (4, sum(lengths))
        assert tally.tokens_kept == 4 * 8


def test_rows_of_ruler_are_cut_before_their_questions(lm):
    """Rows of every task in a batch must equal single rows with a cache driven by hand."""
    setting = parse("reread:0.3")
    lm.use(setting, "read")
    lm.batch_size_per_gpu = 6
    how = {"until": [], "max_gen_toks": 3, "do_sample": False}
    contexts = ["".join(row)[-300:] for row in RULER.values()]
    requests = [Instance("generate_until", {}, (x, how), i) for i, x in enumerate(contexts)]
    texts = lm.generate_until(requests, True)
    for context, text in zip(contexts, texts, strict=True):
        assert lm.tokenizer.decode(written(lm, setting, context, 3)) == text
    asked = [len(lm.tok_encode(question)) for _, question in RULER.values()]
    seen = [min(len(x), 300) - n for x, n in zip(map(lm.tok_encode, contexts), asked, strict=True)]
    assert lm.tally.tokens_seen == sum(seen)


@pytest.mark.parametrize(
    ("name", "protocol", "words"),
    [
        ("mask-local:0.1+0.1", "read", "use protocol=simulate"),
        ("reread:0.1", "drop", "use protocol=read"),
        ("reread:0.1", "simulate", "use protocol=read"),
    ],
)
def test_what_does_not_go_together(lm, name, protocol, words):
    with pytest.raises(ValueError, match=words):
        lm.use(parse(name), protocol)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tasks_of_ruler(folder, tmp_path):
    """RULER's tasks are generated for the model's tokenizer. Lengths without texts have no
    number."""
    printed = subprocess.run(
        [
            sys.executable, "-m", "h2o", "eval", "--tasks", "niah_single_1", "--model", folder,
            "--metadata", '{"max_seq_lengths": [8192]}', "--limit", "2", "--protocol", "read",
            "--compare", "full,echo-bytes:0.5", "-o", tmp_path,
        ],
        check=True,
        timeout=600,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout  # fmt: skip
    results = measured(tmp_path)
    assert list(results) == ["full", "echo-bytes:0.5"]
    for content in results.values():
        facts = content["config"]["h2o"]
        assert (facts["protocol"], facts["requests"]) == ("read", 2)
    for row in table_of(printed).values():
        assert [title for title in row if "niah_single_1" in title] == ["niah_single_1 8192"]
