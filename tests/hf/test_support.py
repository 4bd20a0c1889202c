"""`supports` agrees with what a model does. The supported families have a table in tiny.py."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from packaging import version
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    EncoderDecoderCache,
)
from transformers.utils import logging

from h2o import H2OCache, H2OConfig, UnsupportedError, patched, simulated, supports
from h2o.compat import with_cache
from h2o.hf.model_traits.layer_kinds import kind_of
from tests.hf import families
from tests.hf.tiny import FAMILIES, SPREAD, batch, greedy, model, prompts, slow_if

SMALL = {"heavy": 6, "recent": 6}


def encoder(name: str, **more):
    numbers = FAMILIES["llama"].build_config().to_dict()
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
             "intermediate_size", "pad_token_id", "initializer_range")  # fmt: skip
    config = {key: numbers[key] for key in names} | {"embedding_size": 32} | more
    config = AutoConfig.for_model(name, max_position_embeddings=64, **config)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("name", families.AS_DECODERS)
def test_encoders_are_refused_and_as_decoders_served(name):
    more = {"languages": ["en_XX"], "default_language": "en_XX"} if name == "xmod" else {}
    both_ways, decoder = encoder(name, **more), encoder(name, is_decoder=True, **more)
    assert "bidirectional" in supports(both_ways.config).reason
    with pytest.raises(UnsupportedError, match=r"config\.is_decoder=True"):
        H2OCache(both_ways.config, **SMALL)
    assert supports(decoder.config)
    inputs = batch(prompts(17, 23))
    expected = greedy(decoder, inputs).tolist()
    decoder.set_attn_implementation("h2o")
    cache = H2OCache(decoder.config, H2OConfig.full())
    assert greedy(decoder, inputs, **with_cache(cache)).tolist() == expected


def test_attention_that_turns_out_to_look_both_ways():
    """Bidirectional attention must be refused even if the config does not say so. The attention
    module or the mask shows it."""
    both_ways, decoder = encoder("bert"), encoder("bert", is_decoder=True)
    (ids,) = prompts(20)
    for ours in (both_ways, decoder):
        ours.set_attn_implementation("h2o")
    with pytest.raises(UnsupportedError, match=r"bidirectional|4-D masks"):
        both_ways(ids, **with_cache(H2OCache(decoder.config, **SMALL)), use_cache=True)
    for layer in decoder.bert.encoder.layer:
        layer.attention.self.is_causal = False
    with pytest.raises(UnsupportedError, match="bidirectional"):
        decoder(ids, **with_cache(H2OCache(decoder.config, **SMALL)))
    with pytest.raises(UnsupportedError, match="bidirectional"), simulated(decoder, **SMALL):
        decoder(ids, use_cache=False)


@pytest.mark.parametrize("name", ["bert", "bart"])
def test_a_decoder_with_cross_attention(name):
    """An H2OCache alone cannot hold the keys of the other text, and the error must name the cache
    that can. With it the decoder's own keys are evicted."""
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 32} if name == "bart" else {}
    ours = encoder(name, is_decoder=True, add_cross_attention=True, **sizes)
    ours.set_attn_implementation("h2o")
    (ids,), other = prompts(24), {"encoder_hidden_states": torch.randn(1, 5, 32)}
    exact = copy.deepcopy(ours).double()
    exact.set_attn_implementation("sdpa")
    text = other["encoder_hidden_states"].double()
    exact = exact(ids, use_cache=False, encoder_hidden_states=text).logits[:, 20:]
    rounding = (ours(ids, use_cache=False, **other).logits[:, 20:] - exact).abs().max()
    with pytest.raises((AttributeError, UnsupportedError), match=r"EncoderDecoderCache\(H2OCache"):
        ours(ids, **with_cache(H2OCache(ours.config, **SMALL)), **other)
    with pytest.raises(UnsupportedError, match="cross attention"), simulated(ours, **SMALL):
        ours(ids, use_cache=False, **other)
    for settings, kept in (({"heavy": 32, "recent": 32}, 24), (SMALL, 12)):
        cache = EncoderDecoderCache(H2OCache(ours.config, **settings), DynamicCache())
        ours(ids[:, :20], **with_cache(cache), **other)
        logits = ours(ids[:, 20:], **with_cache(cache), **other).logits
        assert cache.self_attention_cache.report().layers[0].kept == [kept]
        assert ((logits - exact).abs().max() <= 2 * rounding) == (kept == 24)


