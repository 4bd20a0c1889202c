"""patched(), enable() and disable(): H2O for code that makes no cache. They leave nothing
behind."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, pipeline
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

import h2o
from h2o import H2OCache, H2OConfig, UnsupportedError, disable, enable, patched
from h2o.compat import CACHE, with_cache
from h2o.evaluation.generation import new_cache
from tests.cases import checkered
from tests.hf.modes import MODES, policy
from tests.hf.tiny import FAMILIES, batch, greedy, model, prompts

SMALL = {"heavy": 6, "recent": 6}


def traces(model) -> dict:
    """Everything that patching could leave behind."""
    return {
        "attributes": set(model.__dict__),
        "generate": vars(model).get("_prepare_cache_for_generation"),
        "pre_hooks": dict(model._forward_pre_hooks),
        "with_kwargs": dict(model._forward_pre_hooks_with_kwargs),
        "hooks": dict(model._forward_hooks),
        "config": copy.deepcopy(model.config.to_dict()),
        "attention": [
            module.config._attn_implementation
            for module in model.modules()
            if hasattr(module, "config")
        ],
        "config_attributes": dict(vars(model.config)),
    }


@pytest.fixture(params=["llama", "gpt_neox", "gemma3"])
def plain(request):
    """A model under sdpa, compared with itself after the test."""
    plain = model(request.param, "sdpa")
    before = traces(plain)
    yield plain
    assert traces(plain) == before


@pytest.fixture
def llama():
    llama = model("llama", "sdpa")
    before = traces(llama)
    yield llama
    assert traces(llama) == before


def expected_tokens(plain, inputs, tokens=12, **config):
    """Tokens of a call with a cache that is passed by hand."""
    twin = copy.deepcopy(plain)
    twin.set_attn_implementation("h2o")
    return greedy(twin, inputs, tokens, **with_cache(H2OCache(twin.config, **config))).tolist()


def test_generate_has_a_fresh_cache_each_time(plain):
    one, two = batch(prompts(17, 23)), batch(prompts(14, seed=1))
    full = greedy(plain, one, 12).tolist()
    with patched(plain, **SMALL) as patch:
        assert greedy(plain, one, 12).tolist() == expected_tokens(plain, one, **SMALL) != full
        first = patch.cache
        assert greedy(plain, two, 12).tolist() == expected_tokens(plain, two, **SMALL)
        assert patch.cache is not first
        assert patch.cache.get_seq_length() == 14 + 11
    assert greedy(plain, one, 12).tolist() == full


# A block makes a cache from its config. Of the policy it only needs to know whether budgets are
# fractions, because the cache then needs the prompt's length.
@pytest.mark.parametrize("chosen", ["h2o", "fractions"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "chat turns"])
def test_every_mode_as_with_a_cache_by_hand(mode, chosen):
    """Each mode must generate the tokens that it generates with a cache passed by hand. Chat turns
    are left out, because a fresh cache for each call has no second turn."""
    plain = model("llama", "sdpa")
    inputs = batch(prompts(17, 23))
    twin = model("llama")
    config = policy(chosen, twin)
    chunks = {"chunked prompt", "prompt token by token"}
    length = [17, 23] if mode in chunks else None
    expected = MODES[mode](
        twin, inputs, lambda: H2OCache(twin.config, config, prompt_length=length)
    )
    with patched(plain, config):
        got = MODES[mode](plain, inputs, lambda: None)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("by", "budget"), checkered(["scale", "negative prompt", "processor"], [4, 0.3])
)
def test_guidance_keeps_all_of_its_second_text(llama, by, budget):
    """The second text of guidance must keep all of its keys, as it does when a cache is passed by
    hand for the first text."""
    inputs, (negative,) = batch(prompts(17, 23)), prompts(30, seed=5)
    config = {"heavy": budget, "recent": budget}

    def how(ours):
        if by == "processor":
            return {"logits_processor": [UnbatchedClassifierFreeGuidanceLogitsProcessor(3, ours)]}
        negatives = {"negative_prompt_ids": negative.repeat(2, 1)}
        return {"guidance_scale": 3.0} | (negatives if by == "negative prompt" else {})

    twin = copy.deepcopy(llama)
    twin.set_attn_implementation("h2o")
    by_hand = H2OCache(twin.config, **config)
    expected = greedy(twin, inputs, **with_cache(by_hand), **how(twin))
    with patched(llama, **config) as patch:
        assert greedy(llama, inputs, **how(llama)).tolist() == expected.tolist()
        assert str(patch.cache.report()) == str(by_hand.report())
        assert patch.pass_cache is None
        cache = H2OCache(llama.config, **config)
        got = greedy(llama, inputs, **with_cache(cache), **how(llama))
        assert got.tolist() == expected.tolist()
        assert greedy(llama, inputs, use_cache=False, **how(llama)).shape == expected.shape


@pytest.mark.parametrize("how", [{}, {"prefill_chunk_size": 2}], ids=["whole", "chunks"])
def test_fractions_of_a_padded_batch_of_short_prompts(llama, how):
    """Fractions of a padded batch must be of the prompts without padding: one token here, and none
    in a row of padding alone."""
    ids = torch.cat([torch.zeros_like(prompts(2)[0]), prompts(1)[0]], 1).repeat(3, 1)
    mask = torch.tensor([[0, 0, 1], [0, 0, 1], [0, 0, 0]], device=ids.device)
    inputs = {"input_ids": ids, "attention_mask": mask}
    with patched(llama, heavy=0.1, recent=0.1, min_tokens=0) as patch:
        got = greedy(llama, inputs, 12, **how).tolist()
        assert patch.cache.report().layers[0].budget == [2, 2, 2]
    assert got[0] == expected_tokens(llama, {"input_ids": ids[:1, 2:]}, heavy=1, recent=1)[0]


def test_forward_has_a_fresh_cache(plain):
    (ids,) = prompts(20)
    with patched(plain, **SMALL) as patch:
        cache = plain(ids)[CACHE]
        assert isinstance(cache, H2OCache)
        assert cache is patch.cache
        plain(ids[:, :1], **with_cache(cache))  # continue with it
        assert cache.get_seq_length() == 21
        assert plain(ids)[CACHE] is not cache
        assert plain(input_ids=ids, use_cache=True)[CACHE].get_seq_length() == 20
        made = patch.cache
        assert plain(ids, use_cache=False).get(CACHE) is None
        assert plain.model(ids)[CACHE] is not made if hasattr(plain, "model") else True
        assert patch.cache is made
    assert isinstance(plain(ids)[CACHE], DynamicCache)


def test_scoring_texts_is_warned_of(llama):
    """A user who scores whole texts in single passes must be warned. Such a pass is a prompt, whose
    logits are the full cache's at any budget."""
    (ids,) = prompts(20)
    full = llama(ids).logits
    with patched(llama, heavy=1, recent=1) as patch:
        for _ in range(20):  # each time a prompt and a decode step
            cache = llama(ids)[CACHE]
            llama(ids[:, :1], **with_cache(cache))
        for _ in range(8):
            torch.testing.assert_close(llama(ids).logits, full, atol=1e-4, rtol=1e-3)
        with pytest.warns(UserWarning, match=r"h2o\.simulated"):
            llama(ids)
        llama(ids)  # no second warning
        assert patch.scored > 8


