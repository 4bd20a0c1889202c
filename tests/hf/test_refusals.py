"""h2o raises an error that names what it does not support, and never gives wrong results
instead."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.modeling_utils import AttentionInterface

import h2o
from h2o import H2OCache, H2OConfig, UnsupportedError, patched, supports
from h2o.compat import CACHE, with_cache
from h2o.hf.model_traits.shared_keys import SHARES_KEYS
from tests.hf.drive import Attention, feed, forward, new_cache, tensors
from tests.hf.tiny import FAMILIES, SPREAD, batch, greedy, model, prompts, shared
from tests.inputs import drifting

SMALL = {"heavy": 6, "recent": 6}
TEXT = drifting(1, B=1, N=30)


def config_of(model_type: str, **more):
    base = FAMILIES["llama"].build_config().to_dict()
    numbers = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    return AutoConfig.for_model(model_type, **({x: base[x] for x in numbers} | more))


# ---- By the config -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "more", "words"),
    [
        ("bart", {}, "encoder-decoder"),
        ("t5", {}, "encoder-decoder"),
        ("dots3_note_text", {"num_key_value_heads": 4}, "latent attention is sparse"),
        ("doge", {}, "its own attention pattern"),
        ("kosmos-2", None, "its own attention pattern"),
        ("mllama", None, "layers cache the keys of images"),
        ("mllama_text_model", None, "layers cache the keys of images"),
        ("gemma2", {"use_bidirectional_attention": True}, "bidirectional"),
        *[
            (name, None, words)
            for name, words in {
                **dict.fromkeys(
                    ["mamba", "mamba2", "falcon_mamba", "recurrent_gemma"], "nothing to evict"
                ),
                **dict.fromkeys(["inkling_text", "inkling2_text"], "bias"),
                **dict.fromkeys(["deepseek_v32", "glm_moe_dsa"], "an indexer"),
                "qwen4_exp_text": "is indexed_attention, which is sparse attention",
            }.items()
        ],
        pytest.param(
            "gemma4_unified_assistant",
            {},
            "keys of another model",
            marks=pytest.mark.skipif(not SHARES_KEYS, reason="a newer transformers shares keys so"),
        ),
    ],
)
def test_models_that_cannot_be_served(model_type, more, words):
    small = more is not None
    config = config_of(model_type, **more) if small else AutoConfig.for_model(model_type)
    with pytest.raises(UnsupportedError, match=f"h2o does not support {model_type}.*{words}"):
        H2OCache(config, **SMALL)
    assert not supports(config)
    assert words in supports(config).reason


@pytest.mark.parametrize("model_type", ["bloom", "falcon", "mpt", "gpt_neo"])
def test_models_with_attention_code_of_their_own(model_type):
    """These models must be refused. transformers itself would log a warning and continue with their
    own attention."""
    more = {"attention_types": [[["global"], 2]]} if model_type == "gpt_neo" else {}
    more |= {"n_embd": 32, "n_head": 4, "n_layer": 2, "d_model": 32}
    config = config_of(model_type, **more)
    assert "attention code of its own" in supports(config).reason
    legacy = AutoModelForCausalLM.from_config(config).eval()
    before = legacy.config._attn_implementation
    with (
        pytest.raises(UnsupportedError, match="attention code of its own"),
        patched(legacy, **SMALL),
    ):
        pass
    assert legacy.config._attn_implementation == before
    assert "_h2o_patches" not in legacy.__dict__
    cache = H2OCache(legacy.config, **SMALL)
    with pytest.raises(RuntimeError, match="never reached h2o's attention"):
        greedy(legacy, {"input_ids": prompts(20)[0]}, **with_cache(cache))


def test_no_causal_model_of_that_config():
    assert "no causal language model" in supports(AutoConfig.for_model("vit")).reason


def test_not_a_config():
    ours = model("llama")
    with pytest.raises(TypeError, match="unknown parameter 'budgets': expected one of budget, he"):
        H2OCache(ours.config, budgets=3)


def test_an_unknown_keyword_gets_the_names_of_its_function():
    ours, ids = model("llama"), torch.ones(1, 5).long()
    mistakes = {
        "compileable": lambda: H2OCache(ours, budget=3, compilable=True),
        "pinned": lambda: patched(ours, budget=3, pined=[(0, 2)]).__enter__(),
        "trace": lambda: h2o.enable(ours, budget=3, traces=True),
        "ratio_of": lambda: h2o.simulated(ours, budget=3, ratio_off="text").__enter__(),
        "readings": lambda: h2o.compress_document(ours, ids, budget=3, reading=2),
        "rows": lambda: h2o.generate_all(ours, [[2, 3]], budget=3, rows=1, row=1),
        "prompt_length": lambda: h2o.analyze(ours, ids, heavy=3, prompt_lengths=2),
        "budget": lambda: H2OConfig(budgt=3),
        "recent": lambda: dataclasses.replace(H2OConfig(), recents=3),
    }
    for meant, call in mistakes.items():
        with pytest.raises(TypeError, match=rf"unknown parameter .* {meant}.* you mean {meant}\?"):
            call()


def test_a_cache_of_a_model_with_larger_heads():
    ours, other = model("llama"), copy.deepcopy(model("llama").config)
    other.head_dim = 2 * other.head_dim
    cache = H2OCache(other, budget=16)
    with pytest.raises(ValueError, match="from the config of the model that uses it"):
        ours(prompts(20)[0], **with_cache(cache))


OTHERS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 123.0},
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("seen", [0, 20])
def test_a_cache_of_another_model(name, seen):
    """Nothing may be stored of another model, whose keys the cache would take for its own and whose
    budget it would compute wrongly."""
    ours, (ids,) = model("llama"), prompts(30)
    config = copy.deepcopy(ours.config)
    setattr(config, name, OTHERS[name])
    other = AutoModelForCausalLM.from_config(config, attn_implementation="h2o").eval()
    cache, straight = (H2OCache(ours, **SMALL) for _ in range(2))
    for each in (cache, straight) if seen else ():
        ours(ids[:, :seen], **with_cache(each))
    with pytest.raises(ValueError, match=f"made for another model: this model's .*{name}"):
        other(ids[:, seen:], **with_cache(cache))
    assert cache.get_seq_length() == seen
    got, expected = (ours(ids[:, seen:], **with_cache(x)).logits for x in (cache, straight))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_a_config_under_the_name_of_the_model():
    ours, config = model("llama"), H2OConfig(**SMALL)
    with pytest.raises(TypeError, match=r"given already\. Write h2o_config="):
        H2OCache(ours, config=config)
    with pytest.raises(TypeError, match=r"given already\. Write h2o_config="):
        H2OCache.from_dynamic_cache(DynamicCache(), ours, config=config)
    assert H2OCache(config=ours, h2o_config=config).config == config
    for call in (h2o.enable, lambda *x, **more: h2o.simulated(*x, **more).__enter__()):
        with pytest.raises(TypeError, match=r"one of budget, .* Did you mean h2o_config\?"):
            call(ours, config=config)


def test_a_config_in_the_place_of_a_cache():
    """generate() would change it, and a forward pass would call its methods."""
    ours, config, (ids,) = model("llama"), H2OConfig(**SMALL), prompts(20)
    for call in (functools.partial(ours.generate, max_new_tokens=2), ours):
        with pytest.raises(AttributeError, match=r"pass cache=h2o\.H2OCache\(model, config\)"):
            call(ids, **with_cache(config))
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"heavy=3.*make a new one"):
        config.heavy = 3
    assert pickle.loads(pickle.dumps(config)) == copy.copy(config) == config


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("trace", lambda x, **how: H2OCache(x, **how)),
        ("compileable", lambda x, **how: H2OCache(x, **how)),
        ("trace", lambda x, **how: h2o.enable(x, **how)),
        ("trace", lambda x, **how: h2o.simulated(x, **how).__enter__()),
        ("mass", lambda x, **how: h2o.simulated(x, **how).__enter__()),
        ("compileable", lambda x, **how: h2o.generate_all(x, [[2, 3]], rows=1, **how)),
        ("as_completed", lambda x, **how: h2o.generate_all(x, [[2, 3]], rows=1, **how)),
    ],
)
def test_a_text_in_the_place_of_a_flag(name, call):
    """Python takes the text "no" for true."""
    with pytest.raises(TypeError, match=f"{name} is 'no'; expected True or False"):
        call(model("llama"), **SMALL, **{name: "no"})


@pytest.mark.parametrize("call", [h2o.supports, H2OCache, h2o.enable, h2o.disable])
def test_a_name_in_the_place_of_a_model(call):
    with pytest.raises(TypeError, match=r"not str: .*h2o info --model some/model needs no weights"):
        call("some/model")


def test_a_model_in_the_place_of_a_config():
    ours = model("llama")
    for wrong in (ours, ours.config):  # both print as many lines
        with pytest.raises(TypeError, match=rf"not a {type(wrong).__name__}. Write budget="):
            H2OCache(ours, wrong)


WITHOUT_A_MODEL = {
    "H2OCache": lambda x, **how: H2OCache(x, **how),
    "from_dynamic_cache": lambda x, **how: H2OCache.from_dynamic_cache(DynamicCache(), x, **how),
    "for_model": lambda x, **how: H2OConfig(**how).for_model(x),
    "compress_document": lambda x, **how: h2o.compress_document(x, torch.ones(1, 5).long(), **how),
    "generate_all": lambda x, **how: h2o.generate_all(x, [[2, 3]], rows=1, **how),
    "simulated": lambda x, **how: h2o.simulated(x, **how).__enter__(),
    "patched": lambda x, **how: h2o.patched(x, **how).__enter__(),
    "supports": lambda x, **how: h2o.supports(x),
    "analyze": lambda x, **how: h2o.analyze(x, torch.ones(1, 5).long()),
}


@pytest.mark.parametrize("how", [{"budget": 0.2}, SMALL], ids=["bytes", "tokens"])
@pytest.mark.parametrize("call", WITHOUT_A_MODEL)
def test_neither_a_model_nor_a_config(call, how):
    pair = (shared("llama"), None)  # what load_model returns
    for wrong, name in ((None, "None"), ("gpt2", "str"), (pair, "tuple"), (type(pair[0]), "Llama")):
        with pytest.raises(TypeError, match=f"expected a model of transformers.*, not {name}"):
            WITHOUT_A_MODEL[call](wrong, **how)


def test_a_pipeline_or_a_name_in_place_of_a_model(tmp_path):
    ours = shared("llama")
    pipe = SimpleNamespace(model=ours)
    with pytest.raises(TypeError, match=r"not SimpleNamespace: pass its \.model"):
        H2OCache(pipe, **SMALL)
    cache = H2OCache(ours, **SMALL)
    ours(prompts(8)[0], **with_cache(cache))
    cache.save(tmp_path / "cache", ours)
    with pytest.raises(TypeError, match=r"not str: write model, tokenizer = h2o\.load_model"):
        H2OCache.load(tmp_path / "cache", "gpt2")


# ---- By the attention that the model runs --------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "opt", "gpt_neox"])
def test_other_attention_is_noticed_in_the_first_forward_pass(name, attention):
    theirs = model(name, attention)
    cache = H2OCache(theirs.config, **SMALL)
    with pytest.raises(RuntimeError, match=r'model\.set_attn_implementation\("h2o"\)'):
        theirs(prompts(20)[0], **with_cache(cache))
    cache.reset()
    theirs.set_attn_implementation("h2o")
    greedy(theirs, {"input_ids": prompts(20)[0]}, **with_cache(cache))


def test_other_attention_of_a_single_layer_is_noticed_before_the_first_eviction():
    config = FAMILIES["llama"].build_config()
    config.num_hidden_layers = 1
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    cache = H2OCache(config, **SMALL)
    theirs(prompts(20)[0], **with_cache(cache))  # a prompt's attention does not depend on h2o
    with pytest.raises(RuntimeError, match="never reached h2o's attention"):
        theirs(prompts(1)[0], **with_cache(cache))


def test_static_cache():
    ours = model("llama")
    (ids,) = prompts(20)
    with pytest.raises(UnsupportedError, match="such as StaticCache"):
        greedy(ours, {"input_ids": ids}, cache_implementation="static")
    with pytest.raises(UnsupportedError, match="such as StaticCache"):
        ours(ids, **with_cache(StaticCache(config=ours.config, max_cache_len=64)))


def test_paged_attention():
    ours = model("llama")
    # transformers raises it before h2o is called
    with pytest.raises((ValueError, RuntimeError), match=r"h2o|paged"):
        ours.generate_batch(inputs=[[3, 4, 5]])
    theirs = model("llama", "sdpa")
    with patched(theirs, **SMALL), pytest.raises(UnsupportedError, match=r"h2o\.generate_all\("):
        theirs.generate_batch(inputs=[[3, 4, 5]])
    assert "init_continuous_batching" not in vars(theirs)


@pytest.mark.parametrize("name", ["llama", "opt", "gpt_neox", "gpt2", "phi"])
def test_output_attentions(name):
    ours = model(name)
    (ids,) = prompts(20)
    for cache in (None, H2OCache(ours.config, **SMALL)):
        with pytest.raises(UnsupportedError, match="output_attentions=True"):
            ours(ids, **with_cache(cache), output_attentions=True)
    twin = model(name, "eager")
    twin.config.output_attentions = True
    twin.set_attn_implementation("h2o")
    with pytest.raises(UnsupportedError, match="output_attentions=True"):
        twin(ids)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(
    ("keyword", "words"),
    [
        ("sinks", "attention sinks.*sdpa"),
        ("position_bias", "additive position bias.*sdpa"),
        ("block_indices", "block-sparse.*sdpa"),
        ("cache", "paged attention"),
        ("output_attentions", "output_attentions=True.*eager"),
    ],
)
def test_foreign_keywords_of_attention(keyword, words, cached):
    attention = AttentionInterface()["h2o"]
    argument = True if keyword == "output_attentions" else torch.zeros(4)
    query, key, value = tensors(TEXT)
    cache = new_cache(**SMALL)
    if cached:
        key, value = cache.update(key, value, 0)
    with pytest.raises(UnsupportedError, match=words):
        attention(Attention(), query, key, value, None, scaling=0.25, **{keyword: argument})
    feed(cache, TEXT, [30])  # the error has not changed the cache
    # models pass None or False for what they do not need
    query, key, value = tensors(TEXT)
    attention(Attention(), query, key, value, None, scaling=0.25, **{keyword: None})


def test_a_window_in_a_layer_of_ours():
    """A cache that was made for a model without sliding windows must refuse a model with
    windows."""
    windowed = model("mistral-window")
    cache = H2OCache(model("mistral").config, **SMALL)
    with pytest.raises(UnsupportedError, match="sliding window of 10"):
        greedy(windowed, {"input_ids": prompts(20)[0]}, **with_cache(cache))


def test_masks_of_more_dimensions():
    ours = model("llama")
    (ids,) = prompts(20)
    cache = H2OCache(ours.config, **SMALL)
    mask = torch.zeros(1, 1, 20, 20)
    with pytest.raises(UnsupportedError, match="4-D masks"):
        ours(ids, attention_mask=mask, **with_cache(cache))
    assert cache.get_seq_length() == 0
    greedy(ours, {"input_ids": ids}, **with_cache(cache))


@pytest.mark.parametrize("cached", [True, False])
def test_a_mask_without_rows(cached):
    ours = model("llama")
    (ids,) = prompts(20)
    cache = with_cache(H2OCache(ours.config, **SMALL)) if cached else {"use_cache": False}
    with pytest.raises(ValueError, match=r"attention_mask has shape \[20\]; expected \[rows, tok"):
        ours(ids, attention_mask=torch.ones(20), **cache)


def test_masks_of_the_wrong_length():
    ours = model("llama")
    (ids,) = prompts(20)
    cache = H2OCache(ours.config, **SMALL)
    ours(ids, **with_cache(cache))
    for columns in (19, 22, 20):
        with pytest.raises(ValueError, match=f"{columns} columns; expected 21"):
            ours(ids[:, :1], attention_mask=torch.ones(1, columns), **with_cache(cache))
    ours(ids[:, :1], attention_mask=torch.ones(1, 21), **with_cache(cache))
    assert cache.get_seq_length() == 21


def test_different_head_dimensions_of_keys_and_values():
    cache = new_cache(**SMALL)
    _, key, value = tensors(TEXT)
    with pytest.raises(UnsupportedError, match="the same head dimension for both"):
        cache.update(key, value[..., :8], 0)


# ---- By what is done with the cache --------------------------------------------------------------


def test_training():
    ours = model("llama")
    (ids,) = prompts(20)
    ours.train()
    with pytest.raises(RuntimeError, match="for inference"):
        ours(ids, **with_cache(H2OCache(ours.config, **SMALL)))


@pytest.mark.usefixtures("gradients")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        ("llama", {"kv_dtype": "int8"}),
        ("llama", {"positions": "cache_relative"}),
        ("llama", {"compileable": True}),
        ("gpt_oss", {}),
        ("deepseek_v3", {}),
        ("minicpm3", {}),
        *[("gemma4_text", {})] * SHARES_KEYS,
        ("falcon_h1", {}),
    ],
    ids=str,
)
def test_backward_through_a_cache(name, settings):
    """A backward pass through a cache must raise an error, and the logits must be those without
    gradients."""
    ours, (ids,) = model(name), prompts(20)
    cache, plain = (H2OCache(ours.config, **SMALL, **settings) for _ in range(2))
    for piece in ids.split([13, 6, 1], 1):
        with torch.no_grad():
            expected = ours(piece, **with_cache(plain)).logits
        logits = ours(piece, **with_cache(cache)).logits
        assert torch.equal(logits, expected)
    with pytest.raises(RuntimeError, match="has no gradient"):
        logits.sum().backward()


def test_dropout():
    cache = new_cache(**SMALL)
    with pytest.raises(RuntimeError, match="for inference"):
        forward(cache, TEXT, dropout=0.1)
    feed(cache, TEXT, [30])


def test_cropping_and_offloading():
    cache = new_cache(**SMALL)
    feed(cache, TEXT, [20, *[1] * 10])
    before = cache.kept(0)
    cache.crop(0)
    with pytest.raises(NotImplementedError, match="pass that was not recorded"):
        cache.crop(-1)
    with pytest.raises(NotImplementedError, match="cannot be offloaded"):
        cache.offload(0)
    with pytest.raises(NotImplementedError, match="cannot be offloaded"):
        cache.layers[0].prefetch()
    torch.testing.assert_close(cache.kept(0), before, rtol=0, atol=0)


def test_cropping_nothing_and_everything():
    """`crop` must do what it does for a DynamicCache."""
    cache, theirs = new_cache(**SMALL), DynamicCache()
    for crop in (-20, 0, 20):
        feed(cache, TEXT, [20])
        _, key, value = tensors(TEXT.cut(0, 20))
        theirs.update(key, value, 0)
        try:
            theirs.crop(crop)
        except ValueError:
            with pytest.raises(ValueError, match="negative"):
                cache.crop(crop)
        else:
            cache.crop(crop)
            assert cache.get_seq_length() == theirs.get_seq_length()
        cache.reset()
        theirs = DynamicCache()


def test_no_cache_and_a_cache():
    """A cache that is passed must not be ignored because of use_cache=False, whether the call says
    so or training has left it in the model's settings."""
    ours, inputs = model("llama"), {"input_ids": prompts(20)[0]}
    with pytest.raises(ValueError, match="use_cache=False with an H2OCache"):
        greedy(ours, inputs, **with_cache(H2OCache(ours.config, **SMALL)), use_cache=False)
    ours.generation_config.use_cache = False
    with pytest.raises(ValueError, match=r"Pass use_cache=True.* model\.generation_config"):
        greedy(ours, inputs, **with_cache(H2OCache(ours.config, **SMALL)))
    cache = H2OCache(ours.config, **SMALL)
    greedy(ours, inputs, **with_cache(cache), use_cache=True)
    assert cache.get_seq_length() > 20


