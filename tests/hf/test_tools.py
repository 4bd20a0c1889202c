"""Uses of caches other than generation: iteration, columns, other dtypes, comparisons."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from h2o import H2OCache
from h2o.compat import with_cache
from tests.hf.tiny import batch, model, prompts

SMALL = {"heavy": 6, "recent": 6}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_layers_one_by_one_as_of_a_dynamic_cache(name):
    ours = model(name)
    (ids,) = prompts(20)
    theirs, small = DynamicCache(config=ours.config), H2OCache(ours.config, **SMALL)
    ours(ids, **with_cache(theirs))
    ours(ids, **with_cache(small))
    for index, (logits, full) in enumerate(zip(small, theirs, strict=True)):
        assert len(logits) == len(full) == 3
        if not hasattr(small.layers[index], "slots"):
            assert logits[0].shape == full[0].shape
            continue
        positions = small.kept(index)[0][..., None].expand(*logits[0].shape)
        if index == 0:  # the inputs of deeper layers differ between the caches
            torch.testing.assert_close(logits[0], full[0].gather(2, positions))
            torch.testing.assert_close(logits[1], full[1].gather(2, positions))
    assert all(keys.numel() == 0 for keys, *_ in H2OCache(model("llama").config, **SMALL))


@pytest.mark.parametrize("side", ["left", "right"])
def test_kept_as_columns(side):
    ours = model("llama")
    rows = prompts(9, 23)
    inputs = batch(rows, side)
    cache = H2OCache(ours.config, **SMALL)
    ours(**inputs, **with_cache(cache))
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1).long()], dim=1)
    ours(torch.tensor([[5], [6]]), **with_cache(cache), attention_mask=mask)
    ids = torch.cat([inputs["input_ids"], torch.tensor([[5], [6]])], dim=1)
    kept = cache.kept(0)
    columns = kept.columns(inputs["attention_mask"])
    for b, row in enumerate(rows):
        text = torch.cat([row[0], torch.tensor([5 + b])])
        for positions, places in zip(kept.positions[b], columns[b], strict=True):
            assert ids[b, places[places >= 0]].tolist() == text[positions[positions >= 0]].tolist()
            assert ((places < 0) == (positions < 0)).all()
    assert torch.equal(kept.columns(), kept.positions)


def test_the_sliding_window_of_a_comparison_is_plain():
    from h2o import H2OConfig
    from h2o.cli.generate_command import usual_caches
    from tests.hf import tiny

    config = H2OConfig(heavy=8, recent=8, kv_dtype="int8")
    assert usual_caches(config, tiny.model("llama"), 40)["local"] == H2OConfig.local(16)


def test_a_comparison_has_the_cache_that_was_asked_for():
    from h2o import H2OConfig
    from h2o.cli.generate_command import usual_caches
    from tests.hf import tiny

    usual, other = H2OConfig(budget=0.1), H2OConfig(budget=0.1, score_by="sum")
    assert [*usual_caches(usual, tiny.model("llama"), 40)] == ["full", "budget=0.1", "local"]
    caches = usual_caches(other, tiny.model("llama"), 40)
    assert caches["h2o"] == other
    assert caches["budget=0.1"] == usual
