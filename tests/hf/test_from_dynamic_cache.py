"""An H2OCache that continues a filled DynamicCache."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, StaticCache

from h2o import H2OCache, H2OConfig, UnsupportedError, ops
from h2o.compat import with_cache
from h2o.hf.cache_state.recurrent_states import tensors_of
from h2o.hf.model_traits.layer_kinds import has_states
from tests.cases import checkered, pairs
from tests.hf.drive import forward, tensors
from tests.hf.test_families import peer
from tests.hf.tiny import (
    FAMILIES,
    LATENT,
    LAYOUTS,
    batch,
    greedy,
    model,
    prompts,
    with_image,
)
from tests.inputs import POLICIES, drifting, left, pad, right
from tests.reference import operations as reference

SMALL = {"heavy": 6, "recent": 6}
CONFIG = LlamaConfig(
    num_hidden_layers=1, hidden_size=32, num_attention_heads=4, num_key_value_heads=2
)
KINDS = [
    "llama", "gemma2", "qwen2-mixed", "mistral-window", "gpt_oss", "deepseek_v3", "youtu",
    "gemma3n_text", "gemma4_text", *LAYOUTS,
]  # fmt: skip
"""One family for each kind of layer."""


def filled(theirs, inputs, *, config=True, grad=False):
    """A DynamicCache that a model has filled from these inputs."""
    cache = DynamicCache(config=theirs.config) if config else DynamicCache()
    with torch.set_grad_enabled(grad):
        theirs(**inputs, **with_cache(cache))
    return cache


def held(layer):
    """Keys, values and states of one of transformers' layers, by name."""
    state = {name: getattr(layer, name, None) for name in ("keys", "values")}
    state |= tensors_of(layer) if has_states(layer) else {}
    return {name: x for name, x in state.items() if x is not None}


def longer(inputs, tokens):
    """The batch with this number of further tokens in each row."""
    more = torch.cat(prompts(*[tokens] * len(inputs["input_ids"]), seed=7))
    return {
        "input_ids": torch.cat([inputs["input_ids"], more], dim=1),
        "attention_mask": torch.cat([inputs["attention_mask"], torch.ones_like(more)], dim=1),
    }


@pytest.mark.parametrize(
    ("name", "new"), checkered([x for x in KINDS if x in FAMILIES | LATENT], [1, 5])
)
def test_a_dynamic_cache_is_taken_over_with_all_it_holds(name, new):
    """A conversion must keep keys, windows, states and the keys of an image, and leave the
    DynamicCache unchanged. A full budget continues a padded batch with the same tokens, and a small
    one evicts."""
    ours, inputs = model(name), with_image(name, batch(prompts(17, 23)))
    theirs = ours if "pixel_values" in inputs else peer(name)
    full = filled(theirs, inputs)
    before = copy.deepcopy(full)
    taken, small = (
        H2OCache.from_dynamic_cache(
            full, ours.config, config, attention_mask=inputs["attention_mask"]
        )
        for config in (H2OConfig.full(), H2OConfig(**SMALL))
    )
    asked = longer(inputs, new)
    got = greedy(ours, asked, **with_cache(taken))
    greedy(ours, asked, 4, **with_cache(small))
    for now, then in zip(full.layers, before.layers, strict=True):  # nothing is shared
        assert held(now).keys() == held(then).keys()
        torch.testing.assert_close(held(now), held(then), rtol=0, atol=0)
    assert got.tolist() == greedy(theirs, asked, **with_cache(full)).tolist()
    layers = [x for x in small.report().layers if x.kind == "h2o"]
    assert all(x.kept == [12, 12] for x in layers)


@pytest.mark.parametrize(("config", "grad"), [(False, False), (True, True)])
def test_a_dynamic_cache_made_without_config_or_with_gradients(config, grad):
    """Without a config the sliding layers of a DynamicCache hold all keys. A conversion must keep
    the window only."""
    ours, theirs = model("gemma2"), peer("gemma2")
    inputs = batch(prompts(23))
    full = filled(theirs, inputs, config=config, grad=grad)
    taken = H2OCache.from_dynamic_cache(full, ours.config, H2OConfig.full())
    assert not any(keys.requires_grad for keys, *_ in taken)
    got = greedy(ours, longer(inputs, 3), **with_cache(taken))
    assert got.tolist() == greedy(theirs, longer(inputs, 3)).tolist()


