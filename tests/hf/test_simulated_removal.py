"""A simulation with named tokens that leave answers as a cache from which they are removed."""

from __future__ import annotations

import pytest
import torch

from h2o import H2OCache, H2OConfig, UnsupportedError, simulated
from h2o.compat import with_cache
from h2o.evaluation.published_masks import MASKS
from h2o.hf.layers.layer import H2OLayer
from h2o.spans import subtract, without
from tests.hf.program_models import model_of
from tests.hf.tiny import batch, prompts, shared

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

EVICT = {20: [(3, 6), (9, 17)], 31: [(1, 8), (26, 31)], 44: [(41, 44)]}
POLICIES = {
    "all": {"heavy": 100, "recent": 5},
    "sums": {"heavy": 7, "recent": 4, "sinks": 1},
    "means": {"heavy": 6, "recent": 3, "score_by": "mean"},
    "largest": {"heavy": 6, "recent": 3, "score_by": "max", "decay": 0.9},
    "echo": {"budget": 12, "min_tokens": 0},
    "heads": {"heavy": 7, "recent": 3, "head_shares": "echo", "score_by": "mean-echo"},
    "growth": {"heavy": 0.2, "recent": 0.1, "min_tokens": 4},
}


def by_cache(model, ids, config, prompt, evict, **more):
    """Logits [N, vocabulary] of the tokens of a text, and the keys that its last one sees."""
    cache, logits, gone, at = H2OCache(model, config, **more), [], [], 0
    for stop in range(prompt, ids.shape[1] + 1):
        if spans := evict.get(at):
            new = subtract(spans, gone)
            cache.evict(without(new, gone))
            gone = sorted([*gone, *new])
        held = {
            layer.layer_idx: [x[x >= 0].tolist() for x in layer.kept().positions[0]]
            for layer in cache.layers
            if isinstance(layer, H2OLayer) and layer.slots is not None
        }
        with torch.no_grad():
            logits.append(model(ids[:, at:stop], **with_cache(cache)).logits[0])
        at = stop
    left = [i for i in range(ids.shape[1]) if not any(a <= i < b for a, b in gone)]
    kept = {layer: [[left[i] for i in x] for x in heads] for layer, heads in held.items()}
    return torch.cat(logits), kept


def check(family, config, prompt=20, evict=EVICT, **more):
    ours, texts = model_of(family), prompts(50, 38)
    for made in (batch(texts), batch(texts[:1])):
        mask = made["attention_mask"]
        given = {**made, "position_ids": (mask.cumsum(1) - 1).clamp(min=0), "use_cache": False}
        with (
            simulated(
                ours, config, prompt_length=prompt, ratio_of="seen", trace=True, evict=evict, **more
            ) as simulation,
            torch.no_grad(),
        ):
            logits = ours(**given).logits
        for row, text in enumerate(texts[: len(mask)]):
            real = mask[row].bool()
            want, kept = by_cache(ours, text, config, prompt, evict, **more)
            torch.testing.assert_close(logits[row, real], want, rtol=1e-3, atol=1e-3)
            for layer in simulation.layers():
                sees = simulation.evicted_at(layer)[row][:, real][:, :-1] == mask.shape[1]
                assert [x.nonzero()[:, 0].tolist() for x in sees] == kept[layer]


@pytest.mark.parametrize("name", POLICIES)
def test_it_answers_as_a_cache(name):
    """Rows are padded, and one ends before all tokens that are named were read."""
    check("llama", H2OConfig(**POLICIES[name]))


@pytest.mark.parametrize("family", ["gpt_neox", "gemma3", "gemma3n_text", "qwen2_vl"])
def test_other_families(family):
    evict = {20: [(3, 6), (7, 9)], 31: [(1, 8), (12, 14)]}
    check(family, H2OConfig(**POLICIES["sums"]), evict=evict)


@pytest.mark.parametrize("kv_dtype", ["int8", "int8-int4", "int4"])
def test_quantized_keys_stay_as_stored(kv_dtype):
    check("llama, wide", H2OConfig(heavy=7, recent=4, kv_dtype=kv_dtype))


def test_pins_stay():
    check("llama", H2OConfig(heavy=10, recent=4), pinned=[(0, 2), (17, 19)], evict={20: [(5, 9)]})


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"evict": [(20, [(3, 6)])]}, TypeError, "evict is .*; expected spans by number of tokens"),
        ({"evict": {20: [3, 6]}}, TypeError, "evict is .*; expected spans"),
        ({"evict": {0: [(3, 6)]}}, ValueError, "evict is 0; expected an integer of at least 1"),
        ({"evict": {9: [(3, 6)]}, "prompt_length": 10}, ValueError, "once 9 were read, but a prom"),
        ({"evict": {5: [(3, 6)]}}, ValueError, "removes token 5 once only 5 were read"),
        ({"evict": {5: [(0, 3)], 6: [(2, 6)]}}, ValueError, "leaves nothing of the first 6 tokens"),
        ({"evict": {9: [(3, 6)]}, "masks": MASKS["local"]}, ValueError, "remove no named tokens"),
        ({"evict": {9: [(3, 6)]}, "pinned": [(5, 8)]}, ValueError, "5 to 5 are pinned"),
    ],
)
def test_what_cannot_be_removed(given, error, message):
    ours, (text,) = shared("llama"), prompts(30)
    with pytest.raises(error, match=message), simulated(ours, heavy=6, recent=3, **given):
        ours(text, use_cache=False)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("lfm2", "recurrent states are sums over all tokens"),
        ("gpt2", "no rotary position"),
        ("deepseek_v3", "h2o cannot rotate a part of a latent row"),
    ],
)
def test_models_whose_caches_cannot_forget(family, message):
    with (
        pytest.raises(UnsupportedError, match=message),
        simulated(shared(family), heavy=6, recent=3, evict={9: [(3, 6)]}),
    ):
        raise AssertionError


def test_a_span_within_a_window():
    with (
        pytest.raises(ValueError, match=r"still hold the last \d+, and a span ends at 18"),
        simulated(shared("gemma3"), heavy=6, recent=3, evict={20: [(3, 18)]}),
    ):
        raise AssertionError