def test_a_language_model_beside_attention_code_of_the_images_own():
    """transformers cannot set the attention of GOT-OCR2 as a whole, so h2o must set that of its
    language model."""
    config = AutoConfig.for_model(
        "got_ocr2",
        text_config=FAMILIES["qwen2"].build_config().to_dict(),
        vision_config={
            "hidden_size": 16, "output_channels": 16, "num_hidden_layers": 1, "mlp_dim": 16,
            "num_attention_heads": 2, "image_size": 64, "patch_size": 16,
            "global_attn_indexes": [0],
        },
        image_token_id=96, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    support = supports(config)
    assert support.layers == ("h2o", "h2o")
    torch.manual_seed(0)
    ours = AutoModelForImageTextToText.from_config(config).eval()
    inputs = batch([row.clamp(max=95) for row in prompts(17, 23)])
    inputs["input_ids"][:, -9] = 96
    inputs["pixel_values"] = torch.linspace(-9, 9, 2 * 3 * 64 * 64).sin().view(2, 3, 64, 64)
    expected = greedy(ours, inputs, 32).tolist()
    with patched(ours, H2OConfig.full()):
        assert ours.config.text_config._attn_implementation == "h2o"
        assert greedy(ours, inputs, 32).tolist() == expected
    assert ours.config.text_config._attn_implementation == "sdpa"
    with patched(ours, **SMALL):
        small = greedy(ours, inputs, 32)
    assert small.tolist() != expected
    ours.set_attn_implementation("h2o")
    cache = H2OCache(config, **SMALL)
    assert torch.equal(greedy(ours, inputs, 32, **with_cache(cache)), small)
    assert cache.kept(1)[0].shape == (2, 2, 12)
    with simulated(ours, **SMALL):
        ours(**inputs, use_cache=False)


# The test below checks every language model, so an eighth of all configs is enough here.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # modules of old models warn
@pytest.mark.parametrize("every", [8, slow_if(True, 1)])
def test_configs_of_transformers_are_answered(every):
    """`supports` must answer for every config, also of models that are no language models: either
    with layers or with a reason."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        for name in list(CONFIG_MAPPING)[::every]:
            try:
                config = CONFIG_MAPPING[name]()
            except Exception:  # this config needs arguments
                continue
            support = supports(config)
            assert support.model_type == config.model_type
            assert bool(support) == (support.reason == "") == bool(support.layers), name
    finally:
        logging.set_verbosity(before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mapping", families.MAPPINGS)
def test_of_every_family_of_transformers_is_said_whether_it_is_served(mapping):
    """The list of families must be up to date. To renew it, run `python -m tests.hf.families
    docs/reference/families.txt`, and read the changes."""
    written = families.written(families.PAGE)[mapping]
    page = families.PAGE.read_text("utf-8")
    if page.startswith(f"transformers {transformers.__version__}\n"):
        assert families.said(mapping) == written
    elif version.parse(transformers.__version__) > version.parse(page.split()[1]):
        assert set(families.MAPPINGS[mapping]) <= set(written)


def test_the_cache_has_the_layers_that_supports_tells():
    """`supports` must name the layers that a cache has, for example for LFM2, which has no states
    without layer_types."""
    for changes in ({}, {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4}):
        config = AutoConfig.for_model("lfm2", **changes)
        cache = H2OCache(config, **SMALL)
        assert supports(config).layers == tuple(map(kind_of, cache.layers))


def test_a_model_without_layers_to_cache():
    config = FAMILIES["llama"].build_config()
    config.num_hidden_layers = 0
    support = supports(config)
    assert not support
    assert support.reason == "transformers caches none of its layers"


def test_models_that_do_not_tell_their_layers_about_the_cache():
    """OLMo 3's layers always get the default use_cache=False. h2o must not take it for the caller's
    choice."""
    numbers = FAMILIES["llama"].build_config().to_dict()
    for name in ("model_type", "tie_word_embeddings"):
        numbers.pop(name)
    try:
        config = AutoConfig.for_model("olmo3", **numbers, layer_types=["full_attention"] * 2)
    except Exception as error:  # 5.4 with a newer huggingface_hub
        pytest.skip(str(error))
    assert config.initializer_range == SPREAD
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config).eval()
    inputs = batch(prompts(17, 23))
    expected = greedy(plain, inputs).tolist()
    plain.set_attn_implementation("h2o")
    cache = H2OCache(config, H2OConfig.full())
    assert greedy(plain, inputs, **with_cache(cache)).tolist() == expected
    with pytest.raises(ValueError, match="use_cache=False with an H2OCache"):
        greedy(plain, inputs, **with_cache(H2OCache(config, **SMALL)), use_cache=False)


def test_a_model_is_asked_as_its_config_is():
    ours = model("llama")
    assert supports(ours) == supports(ours.config)


def test_windows_that_only_the_cache_knows():
    """Only the cache knows Moshi's sliding window, because the mask is plain causal. h2o must keep
    the window."""
    numbers = FAMILIES["llama"].build_config().to_dict()
    for name in ("model_type", "tie_word_embeddings", "intermediate_size"):
        numbers.pop(name)
    config = AutoConfig.for_model("moshi", **numbers, ffn_dim=48, sliding_window=10)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config).eval()
    inputs = batch(prompts(17, 23))
    expected = greedy(plain, inputs).tolist()
    plain.set_attn_implementation("h2o")
    assert greedy(plain, inputs).tolist() == expected
    assert greedy(plain, inputs, **with_cache(H2OCache(config, **SMALL))).tolist() == expected


def test_an_unsupported_model_is_named_before_its_settings():
    drawn = H2OConfig(heavy=4, recent=4, score_by="random")
    config = copy.deepcopy(model("llama").config)
    with pytest.raises(UnsupportedError, match='"random" is a baseline that no cache has: measure'):
        H2OCache(config, drawn)
    config.is_encoder_decoder = True
    with pytest.raises(UnsupportedError, match="h2o does not support llama: encoder-decoder"):
        H2OCache(config, drawn)
    with pytest.raises(TypeError, match="not str"):
        supports("llama")
