"""Layers that attend to the keys of an earlier layer, in Gemma 3n and Gemma 4.

test_families.py crosses these models with modes and policies.
"""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import AutoConfig, DynamicCache

import h2o
from h2o import H2OCache, H2OConfig, UnsupportedError, simulated, supports
from h2o.compat import with_cache
from h2o.config.layer_plan import LayerPlan
from h2o.evaluation.published_masks import MASKS
from h2o.hf.attention.attention import h2o_attention_forward
from h2o.hf.attention.attention_call import AttentionCall
from h2o.hf.conversation.state import CacheState
from h2o.hf.layers import shared_variant
from h2o.hf.layers.layer import H2OLayer
from h2o.hf.layers.plain_variant import PlainVariant
from h2o.hf.layers.shared_variant import SharedVariant
from h2o.hf.model_traits.shared_keys import SHARES_KEYS, shared_key_layers
from tests.hf.modes import POLICIES
from tests.hf.test_simulation import check_rows_alone
from tests.hf.tiny import failing, greedy, model, prompts

pytestmark = pytest.mark.skipif(not SHARES_KEYS, reason="a newer transformers shares keys so")
SMALL = {"heavy": 6, "recent": 6}
NAMES = ["gemma3n_text", "gemma4_text"]
SHARED, PLAIN = 2, 0
"""The two H2O layers: layers 4 and 5 attend to the keys of SHARED, and no other layer to
PLAIN's."""
SIMULATED = [name for name in POLICIES if name != "head_shares"]


def stepwise(ours, ids, cache, pieces):
    """Logits of a text that is fed in chunks."""
    return torch.cat([ours(x, **with_cache(cache)).logits for x in ids.split(pieces, 1)], 1)


# ---- One layer ---------------------------------------------------------------------------------

H, G, D = 4, 2, 8


class Attention(torch.nn.Module):
    """The attention module of one layer, as far as a cache asks for it."""

    def __init__(self, layer_idx, training=False):
        super().__init__()
        self.layer_idx, self.num_key_value_groups = layer_idx, H // G
        self.train(training)


OWN, LATER, LAST = map(Attention, range(3))


