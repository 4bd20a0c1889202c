"""`Request(evict=...)`: requests of `generate_all` forget tokens of the prefix that they share."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

import h2o
from h2o import H2OCache, H2OConfig, UnsupportedError
from h2o.compat import with_cache
from tests.hf.hidden import logits_without
from tests.hf.tiny import greedy, llama, prompts, shared

DOCUMENT, *QUESTIONS = prompts(40, 3, 9, 5, 6, seed=4)
SPANS = [(5, 20), (22, 24)]
FORGETS = [SPANS, [], [(0, 39)], torch.tensor([[7, 9], [8, 30]])]
FULL, SMALL = H2OConfig.full(), H2OConfig(heavy=12, recent=8)
PROMPTS = [torch.cat([DOCUMENT, question], 1)[0].tolist() for question in QUESTIONS]


def prefix_of(ours, config, **more):
    cache = H2OCache(ours, config, **more)
    ours(DOCUMENT, **with_cache(cache))
    return cache


def requests():
    return [h2o.Request(x, evict=spans) for x, spans in zip(PROMPTS, FORGETS, strict=True)]


def answers(ours, prefix, rows=2, **more):
    how = {"rows": rows, "max_new_tokens": 12, "prefix": prefix, **more}
    return list(h2o.generate_all(ours, requests(), **how))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("config", [FULL, SMALL, H2OConfig(budget=0.5, min_tokens=0)])
def test_each_request_answers_as_a_fork_without_its_spans(config, rows):
    """Its neighbors and the prefix keep what it forgets."""
    ours = shared("llama")
    prefix = prefix_of(ours, config)
    for chunk in (None, 2):
        settings = GenerationConfig(prefill_chunk_size=chunk)
        for result in answers(ours, prefix, rows, generation_config=settings):
            fork, prompt = prefix.fork(), torch.tensor([PROMPTS[result.index]])
            spans = FORGETS[result.index]
            fork.evict(spans, ids=DOCUMENT)
            left = h2o.without_spans(prompt, spans)
            more = {"prefill_chunk_size": chunk}
            assert (
                result.ids
                == greedy(ours, {"input_ids": left}, 12, **more, **with_cache(fork))[0].tolist()
            )
            assert result.prompt_tokens == left.shape[1]
            assert result.report["seen"] == left.shape[1] + 11
    assert prefix.get_seq_length() == 40
    assert prefix.guard.state.row(0).removed == 0


def test_it_answers_as_if_the_spans_were_hidden():
    ours, plain = shared("llama"), shared("llama", "eager")
    result = answers(ours, prefix_of(ours, FULL))[0]
    text = torch.tensor([PROMPTS[0]])
    for token in result.ids:
        best = logits_without(plain, text, [(40, *span) for span in SPANS])[-1].argmax()
        assert token == int(best)
        text = torch.cat([text, best.view(1, 1)], 1)


def test_spans_that_cannot_be_removed():
    """An error concerns one request. The others are answered, and the prefix is unchanged."""
    ours = shared("llama")
    prefix = prefix_of(ours, SMALL, pinned=[(0, 4)])
    wrong = {
        "evict ends at token 41, but the prefix has 40": [(30, 41)],
        "tokens 3 to 3 of row 0 are pinned": [(3, 6)],
        "evict has the span (5, 5)": [(5, 5)],
        "evict is 7; expected spans": 7,
        "evict is 'prompt'; expected spans": "prompt",
        "expected spans [(start, stop), ...]": [[(1, 2)], [(3, 4)]],
    }
    asked = [h2o.Request(PROMPTS[0], evict=spans) for spans in ([], *wrong.values(), [(5, 9)])]
    first, *failed, last = h2o.generate_all(ours, asked, rows=2, prefix=prefix, max_new_tokens=4)
    for result, words in zip(failed, wrong, strict=True):
        assert (result.finish_reason, result.ids) == ("error", [])
        assert words in str(result.error)
    assert (len(first.ids), len(last.ids), last.prompt_tokens) == (4, 4, 39)
    assert prefix.get_seq_length() == 40


def test_without_a_prefix():
    (result,) = h2o.generate_all(shared("llama"), requests()[:1], SMALL, rows=1, max_new_tokens=2)
    assert "evict names tokens of prefix=, and this call has no prefix" in str(result.error)


def test_a_prompt_that_lacks_the_spans():
    """The tokens before the span agree with the prefix, and those after it do not."""
    ours = shared("llama")
    good, left = requests()[0], PROMPTS[0][:5] + PROMPTS[0][24:] + [1] * 20
    asked = [good, h2o.Request(left, evict=SPANS)]
    how = {"rows": 2, "prefix": prefix_of(ours, SMALL), "max_new_tokens": 2}
    _, lost = h2o.generate_all(ours, asked, **how)
    assert "are not those that the prefix has read" in str(lost.error)


def test_models_that_cannot_forget():
    ours = shared("deepseek_v3")
    with pytest.raises(UnsupportedError, match="part of a latent row"):
        answers(ours, prefix_of(ours, SMALL))


def test_keys_without_rotation_do_not_move():
    """The positions of a text with removed tokens would exceed those of a rope that depends on the
    length of the text."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    ours = llama(2, max_position_embeddings=64, rope_parameters=rope)
    prefix = prefix_of(ours, H2OConfig(heavy=12, recent=8, positions="cache_relative"))
    prefix.evict([(5, 35)], ids=DOCUMENT)
    left = torch.cat([h2o.without_spans(DOCUMENT, [(5, 35)]), QUESTIONS[0]], 1)
    how = {"rows": 1, "max_new_tokens": 30, "prefix": prefix}
    (result,) = h2o.generate_all(ours, [left[0].tolist()], **how)
    assert result.ids == greedy(ours, {"input_ids": left}, 30, **with_cache(prefix))[0].tolist()
