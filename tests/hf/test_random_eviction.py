"""score_by="random": a simulation keeps randomly drawn keys, and no cache can."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch

import h2o
from h2o import H2OCache, H2OConfig
from h2o.errors import UnsupportedError
from h2o.hf.model_traits.shared_keys import SHARES_KEYS
from h2o.hf.simulation.random_eviction import draw_ranks
from tests.hf import tiny
from tests.hf.program_models import FAMILIES, model_of
from tests.hf.test_simulation import PROMPT, check_rows_alone, text

SMALL = {"heavy": 6, "recent": 4, "sinks": 2, "score_by": "random"}
CHOICES = {
    "sinks": SMALL,
    "no recent keys": {"heavy": 9, "recent": 0, "score_by": "random"},
    "by head": SMALL | {"heavy": [2, 9, 3, 7], "recent": 3},
}


def evicted_at(N, prompt, layer, head, heavy, recent, sinks=0, pinned=()):
    """The first column that no longer sees each key, by going through the text token by token."""
    ranks = draw_ranks(torch.arange(N), torch.tensor(head), layer).tolist()
    ranks = [math.inf if i in pinned else rank for i, rank in enumerate(ranks)]
    held, gone = [], torch.full((N,), N, dtype=torch.int32)
    for seen in range(1, N + 1):
        held.append(seen - 1)
        while seen >= prompt and len(held) > sinks + heavy + recent:
            least = min((i for i in held if sinks <= i < seen - recent), key=ranks.__getitem__)
            held.remove(least)
            gone[least] = seen
    return gone


@pytest.mark.parametrize("chosen", CHOICES)
@pytest.mark.parametrize("prompt", [1, PROMPT, 40])
def test_the_lowest_ranks_leave(chosen, prompt):
    model, ids, more = tiny.model("llama", "sdpa"), text(), CHOICES[chosen]
    N, layers = ids.shape[1], model.config.num_hidden_layers
    if isinstance(more["heavy"], list):  # one list for the heads of each layer
        more = more | {"heavy": [more["heavy"][: model.config.num_key_value_heads]] * layers}
    with h2o.simulated(model, prompt_length=prompt, trace=True, **more) as simulation:
        model(ids, use_cache=False)
    for layer in range(layers):
        for head, found in enumerate(simulation.evicted_at(layer)[0]):
            heavy = more["heavy"] if isinstance(more["heavy"], int) else more["heavy"][0][head]
            sizes = heavy, more["recent"], more.get("sinks", 0)
            assert torch.equal(found, evicted_at(N, prompt, layer, head, *sizes))


MODELS = ["llama", "gemma3", "falcon_h1", "qwen3_next"]
MODELS += ["gemma3n_text"] * SHARES_KEYS


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *itertools.product(MODELS, [{"kv_dtype": "int8"}, {"pinned": [(9, 12)]}]),
        ("llama, wide", {"kv_dtype": "int8-int4"}),
        *[("llava", {})] * ("llava" in FAMILIES),
    ],
)
def test_ranks_alone_decide_in_any_model(name, more):
    """Neither other kinds of layers nor stored bits nor autocast nor an image change what leaves,
    and pinned keys never do."""
    model, ids = model_of(name), text()
    inputs = (
        tiny.with_image(name, {"input_ids": ids}) if FAMILIES[name].image else {"input_ids": ids}
    )
    pinned = range(*more.get("pinned", [(0, 0)])[0])
    with h2o.simulated(model, prompt_length=PROMPT, trace=True, **SMALL, **more) as simulation:
        model(**inputs, use_cache=False)
        found = {layer: simulation.evicted_at(layer)[0] for layer in simulation.layers()}
        with torch.autocast("cpu", torch.bfloat16):
            model(**inputs, use_cache=False)
        assert all(torch.equal(simulation.evicted_at(layer)[0], x) for layer, x in found.items())
    for layer, heads in found.items():
        for head, columns in enumerate(heads):
            wanted = evicted_at(ids.shape[1], PROMPT, layer, head, 6, 4, 2, pinned)
            assert torch.equal(columns, wanted)


def test_padding_between_tokens():
    """Ranks depend on positions, which do not count padding."""
    model, ids = tiny.model("llama"), text()
    n, at = ids.shape[1], 20
    column = torch.cat([torch.arange(at), torch.arange(at, n) + 3])  # of each token
    padded, mask = torch.zeros(1, n + 3, dtype=torch.long), torch.zeros(1, n + 3, dtype=torch.long)
    padded[:, column], mask[:, column] = ids, 1
    how = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0), "use_cache": False}
    with h2o.simulated(model, prompt_length=PROMPT, trace=True, **SMALL) as simulation:
        alone, before = model(ids, use_cache=False).logits, simulation.evicted_at(1)
        logits = model(padded, attention_mask=mask, **how).logits
        after = simulation.evicted_at(1)[..., column]
    torch.testing.assert_close(logits[:, column], alone, atol=2e-4, rtol=0)
    assert torch.equal((after < n + 3), (before < n))


def test_tokens_attend_to_what_is_held():
    """The logits must be those of dense attention under a mask that hides the evicted keys."""
    model, ids = tiny.llama(1), text()
    model.set_attn_implementation("sdpa")
    with h2o.simulated(model, prompt_length=PROMPT, trace=True, **SMALL) as simulation:
        logits = model(ids, use_cache=False).logits
    column = torch.arange(ids.shape[1])
    seen = column[:, None] < simulation.evicted_at(0)[:, :, None]  # [1, G, N, N]
    seen = seen & (column <= column[:, None])
    G = model.config.num_attention_heads // model.config.num_key_value_heads
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf).repeat_interleave(G, dim=1)
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_batch_are_alone(side):
    rows = [text(seed, tokens) for seed, tokens in enumerate([50, 23, 64])]
    check_rows_alone(tiny.model("llama", "sdpa"), rows, [1] * 3, side, **SMALL)


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


@pytest.mark.parametrize("more", [{"decay": 0.9}, {"value_weighted": True}])
def test_other_policies_are_refused(more):
    with pytest.raises(ValueError, match='score_by="random" can be combined with sinks only'):
        H2OConfig(**SMALL | more)


REFUSED = {
    "cache": lambda model, _: H2OCache(model, **SMALL),
    "patched": lambda model, _: h2o.patched(model, **SMALL).__enter__(),
    "enable": lambda model, _: h2o.enable(model, **SMALL),
    "generate_all": lambda model, ids: list(h2o.generate_all(model, [ids], rows=1, **SMALL)),
    "compress": lambda model, ids: h2o.compress_document(model, ids, **SMALL),
}


@pytest.mark.parametrize("call", REFUSED)
def test_no_cache_evicts_at_random(call):
    with pytest.raises(UnsupportedError, match=r"baseline that no cache has: .* h2o\.simulated\("):
        REFUSED[call](tiny.model("llama"), text())
