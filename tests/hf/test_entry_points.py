"""Ways to reach a model other than generate(): a Trainer, classifiers, wrappers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from h2o import H2OCache, enable, patched, simulated
from h2o.compat import with_cache
from tests.hf.tiny import FAMILIES, model, prompts

SMALL = {"heavy": 6, "recent": 6}


def test_scoring_as_a_trainer_does_is_warned_of():
    """A Trainer sets use_cache=False in the model's config, and its evaluation loss is a full
    cache's at any budget. The user must be warned, as if each text had a cache."""
    plain, (ids,) = model("llama", "sdpa"), prompts(20)
    with patched(plain, **SMALL) as patch, torch.no_grad():
        plain.config.use_cache = False
        for _ in range(7):
            plain(ids)
        plain(ids, use_cache=False)  # the user's own wish
        with pytest.warns(UserWarning, match=r"h2o\.simulated"):
            plain(ids)
        assert patch.cache is None


def classifier():
    """A tiny classifier of texts."""
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(FAMILIES["llama"].build_config()).eval()


def test_models_without_generate():
    """The error must not send from one object that cannot be patched to another."""

    class Pipeline:
        model = classifier()

    for one in (Pipeline.model, Pipeline.model.model):
        with pytest.raises(TypeError, match=rf"not {type(one).__name__}\. .*h2o\.simulated"):
            enable(one, **SMALL)
    with pytest.raises(TypeError, match=r"not Pipeline$"):
        enable(Pipeline(), **SMALL)
    with pytest.raises(TypeError, match=r"not DataParallel; pass its \.module"):
        enable(torch.nn.DataParallel(model("llama")), **SMALL)


@torch.no_grad()
def test_a_simulated_classifier_reads_what_a_cache_would():
    ours, (ids,) = classifier(), prompts(30)
    ours.set_attn_implementation("h2o")
    cache = H2OCache(ours, **SMALL)
    steps = [ours.model(ids[:, i : i + 1], **with_cache(cache))[0] for i in range(30)]
    with simulated(ours, **SMALL):
        got = ours(ids).logits
    torch.testing.assert_close(got, ours.score(steps[-1])[:, -1], atol=1e-4, rtol=1e-3)