def test_scoring_texts_without_a_cache_is_warned_of(llama):
    """So must be a user who passes use_cache=False. The steps of generate(use_cache=False) are no
    texts, and a simulation evicts."""
    (ids,) = prompts(20)
    with patched(llama, heavy=1, recent=1) as patch:
        greedy(llama, {"input_ids": ids}, use_cache=False)
        with h2o.simulated(llama, **SMALL):
            for _ in range(10):
                llama(ids, use_cache=False)
        assert patch.scored == 0
        for _ in range(7):
            llama(ids, use_cache=False)
        with pytest.warns(UserWarning, match=r"h2o\.simulated"):
            llama(ids, use_cache=False)


def test_caches_of_the_callers_own_are_left_alone(llama):
    (ids,) = prompts(20)
    full = greedy(llama, {"input_ids": ids}).tolist()
    with patched(llama, **SMALL) as patch:
        cache = DynamicCache(config=llama.config)
        assert greedy(llama, {"input_ids": ids}, **with_cache(cache)).tolist() == full
        assert greedy(llama, {"input_ids": ids}, use_cache=False).tolist() == full
        llama(ids, None, None, DynamicCache())  # by position
        assert patch.cache is None
        ours = H2OCache(llama.config, heavy=3, recent=3)
        got = greedy(llama, {"input_ids": ids}, 12, **with_cache(ours)).tolist()
        assert ours.report().layers[0].kept == [6]
    assert got == expected_tokens(llama, {"input_ids": ids}, heavy=3, recent=3)


@pytest.mark.usefixtures("gradients")
def test_training_inside_has_no_cache_and_gradients(llama):
    (ids,) = prompts(20)
    llama.train()
    try:
        llama(ids, labels=ids).loss.backward()
        expected = llama.lm_head.weight.grad.clone()
        llama.zero_grad()
        with patched(llama, **SMALL) as patch:
            llama(ids, labels=ids).loss.backward()
            assert patch.cache is None
        torch.testing.assert_close(llama.lm_head.weight.grad, expected)
        assert llama.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0
    finally:
        llama.eval()