def a_pass(layer, Q, seed, B=2, mask=None):
    """Output of the layer for random tokens, and those of two later layers for the same queries."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, heads, Q, D, generator=generator) for heads in (H, G, G))
    key, value = layer.update(k, v)
    first = layer.attend(AttentionCall(OWN, q, key, value, mask))
    held = [None if x is None else x.clone() for x in layer.slots]
    later = [
        layer.attend(AttentionCall(module, q[:, :, -P:], key, value))
        for module, P in ((LATER, Q), (LAST, 1))
    ]
    for x, y in zip(held, layer.slots, strict=True):
        assert x is y is None or torch.equal(x, y)  # nothing is scored or evicted
    return first, later


@pytest.mark.parametrize("chosen", [name for name in POLICIES if name != "head_shares"])
def test_a_later_layer_sees_what_the_layer_itself_saw(chosen):
    """A later layer must see the same keys as the layer itself, in a prompt, in chunks, and in
    steps before and after the budget is full."""
    layer = H2OLayer(LayerPlan.of(POLICIES[chosen], 0, 2), variant=SharedVariant([1, 2]))
    for seed, Q in enumerate([7, *[1] * 20, 5, *[1] * 9, 11, 1, 1]):
        first, (all_queries, last) = a_pass(layer, Q, seed)
        assert torch.equal(all_queries, first)
        torch.testing.assert_close(last, first[:, -1:], rtol=0, atol=2e-6)


def test_pads_of_a_prompt_of_a_chunk_and_of_a_step():
    layer = H2OLayer(LayerPlan.of(POLICIES["h2o"], 0, 2), variant=SharedVariant([1, 2]))
    for seed, Q in enumerate([20, 6, 1, 1, 20, 1]):
        mask = torch.ones(2, Q, dtype=torch.bool)
        mask[0, : Q // 2 + (seed == 3)] = False
        first, (all_queries, last) = a_pass(layer, Q, seed, mask=mask)
        real = mask[:, -1]
        assert torch.equal(all_queries[mask], first[mask])
        torch.testing.assert_close(last[real], first[real, -1:], rtol=0, atol=2e-6)


def test_keys_that_came_from_a_dynamic_cache():
    for Q in (1, 4):
        layer = H2OLayer(LayerPlan.of(POLICIES["h2o"], 0, 2), variant=SharedVariant([1, 2]))
        layer.import_keys(torch.randn(2, G, 20, D), torch.randn(2, G, 20, D), None)
        layer.guard.put(CacheState(20, 20, unscored=True))
        first, (all_queries, _) = a_pass(layer, Q, 0)
        assert torch.equal(all_queries, first)
        first, (all_queries, _) = a_pass(layer, 1, 1)
        assert torch.equal(all_queries, first)


def test_keys_on_another_device_still_know_their_layer():
    """accelerate moves keys to the device of later layers, which must not lose their layer."""
    layer = H2OLayer(LayerPlan.of(POLICIES["h2o"], 0, 2), variant=SharedVariant([1]))
    key, value = layer.update(torch.randn(1, G, 5, D), torch.randn(1, G, 5, D))
    moved = key.to("meta")
    assert moved.h2o_layer is layer
    layer.attend(AttentionCall(OWN, torch.randn(1, H, 5, D), key, value))
    key, value = layer.update(torch.randn(1, G, 1, D), torch.randn(1, G, 1, D))
    layer.attend(AttentionCall(OWN, torch.randn(1, H, 1, D), key, value))
    there = layer.variant.attended.to(torch.device("meta"))
    tensors = [x for x in (*there.tokens, *there.slots) if isinstance(x, torch.Tensor)]
    assert {x.device.type for x in tensors} == {"meta"}
    assert layer.slots.keys.device.type == "cpu"


def test_nothing_is_kept_of_a_pass_that_is_over():
    layer = H2OLayer(LayerPlan.of(POLICIES["h2o"], 0, 2), variant=SharedVariant([1]))
    key, value = layer.update(torch.randn(1, G, 5, D), torch.randn(1, G, 5, D))
    query = torch.randn(1, H, 5, D)
    layer.attend(AttentionCall(OWN, query, key, value))
    layer.attend(AttentionCall(LATER, query, key, value))
    assert layer.variant.attended is None
    with pytest.raises(RuntimeError, match=r"layer 1 attends to keys of layer 0 .* is over"):
        layer.attend(AttentionCall(LATER, query, key, value))


@pytest.mark.usefixtures("gradients")
def test_training_is_refused_in_later_layers_too():
    layer = H2OLayer(LayerPlan.of(POLICIES["h2o"], 0, 2), variant=SharedVariant([1]))
    key, value = layer.update(torch.randn(1, G, 5, D), torch.randn(1, G, 5, D))
    query = torch.randn(1, H, 5, D, requires_grad=True)
    layer.attend(AttentionCall(OWN, query, key, value))
    training = Attention(1, training=True)
    with pytest.raises(RuntimeError, match="for inference"):
        h2o_attention_forward(training, query, key, value, None)
    out = layer.attend(AttentionCall(LATER, query, key, value))
    with pytest.raises(RuntimeError, match="has no gradient"):
        out.sum().backward()


# ---- Models ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_what_is_said_of_them(name):
    ours = model(name)
    assert shared_key_layers(ours.config) == {SHARED: (4, 5)}
    support = supports(ours)
    assert str(support).startswith(
        f"{name}: supported, 2 of 6 layers by h2o, 1 keep their own sliding window, "
        '3 store nothing; positions="cache_relative" is not'
    )
    cache = H2OCache(ours.config, **SMALL)
    assert [type(cache.layers[i].variant) for i in (PLAIN, SHARED)] == [PlainVariant, SharedVariant]


@pytest.mark.parametrize(
    ("kinds", "later"),
    [("ffssf", {1: (4,)}), ("fsfss", {}), ("fsfsf", {2: (4,)})],
)
def test_which_layers_attend_to_whose_keys(kinds, later):
    """`shared_key_layers` must name the right layers, and none with sliding windows, which stay
    transformers' own."""
    names = {"f": "full_attention", "s": "sliding_attention"}
    config = AutoConfig.for_model(
        "gemma3n_text",
        num_hidden_layers=5,
        num_kv_shared_layers=2,
        layer_types=[names[kind] for kind in kinds],
        activation_sparsity_pattern=[0.0] * 5,
    )
    assert shared_key_layers(config) == later
    config.num_kv_shared_layers = 0
    assert shared_key_layers(config) == {}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("chosen", ["h2o", "int8"])
def test_rows_of_a_simulation_are_the_rows_alone(chosen, side):
    ours, rows = model("gemma4_text"), prompts(20, 30)
    config = POLICIES[chosen]
    together, padded = check_rows_alone(ours, rows, [9, 9], side, h2o_config=config)
    with simulated(ours, config, prompt_length=9):
        last = ours(**padded, use_cache=False, logits_to_keep=1).logits
    torch.testing.assert_close(last, together[:, -1:], rtol=0, atol=2e-4)


