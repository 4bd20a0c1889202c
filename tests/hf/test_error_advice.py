"""The remedies that errors and `supports()` name are possible and help."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import (
    AutoConfig,
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    MistralConfig,
)

import h2o
from h2o import H2OCache, H2OConfig, UnsupportedError, patched, simulated, supports
from h2o.compat import SHARES_KEYS, with_cache
from h2o.hf.cache_state.slot_layout import by_head
from tests.hf.tiny import FAMILIES, LATENT, batch, failing, greedy, model, prompts, shared
from tests.hf.tiny import with_image as illustrated

SMALL = {"heavy": 6, "recent": 6}


def those_here(*names):
    """Select the names that this version of transformers has."""
    return [name for name in names if name in FAMILIES | LATENT]


ALL = {"heavy": 500, "recent": 500}


# ---- Images with bidirectional attention ----------------------------------------------------


def gemma_3():
    torch.manual_seed(0)
    text = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "initializer_range": 0.5,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 8, "patch_size": 2,
    }  # fmt: skip
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=96
    )
    ours = Gemma3ForConditionalGeneration(config).eval()
    ours.set_attn_implementation("h2o")
    return ours


def with_image():
    ids = prompts(30)[0].clamp(max=90)
    ids[0, 6:10] = 96
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": (ids == 96).long(),
        "pixel_values": torch.linspace(-1, 1, 192).sin().reshape(1, 3, 8, 8),
    }


def test_gemma_3_with_images():
    ours, inputs = gemma_3(), with_image()
    said = supports(ours)
    assert said
    assert "bidirectional" in said.not_images
    assert "from_dynamic_cache" in str(said)
    for cache in (H2OCache(ours.config, **ALL), H2OCache(ours.config, **SMALL)):
        with pytest.raises(UnsupportedError, match=r"from_dynamic_cache\(full"):
            greedy(ours, inputs, 4, **with_cache(cache))
    with pytest.raises(UnsupportedError, match="from_dynamic_cache"), patched(ours, **SMALL):
        greedy(ours, inputs, 4)


def test_gemma_3_with_images_as_the_error_says():
    ours, inputs = gemma_3(), with_image()
    full = DynamicCache(config=ours.config.get_text_config())
    ours(**inputs, **with_cache(full))
    cache = H2OCache.from_dynamic_cache(full, ours.config, **ALL)
    ids = torch.cat([inputs["input_ids"], torch.tensor([[7, 8, 9]])], 1)
    question = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    answers = [greedy(ours, question, 8, **with_cache(x)).tolist() for x in (full, cache)]
    assert answers[0] == answers[1]


def test_gemma_3_with_types_of_tokens_and_no_image():
    """Token types without an image, which the processor gives for a text, must be accepted and
    change nothing."""
    ours = gemma_3()
    text = {"input_ids": prompts(30)[0].clamp(max=90)}
    text["attention_mask"] = torch.ones_like(text["input_ids"])
    types = {"token_type_ids": torch.zeros_like(text["input_ids"])}
    tokens = [
        greedy(ours, text | more, 6, **with_cache(H2OCache(ours.config, **SMALL))).tolist()
        for more in ({}, types)
    ]
    assert tokens[0] == tokens[1]
    padded = {**text, "attention_mask": (torch.arange(30) > 4).long()[None]}
    tokens = [
        greedy(ours, padded | more, 6, **with_cache(H2OCache(ours.config, **SMALL))).tolist()
        for more in ({}, types)
    ]
    assert tokens[0] == tokens[1]


BIDIRECTIONAL = {"use_bidirectional_attention": "vision"}


@pytest.mark.parametrize(
    ("model_type", "text", "said"),
    [
        ("gemma3", None, True),  # a language model alone
        *[("gemma4", BIDIRECTIONAL, False), ("gemma4", {}, True)] * SHARES_KEYS,
        ("llava", None, True),
    ],
)
def test_which_models_look_both_ways_at_images(model_type, text, said):
    if model_type in FAMILIES and text is None:
        config = FAMILIES[model_type].build_config()
    else:
        config = AutoConfig.for_model(model_type, text_config=text)
    assert supports(config)
    assert (not supports(config).not_images) == said


# ---- Gradients, batches, documents -----------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.usefixtures("gradients")
def test_gradients_in_a_simulation(name):
    ours, (ids,) = model(name), prompts(20)
    with simulated(ours, **SMALL):
        loss = ours(ids, labels=ids, use_cache=False).loss
        with pytest.raises(RuntimeError, match=r"within h2o\.simulated\(\) has no gradient"):
            loss.backward()
    ours(ids, labels=ids, use_cache=False).loss.backward()


def test_another_batch_size():
    ours = shared("llama")
    document, question = prompts(20, 3)
    cache = H2OCache(ours.config, **SMALL)
    ours(document, **with_cache(cache))
    ids = torch.cat([document, question], 1)
    beams = {"num_beams": 2, "num_return_sequences": 2}
    with pytest.raises(ValueError, match=r"cache\.fork\(rows=2\)"):
        greedy(ours, {"input_ids": ids}, 3, **with_cache(cache), **beams)
    cache.reset()
    ours(document, **with_cache(cache))
    out = greedy(ours, {"input_ids": ids}, 3, **with_cache(cache.fork(rows=2)), **beams)
    assert len(out) == 2
    two = cache.fork(rows=2)
    with pytest.raises(ValueError, match="of 2 rows and was given 3"):
        ours(question.expand(3, -1), **with_cache(two))


HOW = {
    "sequences": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 1},
    "both": {"num_beams": 4, "num_return_sequences": 2},
}


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("how", HOW)
def test_prompt_lengths_of_rows_that_generate_repeats(how, chunk):
    ours = shared("llama")
    ids = torch.cat(prompts(20, 20))
    ids[0, :8] = 0
    mask = (ids != 0).long()
    cache = H2OCache(ours.config, heavy=0.2, recent=0.2, min_tokens=0, prompt_length=[12, 20])
    more = HOW[how] | ({} if chunk is None else {"prefill_chunk_size": chunk})
    ours.generate(
        ids, attention_mask=mask, max_new_tokens=3, **{"do_sample": False, **more},
        **with_cache(cache),
    )  # fmt: skip
    budget = cache.report().layers[0].budget
    if how == "sequences":
        assert budget == [4, 4, 8, 8]
    assert set(budget) == {4, 8}


def test_prompt_lengths_follow_the_rows():
    ours = shared("llama")
    ids = torch.cat(prompts(20, 20, 20))
    budget = {"heavy": 0.5, "recent": 0.0, "min_tokens": 0, "ratio_of": "prompt"}
    cache = H2OCache(ours.config, **budget, prompt_length=[4, 8, 20])
    cache.batch_select_indices([0, 2])
    cache.batch_repeat_interleave(2)
    ours(ids[[0, 0, 2, 2]], **with_cache(cache))
    assert cache.report().layers[0].budget == [2, 2, 10, 10]


@pytest.mark.parametrize(
    "rows", [[0, 2], (0, 2), torch.tensor([0, 2]), torch.tensor([True, False, True])], ids=str
)
@pytest.mark.parametrize("name", those_here("llama", "gemma2", "falcon_h1"))
def test_rows_by_numbers_of_any_kind(name, rows):
    ours = shared(name)
    ids = torch.cat(prompts(20, 20, 20))
    cache = H2OCache(ours.config, **SMALL)
    ours(ids, **with_cache(cache))
    expected = cache.fork()
    expected.batch_select_indices(torch.tensor([0, 2]))
    cache.batch_select_indices(rows)
    step = ids[:2, :1]
    assert torch.equal(
        ours(step, **with_cache(cache)).logits, ours(step, **with_cache(expected)).logits
    )


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_documents_longer_than_half_of_the_positions(name):
    config = copy.deepcopy(FAMILIES[name].build_config())
    config.max_position_embeddings = 64
    ours = type(shared(name))(config).eval()
    ours.set_attn_implementation("h2o")
    used = []
    ours.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: used.append(int(kwargs["position_ids"].max())), with_kwargs=True
    )
    request = torch.tensor([5, 6])
    (document,) = prompts(45)
    cache = h2o.compress_document(ours, document, **SMALL, readings=2, repeat=request)
    assert max(used) < 64
    assert cache.report().layers[0].seen == [45]
    with pytest.raises(
        ValueError,
        match=r"64 positions leave no room to repeat them: pass at\s+most 53 tokens, or readings=1",
    ):
        h2o.compress_document(ours, prompts(54)[0], **SMALL, readings=2, repeat=request)
    h2o.compress_document(ours, prompts(53)[0], **SMALL, readings=2, repeat=request)


# ---- After a pass that failed ----------------------------------------------------------------


@pytest.fixture
def pool():
    """A function that runs calls in one thread that stays alive, like a server's."""
    with ThreadPoolExecutor(1) as executor:
        yield lambda call: executor.submit(call).result()


