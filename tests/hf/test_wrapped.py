"""Models that were copied, compiled, tuned or cut short, enabled or with a cache passed by hand."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

import h2o
from h2o import H2OCache, H2OConfig, UnsupportedError, disable, enable, patched
from h2o.compat import CACHE, with_cache
from h2o.hf.cache import many_graphs
from tests.hf.tiny import greedy, llama, model, prompts

SMALL = {"heavy": 6, "recent": 6}
SMALL_CONFIG = H2OConfig(**SMALL)


def saved(plain):
    file = io.BytesIO()
    torch.save(plain, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(plain):
    return pickle.loads(pickle.dumps(plain))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, saved])
def test_copies_of_an_enabled_model_are_enabled(duplicate):
    plain = model("llama", "sdpa")
    inputs = {"input_ids": prompts(20)[0]}
    full = greedy(plain, inputs, 12).tolist()
    outer = enable(plain, **SMALL)
    inner = enable(plain, heavy=2, recent=2)
    greedy(plain, inputs, 12)
    twin = duplicate(plain)
    inner.undo()
    small = greedy(plain, inputs, 12).tolist()
    outer.undo()
    assert plain.config._attn_implementation == "sdpa"
    assert twin._h2o_patches.patches[-1].cache is None
    assert twin._h2o_patches.patches[-1] is not inner
    greedy(twin, inputs, 12)
    assert twin._h2o_patches.patches[-1].cache.report().layers[0].kept == [4]
    disable(twin)
    assert greedy(twin, inputs, 12).tolist() == small != full
    assert twin(**inputs)[CACHE] is twin._h2o_patches.patches[-1].cache
    disable(twin)
    assert twin.config._attn_implementation == "sdpa"
    assert greedy(twin, inputs, 12).tolist() == full
    assert set(vars(twin)) == set(vars(plain))
    assert not twin._forward_pre_hooks


def test_a_compiled_call_of_a_cache_that_is_not_compileable():
    """test_compiled_models compiles a whole model, which takes half a minute."""
    torch._dynamo.reset()
    many_graphs.warn_of_many_graphs.__wrapped__.cache_clear()
    plain = llama(1)
    plain.set_attn_implementation("sdpa")
    inputs = {"input_ids": prompts(20)[0]}
    with patched(plain, **SMALL):
        tokens = greedy(plain, inputs, 2).tolist()
    compiled = torch.compile(plain, backend="eager")
    with patched(compiled, **SMALL) as patch:
        assert greedy(compiled, inputs, 2).tolist() == tokens
        sizes = torch.compile(patch.cache.get_mask_sizes, backend="eager")
        with pytest.warns(RuntimeWarning, match="compileable=True"):
            sizes(1, 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_compiled_models():
    """A compiled model whose layers fall into many graphs must warn once, and say what helps."""
    torch._dynamo.reset()  # dynamo gives up after eight graphs of a function, across tests
    many_graphs.warn_of_many_graphs.__wrapped__.cache_clear()
    plain = llama(1)
    plain.set_attn_implementation("sdpa")
    compiled = torch.compile(plain, backend="eager")
    (ids,) = prompts(20)
    with patched(plain, **SMALL):
        tokens, logits = greedy(plain, {"input_ids": ids}, 2), plain(ids).logits
    with patched(compiled, **SMALL) as patch, warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        assert greedy(compiled, {"input_ids": ids}, 2).tolist() == tokens.tolist()
        out = compiled(ids)
        assert out[CACHE] is patch.cache
        torch.testing.assert_close(out.logits, logits)
    named = [str(x.message) for x in raised if "compileable=True" in str(x.message)]
    assert len(named) == 1
    assert plain.config._attn_implementation == "sdpa"


def repeats_virtual_tokens(wrapped):
    """Whether PEFT adds virtual tokens before each decode step too, because it does not know the
    name that this version of transformers gives the cache."""
    return CACHE not in type(wrapped).prepare_inputs_for_generation.__code__.co_consts


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_prompts_that_were_tuned():
    """Prompt tuning adds embeddings before the text, which must be counted. Prefix tuning puts keys
    into PEFT's own cache, so it must be refused."""
    peft = pytest.importorskip("peft")
    tuned = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    (ids,) = prompts(20)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    wrapped = peft.get_peft_model(model("llama", "sdpa"), peft.PromptTuningConfig(**tuned)).eval()
    full = greedy(wrapped, inputs, 8).tolist()
    with patched(wrapped, H2OConfig.full()) as patch:
        if repeats_virtual_tokens(wrapped):
            with pytest.raises(
                UnsupportedError, match="prompt tuning mistakes each step for a prompt"
            ):
                greedy(wrapped, inputs, 8)
        else:
            assert greedy(wrapped, inputs, 8).tolist() == full
            assert patch.cache.report().layers[0].seen == [4 + 20 + 7]
    wrapped = peft.get_peft_model(model("llama", "h2o"), peft.PrefixTuningConfig(**tuned)).eval()
    with pytest.raises(UnsupportedError, match="prefix tuning"):
        enable(wrapped, **SMALL)
    with pytest.raises(UnsupportedError, match="prefix tuning"):
        H2OCache(wrapped, **SMALL)
    if repeats_virtual_tokens(wrapped):
        return  # this PEFT leaves out the prefix, with a warning, if it is given a cache
    cache = H2OCache(wrapped.get_base_model().config, **SMALL)
    with pytest.raises(AttributeError, match="prefix tuning"):
        greedy(wrapped, inputs, 8, **with_cache(cache))


