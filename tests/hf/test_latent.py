"""Multi-head latent attention: slots, projections of latents, and settings that are refused.

test_families.py crosses these families with modes and policies.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import weakref

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, DynamicCache

import h2o
from h2o import H2OCache, H2OConfig, UnsupportedError, supports
from h2o.compat import with_cache
from h2o.evaluation.published_masks import MASKS
from h2o.hf.model_traits import latent_attention
from h2o.hf.model_traits.latent_attention import Expansion
from tests.hf.test_families import generation
from tests.hf.tiny import LATENT, batch, exact, greedy, model, prompts

LENGTHS = (5, 17, 23, 30)
SMALL = {"heavy": 6, "recent": 6}
FULL = {"heavy": 10**6}


@pytest.mark.parametrize("name", LATENT)
def test_a_dynamic_cache_goes_on_under_h2o(name):
    ours, theirs = model(name), model(name, "sdpa")
    inputs = batch(prompts(*LENGTHS))
    assert greedy(ours, inputs, 8).tolist() == greedy(theirs, inputs, 8).tolist()


@pytest.mark.parametrize("name", LATENT)
def test_a_slot_is_one_row_for_all_heads(name):
    ours = model(name)
    assert not generation(ours)  # cases of test_families.py are left out because of this
    cache = H2OCache(ours.config, **SMALL)
    greedy(ours, {"input_ids": prompts(30)[0]}, 8, **with_cache(cache))
    for layer in cache.layers:
        positions, scores = layer.kept()
        assert positions.shape == (1, 1, 12)
        assert layer.slots.values is None
        assert layer.slots.keys.shape == (1, 1, 13, 24)
        # Each of the 37 queries of each head has an attention of 1 in total.
        H = ours.config.num_attention_heads
        total = scores.sum() + layer.slots.evicted_score.sum()
        torch.testing.assert_close(total.item(), 37.0 * H, rtol=1e-4, atol=0)
    report = cache.report()
    assert report.total.bytes_full == 2 * 37 * 24 * 4
    assert [x.bytes_held for x in report.layers] == [13 * 24 * 4] * 2


class Wrapped(torch.nn.Module):
    """A projection that hides its matrix, with an adapter that has no effect while its scale is
    0."""

    asked = 0

    def __init__(self, inner):
        super().__init__()
        self.inner, self.scale = inner, 0.0
        self.up = torch.nn.Parameter(torch.full((inner.out_features, 1), 0.3))

    def forward(self, x):
        Wrapped.asked += x.shape == (16, 16)  # the unit vectors
        return self.inner(x) + self.scale * x[..., :1] @ self.up.T

    def merged(self):
        weight = self.inner.weight.detach().clone()
        weight[:, :1] += self.scale * self.up.detach()
        return weight


def wrapped(ours):
    for layer in ours.model.layers:
        layer.self_attn.kv_b_proj = Wrapped(layer.self_attn.kv_b_proj)
    return [layer.self_attn.kv_b_proj for layer in ours.model.layers]


def test_a_projection_that_is_no_plain_matrix(monkeypatch):
    """The matrix of a projection that is quantized or has an adapter must be recovered once for
    each layer."""
    ours, twin, row = model("deepseek_v2"), model("deepseek_v2"), {"input_ids": prompts(30)[0]}
    wrapped(twin)
    monkeypatch.setattr(Wrapped, "asked", 0)
    for _ in range(2):
        caches = [H2OCache(ours.config, **SMALL) for _ in range(2)]
        answers = [
            greedy(x, row, 12, **with_cache(cache))
            for x, cache in zip((ours, twin), caches, strict=True)
        ]
        assert torch.equal(*answers)
    assert Wrapped.asked == 2  # layers


CHANGES = {
    "weights, in place": lambda x: x.inner.weight.mul_(0.5),
    "weights, others": lambda x: setattr(x.inner.weight, "data", x.inner.weight.data * 0.5),
    "a new parameter": lambda x: setattr(
        x.inner, "weight", torch.nn.Parameter(x.inner.weight.detach() * 0.5)
    ),
    "an adapter": lambda x: setattr(x, "scale", 2.0),
    "an adapter's weights": lambda x: (setattr(x, "scale", 2.0), x.up.neg_()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_projection_that_changes_between_two_steps(change):
    ours, twin, ids = model("deepseek_v2"), model("deepseek_v2"), prompts(32)[0]
    projections = wrapped(twin)
    caches = [H2OCache(ours.config, **SMALL) for _ in range(2)]
    logits = []
    for piece in ids.split([30, 1, 1], 1):
        logits = [
            x(piece, **with_cache(cache)).logits
            for x, cache in zip((ours, twin), caches, strict=True)
        ]
        torch.testing.assert_close(*logits)
        for layer, projection in zip(ours.model.layers, projections, strict=True):
            CHANGES[change](projection)
            layer.self_attn.kv_b_proj.weight.copy_(projection.merged())


@pytest.mark.parametrize("kind", ["plain", "an adapter", "quantized"])
def test_writes_that_torch_does_not_count_are_noticed_by_the_next_text(kind):
    """`hotswap_adapter` and trainers that copy weights to a generator write through `.data`."""
    ours, (ids,) = model("deepseek_v2"), prompts(32)
    projections = [layer.self_attn.kv_b_proj for layer in ours.model.layers]
    if kind == "an adapter":
        projections = wrapped(ours)
        for projection in projections:
            projection.scale = 1.0
    if kind == "quantized":
        torchao = pytest.importorskip("torchao.quantization")
        config = torchao.Int8WeightOnlyConfig()
        torchao.quantize_(ours, config, lambda _, name: name.endswith("kv_b_proj"))
    for _ in range(2):
        full, begun = (DynamicCache(config=ours.config) for _ in range(2))
        ours(ids[:, :30], **with_cache(begun))
        converted = H2OCache.from_dynamic_cache(begun, ours.config, **FULL)
        later = ours(ids[:, 30:31], **with_cache(converted)).logits
        wanted, got = (
            torch.cat([ours(x, **with_cache(cache)).logits for x in ids.split([28, 2, 1, 1], 1)], 1)
            for cache in (full, H2OCache(ours.config, **FULL))
        )
        torch.testing.assert_close(later, wanted[:, 30:31], rtol=0, atol=1e-3)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-3)
        for projection in projections:
            if kind == "quantized":
                projection.weight.scale.data.mul_(-2)
            else:
                weight = projection.weight if kind == "plain" else projection.up
                weight.data.copy_(weight.roll(1, 0) * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_projection_is_read_as_it_is_now(dtype):
    """In bfloat16 the two matrices of a projection are packed and remembered. They must not be used
    after the weight has changed."""
    H, C, V, L, P = 4, 12, 10, 16, 8
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.kv_b_proj = torch.nn.Linear(L, H * (C + V), bias=False).to(dtype)
    query, value, row = (
        torch.randn(2, heads, 3, width).to(dtype)
        for heads, width in ((H, C + P), (H, V), (1, L + P))
    )
    out = torch.randn(2, 3, H, L + P).to(dtype)

    def check(**how):
        expansion = Expansion.of(module, query, value, row, L, **how)
        keys, values = module.kv_b_proj.weight.view(H, C + V, L).split([C, V], 1)
        absorbed = torch.einsum("bhqc,hcl->bhql", query[..., :C].double(), keys.double())
        wanted = torch.cat([absorbed, query[..., C:].double()], -1)
        near = {"rtol": 1e-2, "atol": 3e-2 if dtype == torch.bfloat16 else 1e-5}
        torch.testing.assert_close(expansion.queries(query).double(), wanted, **near)
        wanted = torch.einsum("bqhl,hvl->bqhv", out[..., :L].double(), values.double())
        torch.testing.assert_close(expansion.expand_output(out).double(), wanted, **near)
        return expansion

    assert check() is check()
    module.kv_b_proj.weight.mul_(-2)
    check()
    module.kv_b_proj.weight = torch.nn.Parameter(module.kv_b_proj.weight.flip(0))
    check()
    module.kv_b_proj.weight.data.mul_(-2)  # torch does not count this; a prompt packs again
    check(fresh=True)
    projection = weakref.ref(module.kv_b_proj)
    del module.kv_b_proj
    gc.collect()
    assert projection() is None  # the packed matrices do not keep it alive
    with torch.inference_mode():
        module.kv_b_proj = torch.nn.Linear(L, H * (C + V), bias=False).to(dtype)
        check()
        module.kv_b_proj.weight.mul_(-2)
        check()


@pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="torchao quantizes weights")
def test_a_quantized_projection_is_asked_for_its_matrix_once(monkeypatch):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    ours, calls = model("deepseek_v2"), []
    quantize_(ours, Int8WeightOnlyConfig(), lambda _, name: name.endswith("kv_b_proj"))
    ask = latent_attention._compute_weight
    monkeypatch.setattr(
        latent_attention, "_compute_weight", lambda *x: (calls.append(1), ask(*x))[1]
    )
    full, cache, (ids,) = (
        DynamicCache(config=ours.config),
        H2OCache(ours.config, **FULL),
        prompts(30),
    )
    for piece in ids.split([20, *[1] * 10], 1):
        got, expected = (ours(piece, **with_cache(x)).logits for x in (cache, full))
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-3)
    assert len(calls) == 2  # layers


def test_half_precision_is_near_float32():
    ours, half = model("deepseek_v2"), model("deepseek_v2").bfloat16()
    ids = prompts(30)[0]
    cache, full = H2OCache(half.config, H2OConfig.full()), DynamicCache(config=half.config)
    exact = DynamicCache(config=ours.config)
    for piece in (ids[:, :20], *ids[:, 20:].split(1, dim=1)):
        wanted = ours(piece, **with_cache(exact)).logits
        got = half(piece, **with_cache(cache)).logits.float()
        theirs = half(piece, **with_cache(full)).logits.float()
        assert (got - wanted).abs().mean() < 1.5 * (theirs - wanted).abs().mean() + 1e-3


def test_a_language_model_within_one_that_reads_images():
    """Kimi K2.5 is a vision-language model with the layers of DeepSeek V3, which h2o must find."""
    config = AutoConfig.for_model(
        "kimi_k25",
        text_config=LATENT["deepseek_v3"].build_config().to_dict(),
        vision_config={
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
            "num_attention_heads": 2, "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4,
        },
        projection_hidden_size=16,
        tie_word_embeddings=False,
    )  # fmt: skip
    assert supports(config).layers == ("h2o", "h2o")
    torch.manual_seed(1)
    ours = AutoModelForImageTextToText.from_config(config).eval()
    rows = prompts(17, 23)
    expected = greedy(ours, batch(rows), 32)
    ours.set_attn_implementation("h2o")
    cache = H2OCache(ours.config, H2OConfig.full())
    assert greedy(ours, batch(rows), 32, **with_cache(cache)).tolist() == expected.tolist()
    cache = H2OCache(ours.config, **SMALL)
    together = greedy(ours, batch(rows), 12, **with_cache(cache)).tolist()
    assert cache.kept(0)[0].shape == (2, 1, 12)
    for row, tokens in zip(rows, together, strict=True):
        alone = H2OCache(ours.config, **SMALL)
        assert greedy(ours, {"input_ids": row}, 12, **with_cache(alone)).tolist() == [tokens]


# ---- Refused -----------------------------------------------------------------------------------


def test_settings_that_do_not_go_with_latents():
    for settings, words in (
        ({"kv_dtype": "int8-int4"}, 'Use kv_dtype="int8"'),
        ({"positions": "cache_relative"}, "only a part of a row is rotated"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            H2OCache(model("deepseek_v3").config, **SMALL, **settings)


def test_heads_are_not_measured():
    ours = model("deepseek_v3")
    for measure in (h2o.calibrate, h2o.analyze):
        with pytest.raises(UnsupportedError, match="all heads of a layer share its latents"):
            measure(ours, prompts(64)[0])


@pytest.mark.parametrize("kv_dtype", ["auto", None])
def test_a_part_of_the_bytes(kv_dtype):
    """A budget in bytes must be used up and not exceeded, with latents in int8, which `h2o
    generate` uses, and unquantized."""
    ours = model("deepseek_v3")
    config = exact(
        dataclasses.replace(H2OConfig.robust(0.3, budget_unit="bytes"), kv_dtype=kv_dtype)
    )
    cache = H2OCache(ours.config, config)
    ours(prompts(200)[0], **with_cache(cache))
    assert cache.layers[0].config.kv_dtype == ("int8" if kv_dtype else None)
    total = cache.report().total
    share = (total.bytes_held + total.bytes_bookkeeping) / total.bytes_full
    assert 0.27 < share <= 0.3


@torch.no_grad()
def test_masks_see_the_rows_of_latents():
    ours, ids = model("deepseek_v2"), prompts(30)[0]
    expected = ours(ids, use_cache=False).logits
    with h2o.simulated(ours, heavy=30, recent=30, masks=MASKS["local"]):
        torch.testing.assert_close(ours(ids, use_cache=False).logits, expected, rtol=0, atol=1e-4)