BREAKING = those_here("llama", "gemma3", "deepseek_v3", "qwen3_next", "nemotron_h",
                      "falcon_h1")  # fmt: skip
"""Families with H2O layers alone, with windows, with latents, and with states."""


@pytest.mark.parametrize("seen", [False, True], ids=["prompt", "later pass"])
@pytest.mark.parametrize(
    ("name", "threaded"), [("llama", True), *((name, False) for name in BREAKING)]
)
def test_a_pass_that_failed(name, threaded, seen, pool):
    """A pass that failed in the last layer must be reported until `reset()`, and must leave nothing
    behind in the model."""
    ours, (ids, more) = model(name), prompts(20, 5)
    inputs, cache = illustrated(name, {"input_ids": ids}), H2OCache(ours.config, **SMALL)
    expected = ours(**inputs, use_cache=False).logits
    if seen:
        ours(**inputs, **with_cache(cache))
    assert not cache.report().broken
    within = pool if threaded else lambda call: call()
    now = {"input_ids": more} if seen else inputs
    with failing(ours.get_decoder().layers[-1]):
        within(torch.no_grad()(lambda: ours(**now, **with_cache(cache))))
    assert cache.report().broken
    assert "last forward pass has not ended" in str(cache.report())
    assert torch.equal(ours(**inputs, use_cache=False).logits, expected)
    for call in (
        cache.fork,
        lambda: cache.save("nowhere"),
        lambda: ours(more, **with_cache(cache)),
    ):
        with pytest.raises(
            RuntimeError, match=r"(?s)forward pass was interrupted.*cache\.reset\(\)"
        ) as error:
            call()
        assert "thread" not in str(error.value)
    cache.reset()
    ours(**inputs, **with_cache(cache))
    assert not cache.report().broken


