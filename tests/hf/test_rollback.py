"""Rollback: crop() with recorded passes, prompt lookup and assisted decoding."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList

from h2o import H2OCache, H2OConfig, UnsupportedError, patched
from h2o.compat import with_cache
from h2o.hf.layers import layer as layers
from h2o.hf.layers.layer import H2OLayer
from tests.cases import checkered
from tests.hf.drive import feed, new_cache
from tests.hf.test_compiled import compiling, nothing_compiled  # noqa: F401
from tests.hf.test_saved import SETTINGS, assert_same, opened
from tests.hf.tiny import (
    FAMILIES,
    LATENT,
    failing,
    greedy,
    model,
    needs_compiler,
    prompts,
)
from tests.inputs import drifting, holes, pad

SMALL = {"heavy": 6, "recent": 6}
TEXT = drifting(5, B=2, N=48)
LOOKUP = {"prompt_lookup_num_tokens": 4}
WAYS = ["prompt lookup", "draft model"]


def recording(cache):
    cache.activate_past_recording()
    return cache


def drafted(name, model):
    """Arguments that make generate() draft, by lookup or with a model that sometimes agrees."""
    if name == "prompt lookup":
        return LOOKUP
    draft = copy.deepcopy(model)
    draft.set_attn_implementation("sdpa")
    for parameter in draft.parameters():
        parameter.add_(0.03 * torch.randn(parameter.shape, generator=torch.manual_seed(1)))
    draft.generation_config.num_assistant_tokens = 5
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    return {"assistant_model": draft}


class Echo(LogitsProcessor):
    """Makes a model repeat, mostly but not always, what it said PERIOD tokens ago."""

    def __call__(self, ids, scores):
        return scores + 3 * scores.std() * nn.functional.one_hot(ids[:, -PERIOD], scores.shape[-1])


PERIOD = 9


def repeated(seed=0):
    """A prompt that repeats itself, and a processor that lets the answer continue to do so."""
    (ids,) = prompts(PERIOD, seed=seed)
    return {"input_ids": ids.repeat(1, 4), "logits_processor": LogitsProcessorList([Echo()])}


@pytest.mark.parametrize("policy", [{}, {"kv_dtype": "int8"}, {"value_weighted": True}])
@pytest.mark.parametrize("calls", [[20], [20, 6], [20, 1], [20, 1, 1, 9], [3, 7]])
def test_what_was_taken_back_never_came(calls, policy):
    """A cache that takes back some tokens of the last pass must equal one that never saw them, at
    once and in later steps and chunks."""
    mask = holes(3, [38, 44], 48)
    text = pad(TEXT, mask)
    for back in range(1, calls[-1] + (len(calls) > 1)):
        ours = recording(new_cache(**SMALL, **policy, trace=True))
        plain = new_cache(**SMALL, **policy, trace=True)
        left = sum(calls) - back
        feed(ours, text, calls, mask)
        ours.crop(-back)
        assert ours.get_seq_length() == left
        shorter = [n for n in [*calls[:-1], calls[-1] - back] if n]
        feed(plain, text, shorter, mask)
        assert_same(ours, plain)
        for columns in (1, 5, 1):
            rest = text.cut(left, left + columns)
            got, expected = (feed(x, rest, [columns], mask) for x in (ours, plain))
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
            left += columns
        assert_same(ours, plain)


NAMES = ("llama", "opt", "gpt_neox", "qwen2", "gemma3", "deepseek_v2", "gemma3n_text",
         "gemma4_text", "lfm2")  # fmt: skip
"""Families that can go back, some of which have latents, shared keys or convolutions."""


@pytest.mark.parametrize(
    ("name", "way"), checkered([x for x in NAMES if x in FAMILIES | LATENT], WAYS)
)
def test_a_full_budget_gives_the_tokens_of_greedy(name, way):
    ours = model(name)
    inputs = repeated()
    cropped = []
    cache = recording(H2OCache(ours.config, H2OConfig.full()))
    crop, cache.crop = cache.crop, lambda n: cropped.append(cache.get_seq_length()) or crop(n)
    got = greedy(ours, inputs, 24, **with_cache(cache), **drafted(way, ours))
    theirs = model(name, "sdpa")
    assert got.tolist() == greedy(theirs, inputs, 24).tolist()
    assert sum(cropped) > sum(range(36, 36 + len(cropped)))  # some drafts were rejected
    assert cache.get_seq_length() == 36 + 23


def watched(ours, cache, inputs, **more):
    """Generate tokens. Returns them, the ids of each forward pass that were not taken back, and the
    passes of which some were."""
    passes, cut = [], set()
    crop = cache.crop

    def forward(module, args, kwargs):
        passes.append(kwargs["input_ids"])

    def cropping(tokens):
        before = cache.get_seq_length()
        crop(tokens)
        passes[-1] = passes[-1][:, : passes[-1].shape[1] - before + cache.get_seq_length()]
        cut.add(len(passes) - 1)

    cache.crop = cropping
    hook = ours.register_forward_pre_hook(forward, with_kwargs=True)
    tokens = greedy(ours, inputs, 24, **with_cache(cache), **more)
    hook.remove()
    return tokens, passes, cut


@pytest.mark.parametrize(("setting", "way"), checkered(SETTINGS, WAYS))
def test_a_small_budget_gives_what_the_same_chunks_give(setting, way):
    ours, parameters, _ = opened(setting)
    # A budget that grows would count the tokens that are taken back.
    parameters = parameters | {"prompt_length": 36, "ratio_of": "prompt"}
    cache = recording(H2OCache(ours.config, **parameters))
    got, passes, cut = watched(ours, cache, repeated(), **drafted(way, ours))
    assert len({chunk.shape[1] for chunk in passes[1:]}) > 1
    plain = H2OCache(ours.config, **parameters)
    for layer in plain.layers:
        layer.record_past = True  # without this, fractional budgets do not allow chunks
    expected = repeated()["input_ids"]
    for i, chunk in enumerate(passes):
        logits = ours(chunk, **with_cache(plain)).logits
        if chunk.shape[1] == 1 and i in cut and "kv_dtype" in parameters:
            # A step attends to its token as it is stored, the longer pass did not.
            known = expected.shape[1] - 36
            expected = torch.cat([expected, got[:, known : known + 1]], dim=1)
            continue
        for row in logits[:, 35 - plain.get_seq_length() :].unbind(1):
            expected = torch.cat([expected, Echo()(expected, row).argmax(-1)[None]], dim=1)
    assert got[0].tolist() == expected[0, 36 : 36 + 24].tolist()
    for one, other in zip(cache.layers, plain.layers, strict=True):
        assert torch.equal(one.slots.positions, other.slots.positions)
        assert one.seen == other.seen


def test_prompt_lookup_takes_fewer_passes():
    ours = model("llama")
    counts, texts = [], []
    for more in ({}, LOOKUP):
        cache = recording(H2OCache(ours.config, H2OConfig.full()))
        text, passes, _ = watched(ours, cache, repeated(), **more)
        counts.append(len(passes))
        texts.append(text.tolist())
    assert texts[0] == texts[1]
    assert counts[0] == 24
    assert counts[1] < 18


@pytest.mark.parametrize("way", WAYS)
def test_patched(way):
    """A fractional budget must not count the draft that comes with the prompt."""
    ours = model("llama")
    more = drafted(way, ours)
    with patched(ours, H2OConfig.full()):
        got = greedy(ours, repeated(), 24, **more)
    assert got.tolist() == greedy(model("llama", "sdpa"), repeated(), 24).tolist()
    of_prompt = {"ratio_of": "prompt", "min_tokens": 0}
    with patched(ours, heavy=0.25, recent=0.25, **of_prompt) as patch:
        greedy(ours, repeated(), 24, **more)
        assert patch.cache.report().layers[0].budget == [18]


def test_nothing_is_kept_where_nobody_records(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError

    monkeypatch.setattr(layers, "record_pass", refuse)
    cache = new_cache(**SMALL)
    feed(cache, TEXT, [20, 1, 6])
    assert cache.layers[0].last is None


def test_what_cannot_be_taken_back():
    cache = new_cache(**SMALL)
    feed(cache, TEXT, [20, 4])
    with pytest.raises(NotImplementedError, match="activate_past_recording"):
        cache.crop(-1)
    recording(cache)
    with pytest.raises(NotImplementedError, match="activate_past_recording"):
        cache.crop(-1)  # the last pass was not recorded
    feed(cache, TEXT.cut(24, 30), [6])
    before = copy.deepcopy(cache)
    with pytest.raises(NotImplementedError, match="began after 24 of 30 tokens"):
        cache.crop(-7)
    assert_same(cache, before)
    cache.crop(-2)
    with pytest.raises(NotImplementedError, match="activate_past_recording"):
        cache.crop(-1)  # a pass can be taken back once
    feed(cache, TEXT.cut(28, 30), [2])
    cache.reorder_cache(torch.tensor([1, 0]))
    with pytest.raises(NotImplementedError, match="activate_past_recording"):
        cache.crop(-1)
    cache.crop(-30)
    assert cache.get_seq_length() == 0


class Failure(BaseException):
    """A BaseException, like KeyboardInterrupt."""


@pytest.mark.parametrize("compileable", [False, True])
@pytest.mark.parametrize("error", [MemoryError, Failure])
def test_what_breaks_off_leaves_all_as_it_was(monkeypatch, error, compileable):
    """A crop that fails in the second layer must leave the first layer unchanged."""
    ours = model("llama")
    (ids,) = prompts(30)
    cache = recording(H2OCache(ours.config, **SMALL, compileable=compileable))
    forward = H2OLayer.forward

    def failing(layer, *args, **kwargs):
        out = forward(layer, *args, **kwargs)
        if layer.layer_idx == 1:
            raise error
        return out

    ours(ids[:, :20], **with_cache(cache))
    ours(ids[:, 20:26], **with_cache(cache))
    before = copy.deepcopy(cache)
    monkeypatch.setattr(H2OLayer, "forward", failing)
    with pytest.raises(error):
        cache.crop(-4)
    monkeypatch.undo()
    assert_same(cache, before)
    with pytest.raises(NotImplementedError, match="activate_past_recording"):
        cache.crop(-4)  # the record was used up when the pass was repeated
    got, expected = (ours(ids[:, 26:], **with_cache(x)).logits for x in (cache, before))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_a_pass_that_broke_off_is_not_taken_back():
    """After a failed pass the layers have seen different numbers of tokens. `crop` must raise an
    error instead of taking back different tokens."""
    ours = model("llama")
    (ids,) = prompts(30)
    cache = recording(H2OCache(ours.config, **SMALL))
    ours(ids[:, :20], **with_cache(cache))
    with failing(ours.model.layers[1].self_attn):
        ours(ids[:, 20:26], **with_cache(cache))
    with pytest.raises(RuntimeError, match="was interrupted between two layers"):
        cache.crop(-3)
    assert cache.report().broken
    cache.crop(-26)
    expected = ours(ids, **with_cache(H2OCache(ours.config, **SMALL))).logits
    torch.testing.assert_close(ours(ids, **with_cache(cache)).logits, expected)


def test_an_interrupted_layer_is_not_taken_back(monkeypatch):
    cache = recording(new_cache(**SMALL))
    feed(cache, TEXT, [20])

    def interrupted(*_, **__):
        raise Failure

    monkeypatch.setattr(H2OLayer, "forward", interrupted)
    with pytest.raises(Failure):
        feed(cache, TEXT.cut(20, 24), [4])
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"was interrupted, call cache.reset\(\)"):
        cache.crop(-2)


@needs_compiler
@pytest.mark.parametrize("taken", [1, 0])
def test_after_compiled_steps(taken):
    """A step that ran in a compiled graph must be taken back like an eager one."""
    ours = model("llama")
    (ids,) = prompts(20)
    caches = [recording(H2OCache(ours.config, **SMALL, compileable=x)) for x in (True, False)]
    first = [
        greedy(ours, {"input_ids": ids}, **with_cache(cache), **more)
        for cache, more in zip(caches, (compiling(), {}), strict=True)
    ]
    assert first[0].tolist() == first[1].tolist()
    for cache in caches:
        cache.crop(-taken)
        assert int(cache.get_seq_length()) == 35 - taken
    for layer in range(2):
        torch.testing.assert_close(*(cache.kept(layer) for cache in caches), rtol=0, atol=0)
    more = torch.cat([ids, first[0], *prompts(3)], dim=1)
    second = [greedy(ours, {"input_ids": more}, **with_cache(cache)) for cache in caches]
    assert second[0].tolist() == second[1].tolist()


@needs_compiler
def test_prompt_lookup_where_steps_are_compiled():
    ours = model("llama")
    tokens = [
        greedy(ours, repeated(), 24, **with_cache(recording(cache)), **LOOKUP, **x)
        for cache, x in (
            (H2OCache(ours.config, **SMALL), {}),
            (H2OCache(ours.config, **SMALL, compileable=True), compiling()),
        )
    ]
    assert tokens[0].tolist() == tokens[1].tolist()


def test_a_draft_model_with_such_a_cache():
    """A draft model with an H2OCache would have to take back several of its own passes, so it must
    be refused."""
    ours = model("llama")
    draft = model("llama")
    with (
        patched(ours, **SMALL),
        patched(draft, **SMALL),
        pytest.raises(UnsupportedError, match="Leave the draft model outside"),
    ):
        greedy(ours, repeated(), 24, assistant_model=draft, num_assistant_tokens=5)


@pytest.mark.parametrize("tokens", [math.nan, -1.5, "1"])
def test_the_number_of_tokens_to_remove_is_an_integer(tokens):
    cache = recording(H2OCache(model("llama").config, **SMALL))
    with pytest.raises(TypeError, match="expected an integer"):
        cache.crop(tokens)


def test_windows_that_refuse_leave_all_as_it_was():
    ours = model("gemma3")
    (ids,) = prompts(30)
    cache = recording(H2OCache(ours.config, **SMALL))
    for layer in cache.layers:
        layer.record_past = isinstance(layer, H2OLayer)
    ours(ids[:, :20], **with_cache(cache))
    ours(ids[:, 20:26], **with_cache(cache))
    before = copy.deepcopy(cache)
    with pytest.raises(RuntimeError, match="does not track past states"):
        cache.crop(-2)
    got, expected = (ours(ids[:, 26:], **with_cache(x)).logits for x in (cache, before))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_windows_go_back_too():
    ours = model("gemma3")
    (ids,) = prompts(30)
    cache = recording(H2OCache(ours.config, **SMALL))
    plain = recording(H2OCache(ours.config, **SMALL))
    ours(ids[:, :20], **with_cache(cache))
    ours(ids[:, 20:], **with_cache(cache))
    cache.crop(-6)
    ours(ids[:, :20], **with_cache(plain))
    ours(ids[:, 20:24], **with_cache(plain))
    plain.crop(0)
    got, expected = (ours(ids[:, 24:26], **with_cache(x)).logits for x in (cache, plain))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert all(isinstance(x, H2OLayer) == hasattr(x, "slots") for x in cache.layers)
