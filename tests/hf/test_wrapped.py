"""Models that were copied, compiled, tuned or cut, enabled or with a cache by hand."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from h2o import H2OCache, H2OConfig, Unsupported, disable, enable, patched
from h2o.borrowed import CACHE, repeats_virtual_tokens, with_cache
from tests.hf.tiny import greedy, model, prompts

SMALL = {"heavy": 6, "recent": 6}


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
    with torch.no_grad():
        assert twin(**inputs)[CACHE] is twin._h2o_patches.patches[-1].cache
    disable(twin)
    assert twin.config._attn_implementation == "sdpa"
    assert greedy(twin, inputs, 12).tolist() == full
    assert set(vars(twin)) == set(vars(plain))
    assert not twin._forward_pre_hooks


STEPS = 4
"""Of a compiled model: each makes a graph anew, and after eight torch goes on without."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_models():
    plain = model("llama", "sdpa")
    compiled = torch.compile(plain, backend="eager")
    (ids,) = prompts(20)
    with patched(plain, **SMALL), torch.no_grad():
        tokens, logits = greedy(plain, {"input_ids": ids}, STEPS), plain(ids).logits
    with patched(compiled, **SMALL) as patch, torch.no_grad():
        assert greedy(compiled, {"input_ids": ids}, STEPS).tolist() == tokens.tolist()
        out = compiled(ids)
        assert out[CACHE] is patch.cache
        torch.testing.assert_close(out.logits, logits)
    assert plain.config._attn_implementation == "sdpa"


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_prompts_that_were_tuned():
    """Prompt tuning puts embeddings before the text, prefix tuning keys into PEFT's own cache."""
    peft = pytest.importorskip("peft")
    tuned = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    (ids,) = prompts(20)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    wrapped = peft.get_peft_model(model("llama", "sdpa"), peft.PromptTuningConfig(**tuned)).eval()
    if repeats_virtual_tokens(wrapped):  # with any cache
        with pytest.raises(Unsupported, match="virtual tokens before every decode step"):
            enable(wrapped, **SMALL)
    else:
        full = greedy(wrapped, inputs, 8).tolist()
        with patched(wrapped, H2OConfig.full()) as patch:
            assert greedy(wrapped, inputs, 8).tolist() == full
            assert patch.cache.report().layers[0].seen == [4 + 20 + 7]
    wrapped = peft.get_peft_model(model("llama", "h2o"), peft.PrefixTuningConfig(**tuned)).eval()
    with pytest.raises(Unsupported, match="prefix tuning"):
        enable(wrapped, **SMALL)
    if CACHE == "past_key_values":  # with later names PEFT up to 0.21.2 drops its own prefix
        cache = H2OCache(wrapped.get_base_model().config, **SMALL)
        with pytest.raises(AttributeError, match="prefix tuning"):
            greedy(wrapped, inputs, 8, **with_cache(cache))


def test_a_model_with_fewer_layers_than_its_config():
    ours = model("llama")
    (ids,) = prompts(20)
    full = H2OCache(ours.config, **SMALL)
    ours.model.layers = ours.model.layers[:1]
    with pytest.raises(RuntimeError, match=r"set config\.num_hidden_layers = 1"):
        greedy(ours, {"input_ids": ids}, **with_cache(full))
    ours.config.num_hidden_layers = 1
    greedy(ours, {"input_ids": ids}, **with_cache(H2OCache(ours.config, **SMALL)))


def test_a_model_with_more_layers_than_the_cache():
    ours = model("llama")
    short = copy.deepcopy(ours.config)
    short.num_hidden_layers = 1
    with pytest.raises(ValueError, match="layer 1 was given a cache of 1 layers"):
        greedy(ours, {"input_ids": prompts(20)[0]}, **with_cache(H2OCache(short, **SMALL)))