def test_an_error_inside_restores_everything(llama):
    def stop(ids, logits):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), patched(llama, **SMALL):
        greedy(llama, {"input_ids": prompts(20)[0]}, logits_processor=[stop])


def test_an_error_in_a_forward_pass_does_not_spoil_the_next(llama):
    (ids,) = prompts(20)

    def fail(*args):
        raise KeyboardInterrupt

    with patched(llama, **SMALL):
        hook = llama.model.layers[1].mlp.register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            greedy(llama, {"input_ids": ids})
        hook.remove()
        got = greedy(llama, {"input_ids": ids}, 12).tolist()
    assert got == expected_tokens(llama, {"input_ids": ids}, **SMALL)


def test_enable_and_disable(llama):
    inputs = {"input_ids": prompts(20)[0]}
    patch = enable(llama, H2OConfig(**SMALL), trace=True)
    got = greedy(llama, inputs, 12).tolist()
    assert patch.cache.evicted_at(0).shape == (1, 2, 31)
    inner = enable(llama, heavy=2)
    disable(llama)
    with pytest.raises(RuntimeError, match="already been undone"):
        inner.undo()
    with patched(llama, heavy=2), patched(llama, heavy=3):
        disable(llama)  # this must not end a block
        with pytest.raises(RuntimeError, match="not enabled"):
            disable(llama)
    with pytest.raises(RuntimeError, match="already been undone"):
        patch.undo()
    assert got == expected_tokens(llama, inputs, **SMALL)
    with pytest.raises(RuntimeError, match="not enabled"):
        disable(llama)


