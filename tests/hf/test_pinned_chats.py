"""Pinned keys of requests, documents and chats."""

from __future__ import annotations

import functools

import pytest
import torch

import h2o
from h2o import H2OCache, Request, cli
from h2o.compat import with_cache
from h2o.hf.batching.batch_scheduler import Scheduler
from tests.hf.chat_templates import TURNS, byte_tokenizer
from tests.hf.test_cross_head_budget import deep
from tests.hf.test_pinned import SMALL, SPAN, held, survives
from tests.hf.tiny import batch, needs_compiler, prompts, shared
from tests.test_cli import tiny  # noqa: F401

SYSTEM = {"role": "system", "content": "Answer in one word."}
CHAT = [
    SYSTEM,
    *({"role": "user", "content": x} for x in ("Where is the pier?", "And who built it?")),
]


@pytest.fixture
def tokenizer():
    made = byte_tokenizer()
    made.chat_template = TURNS
    return made


# ---- generate_all ------------------------------------------------------------------------------


def rows_at_their_ends(monkeypatch):
    """A dict that gets the positions held by each request at its last token, by request index."""
    ends = {}
    leave = Scheduler._leave

    def watching(self, row):
        ends[self.running[row].index] = held(self.batch.cache, row)
        leave(self, row)

    monkeypatch.setattr(Scheduler, "_leave", watching)
    return ends


@pytest.mark.parametrize(
    "more", [{}, {"head_shares": [[0.3, 1.7], [1.0, 0.6]]}, {"kv_dtype": "int8"}]
)
def test_pins_of_requests(more, monkeypatch):
    """Each request must keep its own pins, or else those of all requests, and answer as
    `generate()` does alone."""
    ours, ends = shared("llama"), rows_at_their_ends(monkeypatch)
    spans = {1: [(23, 30)], 3: [(1, 4), (30, 33)], 4: "prompt"}
    texts = [x[0].tolist() for x in prompts(40, 30, 25, 37, 5)]
    requests = [Request(x, pinned=spans.get(i)) for i, x in enumerate(texts)]
    how = {"rows": 2, "max_new_tokens": 20, "pinned": [SPAN]}
    for result in [*h2o.generate_all(ours, requests, **SMALL | more, **how)]:
        pins = spans.get(result.index, [SPAN])
        for span in [(0, 5)] if pins == "prompt" else pins:
            assert all(set(range(*span)) <= head for head in ends[result.index])
        alone = H2OCache(ours, **SMALL | more, pinned=pins)
        ids = torch.tensor([texts[result.index]], device=ours.device)
        out = ours.generate(ids, max_new_tokens=20, do_sample=False, **with_cache(alone))
        assert out[0, ids.shape[1] :].tolist() == result.ids


def test_the_system_turn_of_requests(tokenizer, monkeypatch):
    """The system turn must stay when heads share a budget by echo. A chat without one must get an
    error of its own."""
    ends = rows_at_their_ends(monkeypatch)
    ours = deep(vocab_size=256)
    how = {"rows": 2, "max_new_tokens": 30, "tokenizer": tokenizer, "pinned": "system"}
    results = [*h2o.generate_all(ours, [CHAT, CHAT[1:], CHAT[:2]], budget=60, **how)]
    assert [x.finish_reason for x in results] == ["length", "error", "length"]
    assert "no system message" in str(results[1].error)
    _, stop = h2o.system_span(tokenizer, CHAT)
    for index in (0, 2):
        assert all(set(range(stop)) <= head for head in ends[index])


def test_pins_of_a_prefix(monkeypatch):
    """Requests that continue a prefix must keep its pinned keys."""
    ours, ends, (text,) = shared("llama"), rows_at_their_ends(monkeypatch), prompts(40)
    prefix = H2OCache(ours, **SMALL, pinned=[SPAN])
    ours(text[:, :16], **with_cache(prefix))
    how = {"rows": 2, "max_new_tokens": 20, "prefix": prefix}
    assert len([*h2o.generate_all(ours, [text[0].tolist()] * 3, prefix.config, **how)]) == 3
    assert all(set(range(*SPAN)) <= head for heads in ends.values() for head in heads)


@needs_compiler
def test_compiled_rows(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    ours, ends = shared("llama"), rows_at_their_ends(monkeypatch)
    texts = [x[0].tolist() for x in prompts(40, 30, 25)]
    how = {"rows": 2, "max_new_tokens": 12, "pinned": [SPAN], "compileable": True}
    assert len([*h2o.generate_all(ours, texts, **SMALL, **how)]) == 3
    assert all(set(range(*SPAN)) <= head for heads in ends.values() for head in heads)


def test_requests_that_cannot_be_pinned():
    ours, text = shared("llama"), prompts(20)[0]
    cache = H2OCache(ours, **SMALL)
    ours(text[:, :8], **with_cache(cache))
    settings = {**SMALL, "rows": 1, "max_new_tokens": 2}
    for prompt, more, word in [
        (Request(text, pinned=[(15, 25)]), {}, "ends at token 25, but the prompt has 20"),
        (Request(text, pinned="system"), {}, "needs a chat"),
        (Request(text, pinned=[(0, 18)]), {}, "give budget="),
        (Request(text, pinned=[SPAN]), {"prefix": cache}, "combined with prefix="),
    ]:
        (result,) = h2o.generate_all(ours, [prompt], **settings, **more)
        assert result.finish_reason == "error"
        assert word in str(result.error)


# ---- Documents, commands -----------------------------------------------------------------------


def test_a_document_that_is_read_twice():
    ours, spans = shared("llama"), [[SPAN], [(20, 27)]]
    inputs = batch(prompts(40, 61))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    how = {"attention_mask": mask, "readings": 2, "repeat": torch.tensor([7, 8, 9])}
    cache = h2o.compress_document(ours, ids, **SMALL | {"recent": 6}, **how, pinned=spans)
    bare = h2o.compress_document(ours, ids, **SMALL | {"recent": 6}, **how)
    question = torch.arange(10, 30).view(1, -1).expand(2, -1).to(ids.device)
    for _ in range(2):
        for row, [span] in enumerate(spans):
            assert survives(cache, [row], span)
            assert not survives(bare, [row], span)
        assert sum(map(len, held(cache))) == sum(map(len, held(bare)))
        mask = torch.cat([mask, torch.ones_like(question)], 1)
        positions = (mask.cumsum(1) - 1)[:, -question.shape[1] :]
        for each in (cache, bare):
            ours(question, attention_mask=mask, position_ids=positions, **with_cache(each))
    with pytest.raises(ValueError, match="give budget="):
        h2o.compress_document(ours, ids, **SMALL, **how, pinned="prompt")


def test_commands(tiny, capsys):  # noqa: F811
    command = [
        "generate",
        "--model",
        tiny,
        "--heavy",
        "12",
        "--recent",
        "4",
        "--max-new-tokens",
        "4",
    ]
    text = ["--prompt", "Where is the pier? " * 3, "--json"]
    assert cli.main([*command, *text, "--pin", "5:12"]) == 0
    capsys.readouterr()
    assert cli.main([*command, *text, "--pin", "0:40"]) == 1
    assert "40 pinned keys" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [["--pin", "5"], ["--pin", "9:3"], ["--pin", "system"], ["--system", "Be brief.", "--no-chat"]],
)
def test_wrong_options(wrong, capsys):
    with pytest.raises(SystemExit):
        cli.main(["generate", "--prompt", "a", *wrong])
    assert f"argument {wrong[0]}" in capsys.readouterr().err
