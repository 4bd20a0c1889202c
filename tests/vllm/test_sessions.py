"""Sessions (vLLM's streaming input) whose later turns forget tokens of earlier ones."""

from __future__ import annotations

import logging

import pytest
import torch

from h2o import H2OCache, H2OConfig, without_spans
from h2o.compat import with_cache
from h2o.hf.prompt import echo_scorer
from tests.vllm.engines import NEW, SamplingParams, after_prefix, alone, engine, prompts, served

SMALL = {"heavy": 8, "recent": 8}
ENTRIES = {
    "tokens": SMALL,
    "divided": {"budget": 24},
    "heads": {"heavy": [[4, 12], [9, 3]], "recent": 4, "score_by": "mean-echo"},
}
CHUNK = 24
"""Tokens of a later turn that are read at once, in engines with batches of 32 tokens"""


def in_session(llm, turns, resets=()):
    """The answers to turns (ids, xargs) of one session. In passes `resets` vLLM preempts all."""
    core, make = llm.llm_engine.engine_core.engine_core, llm.llm_engine.input_processor
    known = {"supported_tasks": llm.llm_engine.get_supported_tasks()}
    answers, passes = [], iter(range(10_000))

    def add(ids, resumable=True, **params):
        sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **params)
        prompt = {"prompt_token_ids": [*ids]}  # vLLM appends to the list
        made = make.process_inputs("session", prompt, sampling, resumable=resumable, **known)
        core.add_request(core.preprocess_add_request(made)[0])

    for ids, arguments in turns:
        add(ids, max_tokens=NEW, extra_args=arguments)
        tokens, reason = [], None
        while reason is None:
            if next(passes) in resets:
                assert llm.reset_prefix_cache(reset_running_requests=True)
            outs, _ = core.step_fn()
            for one in outs[0].outputs if outs else ():
                tokens += one.new_token_ids
                reason = one.finish_reason
        answers.append(tokens)
    add([0], resumable=False)
    return answers


def on_cache(model, turns, config):
    """Answer the same turns with an H2OCache. `turns`: ids, and spans that a turn forgets, in the
    text with everything."""
    model.set_attn_implementation("h2o")
    cache = H2OCache(model.config, config)
    text, gone, answers = torch.zeros(1, 0, dtype=torch.long), [], []

    def left(spans=()):
        return without_spans(text, sorted([*gone, *spans]))

    for number, (ids, spans) in enumerate(turns):
        if new := [span for span in spans if span not in gone]:
            before = [(a - sum(y - x for x, y in gone if y <= a), b - a) for a, b in new]
            cache.evict([(a, a + n) for a, n in before], ids=left())
            gone += new
        text = torch.cat([text, torch.tensor([ids])], 1)
        while number and left().shape[1] - (seen := int(cache.get_seq_length())) > CHUNK:
            with torch.no_grad():
                model(left()[:, seen : seen + CHUNK], **with_cache(cache))
        known = {"attention_mask": torch.ones_like(left()), **with_cache(cache)}
        out = model.generate(left(), **known, max_new_tokens=NEW, do_sample=False)
        answers.append(out[0, -NEW:].tolist())
        text = torch.cat([text, out[:, -NEW:-1]], 1)  # without the last token, as in vLLM
    return answers


def later(first, turns):
    """Turns (ids, xargs) of a session after a first one: `h2o_prefix` is the text before each."""
    made, tokens = [(first, None)], len(first) + NEW - 1
    for ids, spans in turns:
        made.append((ids, {"h2o_prefix": tokens, "h2o_evict": spans}))
        tokens += len(ids) + NEW - 1
    return made


@pytest.mark.parametrize("name", ENTRIES)
def test_later_turns_forget(name, llama, monkeypatch):
    """Spans count everything that the session has seen, forgotten or not. Naming tokens again
    changes nothing."""
    monkeypatch.setattr(echo_scorer, "FEWEST_HEADS", 1)
    folder, model = llama
    first, second, third, fourth = prompts((40, 30, 1, 20), 5)
    config = H2OConfig(**ENTRIES[name], ratio_of="prompt")
    plain = [(second, []), (third, []), (fourth, [])]
    turns = [(second, [(5, 20)]), (third, [(5, 20), (22, 31), (70, 85)]), (fourth, [(22, 31)])]
    wanted = on_cache(model, [(first, []), *turns], config)
    kept = on_cache(model, [(first, []), *plain], config)
    assert wanted[1] != kept[1]
    with engine(folder, ENTRIES[name], max_num_batched_tokens=32) as llm:
        assert in_session(llm, later(first, turns)) == wanted
        assert in_session(llm, later(first, plain)) == kept
        assert served(llm, [first]) == wanted[:1]


@pytest.mark.parametrize("name", ["tokens", "divided"])
def test_a_session_that_begins_anew(name, llama, monkeypatch):
    """vLLM then prefills the text before the turn at once, with what was forgotten. The session has
    still its budget and pins, and forgets the same tokens again, once."""
    monkeypatch.setattr(echo_scorer, "FEWEST_HEADS", 1)
    folder, model = llama
    first, second, third = prompts((40, 40, 40), 5)
    config = H2OConfig(**ENTRIES[name])
    own = {}
    if name == "tokens":
        own, config = {"h2o_heavy": 12}, H2OConfig(heavy=12, recent=8)
    pinned, spans, tokens = [(3, 6)], [(12, 20)], 40 + NEW - 1
    (told,) = alone(model, [first], config, pinned=pinned)
    text = first + told[:-1] + second
    (more,) = after_prefix(model, [text], tokens, config, CHUNK, pinned, spans)
    text += more[:-1]
    (last,) = after_prefix(model, [text + third], len(text), config, CHUNK, pinned, spans)
    assert [last] != after_prefix(model, [text + third], len(text), config, CHUNK, pinned)
    turns = [
        (first, own | {"h2o_pinned": "3:6"}),
        (second, {"h2o_heavy": 3, "h2o_prefix": tokens, "h2o_evict": spans}),
        (third, {}),
    ]
    entry = SMALL | {"heavy": 16} if own else ENTRIES[name]
    with engine(folder, entry, max_num_batched_tokens=32) as llm:
        # Each time before the second pass of a turn
        assert in_session(llm, turns, (26, 54)) == [told, more, last]


def test_what_a_session_cannot_forget(llama, caplog, monkeypatch):
    """The log must say why, and the session keeps the tokens, also those that it has forgotten
    before."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    folder, model = llama
    first, second = prompts((40, 30), 5)
    before = {"h2o_prefix": 40 + NEW - 1}
    wanted = on_cache(model, [(first, []), (second, [])], H2OConfig(**SMALL))
    with engine(folder, SMALL, max_num_batched_tokens=32) as llm:
        wrong = {"h2o_prefix": 40 + NEW, "h2o_evict": "5:20"}
        assert in_session(llm, [(first, None), (second, wrong)])[0] == wanted[0]
        assert "has 63 tokens before this turn, but h2o_prefix is 64" in caplog.text
        pinned = {"h2o_pinned": "3:9"}
        asked = [(first, pinned), (second, before | {"h2o_evict": "5:20"})]
        kept = in_session(llm, [(first, pinned), (second, before)])
        assert in_session(llm, asked) == kept
        assert "h2o_evict names token 5, which an earlier turn has pinned" in caplog.text
