"""Models with states, some parts of them on the disk; read part by part; asked by lm-eval."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from h2o import H2OCache, model_identity, patched, simulated
from h2o.compat import with_cache
from h2o.evaluation.setting import parse
from h2o.hf.families.layer_kinds import HYBRIDS
from tests.evaluation.conftest import tokenizer  # noqa: F401
from tests.hf.tiny import FAMILIES, batch, greedy, model, prompts, slow_if

pytestmark = pytest.mark.skipif(not HYBRIDS, reason="states as of transformers 5.21")
SMALL = {"heavy": 6, "recent": 6}
NAMES = [x for x in ("qwen3_next", "qwen3_5", "bamba", "lfm2", "falcon_h1") if x in FAMILIES]
"""Of gated delta rules, Mamba 2 and convolutions, beside keys and in one layer with them."""
every = pytest.mark.parametrize("name", [slow_if(x == "qwen3_5", x) for x in NAMES])


# ---- Parts on other devices --------------------------------------------------------------------


@every
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of accelerate, which keeps files open
@pytest.mark.filterwarnings("ignore:You are calling .generate")  # of a model on no device
def test_parts_on_the_disk(name, tmp_path):
    plain = model(name)
    plain.save_pretrained(tmp_path / "model")
    where = {part: "cpu" for part, _ in plain.base_model.named_children()}
    where = {f"{plain.base_model_prefix}.{part}": place for part, place in where.items()}
    layers = f"{plain.base_model_prefix}.layers"
    del where[layers]
    count = len(plain.base_model.layers)
    where |= {f"{layers}.{i}": "cpu" if i % 3 == 2 else "disk" for i in range(count)}
    ours = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="h2o", device_map=where | {"lm_head": "cpu"},
        offload_folder=tmp_path / "offloaded",
    )  # fmt: skip
    assert any(parameter.is_meta for parameter in ours.parameters())
    assert model_identity.model_fingerprint(ours) == model_identity.model_fingerprint(plain)
    inputs, (ids,) = batch(prompts(40, 33)), prompts(30)
    answers = []
    for one in (plain, ours):
        cache = H2OCache(one.config, **SMALL)
        tokens = greedy(one, inputs, 8, **with_cache(cache)).tolist()
        with patched(one, **SMALL):
            assert greedy(one, inputs, 8).tolist() == tokens
        with simulated(one, **SMALL), torch.no_grad():
            logits = one(ids, use_cache=False).logits
        cache = H2OCache(one.config, **SMALL)
        with torch.no_grad():
            one(ids[:, :24], **with_cache(cache))
            cache.save(tmp_path / "cache.safetensors", one)
            loaded = H2OCache.load(tmp_path / "cache.safetensors", one)
            more = [one(ids[:, 24:], **with_cache(x)).logits for x in (cache, loaded)]
        assert torch.equal(*more)
        answers.append((tokens, logits, more[0]))
    (tokens, *expected), (again, *got) = answers
    assert again == tokens
    assert all(map(torch.equal, got, expected))


# ---- Texts without end -------------------------------------------------------------------------


@every
def test_a_text_is_read_in_parts_at_rolled_positions(name):
    """Rolled positions take the model's own off again: it may count each part from 0."""
    ours, (row,) = model(name), prompts(120)
    logits, sizes = [], set()
    for counts in (True, False):
        cache = H2OCache(ours.config, **SMALL, positions="cache_relative")
        for i, part in enumerate(row.split(4, dim=1)):
            ids = torch.arange(4 * i, 4 * i + 4)[None] if counts else torch.zeros_like(part)
            with torch.no_grad():
                out = ours(part, **with_cache(cache), position_ids=ids)
            if i >= 10:
                sizes.add(cache.report().total.bytes_held)
        logits.append(out.logits[0, -1])
    torch.testing.assert_close(*logits, rtol=0, atol=1e-3)
    assert len(sizes) == 1


# ---- Evaluation --------------------------------------------------------------------------------


# The protocols ask whether a layer has states and keys; not of which kind its states are.
@pytest.mark.parametrize("name", [slow_if(x not in ("qwen3_next", "falcon_h1"), x) for x in NAMES])
def test_lm_eval(name, tokenizer):  # noqa: F811
    """With room for all its numbers are lm-eval's own; of a small budget those of a batch are those
    of single questions."""
    lm = pytest.importorskip("h2o.evaluation.lm")
    from tests.evaluation.test_lm import HFLM, PAIRS, numbers

    family = FAMILIES[name]
    config = dataclasses.replace(family, config=family.config | {"vocab_size": 258}).build_config()
    torch.manual_seed(1)
    built = AutoModelForCausalLM.from_config(config).eval()
    pairs = PAIRS[:6]
    wanted = numbers(HFLM(built, tokenizer=tokenizer, batch_size=5, logits_cache=False), pairs)[0]
    ours = lm.H2OLM(built, tokenizer=tokenizer, batch_size=5)
    results = {}
    for protocol in ("simulate", "drop"):
        ours.batch_size_per_gpu = 5
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
    """Padding between a document and its question would stand in windows and states."""
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