def test_what_is_not_simulated():
    with (
        pytest.raises(UnsupportedError, match="reuse others' keys"),
        simulated(model("gemma4_text"), **SMALL, masks=MASKS["local"]),
    ):
        pass


@pytest.mark.parametrize("pieces", [[36], [20, 16], [9, 9, 9, 9], [20, *[1] * 16], [1] * 36])
@pytest.mark.parametrize("name", NAMES)
def test_pieces_of_a_text_with_a_budget_for_all(name, pieces):
    ours, (ids,) = model(name), prompts(36)
    expected = stepwise(model(name, "sdpa"), ids, DynamicCache(config=ours.config), [36])
    got = stepwise(ours, ids, H2OCache(ours.config, H2OConfig.full()), pieces)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("keeps", [1, 3])
@pytest.mark.parametrize("pieces", [[30], [20, 10], [20, *[1] * 10]])
def test_the_last_queries_alone_are_the_last_of_all(pieces, keeps):
    """generate() needs the last logits only, so Gemma 4 drops all other queries. The last queries
    must still see the same keys."""
    ours, (ids,) = model("gemma4_text"), prompts(30)
    first, last = H2OCache(ours.config, **SMALL), H2OCache(ours.config, **SMALL)
    for piece in ids.split(pieces, 1):
        expected = ours(piece, **with_cache(first)).logits[:, -keeps:]
        got = ours(piece, **with_cache(last), logits_to_keep=keeps).logits
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-4)
    for layer in (PLAIN, SHARED):
        assert torch.equal(first.kept(layer)[0], last.kept(layer)[0])


@pytest.mark.parametrize("name", NAMES)
def test_documents_are_read_and_heads_measured(name):
    ours, (ids,) = model(name), prompts(40)
    cache = h2o.compress_document(
        ours, ids, H2OConfig(**SMALL), readings=2, repeat=torch.tensor([5, 6])
    )
    more = {"input_ids": torch.cat([ids, prompts(3)[0]], 1)}
    assert greedy(ours, more, 4, **with_cache(cache)).shape == (1, 4)
    ids = prompts(256)[0]
    assert len(h2o.calibrate(ours, ids, window=128, refine=0).shares[0]) == 6
    h2o.analyze(ours, ids, min_tokens=0)


def test_a_pass_ends_with_the_last_layer_that_attends():
    """No other thread may begin a pass while later layers still attend to the keys of this one."""
    ours, (ids,) = model("gemma4_text"), prompts(20)
    cache = H2OCache(ours.config, **SMALL)
    errors = []

    def begin(*_):
        def other():
            try:
                cache.get_mask_sizes(1, 0)
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    hook = ours.model.layers[5].register_forward_pre_hook(begin)
    ours(ids, **with_cache(cache))
    hook.remove()
    assert "another thread" in errors[0]
    assert cache.guard.current is None
    begin()
    assert len(errors) == 1


def test_a_pass_that_broke_off_in_a_later_layer():
    ours, (ids,) = model("gemma4_text"), prompts(30)
    cache, unbroken = H2OCache(ours.config, **SMALL), H2OCache(ours.config, **SMALL)
    pieces = ids.split([20, 1, 9], 1)
    with failing(ours.model.layers[4]):
        ours(pieces[0], **with_cache(cache))
    ours(pieces[0], **with_cache(unbroken))
    for piece in pieces[1:]:  # all keys had been stored
        got, expected = (ours(piece, **with_cache(x)).logits for x in (cache, unbroken))
        assert torch.equal(got, expected)


# ---- Configs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma4", "gemma4_text"])
def test_layers_may_have_heads_of_another_size(name):
    """If a config has several head sizes, h2o must use that of full attention."""
    config = AutoConfig.for_model(name)
    assert supports(config)
    cache = H2OCache(config, H2OConfig.robust(0.2, budget_unit="bytes"))
    assert cache.model_shape["head_dim"] == 512


def test_a_model_that_is_cut_over_processes_is_refused(monkeypatch):
    monkeypatch.setattr(shared_variant.tensor_parallel, "part", lambda module: (1, 2))
    ours = model("gemma4_text")
    monkeypatch.setattr(SharedVariant, "attention", lambda *arguments: 1 / 0)
    layer = H2OCache(ours.config, **SMALL).layers[SHARED]
    key, value = layer.update(torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16))
    with pytest.raises(UnsupportedError, match="cut over several processes"):
        layer.attend(AttentionCall(OWN, torch.randn(1, 4, 5, 16), key, value))