@pytest.mark.parametrize(("name", "new", "padding"), pairs(POLICIES, [1, 6], [None, left, right]))
def test_a_small_budget_keeps_what_the_reference_keeps(name, new, padding):
    """The first pass must evict by the scores of the reference, and so must later steps and
    chunks."""
    policy, n = POLICIES[name], 24
    calls = [new, 1, 1, 3, *[1] * 5]
    N = n + sum(calls)
    text = drifting(3, B=3, N=N)
    mask = np.ones((3, N), bool)
    if padding:
        mask[:, :n] = padding([7, 24, 13], n)
        text = pad(text, mask)
    foreign = tensors(text.cut(0, n))[1:]
    cache = H2OCache.from_dynamic_cache(
        DynamicCache([foreign]), CONFIG,
        attention_mask=mask[:, :n], heavy=policy.heavy, recent=policy.recent, **policy.ranking,
    )  # fmt: skip
    mask = torch.from_numpy(mask)
    everything = ops.new_slots(foreign[0], N, value_weighted=policy.value_weighted)
    reference.evict(
        *foreign, torch.zeros(3, 2, n), everything, mask=mask[:, :n],
        value_weighted=policy.value_weighted,
    )  # fmt: skip
    slots = ops.new_slots(
        foreign[0], N, policy.heavy, policy.recent, value_weighted=policy.value_weighted
    )
    stop = n
    for columns in calls:
        start, stop = stop, stop + columns
        out = forward(cache, text.cut(start, stop), mask)
        query, key, value = tensors(text.cut(start, stop))
        real = mask[:, start:stop]
        stored = everything if start == n else slots
        expected, scores = reference.attend(query, key, value, stored, mask=real, **policy.ranking)
        if start == n:  # converted and new keys together, with the padding of both
            received = torch.zeros(3, 2, n)
            for b in range(3):
                count = int(mask[b, :n].sum())
                received[b][:, mask[b, :n]] = everything.scores[b, :, :count]
            key, value = torch.cat([foreign[0], key], 2), torch.cat([foreign[1], value], 2)
            scores, real = torch.cat([received, scores], 2), mask[:, :stop]
        reference.evict(key, value, scores, slots, mask=real, **policy.ranking)
        np.testing.assert_allclose(out, expected, rtol=0, atol=2e-5)
        for held, judge in zip(cache.kept(0), reference.kept(slots), strict=True):
            np.testing.assert_allclose(held, judge, rtol=0, atol=1e-4)
    assert name == "full" or min(cache.report().layers[0].evicted) > 0
    np.testing.assert_allclose(
        cache.layers[0].slots.evicted_score, slots.evicted_score, rtol=0, atol=1e-4
    )


def test_before_the_first_pass_everything_is_held_without_scores():
    ours = model("gemma2")
    inputs = batch(prompts(9, 23))
    full = filled(peer("gemma2"), inputs)
    cache = H2OCache.from_dynamic_cache(
        full, ours.config, attention_mask=inputs["attention_mask"], trace=True, **SMALL
    )
    assert cache.get_seq_length() == 23
    report = cache.report()
    layer = report.layers[1]
    assert layer.unscored
    assert layer.seen == layer.kept == [9, 23]
    assert layer.mass_kept == layer.mass_evicted == layer.share_evicted == 0
    assert layer.bytes_full == 2 * full.layers[1].keys.nbytes
    assert "next forward pass" in report.note
    positions, scores = cache.kept(1)
    assert positions[1, 0].tolist() == list(range(23))
    assert positions[0, 0].tolist() == [*range(9), *[-1] * 14]
    assert not scores.any()
    for layer, expected in zip(cache, full, strict=True):
        torch.testing.assert_close(layer[0][1], expected[0][1], rtol=0, atol=0)
    assert (cache.evicted_at(1) == 23 * inputs["attention_mask"][:, None]).all()

    step = {"attention_mask": torch.cat([inputs["attention_mask"], torch.ones(2, 1).long()], 1)}
    ours(torch.tensor([[5], [6]]), **with_cache(cache), **step)
    report = cache.report()
    assert not report.layers[1].unscored
    assert report.layers[1].kept == [10, 12]
    assert report.layers[1].budget == [12, 12]
    assert report.layers[1].mass_kept + report.layers[1].mass_evicted == pytest.approx(8)
    assert (cache.evicted_at(1)[:, :, -1] == 24).all()
    assert cache.layers[1].slots.keys.shape[2] == 13