def by_hand(wrapped, ids, config, tokens):
    """Greedy decoding in which only the first pass goes through the wrapper."""
    cache = H2OCache(wrapped.get_base_model().config, config)
    new = [wrapped(input_ids=ids, **with_cache(cache)).logits[0, -1].argmax()]
    for _ in range(tokens - 1):
        last = wrapped.get_base_model()(new[-1].reshape(1, 1), **with_cache(cache))
        new.append(last.logits[0, -1].argmax())
    return [int(token) for token in new]


def tuned_prompt(kind):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return peft.get_peft_model(model("llama", "h2o"), config).eval()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig"])
@pytest.mark.parametrize("rows", [1, 2])
def test_rows_with_prompts_that_were_tuned(kind, rows):
    """The tuned embeddings must come before each prompt once, even if the prompt is prefilled in
    chunks."""
    wrapped = tuned_prompt(kind)
    texts, config = prompts(20, 33, 9), H2OConfig(heavy=0.2, recent=0.2)
    results = h2o.generate_all(
        wrapped, [x[0].tolist() for x in texts], config, rows=rows, max_new_tokens=8
    )
    for text, result in zip(texts, results, strict=True):
        assert result.ids == by_hand(wrapped, text, config, 8)
        assert result.report["seen"] == 4 + text.shape[1] + 7
    full, ids = H2OConfig.full(), texts[1][0].tolist()
    settings = GenerationConfig(prefill_chunk_size=8, max_new_tokens=8, do_sample=False)
    (chunked,) = h2o.generate_all(wrapped, [ids], full, rows=1, generation_config=settings)
    assert chunked.ids == by_hand(wrapped, texts[1], full, 8)
    prefix = H2OCache(wrapped.get_base_model().config, full)
    wrapped(input_ids=texts[1][:, :16], **with_cache(prefix))
    (after,) = h2o.generate_all(wrapped, [ids], full, rows=1, prefix=prefix, max_new_tokens=8)
    assert after.ids == chunked.ids
    forgets = h2o.Request(ids, evict=[(2, 4)])
    with pytest.raises(UnsupportedError, match="evict does not support prompt tuning"):
        next(h2o.generate_all(wrapped, [forgets], full, rows=1, prefix=prefix))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_tuned_prompt_where_each_pass_would_repeat_it():
    wrapped = tuned_prompt("PromptTuningConfig")
    with pytest.raises(UnsupportedError, match="prompt tuning"):
        h2o.compress_document(
            wrapped, prompts(20)[0], SMALL_CONFIG, readings=2, repeat=torch.tensor([5])
        )


def hooked(ours):
    hooks = pytest.importorskip("accelerate").hooks
    hooks.add_hook_to_module(ours, hooks.AlignDevicesHook("cpu", io_same_device=True))


def offloaded(ours):
    pytest.importorskip("accelerate").cpu_offload(ours, torch.device("cpu"))


def wrapped_forward(ours):
    forward = ours.forward

    @functools.wraps(forward)  # generate() looks at the parameters
    def wrapper(*args, **kwargs):
        return forward(*args, **kwargs)

    ours.forward = wrapper


def wrapped_inside(ours):
    wrapped_forward(ours.model)


@pytest.mark.parametrize("wrap", [hooked, offloaded, wrapped_forward, wrapped_inside])
def test_a_turn_with_other_ids_of_a_wrapped_model(wrap):
    """A wrapper of forward(), such as a hook of accelerate, hides the calls of generate() from the
    cache. Ids that differ from those seen must be refused all the same."""
    ours, (ids, more) = model("llama"), prompts(30, 4)
    wrap(ours)
    cache = H2OCache(ours.config, **SMALL)
    new = greedy(ours, {"input_ids": ids}, 5, **with_cache(cache))
    turn = torch.cat([ids, new, more], 1)
    other = turn.clone()
    other[0, 7] += 1
    with pytest.raises(ValueError, match="are not the ones that the cache has seen"):
        greedy(ours, {"input_ids": other}, 3, **with_cache(cache))
    greedy(ours, {"input_ids": turn}, 3, **with_cache(cache))
    assert cache.get_seq_length() == 41


