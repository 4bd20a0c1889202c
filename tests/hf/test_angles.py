"""Rotary angles that change with the length of the text: each text gets those of its length."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
)

import h2o
from h2o import H2OCache, H2OConfig, UnsupportedError, patched
from h2o.compat import CACHE, with_cache
from h2o.evaluation.generation import time_tokens
from tests.hf.tiny import greedy, prompts

pytestmark = pytest.mark.timeout(120)

SMALL = {"heavy": 8, "recent": 8}
NUMBERS = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.5,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, "short_factor": [1.0] * 4,
    "long_factor": [2.0 + i for i in range(4)], "original_max_position_embeddings": 32,
}  # fmt: skip
KINDS = {
    "longrope": {"rope_parameters": LONGROPE},
    "dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        "max_position_embeddings": 32,
    },
}
PHIS = {
    "phi3": (Phi3Config, Phi3ForCausalLM, {"sliding_window": None}),
    "phimoe": (PhimoeConfig, PhimoeForCausalLM, {"num_local_experts": 2}),
}


def llama(kind):
    torch.manual_seed(1)
    made = LlamaForCausalLM(LlamaConfig(**{**NUMBERS, "head_dim": 8, **KINDS[kind]})).eval()
    made.set_attn_implementation("h2o")
    return made


def phi(name, rope=LONGROPE):
    config, made, more = PHIS[name]
    rope = copy.deepcopy(rope)
    if name == "phimoe" and rope["rope_type"] == "longrope":
        rope |= {"short_mscale": 1.1, "long_mscale": 1.3}
    more = {**more, "original_max_position_embeddings": 32, "rope_parameters": rope}
    torch.manual_seed(1)
    made = made(config(**{**NUMBERS, **more})).eval()
    made.set_attn_implementation("h2o")
    return made


def alone(ours, ids, config, tokens):
    """Tokens of a model that has seen no other text, whose angles a dynamic embedding may keep."""
    twin = copy.deepcopy(ours)
    cache = with_cache(H2OCache(twin.config, config))
    return greedy(twin, {"input_ids": ids}, tokens, **cache)[0].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_rows_of_several_lengths(kind, rows):
    """A row must get the angles of its own length, whether its neighbors are short, long or become
    long."""
    ours, config = llama(kind), H2OConfig(**SMALL)
    texts = prompts(20, 60, 27, 9, 90, 31)
    untouched = copy.deepcopy(ours)
    results = h2o.generate_all(
        ours, [x[0].tolist() for x in texts], config, rows=rows, max_new_tokens=10
    )
    for text, result in zip(texts, results, strict=True):
        assert result.ids == alone(untouched, text, config, 10)


def test_a_long_text_read_before_in_chunks():
    """A dynamic embedding keeps the angles of the longest text that it has seen. A shorter prompt
    must not get them."""
    ours, config = llama("dynamic"), H2OConfig(**SMALL)
    untouched, (long, short) = copy.deepcopy(ours), prompts(120, 50)
    settings = GenerationConfig(prefill_chunk_size=20, max_new_tokens=6, do_sample=False)
    texts = [long[0].tolist(), short[0].tolist()]
    *_, result = h2o.generate_all(ours, texts, config, rows=1, generation_config=settings)
    cache = H2OCache(untouched.config, config)
    out = untouched.generate(short, generation_config=settings, **with_cache(cache))
    assert result.ids == out[0, 50:].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [59, 45, 20])
def test_an_analysis_up_to_a_token_has_the_angles_of_the_whole_text(kind, at):
    """Nor does it have the angles of a longer text that the model has processed before."""
    ours, (ids, longer) = llama(kind), prompts(60, 90)
    twin = copy.deepcopy(ours)
    twin.set_attn_implementation("eager")
    dense = twin(ids, use_cache=False, output_attentions=True).attentions
    ours(longer, use_cache=False)
    analysis = h2o.analyze(ours, ids, **SMALL)
    for layer, p in enumerate(dense):
        want = p[0, :, : at + 1, : at + 1].sum(1).numpy()
        got = analysis.scores(layer, "query", at=at)
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-4)


def test_runs_that_are_compared_do_not_depend_on_their_order():
    """An earlier run has generated, so it has seen a longer text."""
    ours, (ids, longer) = llama("dynamic"), prompts(60, 90)
    caches = [H2OCache(ours.config, **SMALL) for _ in range(2)]
    want = time_tokens(ours, ids, caches[0], max_new_tokens=10).tokens
    ours(longer, use_cache=False)
    assert time_tokens(ours, ids, caches[1], max_new_tokens=10).tokens == want


def test_a_calibration_after_a_longer_text():
    ours, (ids, longer) = llama("dynamic"), prompts(96, 90)
    want = h2o.calibrate(ours, ids, window=48, refine=0).shares
    ours(longer, use_cache=False)
    assert h2o.calibrate(ours, ids, window=48, refine=0).shares == want


@pytest.mark.parametrize("name", PHIS)
def test_a_cache_is_not_left_out_in_silence(name):
    """When the text becomes long, Phi-3 would prefill it again with a cache of its own. The
    H2OCache must not be left out without an error."""
    ours, (ids, long) = phi(name), prompts(25, 60)
    cache = H2OCache(ours.config, **SMALL)
    with pytest.raises(ValueError, match="Beyond 32 tokens this model's rotary angles change"):
        greedy(ours, {"input_ids": ids}, 20, **with_cache(cache))
    assert cache.get_seq_length() == 32
    for text, tokens in ((ids, 8), (long, 12)):
        cache = H2OCache(ours.config, H2OConfig.full())
        got = greedy(ours, {"input_ids": text}, tokens, **with_cache(cache))
        assert cache.get_seq_length() == text.shape[1] + tokens - 1
        full = with_cache(DynamicCache(config=ours.config))
        assert got.tolist() == greedy(ours, {"input_ids": text}, tokens, **full).tolist()


@pytest.mark.parametrize("name", PHIS)
def test_patched_reads_the_text_anew_as_the_model_does(name):
    ours, (ids,) = phi(name), prompts(25)
    full = greedy(ours, {"input_ids": ids}, 20, **with_cache(DynamicCache(config=ours.config)))
    with patched(ours, H2OConfig.full()):
        assert greedy(ours, {"input_ids": ids}, 20).tolist() == full.tolist()
    with patched(ours, **SMALL) as patch:
        out = ours.generate(ids, max_new_tokens=20, do_sample=False, return_dict_in_generate=True)
        assert out[CACHE] is patch.cache
        assert patch.cache.get_seq_length() == 44
        assert patch.cache.report().layers[0].kept[0] < 20


@pytest.mark.parametrize("name", PHIS)
def test_other_angles_stay_as_they_are(name):
    ours, (ids,) = phi(name, {"rope_type": "default", "rope_theta": 1e4}), prompts(25)
    cache = H2OCache(ours.config, H2OConfig.full())
    got = greedy(ours, {"input_ids": ids}, 20, **with_cache(cache))
    assert cache.get_seq_length() == 44
    llama_like = copy.deepcopy(ours)
    llama_like.config.original_max_position_embeddings = 256
    full = with_cache(DynamicCache(config=ours.config))
    assert got.tolist() == greedy(llama_like, {"input_ids": ids}, 20, **full).tolist()


@pytest.mark.parametrize("name", PHIS)
def test_rows_end_where_the_text_would_be_read_anew(name):
    ours, texts = phi(name), prompts(20, 28, 60)
    config = H2OConfig(**SMALL)
    results = list(
        h2o.generate_all(ours, [x[0].tolist() for x in texts], config, rows=3, max_new_tokens=10)
    )
    assert "the whole text has to be processed again" in str(results[1].error)
    for i in (0, 2):
        assert results[i].ids == alone(ours, texts[i], config, 10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_that_grows_out_of_its_angles(kind):
    """If the repetition would be rotated by other angles than the document, a second reading must
    raise an error."""
    ours, (short, long) = llama(kind), prompts(12, 28)
    repeat = prompts(2)[0]
    assert (
        h2o.compress_document(ours, short, **SMALL, readings=2, repeat=repeat).get_seq_length()
        == 12
    )
    with pytest.raises(UnsupportedError, match="angles"):
        h2o.compress_document(ours, long, **SMALL, readings=2, repeat=repeat)