def test_rows_move_before_the_first_pass():
    ours = model("gemma2")
    inputs = batch(prompts(9, 23))
    question = longer(inputs, 4)

    def take(full, mask):
        return H2OCache.from_dynamic_cache(full, ours.config, attention_mask=mask, **SMALL)

    def logits(cache, rows):
        return ours(
            question["input_ids"][rows, -4:], **with_cache(cache),
            attention_mask=question["attention_mask"][rows],
        ).logits  # fmt: skip

    full = filled(peer("gemma2"), inputs)
    expected = logits(take(full, inputs["attention_mask"]), [0, 1])
    swapped, doubled, selected = (take(full, inputs["attention_mask"]) for _ in range(3))
    swapped.reorder_cache(torch.tensor([1, 0]))
    doubled.batch_repeat_interleave(2)
    selected.batch_select_indices(torch.tensor([1]))
    copied = copy.deepcopy(swapped)
    for cache, rows in [
        (swapped, [1, 0]), (doubled, [0, 0, 1, 1]), (selected, [1]), (copied, [1, 0]),
    ]:  # fmt: skip
        torch.testing.assert_close(logits(cache, rows), expected[rows])
    assert copied.kept(1)[0].shape[-1] == 12


def test_crop_and_reset_before_the_first_pass():
    ours = model("llama")
    inputs = batch(prompts(20))
    full = filled(peer("llama"), inputs)
    cache = H2OCache.from_dynamic_cache(full, ours.config, **SMALL)
    cache.crop(0)
    assert cache.get_seq_length() == 20
    with pytest.raises(NotImplementedError, match="pass that was not recorded"):
        cache.crop(-3)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert not cache.report().layers[0].unscored
    got = greedy(ours, inputs, **with_cache(cache))
    fresh = H2OCache(ours.config, **SMALL)
    assert got.tolist() == greedy(ours, inputs, **with_cache(fresh)).tolist()
    assert full.get_seq_length() == 20


def test_a_fraction_is_of_all_that_is_cut_first():
    ours = model("llama")
    inputs = batch(prompts(20, 30))
    full = filled(peer("llama"), inputs)
    asked = longer(inputs, 10)

    def budget(ids, **parameters):
        cache = H2OCache.from_dynamic_cache(
            full, ours.config, attention_mask=inputs["attention_mask"],
            heavy=0.1, recent=0.1, min_tokens=0, **parameters,
        )  # fmt: skip
        ours(ids[:, 30:], **with_cache(cache), attention_mask=asked["attention_mask"])
        return cache, cache.report().layers[0].budget

    cache, new_budget = budget(asked["input_ids"])
    assert new_budget == [6, 8]
    assert cache.is_prompt_only()
    assert budget(asked["input_ids"], prompt_length=100)[1] == [20, 20]
    ours(torch.full((2, 3), 5), **with_cache(cache))
    assert cache.report().layers[0].budget == [6, 8], "a turn changes nothing"


@pytest.mark.parametrize("columns", [1, 4])
def test_a_first_pass_that_fails_leaves_all_as_it_was(columns):
    text = drifting(3, B=2, N=24)
    cache = H2OCache.from_dynamic_cache(
        DynamicCache([tensors(text.cut(0, 20))[1:]]), CONFIG, **SMALL
    )
    before = [x.numpy().tobytes() for x in cache.layers[0].slots if x is not None]
    wrong = drifting(3, B=2, G=4, N=24)
    with pytest.raises(ValueError, match="key"):
        forward(cache, wrong.cut(20, 20 + columns))
    assert [x.numpy().tobytes() for x in cache.layers[0].slots if x is not None] == before
    assert cache.report().layers[0].unscored
    forward(cache, text.cut(20, 20 + columns))
    assert cache.report().layers[0].kept == [12, 12]


