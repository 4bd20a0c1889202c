"""A model inside a wrapper of PEFT or torch.compile gives the answers that it gives without one."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

import h2o
from h2o import H2OCache, patched, simulated
from h2o.analysis.collect import forward
from h2o.compat import with_cache
from h2o.evaluation.protocols import by_cache, pad_rows
from h2o.hf.model_traits.wrappers import decoder_of, forward_accepts, unwrap
from tests.hf.tiny import batch, greedy, model, prompts

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
compiled = functools.partial(torch.compile, backend="eager")
FULL = {"heavy": 200, "recent": 200}
SMALL = {"heavy": 6, "recent": 6}


def config():
    return peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )


def tuned(inner):
    return peft.get_peft_model(inner, config()).eval()


def mixed(inner):
    return peft.get_peft_model(inner, config(), mixed=True).eval()


def tuner(inner):
    return peft.LoraModel(inner, config(), "default").eval()


WRAPPERS = {
    "PeftModel": tuned,
    "PeftMixedModel": mixed,
    "LoraModel": tuner,
    "compiled PeftModel": lambda inner: compiled(tuned(inner)),
    "PeftModel of a compiled model": lambda inner: tuned(compiled(inner)),
}


@pytest.fixture(params=WRAPPERS)
def pair(request):
    """A wrapped model, and the model inside, with the adapter's layers."""
    torch.manual_seed(4)
    inner = model("llama")
    wrapped = WRAPPERS[request.param](inner)
    assert unwrap(wrapped) is inner
    return wrapped, inner


def test_what_forward_takes(pair):
    wrapped, inner = pair
    assert forward_accepts(wrapped, "position_ids", "logits_to_keep")
    assert not forward_accepts(wrapped, "pixel_values")
    assert decoder_of(wrapped) is inner.model


def test_a_padded_document(pair):
    """The padding of a row must not shift the positions of its tokens."""
    wrapped, inner = pair
    rows, questions = prompts(40, 25), torch.cat(prompts(6, 6))
    inputs = batch(rows)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    asked = {
        "input_ids": torch.cat([ids, questions], 1),
        "attention_mask": torch.cat([mask, torch.ones_like(questions)], 1),
    }
    for how in ({}, {"readings": 2, "repeat": torch.tensor([5, 9])}):
        cache = h2o.compress_document(wrapped, ids, **FULL, attention_mask=mask, **how)
        together = greedy(inner, asked, 6, **with_cache(cache)).tolist()
        for row, question, answer in zip(rows, questions, together, strict=True):
            alone = {"input_ids": torch.cat([row, question[None]], 1)}
            assert greedy(inner, alone, 6).tolist() == [answer]


def test_calls_that_make_their_own_cache(pair):
    """generate() of the wrapper must use an H2OCache, and give the tokens of the model inside."""
    wrapped, inner = pair
    (ids,) = prompts(40)
    inputs = {"input_ids": ids}
    with patched(inner, **SMALL):
        expected = greedy(inner, inputs, 6).tolist()
    with patched(wrapped, **SMALL) as patch:
        assert greedy(wrapped, inputs, 6).tolist() == expected
        assert patch.cache.report().layers[0].kept == [12]


@pytest.mark.parametrize("wrap", [tuned, mixed, tuner])
def test_direct_forward_passes(wrap):
    inner, (ids,) = model("llama"), prompts(40)
    wrapped = wrap(inner)
    with patched(inner, **SMALL):
        expected = greedy(inner, {"input_ids": ids}, 6).tolist()
    (result,) = h2o.generate_all(wrapped, [ids[0].tolist()], **SMALL, rows=1, max_new_tokens=6)
    assert [result.ids] == expected
    logits = []
    for each in (wrapped, inner):
        with simulated(each, **SMALL):
            logits.append(each(input_ids=ids, use_cache=False).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("wrap", [tuned, mixed, tuner])
def test_logits_of_the_last_token_only(wrap):
    """Evaluation must not compute logits that nobody reads, which may not fit into memory."""
    inner, sizes = model("llama"), []
    wrapped = wrap(inner)
    inner.lm_head.register_forward_hook(lambda *call: sizes.append(call[-1].shape[1]))
    texts = [ids[0].tolist() for ids in prompts(20, 12)]
    cache = H2OCache(inner.config, **FULL)
    by_cache(wrapped, pad_rows(texts), [[3, 4], [5, 6]], cache)
    assert sizes == [1, 1]
    sizes.clear()
    forward(wrapped, prompts(20)[0][0])
    assert sizes == [1]


def test_a_tuned_prompt_that_is_disabled():
    """Embeddings that PEFT leaves out must not be counted as tokens."""
    inner = model("llama")
    tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    wrapped = peft.get_peft_model(copy.deepcopy(inner), tuning).eval()
    asked = [ids[0].tolist() for ids in prompts(30, 21)]
    how = SMALL | {"rows": 2, "max_new_tokens": 6}
    with wrapped.disable_adapter():
        got = list(h2o.generate_all(wrapped, asked, **how))
    for result, expected in zip(got, h2o.generate_all(inner, asked, **how), strict=True):
        assert (result.ids, result.report) == (expected.ids, expected.report)
