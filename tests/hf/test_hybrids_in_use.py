"""Models with states: texts fed in parts, lm-eval, and copies of caches that record passes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from h2o import H2OCache, generate_all
from h2o.compat import with_cache
from h2o.evaluation.setting import parse
from tests.evaluation.conftest import tokenizer  # noqa: F401
from tests.hf.test_offload import NAMES
from tests.hf.tiny import FAMILIES, model, prompts, slow_if

SMALL = {"heavy": 6, "recent": 6}
every = pytest.mark.parametrize("name", [slow_if(x == "qwen3_5", x) for x in NAMES])


# ---- Texts without end -------------------------------------------------------------------------


@every
def test_a_text_is_read_in_parts_at_rolled_positions(name):
    """Cache-relative positions must undo the model's own, which may count each part from 0."""
    ours, (row,) = model(name), prompts(72)
    logits, sizes = [], set()
    for counts in (True, False):
        cache = H2OCache(ours.config, **SMALL, positions="cache_relative")
        for i, part in enumerate(row.split(4, dim=1)):
            ids = torch.arange(4 * i, 4 * i + 4)[None] if counts else torch.zeros_like(part)
            out = ours(part, **with_cache(cache), position_ids=ids)
            if i >= 10:
                sizes.add(cache.report().total.bytes_held)
        logits.append(out.logits[0, -1])
    torch.testing.assert_close(*logits, rtol=0, atol=1e-3)
    assert len(sizes) == 1


# ---- Evaluation --------------------------------------------------------------------------------


# The protocols depend on whether a layer has states and keys, not on the kind of its states.
@pytest.mark.parametrize("name", [slow_if(x not in ("qwen3_next", "falcon_h1"), x) for x in NAMES])
def test_lm_eval(name, tokenizer):  # noqa: F811
    """With a budget for all keys the numbers must be lm-eval's own, and with a small budget those
    of a batch must be those of single questions."""
    lm = pytest.importorskip("h2o.evaluation.lm")
    from tests.evaluation.test_lm import HFLM, PAIRS, numbers

    family = FAMILIES[name]
    config = dataclasses.replace(family, config=family.config | {"vocab_size": 258}).build_config()
    torch.manual_seed(1)
    built = AutoModelForCausalLM.from_config(config).eval()
    pairs = PAIRS[:4]
    wanted = numbers(HFLM(built, tokenizer=tokenizer, batch_size=3, logits_cache=False), pairs)[0]
    ours = lm.H2OLM(built, tokenizer=tokenizer, batch_size=3)
    results = {}
    for protocol in ("simulate", "drop"):
        ours.batch_size_per_gpu = 3
        ours.use(parse("h2o:500+0"), protocol)
        close(numbers(ours, pairs)[0], wanted)
        ours.use(parse("h2o:8+8"), protocol)
        together = numbers(ours, pairs)[0]
        ours.batch_size_per_gpu = 1
        results[protocol] = numbers(ours, pairs)[0]
        close(together, results[protocol])
    assert (results["simulate"] - wanted).abs().max() > 0.05
    assert (results["drop"] - wanted).abs().max() > 0.05


def test_questions_of_several_lengths(tokenizer):  # noqa: F811
    """Padding between a document and its question would enter windows and states."""
    lm = pytest.importorskip("h2o.evaluation.lm")
    from tests.evaluation.test_lm import numbers

    family = FAMILIES["qwen3_next"]
    config = dataclasses.replace(family, config=family.config | {"vocab_size": 258}).build_config()
    torch.manual_seed(1)
    ours = lm.H2OLM(
        AutoModelForCausalLM.from_config(config).eval(), tokenizer=tokenizer, batch_size=5
    )
    ours.use(parse("h2o:8+8"), "read")
    document = "The gate was open all night.\n"
    pairs = [(f"{document}Question: {words}?", " yes") for words in ("why", "who closed it then")]
    together = numbers(ours, pairs)[0]
    close(together, torch.cat([numbers(ours, [pair])[0] for pair in pairs]))


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-3, rtol=0)


# ---- Copies of a cache whose passes are recorded -----------------------------------------------


@every
@pytest.mark.parametrize("tokens", [2, 17])
def test_what_was_recorded_of_a_prompt_is_left_out(name, tokens, tmp_path):
    """While passes are recorded, convolution states have fewer columns after a short prompt and all
    columns after a long one. Loaded caches and refilled rows do not record, so they must get the
    usual columns."""
    ours = model(name)
    document, question = prompts(tokens, 5)
    cache, plain = (H2OCache(ours.config, **SMALL) for _ in range(2))
    cache.activate_past_recording()
    with torch.no_grad():
        for one in (cache, plain):
            ours(document, **with_cache(one))
        cache.save(path := tmp_path / "cache", ours)
        loaded = H2OCache.load(path, ours)
        places = torch.arange(tokens, tokens + 5)[None].to(question.device)
        for part, at in zip(*(x.split([1, 1, 3], dim=1) for x in (question, places)), strict=True):
            how = {"position_ids": at}  # transformers' Bamba numbers the tokens of a pass from 0
            same, wanted = (ours(part, **how, **with_cache(one)).logits for one in (loaded, plain))
            torch.testing.assert_close(same, wanted)

    asked = [torch.cat([document, question], dim=1)[0]]
    plain = H2OCache(ours.config, **SMALL)
    with torch.no_grad():
        ours(document, **with_cache(plain))
    answers = [
        next(generate_all(ours, asked, **SMALL, rows=1, max_new_tokens=6, prefix=prefix))
        for prefix in (cache, plain)
    ]
    assert answers[0].ids == answers[1].ids
    assert len(answers[0].ids) == 6
