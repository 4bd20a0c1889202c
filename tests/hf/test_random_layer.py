"""score_by="random" keeps randomly drawn keys, the same ones in whichever way a text is fed."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from transformers import DynamicCache

from h2o import H2OCache, H2OConfig
from h2o.compat import with_cache
from h2o.errors import UnsupportedError
from h2o.hf.prompt.scorers import draw_ranks
from tests.cases import checkered
from tests.hf import tiny
from tests.hf.test_simulation import PROMPT, TEXT, check_rows_alone, fitted, prove, text

SMALL = {"heavy": 6, "recent": 4, "sinks": 2, "score_by": "random"}
POLICIES = {
    "sinks": SMALL,
    "no recent keys": {"heavy": 9, "recent": 0, "score_by": "random"},
    "int8": SMALL | {"kv_dtype": "int8"},
    "by head": SMALL | {"heavy": [2, 9, 3, 7], "recent": lambda layer, layers: [3, 5, 2, 4]},
    "head_shares": SMALL | {"heavy": 9, "head_shares": [[0.4, 2.5, 1.0, 0.9]] * 4},
}


def held(model, ids, chunks, **chosen):
    """Positions held in each layer after `ids` were fed in chunks, and the cache."""
    model.set_attn_implementation("h2o")
    cache = H2OCache(model.config, **chosen)
    for chunk in ids.split(chunks, dim=1):
        model(chunk, **with_cache(cache))
    return [cache.kept(layer).positions for layer in range(len(cache.layers))], cache


@pytest.mark.parametrize(("chosen", "prompt_length"), checkered(POLICIES, [1, PROMPT, 40]))
def test_simulation_equals_the_cache(chosen, prompt_length):
    model = tiny.model("llama", "sdpa")
    atol = 2e-2 if chosen == "int8" else 2e-4
    assert prove(model, text(), prompt_length, atol, **fitted(POLICIES[chosen], model)) > 3


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "falcon_h1"])
def test_capped_logits_learned_sinks_and_states(family):
    # Falcon-H1's states alone differ by 2.3e-4 between a whole pass and steps with a DynamicCache
    atol = 5e-4 if family == "falcon_h1" else 2e-4
    prove(tiny.model(family, "h2o"), text(2), PROMPT, atol, **SMALL)


@pytest.mark.parametrize("chunks", [1, 7, 50])
def test_chunks_change_nothing(chunks):
    """The keys held must not depend on chunks or tokens. Once the budget is full, they depend on
    the text's length alone."""
    model, ids = tiny.model("llama", "sdpa"), text()
    whole, _ = held(model, ids, ids.shape[1], **SMALL)
    parts, _ = held(model, text(seed=1), chunks, **SMALL)
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_batch_are_alone(side):
    model = tiny.model("llama", "sdpa")
    rows = [text(seed, tokens) for seed, tokens in enumerate([50, 23, 64])]
    _, inputs = check_rows_alone(model, rows, [1] * 3, side, **SMALL)
    model.set_attn_implementation("h2o")
    cache = H2OCache(model.config, **SMALL)
    model(**inputs, **with_cache(cache))
    for b, row in enumerate(rows):
        alone, _ = held(model, row, row.shape[1], **SMALL)
        for layer, positions in enumerate(alone):
            assert torch.equal(cache.kept(layer).positions[b], positions[0])


def test_the_choice_is_uniform():
    """The draw must not favor any key. Over 4,000 draws of 30 keys from 300, each key's count must
    lie within 5 standard deviations of the binomial, and chi-square within 5 of its own."""
    keys, kept, heads, layers = 300, 30, 100, 40
    ranks = torch.stack(
        [
            draw_ranks(torch.arange(keys), torch.arange(heads)[:, None], layer)
            for layer in range(layers)
        ]
    )
    assert ((ranks >= 0) & (ranks < 1)).all()
    chosen = ranks.topk(kept).indices
    counts = torch.bincount(chosen.flatten(), minlength=keys).double()
    mean, part = layers * heads * kept / keys, kept / keys
    deviation = (layers * heads * part * (1 - part)) ** 0.5
    assert (counts - mean).abs().max() < 5 * deviation
    chi_square = ((counts - mean) ** 2).sum() / (mean * (1 - part))
    assert abs(chi_square - (keys - 1)) < 5 * (2 * (keys - 1)) ** 0.5
    sets = {tuple(sorted(x)) for layer in chosen.tolist() for x in layer}
    assert len(sets) == layers * heads, "two heads never keep the same keys"
    pairs = Counter((a + 1 == b) for a, b in zip(*_neighbors(chosen), strict=True))
    wanted = len(sets) * (kept - 1) * part  # the next key is kept as often as any other
    assert abs(pairs[True] - wanted) < 8 * wanted**0.5


def _neighbors(chosen):
    ordered = chosen.sort(-1).values
    return ordered[..., :-1].flatten().tolist(), ordered[..., 1:].flatten().tolist()


def test_a_full_cache_is_taken_over():
    """Keys that were converted from a DynamicCache must be drawn like any others."""
    model, ids = tiny.model("llama", "sdpa"), text()
    cache = DynamicCache(config=model.config)
    model(ids[:, :-1], **with_cache(cache))
    taken = H2OCache.from_dynamic_cache(cache, model.config, **SMALL)
    model.set_attn_implementation("h2o")
    model(ids[:, -1:], **with_cache(taken))
    for layer, positions in enumerate(held(model, ids, TEXT, **SMALL)[0]):
        assert torch.equal(taken.kept(layer).positions, positions)


def test_heads_and_layers_of_a_cache_differ():
    held_by, _ = held(tiny.model("llama", "sdpa"), text(), TEXT, **SMALL)
    sets = [tuple(head) for layer in held_by for head in layer[0].tolist()]
    assert len(set(sets)) == len(sets)


def test_attention_is_not_reported():
    """A cache that sums no attention must report NaN instead of wrong numbers, and write "-"."""
    _, cache = held(tiny.model("llama", "sdpa"), text(), TEXT, **SMALL)
    report = cache.report()
    assert all(math.isnan(layer.share_evicted) for layer in report.layers)
    assert "nan" not in str(report) + report._repr_html_()
    *_, first, _, total, note = str(report).splitlines()
    assert first.split()[-1] == total.split()[-1] == "-"
    assert note.endswith("The attention to evicted tokens was not summed.")


@pytest.mark.parametrize("more", [{"decay": 0.9}, {"value_weighted": True}])
def test_other_policies_are_refused(more):
    with pytest.raises(ValueError, match='score_by="random" can be combined with sinks only'):
        H2OConfig(**SMALL | more)


def test_other_layers_are_refused():
    with pytest.raises(UnsupportedError, match="cannot be combined with compileable"):
        H2OCache(tiny.model("llama").config, **SMALL, compileable=True)
    with pytest.raises(UnsupportedError, match="cannot be combined with multi-head latent"):
        H2OCache(tiny.model("deepseek_v2").config, **SMALL)