def test_an_interrupt_in_a_thread_that_goes_on(pool):
    """After an interrupt between a layer's update and its attention, `reset()` must make the cache
    usable again."""
    ours, (ids,) = model("llama"), prompts(20)
    cache = H2OCache(ours.config, **SMALL)
    states = torch.zeros(1, 2, 3, 8)
    pool(lambda: cache.update(states, states, 0))
    with pytest.raises(RuntimeError, match=r"was interrupted|never reached"):
        ours(ids, **with_cache(cache))
    cache.reset()
    ours(ids, **with_cache(cache))


# ---- What a cache says of itself ---------------------------------------------------------------


@pytest.mark.parametrize(
    "name", those_here("llama", "gemma2", "qwen3_5", "falcon_h1", "deepseek_v3")
)
def test_is_initialized(name):
    ours, (ids,) = shared(name), prompts(20)
    cache = H2OCache(ours.config, heavy=6, recent=6)
    assert not cache.is_initialized
    ours(ids, **with_cache(cache))
    assert cache.is_initialized
    cache.reset()
    assert not cache.is_initialized
    assert all(getattr(layer, "keys", None) is None for layer in cache.layers), "memory is free"


@pytest.mark.parametrize(
    "config",
    [
        H2OConfig(heavy=6, recent=6),
        H2OConfig(heavy=6, recent=6, kv_dtype="int8"),
        H2OConfig(heavy=6, recent=6, head_shares=[[0.5, 1.5], [1.0, 1.0]]),
        H2OConfig(heavy=6, recent=6, score_by="mean-echo", head_shares="echo"),
    ],
    ids=["plain", "int8", "head_shares", "by rank"],
)
def test_keys_have_the_shape_of_a_dynamic_cache(config):
    ours, (ids,) = shared("llama"), prompts(20)
    cache = H2OCache(ours.config, config)
    assert cache.layers[0].keys is None
    ours(ids, **with_cache(cache))
    full = DynamicCache(config=ours.config)
    ours(ids, **with_cache(full))
    near = 0.05 if config.kv_dtype else 0
    for layer, theirs in zip(cache.layers, full.layers, strict=True):
        positions = by_head(layer.slots, layer.capacity.sizes, "positions", -1)
        at = positions.long().clamp(min=0)[..., None].expand(-1, -1, -1, 8)
        real = positions >= 0
        assert real.sum() == layer.kept()[0].ge(0).sum()
        for own, wanted in ((layer.keys, theirs.keys), (layer.values, theirs.values)):
            assert own.shape == at.shape
            assert layer.layer_idx or torch.allclose(
                own[real], wanted.gather(2, at)[real], rtol=near, atol=near
            )