@pytest.mark.parametrize("columns", [1, 3])
def test_other_heads(columns):
    """A cache must refuse keys of another number of heads, as after a model was split over
    processes, or is whole again."""
    cache = new_cache(**SMALL)
    forward(cache, TEXT)
    _, key, value = tensors(TEXT)
    half = key[:, :1, :columns], value[:, :1, :columns]
    with pytest.raises(ValueError, match=r"of 2 heads in layer 0 and was given keys of 1 heads"):
        cache.update(*half, 0)
    cut = key[:, :, :columns, :8], value[:, :, :columns, :8]
    with pytest.raises(ValueError, match=r"of 16 elements in layer 0 and was given keys of 8\."):
        cache.update(*cut, 0)
    forward(cache, type(TEXT)(*(x[:, :, :1] for x in TEXT)))  # the cache can still be used


def test_attention_twice_for_one_update():
    cache = new_cache(**SMALL)
    query, key, value = tensors(TEXT)
    key, value = cache.update(key, value, 0)
    attention = AttentionInterface()["h2o"]
    attention(Attention(), query, key, value, None, scaling=0.25)
    with pytest.raises(RuntimeError, match="ran twice"):
        attention(Attention(), query, key, value, None, scaling=0.25)


def test_no_new_tokens():
    """Ids that are shorter than the text seen, as from another conversation, leave no new tokens.
    The error must say so."""
    ours = model("llama")
    (ids,) = prompts(20)
    cache = H2OCache(ours.config, **SMALL)
    greedy(ours, {"input_ids": ids}, **with_cache(cache))
    with pytest.raises(ValueError, match="no new tokens: the cache has seen 35"):
        greedy(ours, {"input_ids": ids[:, :9]}, **with_cache(cache))