def test_a_row_without_a_token_in_the_first_pass():
    """A row that has only padding in the first pass must be refused, because its keys would be
    evicted before any query has scored them."""
    ours, inputs = model("llama"), batch(prompts(20, 14))
    full = filled(peer("llama"), inputs)
    cache, other = (
        H2OCache.from_dynamic_cache(
            full, ours.config, **SMALL, attention_mask=inputs["attention_mask"]
        )
        for _ in range(2)
    )
    turn = longer(inputs, 3)
    turn["attention_mask"][0, -3:] = 0
    turn["input_ids"] = turn["input_ids"][:, -3:]
    with pytest.raises(ValueError, match="row 0 has only padding in the first forward pass"):
        ours(**turn, **with_cache(cache))
    turn["attention_mask"][0, -1] = 1
    logits = [ours(**turn, **with_cache(one)).logits for one in (cache, other)]
    torch.testing.assert_close(*logits, rtol=0, atol=0)


def test_another_thread_is_refused_during_the_first_pass():
    ours = model("llama")
    (ids,) = prompts(20)
    full = filled(peer("llama"), {"input_ids": ids})
    cache, alone = (H2OCache.from_dynamic_cache(full, ours.config, **SMALL) for _ in range(2))
    errors = []

    def intrude():
        try:
            ours(ids[:, :3], **with_cache(cache))
        except RuntimeError as error:
            errors.append(str(error))

    def between(*_):
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join(60)

    hook = ours.model.layers[1].register_forward_pre_hook(between)
    got = ours(ids[:, :2], **with_cache(cache)).logits
    hook.remove()
    expected = ours(ids[:, :2], **with_cache(alone)).logits
    assert len(errors) == 1
    assert "one cache per thread" in errors[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def states(dtype=torch.float32, *, D=8, n=6, B=2):
    return torch.ones(B, 2, n, D, dtype=dtype)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: DynamicCache(), ValueError, "is empty"),
        (lambda: DynamicCache(config=model("llama").config), ValueError, "is empty"),
        (lambda: DynamicCache([(states(), states())]), ValueError, "1 layers, but the"),
        (lambda: DynamicCache([(states(), states()), (states(n=5), states(n=5))]), ValueError,
         r"\[\(6, 2\), \(5, 2\)\].*interrupted"),
        (lambda: DynamicCache([(states(), states()), (states(B=1), states(B=1))]), ValueError,
         "different numbers"),
        (lambda: DynamicCache([(states(torch.float64),) * 2] * 2), TypeError, "torch.float64"),
        (lambda: DynamicCache([(states(), states(D=4))] * 2), UnsupportedError,
         "same head dimension"),
        (lambda: filled(model("mistral-window", "sdpa"), {"input_ids": prompts(20)[0]}), ValueError,
         "holds 9 of 20 keys"),
        (lambda: StaticCache(config=model("llama").config, max_cache_len=9), TypeError,
         "DynamicCache, not StaticCache"),
        (lambda: H2OCache(model("llama").config), TypeError, "fork"),
        (lambda: [(states(), states())] * 2, TypeError, "not list"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_over(make, error, words):
    with pytest.raises(error, match=words):
        H2OCache.from_dynamic_cache(make(), model("llama").config, **SMALL)


@pytest.mark.parametrize(
    ("mask", "error", "words"),
    [
        (torch.ones(2, 7), ValueError, r"shape \[2, 7\]; expected a mask \[2, 6\]"),
        (torch.ones(2, 1, 6, 6), ValueError, r"expected a mask \[2, 6\]"),
        (torch.full((2, 6), -torch.inf), ValueError, "other values than 0 and 1"),
    ],
)
def test_masks_that_do_not_fit(mask, error, words):
    full = DynamicCache([(states(), states())] * 2)
    with pytest.raises(error, match=words):
        H2OCache.from_dynamic_cache(full, model("llama").config, attention_mask=mask, **SMALL)


def test_other_layers_are_named():
    full = DynamicCache([(states(), states())] * 2)

    class Quantized(type(full.layers[0])):
        pass

    full.layers[1].__class__ = Quantized
    with pytest.raises(UnsupportedError, match="layer 1 of the DynamicCache is a Quantized"):
        H2OCache.from_dynamic_cache(full, model("llama").config, **SMALL)
