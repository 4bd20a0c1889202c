"""The cache and the simulation with vision-language models and an image in the text.

test_families.py crosses these models with modes and policies.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from h2o import H2OCache, H2OConfig, simulated, supports
from h2o.compat import with_cache
from tests.hf.tiny import FAMILIES, batch, greedy, model, prompts, shared, slow_if, with_image

SMALL = {"heavy": 6, "recent": 6}
IMAGES = [name for name, family in FAMILIES.items() if family.image]
ALIKE = {"qwen2_vl", "lfm2_vl"}
"""Families that add nothing here: other families have positions with several axes, and states next
to keys."""
each = pytest.mark.parametrize("name", [slow_if(name in ALIKE, name) for name in IMAGES])
TEXT = ("input_ids", "attention_mask", "mm_token_type_ids")
"""Model inputs that have one column per token."""


def illustrated(name, *lengths, **how) -> dict[str, Tensor]:
    return with_image(name, batch(prompts(*lengths, **how)))


def row_of(inputs, b, length):
    """Row `b` alone, with its image."""
    rows = len(inputs["input_ids"])
    own = {key: x.chunk(rows)[b] for key, x in inputs.items()}
    return own | {key: own[key][:, -length:] for key in TEXT if key in own}


def longer(inputs, ids):
    """`inputs` with tokens [1, n] appended to the text."""
    more = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "mm_token_type_ids" in inputs:
        more["mm_token_type_ids"] = inputs["mm_token_type_ids"][:, -1:].repeat(1, ids.shape[1])
    return inputs | {key: torch.cat([inputs[key], x], 1) for key, x in more.items()}


@each
def test_a_budget_for_all_gives_the_full_caches_tokens(name):
    ours, theirs, inputs = shared(name), shared(name, "sdpa"), illustrated(name, 17, 23)
    expected = greedy(theirs, inputs, 32)
    got = greedy(ours, inputs, 32, **with_cache(H2OCache(ours.config, H2OConfig.full())))
    assert got.tolist() == expected.tolist()
    assert greedy(ours, inputs, 32).tolist() == expected.tolist()  # with a DynamicCache
    assert expected.tolist() != greedy(theirs, batch(prompts(17, 23)), 32).tolist()
    assert len(expected.unique()) > 10


@each
def test_rows_are_rows_alone_and_the_budget_holds(name):
    ours, lengths = shared(name), (17, 30)
    inputs = illustrated(name, *lengths)
    cache = H2OCache(ours.config, **SMALL)
    tokens = greedy(ours, inputs, 12, **with_cache(cache))
    for b, length in enumerate(lengths):
        alone = H2OCache(ours.config, **SMALL)
        expected = greedy(ours, row_of(inputs, b, length), 12, **with_cache(alone))
        assert tokens[b].tolist() == expected[0].tolist()
    for index, kind in enumerate(supports(ours).layers):
        if kind == "h2o":
            assert (cache.kept(index)[0] >= 0).sum(-1).unique().tolist() == [12]


@each
def test_the_simulation_is_the_cache(name):
    """The simulation must evict the same keys as the cache when the text has an image, also during
    the answer."""
    ours, inputs = model(name), illustrated(name, 30)
    cache = H2OCache(ours.config, **SMALL, trace=True)
    made = ours.generate(
        **inputs, **with_cache(cache), max_new_tokens=9, do_sample=False,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    text = longer(inputs, made.sequences[:, 30:38])
    with simulated(ours, **SMALL, prompt_length=30, trace=True) as simulation:
        expected = ours(**text, use_cache=False).logits[0, 29:]
    full = ours(**text, use_cache=False).logits[0, 29:]
    got = torch.cat(made.logits)
    assert (got - expected).abs().max() < 1e-3 * (full - expected).abs().max()
    for layer in simulation.layers():
        assert torch.equal(simulation.evicted_at(layer), cache.evicted_at(layer))