def test_siblings_that_share_a_config():
    """Models that share a config switch attention together. Both must still answer correctly, and
    the last one to be disabled must restore the attention."""
    config = FAMILIES["llama"].build_config()
    torch.manual_seed(0)
    one, two = (AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    assert one.config is two.config
    before = traces(one), traces(two)
    inputs = {"input_ids": prompts(20)[0]}
    full = greedy(two, inputs).tolist()
    first = enable(one, **SMALL)
    assert greedy(two, inputs).tolist() == full  # "h2o" without a cache is dense attention
    second = enable(two, **SMALL)
    first.undo()
    assert two.config._attn_implementation == "h2o"
    assert greedy(two, inputs, 12).tolist() != full
    assert second.cache.report().layers[0].kept == [12]
    second.undo()
    assert (traces(one), traces(two)) == before


def test_a_model_that_was_under_h2o_stays_so():
    ours = model("llama", "h2o")
    before = traces(ours)
    with patched(ours, **SMALL):
        pass
    assert traces(ours) == before
    assert ours.config._attn_implementation == "h2o"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_models():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = model("llama", "sdpa")
    settings = peft.LoraConfig(
        target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    wrapped = peft.get_peft_model(base, settings).eval()
    before = traces(wrapped.get_base_model()), set(wrapped.__dict__)
    inputs = batch(prompts(17, 23))
    with patched(wrapped, **SMALL) as patch:
        got = greedy(wrapped, inputs, 12)
        assert patch.cache.report().layers[0].kept == [12, 12]
        assert wrapped(**inputs)[CACHE] is patch.cache
    assert (traces(wrapped.get_base_model()), set(wrapped.__dict__)) == before
    wrapped.set_adapter("default")
    merged = wrapped.merge_and_unload()
    assert got.tolist() == expected_tokens(merged, inputs, **SMALL)


def test_pipelines(llama, tmp_path):
    tokenizer = tiny_tokenizer(tmp_path)
    pipe = pipeline("text-generation", model=llama, tokenizer=tokenizer)
    texts = ["t3 t5 t7 t11 t13 t17 t19 t23 t29 t31 t37 t41 t43 t47", "t4 t6 t8 t9 t10 t12 t14"]
    settings = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    full = [pipe(text, **settings)[0]["generated_text"] for text in texts]
    with patched(llama, heavy=3, recent=3) as patch:
        small = [pipe(text, **settings)[0]["generated_text"] for text in texts]
        assert patch.cache.report().layers[0].seen == [7 + 7]  # each prompt has its own cache
        together = [out[0]["generated_text"] for out in pipe(texts, batch_size=2, **settings)]
    assert small != full
    assert together == small
    assert [pipe(text, **settings)[0]["generated_text"] for text in texts] == full


def tiny_tokenizer(folder):
    """A tokenizer of words t2 to t96 for the tiny vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<bos>": 1, **{f"t{i}": i for i in range(2, 97)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", padding_side="left"
    )


@pytest.mark.parametrize("wanted", ["static", "offloaded_static", "quantized", "offloaded"])
def test_other_caches_are_refused(llama, wanted):
    (ids,) = prompts(20)
    with (
        patched(llama, **SMALL),
        pytest.raises(UnsupportedError, match=f"cache_implementation='{wanted}"),
    ):
        greedy(llama, {"input_ids": ids}, cache_implementation=wanted)
    llama.generation_config.cache_implementation = wanted  # as a checkpoint may have it
    with (
        patched(llama, **SMALL),
        pytest.raises(UnsupportedError, match="If you did not pass it, set model"),
    ):
        greedy(llama, {"input_ids": ids})


def test_dynamic_by_name_is_ours(llama):
    with patched(llama, **SMALL) as patch:
        greedy(llama, {"input_ids": prompts(20)[0]}, cache_implementation="dynamic")
        assert patch.cache.report().layers[0].kept == [12]


def test_what_cannot_be_patched(llama):
    with pytest.raises(TypeError, match="a model of transformers"):
        enable(llama.config, **SMALL)
    pipe = pipeline("text-generation", model=llama, tokenizer=tiny_tokenizer(None))
    with pytest.raises(TypeError, match=r"for a pipeline pass its \.model"):
        enable(pipe, **SMALL)
    with pytest.raises(TypeError, match="unknown parameter 'heavi'"):
        enable(llama, heavi=3)
    with pytest.raises(TypeError, match="not both"):
        enable(llama, H2OConfig(), heavy=3)
    with pytest.raises(ValueError, match="2 amounts") as error:
        enable(model("gemma3"), heavy=[1, 2])
    assert "4 layers" in str(error.value)
    assert h2o.patched is patched


def test_a_model_that_asks_for_no_cache_is_told():
    ours = copy.deepcopy(model("llama"))
    ours.config.use_cache = False
    with pytest.warns(UserWarning, match="use_cache=False, so its calls use no cache"):
        with patched(ours, heavy=6, recent=6):
            pass


@pytest.mark.parametrize("given", [False, True])
def test_early_exit_is_refused_before_layers_are_taken_off(llama, given):
    """Early exit must be refused before it takes layers off the model. The draft would use the
    patch's cache, even if the caller passes one."""
    inputs = {"input_ids": prompts(20)[0]}
    expected = greedy(llama, inputs).tolist()
    with patched(llama, **SMALL):
        cache = with_cache(H2OCache(llama.config, **SMALL)) if given else {}
        with pytest.raises(UnsupportedError, match="assistant_early_exit"):
            greedy(llama, inputs, assistant_early_exit=1, **cache)
    assert llama.config.num_hidden_layers == 2
    assert greedy(llama, inputs).tolist() == expected


def test_a_cache_that_is_refused_leaves_the_attention():
    plain = model("llama", "sdpa")
    with pytest.raises(ValueError, match="cache_relative"):
        new_cache(
            plain, H2OConfig(heavy=4, recent=4, positions="cache_relative"), 20, compileable=True
        )
    assert plain.config._attn_implementation == "sdpa"


def test_a_simulated_model_is_not_enabled():
    """enable() within a simulation must be refused. It would set another attention, and the rest of
    the block would run without the simulation."""
    plain, (ids,) = model("llama", "sdpa"), prompts(30)
    with h2o.simulated(plain, **SMALL):
        want = plain(ids, use_cache=False).logits
        with pytest.raises(RuntimeError, match=r"h2o.enable\(\) inside h2o.simulated\(\)"):
            enable(plain, **SMALL)
        assert torch.equal(plain(ids, use_cache=False).logits, want)
    enable(plain, **SMALL)
    with h2o.simulated(plain, **SMALL):
        assert torch.equal(plain(ids, use_cache=False).logits, want)
    disable(plain)
    assert plain.config._attn_implementation == "sdpa"
    assert not torch.equal(plain(ids, use_cache=False).logits, want)


def test_attention_that_is_set_inside_a_simulation():
    """An attention that is set within a simulation would end it silently. The next call must raise
    an error."""
    plain, (ids,) = model("llama", "sdpa"), prompts(30)
    full = plain(ids, use_cache=False).logits
    with h2o.simulated(plain, **SMALL):
        want = plain(ids, use_cache=False).logits
        with patched(plain, **SMALL):
            plain(ids)
        assert torch.equal(plain(ids, use_cache=False).logits, want)
        plain.set_attn_implementation("eager")
        with pytest.raises(RuntimeError, match="set to 'eager' while it is simulated"):
            plain(ids, use_cache=False)
    assert plain.config._attn_implementation == "sdpa"
    assert torch.equal(plain(ids, use_cache=False).logits, full)