def test_a_model_that_another_one_calls():
    """The ids that generate() drops for the outer model are not those of the inner model's text,
    even if there are as many."""
    outer, inner, (ids, own) = model("llama"), model("llama"), prompts(20, 14)
    ours, other = H2OCache(outer.config, **SMALL), H2OCache(inner.config, **SMALL)
    new = greedy(outer, {"input_ids": ids}, 5, **with_cache(ours))
    inner(torch.cat([own, own[:, :10]], 1), **with_cache(other))
    assert ours.get_seq_length() == other.get_seq_length() == 24
    forward = outer.forward

    @functools.wraps(forward)
    def consult(*args, **kwargs):
        inner(own, **with_cache(other))
        return forward(*args, **kwargs)

    outer.forward = consult
    greedy(outer, {"input_ids": torch.cat([ids, new, own], 1)}, 4, **with_cache(ours))
    assert other.get_seq_length() == 24 + 4 * 14


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter_that_tokens_switch_on():
    """PEFT would look for the invocation tokens in each decode step, so such an adapter must be
    refused."""
    peft = pytest.importorskip("peft")
    (ids,) = prompts(20)
    adapter = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False,
        alora_invocation_tokens=ids[0, 10:12].tolist(),
    )  # fmt: skip
    wrapped = peft.get_peft_model(model("llama", "h2o"), adapter).eval()
    with pytest.raises(UnsupportedError, match="aLoRA"):
        next(h2o.generate_all(wrapped, [ids[0].tolist()], SMALL_CONFIG, rows=1, max_new_tokens=4))
    with pytest.raises(UnsupportedError, match="aLoRA"):
        h2o.compress_document(wrapped, ids, SMALL_CONFIG, readings=2, repeat=torch.tensor([5]))


def test_a_model_with_fewer_layers_than_its_config():
    ours = model("llama")
    (ids,) = prompts(20)
    full = H2OCache(ours.config, **SMALL)
    ours.model.layers = ours.model.layers[:1]
    said = r"^1 of the cache's 2 layers have seen \d+ tokens, the others none\. If an earlier call "
    said += r"raised an error, .*If none did, .*Set config\.num_hidden_layers = 1"
    with pytest.raises(RuntimeError, match=said):
        greedy(ours, {"input_ids": ids}, **with_cache(full))
    ours.config.num_hidden_layers = 1
    greedy(ours, {"input_ids": ids}, **with_cache(H2OCache(ours.config, **SMALL)))


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_a_model_with_fewer_layers_whose_masks_were_made_before(name):
    """Such a model does not say that a pass begins. The layer that gets keys again before the
    others have got theirs must store nothing more."""
    ours, (ids,) = model(name), prompts(20)
    cache = H2OCache(ours, **SMALL)
    ours.model.layers = ours.model.layers[:1]
    masks = dict.fromkeys(("full_attention", "sliding_attention"))
    with torch.no_grad():
        ours(ids, attention_mask=masks, **with_cache(cache))
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"^1 of the cache's . layers have seen 20"):
                ours(ids[:, :1], attention_mask=masks, **with_cache(cache))
    first = cache.layers[0]
    seen = first.cumulative_length if first.is_sliding else int(first.slots.seen_tokens)
    assert seen == 20


@pytest.mark.parametrize("removed", [0, 1])
def test_a_model_without_one_of_its_layers(removed):
    """The other layers keep their numbers. The errors must say how to number them, and the model
    then generates what it generates with a full cache."""
    ours, (ids,) = llama(3), prompts(20)
    ours.set_attn_implementation("h2o")
    full = H2OCache(ours, heavy=60, recent=60)
    del ours.model.layers[removed]
    expected = greedy(ours, {"input_ids": ids}, **with_cache(DynamicCache()))
    number = r"number the layers .*layer\.self_attn\.layer_idx = i"
    with pytest.raises(RuntimeError, match=rf"^2 of the cache's 3 layers .* removed.* {number}"):
        greedy(ours, {"input_ids": ids}, **with_cache(full))
    ours.config.num_hidden_layers = 2
    with pytest.raises(ValueError, match=rf"layer 2 of the model .* {number}"):
        greedy(ours, {"input_ids": ids}, **with_cache(H2OCache(ours, heavy=60, recent=60)))
    for i, layer in enumerate(ours.model.layers):
        layer.self_attn.layer_idx = i
    cache = H2OCache(ours, heavy=60, recent=60)
    assert torch.equal(greedy(ours, {"input_ids": ids}, **with_cache(cache)), expected)


def test_a_model_with_more_layers_than_the_cache():
    ours = model("llama")
    short = copy.deepcopy(ours.config)
    short.num_hidden_layers = 1
    cache = H2OCache(short, **SMALL)
    with pytest.raises(ValueError, match="another model: this model's num_hidden_layers is 2, not"):
        greedy(ours, {"input_ids": prompts(20)[0]}, **with_cache(cache))
    with pytest.raises(ValueError, match="layer 1 of the model was given a cache of 1 layers"):
        cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 1)


def test_a_model_inside_data_parallel():
    """The error must say which part of the wrapper to pass."""
    wrapped = torch.nn.DataParallel(model("llama"))
    for call in (H2OCache, h2o.supports, lambda x, **how: h2o.simulated(x, **how).__enter__()):
        how = {} if call is h2o.supports else SMALL
        with pytest.raises(TypeError, match=r"not DataParallel: pass its \.module"):
            call(wrapped, **how)
    H2OCache(wrapped.module, **SMALL)