@pytest.mark.filterwarnings("default:nothing is evicted")
def test_a_simulation_of_sliding_windows_alone():
    with pytest.warns(UserWarning, match="nothing is evicted") as warned:
        with simulated(shared("mistral-window"), heavy=3, recent=3):
            pass
    assert warned[0].filename == __file__


@pytest.mark.filterwarnings("default:nothing is evicted")
def test_a_cache_of_sliding_windows_alone(tmp_path):
    config = MistralConfig(num_hidden_layers=2, sliding_window=10)
    with pytest.warns(
        UserWarning, match="nothing is evicted: every layer of mistral has a sliding"
    ):
        cache = H2OCache(config, heavy=0.3, recent=7, sinks=2, kv_dtype="int8")
    assert "nothing is evicted" in repr(cache)
    assert "nothing is evicted" in str(supports(config))
    cache.save(tmp_path / "cache")
    for x in (cache, copy.deepcopy(cache), H2OCache.load(tmp_path / "cache", config)):
        settings = x.config
        assert (settings.heavy, settings.recent, settings.sinks) == (0.3, 7, 2)
        assert settings.kv_dtype == "int8"


def test_a_long_document_is_repeated_as_it_is_alone():
    """A document must be repeated in the same pieces as alone, however little room the longer
    documents of its batch leave."""
    ours = model("llama")
    ours.config.max_position_embeddings = 150
    documents = prompts(100, 40, 64)
    inputs = batch(documents)
    how = {"heavy": 12, "recent": 4, "readings": 2, "repeat": torch.tensor([5, 9])}
    together = h2o.compress_document(ours, **inputs, **how)
    for row, document in enumerate(documents):
        alone = h2o.compress_document(ours, document, **how)
        for ours_, theirs in zip(together.layers, alone.layers, strict=True):
            got, want = ours_.kept(), theirs.kept()
            n = want.positions.shape[2]
            assert torch.equal(got.positions[row, :, :n], want.positions[0])
            torch.testing.assert_close(got.scores[row, :, :n], want.scores[0], rtol=1e-4, atol=1e-5)