def test_sliding_layers_have_no_evictions_to_tell():
    cache = H2OCache(model("gemma3").config, **SMALL, trace=True)
    for ask in (cache.kept, cache.evicted_at):
        with pytest.raises(ValueError, match=r"layers of h2o are \[1, 3\]"):
            ask(0)


def _with_tangent(call, x):
    with forward_ad.dual_level():
        call(forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.fixture(params=["dual", "grad", "jvp", "vmap"])
def transform(request):
    return {
        "dual": _with_tangent,
        "grad": lambda call, x: torch.func.grad(lambda x: call(x).sum())(x),
        "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
        "vmap": lambda call, x: torch.func.vmap(call)(x[None]),
    }[request.param]


NO_TRANSFORMS = pytest.raises(UnsupportedError, match=r"torch\.func")


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own call
@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_transforms_of_functions(name, transform, records):
    """Transforms must be refused, because attention would drop the tangent of a dual tensor that
    the rest of the model keeps."""
    ours, (ids,) = shared(name), prompts(20)
    cache = H2OCache(ours.config, heavy=6, recent=6)
    embedded = ours.get_input_embeddings()(ids).detach()

    def call(x):
        return ours(inputs_embeds=x, **with_cache(cache)).logits

    with torch.set_grad_enabled(records), NO_TRANSFORMS:
        transform(call, embedded)
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        expected = ours(ids, **with_cache(H2OCache(ours.config, heavy=6, recent=6))).logits
        assert torch.equal(call(embedded), expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own call
def test_a_transform_of_a_later_pass(transform):
    """A transform must be noticed in any pass, not only in the first one."""
    ours, (ids,) = shared("llama"), prompts(20)
    cache = H2OCache(ours.config, heavy=6, recent=6)
    embedded = ours.get_input_embeddings()(ids).detach()

    def call(x):
        return ours(inputs_embeds=x, **with_cache(cache)).logits

    with torch.no_grad():
        ours(ids, **with_cache(cache))
        call(embedded[:, :1])
        with NO_TRANSFORMS:
            transform(call, embedded[:, :1])
        assert cache.get_seq_length() == 21
        call(embedded[:, :1])
        assert cache.get_seq_length() == 22


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own call
@pytest.mark.parametrize("records", [False, True])
def test_transforms_of_a_simulation(transform, records):
    """A simulation must refuse transforms, with and without gradients. Without them a dual tensor's
    tangent would bypass the attention."""
    ours, (ids,) = shared("llama"), prompts(20)
    embedded = ours.get_input_embeddings()(ids).detach()
    with (
        torch.set_grad_enabled(records),
        h2o.simulated(ours, heavy=6, recent=6),
        NO_TRANSFORMS,
    ):
        transform(lambda x: ours(inputs_embeds=x, use_cache=False).logits, embedded)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own call
@pytest.mark.parametrize("attention", ["h2o", "eager"])
def test_transforms_without_a_cache(attention):
    """The remedy that the error names must work: no cache, with "eager", or with "h2o" in reverse
    mode."""
    ours, (ids,) = model("llama", attention), prompts(12)
    embedded = ours.get_input_embeddings()(ids).detach()

    def call(x):
        return ours(inputs_embeds=x, use_cache=False).logits.sum()

    gradient = torch.func.grad(call)(embedded)
    assert torch.isfinite(gradient).all()
    if attention == "eager":
        _, tangent = torch.func.jvp(call, (embedded,), (torch.ones_like(embedded),))
        torch.testing.assert_close(tangent, gradient.sum(), rtol=1e-3, atol=1e-3)


# ---- What is supported: without an H2OCache, "h2o" is dense attention ----------------------------


@pytest.mark.parametrize("name", ["llama", "opt", "gpt_neox", "gemma3", "mistral-window"])
def test_dense_attention_is_that_of_sdpa(name):
    ours, theirs = model(name), model(name, "sdpa")
    inputs = batch(prompts(12, 20))
    real = inputs["attention_mask"].bool()
    for more in ({"use_cache": False}, {}):
        got, expected = ours(**inputs, **more), theirs(**inputs, **more)
        torch.testing.assert_close(got.logits[real], expected.logits[real])
    # with a filled DynamicCache: a chunk after a padded prompt, and one token
    got, expected = got[CACHE], expected[CACHE]
    for columns in (4, 1):
        ids = torch.arange(2 * columns).reshape(2, columns) + 5
        mask = inputs["attention_mask"]
        inputs["attention_mask"] = mask = torch.cat([mask, mask.new_ones(2, columns)], 1)
        torch.testing.assert_close(
            ours(ids, attention_mask=mask, **with_cache(got)).logits,
            theirs(ids, attention_mask=mask, **with_cache(expected)).logits,
        )
    # the same without padding, for which neither makes a mask
    (row,) = prompts(16)
    got, expected = (x(row[:, :9])[CACHE] for x in (ours, theirs))
    torch.testing.assert_close(
        ours(row[:, 9:], **with_cache(got)).logits,
        theirs(row[:, 9:], **with_cache(expected)).logits,
    )


def test_packed_texts_without_a_cache():
    ours, theirs = model("llama"), model("llama", "sdpa")
    (ids,) = prompts(20)
    position = torch.cat([torch.arange(12), torch.arange(8)])[None]
    got = ours(ids, position_ids=position, use_cache=False).logits
    expected = theirs(ids, position_ids=position, use_cache=False).logits
    torch.testing.assert_close(got, expected)
    alone = ours(ids[:, 12:], use_cache=False).logits
    torch.testing.assert_close(got[:, 12:], alone)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.usefixtures("gradients")
def test_training_without_a_cache():
    ours, theirs = model("llama"), model("llama", "sdpa")
    inputs = batch(prompts(12, 20), "right")
    for twin in (ours, theirs):
        twin.train()
        twin.gradient_checkpointing_enable()
        twin(**inputs, labels=inputs["input_ids"]).loss.backward()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


@pytest.mark.usefixtures("gradients")
def test_soft_capped_logits_without_a_cache():
    """Dense attention under "h2o" must apply the softcap. It is compared with "eager", because sdpa
    has no softcap."""
    ours, theirs = model("gemma2"), model("gemma2", "eager")
    ours.train()
    theirs.train()
    inputs = batch(prompts(12, 20))
    real = inputs["attention_mask"].bool()
    got, expected = ours(**inputs).logits[real], theirs(**inputs).logits[real]
    torch.testing.assert_close(got, expected)
    got.sum().backward()
    expected.sum().backward()
    ours_grad = ours.model.layers[1].self_attn.q_proj.weight.grad
    torch.testing.assert_close(ours_grad, theirs.model.layers[1].self_attn.q_proj.weight.grad)


def test_encoder_decoder_without_a_cache():
    config = config_of("bart", d_model=32, encoder_layers=1, decoder_layers=1, init_std=SPREAD)
    config.encoder_ffn_dim = config.decoder_ffn_dim = 48
    from transformers import BartForConditionalGeneration

    theirs = BartForConditionalGeneration(config).eval()
    ours = copy.deepcopy(theirs)
    theirs.set_attn_implementation("sdpa")
    ours.set_attn_implementation("h2o")
    inputs = batch(prompts(9, 14), "right")
    decoder = {"decoder_input_ids": prompts(6)[0].repeat(2, 1), "use_cache": False}
    got, expected = ours(**inputs, **decoder), theirs(**inputs, **decoder)
    torch.testing.assert_close(got.logits, expected.logits)


def test_a_model_without_weights():
    """A model on the device "meta" can be asked what h2o does with it. Calls of it must say that it
    has no weights instead of what torch or a library says first."""
    ours, (ids,) = model("llama").to("meta"), prompts(20)
    assert h2o.supports(ours)
    cache = H2OCache(ours, **SMALL)
    with pytest.raises(BufferError, match=r'on the device "meta".*load its weights'):
        ours(ids.to("meta"), **with_cache(cache))
    with pytest.raises(ValueError, match=r'the model is on the device "meta".*load its weights'):
        h2o.enable(ours, **SMALL)
    with pytest.raises(ValueError, match=r'the model is on the device "meta"'):
        with h2o.simulated(ours, **SMALL):
            pass
    with pytest.raises(ValueError, match=r'the model is on the device "meta"'):
        h2o.compress_document(ours, ids, **SMALL)
    (result,) = h2o.generate_all(ours, [ids[0]], rows=1, max_new_tokens=1, **SMALL)
    assert 'the model is on the device "meta"' in str(result.error)
