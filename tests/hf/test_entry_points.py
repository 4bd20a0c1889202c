"""Ways to reach a model other than generate(): a Trainer, classifiers, wrappers, traces."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    Blip2Config,
    Blip2ForConditionalGeneration,
)

from h2o import H2OCache, H2OConfig, UnsupportedError, disable, enable, patched, simulated
from h2o.compat import CACHE, with_cache
from tests.hf.tiny import FAMILIES, IMAGE, IMAGE_STARTS, SPREAD, VOCABULARY, greedy, model, prompts

SMALL = {"heavy": 6, "recent": 6}


def test_scoring_as_a_trainer_does_is_warned_of():
    """A Trainer sets use_cache=False in the model's config, and its evaluation loss is a full
    cache's at any budget. The user must be warned, as if each text had a cache."""
    plain, (ids,) = model("llama", "sdpa"), prompts(20)
    with patched(plain, **SMALL) as patch, torch.no_grad():
        plain.config.use_cache = False
        for _ in range(6):
            plain(ids)
        plain(ids, use_cache=False)
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
    with pytest.raises(TypeError, match=r"not Pipeline: pass its \.model"):
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


def blip_2():
    """A tiny model whose generate() calls that of its language model."""
    eye = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    eye |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    text = {"model_type": "opt", "vocab_size": VOCABULARY, "hidden_size": 32, "init_std": SPREAD}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "eos_token_id": None}
    text |= {"word_embed_proj_dim": 32, "max_position_embeddings": 256, "pad_token_id": 0}
    config = Blip2Config(
        vision_config=eye,
        qformer_config=eye | {"encoder_hidden_size": 16, "vocab_size": VOCABULARY},
        text_config=text,
        num_query_tokens=4,
        image_token_index=IMAGE,
        image_token_id=IMAGE,
    )
    torch.manual_seed(0)
    return Blip2ForConditionalGeneration(config).eval()


def test_a_model_whose_part_generates():
    """A patch of the whole model must reach the part that generates. Otherwise nothing would be
    evicted, without an error."""
    plain, (ids,) = blip_2(), prompts(40)
    ids[ids >= IMAGE_STARTS] = 2
    ids[:, 2:6] = IMAGE
    image = torch.linspace(-1, 1, 192).sin().reshape(1, 3, 8, 8)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": image}
    full = greedy(plain, inputs, 10).tolist()
    with patched(plain, H2OConfig.full()):
        assert greedy(plain, inputs, 10).tolist() == full
    patch = enable(plain, **SMALL)
    got = greedy(plain, inputs, 10).tolist()
    assert patch.cache.report().layers[0].kept == [12]
    disable(plain)
    assert greedy(plain, inputs, 10).tolist() == full != got
    plain.set_attn_implementation("h2o")
    assert greedy(plain, inputs, 10, **with_cache(H2OCache(plain, **SMALL))).tolist() == got


def test_a_cache_that_is_none_by_position():
    """None in the place of a cache asks for one, by position as by name."""
    plain, (ids,) = model("llama", "sdpa"), prompts(20)
    with patched(plain, **SMALL) as patch:
        made = plain(ids, None, None, None, None, None, True)[CACHE]
        assert made is patch.cache is not None
        assert plain(ids, None, None, None, None, None, False).get(CACHE) is None


@pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning",
    "ignore::DeprecationWarning",
    r"ignore:.*(torch\.jit|TorchScript):FutureWarning",  # since torch 2.15
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
)
def test_traces():
    """A trace would record the attention over an H2OCache as constants, and answer every text as
    the one that it was made with."""

    class Logits(torch.nn.Module):
        def __init__(self, use_cache):
            super().__init__()
            self.model, self.use_cache = model("llama", "sdpa"), use_cache

        def forward(self, ids):
            return self.model(ids, use_cache=self.use_cache).logits

    one, two = prompts(20, 31)
    cached, plain = Logits(True), Logits(False)
    with (
        patched(cached.model, **SMALL),
        pytest.raises(UnsupportedError, match=r"torch\.jit\.trace"),
    ):
        torch.jit.trace(cached, (one,), check_trace=False)
    with (
        simulated(plain.model, **SMALL),
        pytest.raises(UnsupportedError, match=r"torch\.jit\.trace"),
    ):
        torch.jit.trace(plain, (one,), check_trace=False)
    with patched(plain.model, **SMALL):
        traced = torch.jit.trace(plain, (one,), check_trace=False)
    torch.testing.assert_close(traced(two), plain(two), atol=1e-4, rtol=1e-3)
