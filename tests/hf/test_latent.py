"""Multi-head latent attention: every family with every mode and policy, and what is refused."""

from __future__ import annotations

import copy
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
from h2o.hf.families import linear_matrix
from h2o.hf.families.latent_attention import Expansion
from tests.cases import checkered
from tests.hf.modes import MODES, POLICIES
from tests.hf.test_families import generation, held, one_in_three
from tests.hf.tiny import LATENT, batch, exact, greedy, model, prompts, shared, slow_if

pytestmark = pytest.mark.skipif(not LATENT, reason="a newer transformers caches latents")
LENGTHS = (5, 17, 23, 30)
SMALL = {"heavy": 6, "recent": 6}
FULL = {"heavy": 10**6}
SERVED = [name for name in POLICIES if name != "head_shares"]
WHOLE = ("deepseek_v2", "youtu")
"""What attention of few heads does, and of many. The other families' latents come to the cache in
the same shape (`test_what_the_cases_left_out_rest_on`), so a third of the cases is theirs."""
MODE_CASES = [
    slow_if(name not in WHOLE and mode != "greedy" and not one_in_three(i, j), name, mode)
    for i, name in enumerate(LATENT)
    for j, mode in enumerate(MODES)
]
POLICY_CASES = [
    slow_if(name not in WHOLE and not one_in_three(i, j), name, chosen)
    for i, name in enumerate(LATENT)
    for j, chosen in enumerate(SERVED)
]


def small(name):
    """One of `POLICIES`."""
    return POLICIES[name]


@pytest.mark.parametrize("name", LATENT)
def test_every_layer_is_served(name):
    support = supports(model(name).config)
    assert support
    assert support.layers == ("h2o",) * 2


@pytest.mark.parametrize("name", LATENT)
def test_what_the_cases_left_out_rest_on(name):
    ours = shared(name)
    assert not generation(ours)
    cache = H2OCache(ours.config, **SMALL)
    with torch.no_grad():
        ours(prompts(30)[0], **with_cache(cache))
    assert {layer.slots.keys.shape for layer in cache.layers} == {(1, 1, 13, 24)}
    assert all(layer.slots.values is None for layer in cache.layers)


@pytest.mark.parametrize(("name", "mode"), MODE_CASES)
def test_full_budget_is_the_full_cache(name, mode):
    ours, theirs = shared(name), shared(name, "sdpa")
    inputs = batch(prompts(*LENGTHS[1:3]))
    expected = MODES[mode](theirs, inputs, lambda: None)
    got = MODES[mode](ours, inputs, lambda: H2OCache(ours.config, H2OConfig.full()))
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("name", LATENT)
def test_a_long_text_of_a_full_budget(name):
    ours, theirs = model(name), model(name, "sdpa")
    row = {"input_ids": prompts(40)[0]}
    cache = H2OCache(ours.config, H2OConfig.full())
    assert greedy(ours, row, 32, **with_cache(cache)).tolist() == greedy(theirs, row, 32).tolist()


@pytest.mark.parametrize("name", LATENT)
def test_a_dynamic_cache_goes_on_under_h2o(name):
    ours, theirs = model(name), model(name, "sdpa")
    inputs = batch(prompts(*LENGTHS))
    assert greedy(ours, inputs, 8).tolist() == greedy(theirs, inputs, 8).tolist()


@pytest.mark.parametrize(("name", "chosen"), POLICY_CASES)
def test_each_row_is_the_row_alone(name, chosen):
    ours, config, rows = shared(name), small(chosen), prompts(*LENGTHS)
    cache = H2OCache(ours.config, config)
    tokens = greedy(ours, batch(rows), 12, **with_cache(cache))
    for b, row in enumerate(rows):
        alone = H2OCache(ours.config, config)
        expected = greedy(ours, {"input_ids": row}, 12, **with_cache(alone))
        assert tokens[b].tolist() == expected[0].tolist()
        assert [held(cache, i, b) for i in (0, 1)] == [held(alone, i, 0) for i in (0, 1)]


@pytest.mark.parametrize(
    ("name", "chosen"),
    checkered(LATENT, ["h2o", "fractions", "decayed", "int8", "value-weighted", "max"]),
)
def test_simulation_is_the_cache(name, chosen):
    ours, config = model(name), small(chosen)
    ids = prompts(40, seed=3)[0]  # whose largest scores are no ties
    cache = H2OCache(ours.config, config, trace=True)
    with torch.no_grad():
        steps = [ours(ids[:, :20], **with_cache(cache)).logits]
        for i in range(20, 40):
            steps.append(ours(ids[:, i : i + 1], **with_cache(cache)).logits)
        with h2o.simulated(
            ours, config, prompt_length=20, ratio_of="prompt", trace=True
        ) as simulation:
            at_once = ours(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(steps, 1), at_once, rtol=0, atol=2e-4)
    for layer in range(2):
        evicted_at = cache.evicted_at(layer)
        assert evicted_at.tolist() == simulation.evicted_at(layer).tolist()
        while_decoding = (evicted_at > 20) & (evicted_at < 40)
        assert while_decoding.sum() >= 10
    assert not any(
        hasattr(x, "_forward_pre_hooks") and x._forward_pre_hooks for x in ours.modules()
    )


@pytest.mark.parametrize("name", LATENT)
def test_a_slot_is_one_row_for_all_heads(name):
    ours = model(name)
    cache = H2OCache(ours.config, **SMALL)
    greedy(ours, {"input_ids": prompts(30)[0]}, 8, **with_cache(cache))
    for layer in cache.layers:
        positions, scores = layer.kept()
        assert positions.shape == (1, 1, 12)
        assert layer.slots.values is None
        assert layer.slots.keys.shape == (1, 1, 13, 24)
        # Each of 37 queries of each head has given out an attention of 1.
        H = ours.config.num_attention_heads
        total = scores.sum() + layer.slots.evicted_score.sum()
        torch.testing.assert_close(total.item(), 37.0 * H, rtol=1e-4, atol=0)
    report = cache.report()
    assert report.total.bytes_full == 2 * 37 * 24 * 4
    assert [x.bytes_held for x in report.layers] == [13 * 24 * 4] * 2


@pytest.mark.parametrize("chosen", ["h2o", "int8"])
@pytest.mark.parametrize("name", ["deepseek_v2", "youtu"])
def test_copies_and_files(name, chosen, tmp_path):
    ours, config = model(name), small(chosen)
    document, question = prompts(30, 6)
    cache = H2OCache(ours.config, config)
    with torch.no_grad():
        ours(document, **with_cache(cache))
    cache.save(tmp_path / "document.safetensors", ours)
    both = {"input_ids": torch.cat([document, question], 1)}
    forks = [
        cache.fork(),
        copy.deepcopy(cache),
        H2OCache.load(tmp_path / "document.safetensors", ours),
    ]
    answers = [greedy(ours, both, 10, **with_cache(x)).tolist() for x in [*forks, cache]]
    assert answers.count(answers[0]) == 4
    cache.reset()
    again = H2OCache(ours.config, config)
    row = {"input_ids": document}
    assert (
        greedy(ours, row, 8, **with_cache(cache)).tolist()
        == greedy(ours, row, 8, **with_cache(again)).tolist()
    )


@pytest.mark.parametrize("name", ["deepseek_v3", "youtu"])
def test_goes_on_from_a_dynamic_cache(name):
    ours, theirs = model(name), model(name, "sdpa")
    rows = prompts(21, 30)
    inputs = batch(rows)
    full, mask = DynamicCache(config=ours.config), inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        theirs(**inputs, position_ids=positions, **with_cache(full))
    cache = H2OCache.from_dynamic_cache(full, ours.config, H2OConfig.full(), attention_mask=mask)
    for ours_layer, theirs_layer in zip(cache.layers, full.layers, strict=True):
        latents, rotated = ours_layer.kept_rows()
        assert torch.equal(latents[1], theirs_layer.keys[1])
        assert torch.equal(rotated[1], theirs_layer.values[1])
    more = torch.arange(6).reshape(2, 3) + 7
    turn = {
        "input_ids": torch.cat([inputs["input_ids"], more], 1),
        "attention_mask": torch.cat([mask, mask.new_ones(2, 3)], 1),
    }
    expected = greedy(theirs, turn, 10)
    assert greedy(ours, turn, 10, **with_cache(cache)).tolist() == expected.tolist()
    small_cache = H2OCache.from_dynamic_cache(full, ours.config, **SMALL, attention_mask=mask)
    greedy(ours, turn, 10, **with_cache(small_cache))
    assert small_cache.kept(0)[0].shape == (2, 1, 12)


def test_assisted_decoding_takes_tokens_back():
    ours = model("deepseek_v2")
    row = {"input_ids": prompts(8)[0].repeat(1, 4)}
    plain = greedy(ours, row, 24, **with_cache(H2OCache(ours.config, H2OConfig.full())))
    cache = H2OCache(ours.config, H2OConfig.full())
    cache.activate_past_recording()
    looked_up = greedy(ours, row, 24, **with_cache(cache), prompt_lookup_num_tokens=3)
    assert looked_up.tolist() == plain.tolist()


def test_two_threads():
    import threading

    ours = model("deepseek_v3")
    rows = prompts(20, 26, 31, 37)
    expected = [
        greedy(ours, {"input_ids": x}, 10, **with_cache(H2OCache(ours.config, **SMALL))).tolist()
        for x in rows
    ]
    got = [None] * len(rows)

    def work(i):
        cache = H2OCache(ours.config, **SMALL)
        got[i] = greedy(ours, {"input_ids": rows[i]}, 10, **with_cache(cache)).tolist()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == expected


@pytest.mark.parametrize("name", ["deepseek_v3", "minicpm3"])
def test_with_gradients_enabled(name):
    """Keys carry their layer into autograd, which is told that there is no backward."""
    ours, ids = model(name), prompts(20)[0]
    logits = ours(ids, **with_cache(H2OCache(ours.config, **SMALL))).logits
    with torch.no_grad():
        want = ours(ids, **with_cache(H2OCache(ours.config, **SMALL))).logits
    assert torch.equal(logits, want)
    with pytest.raises(RuntimeError, match="no gradient"):
        logits.sum().backward()


def test_a_pass_that_broke_off_leaves_nothing_behind():
    ours = model("deepseek_v3")
    ids = prompts(20)[0]
    expected = ours(ids).logits
    cache = H2OCache(ours.config, **SMALL)
    projection = ours.model.layers[1].self_attn.kv_b_proj
    hook = projection.register_forward_pre_hook(lambda *_: 1 / 0)
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        ours(ids, **with_cache(cache))
    hook.remove()
    with torch.no_grad():
        assert torch.equal(ours(ids, **with_cache(DynamicCache())).logits, expected)
        with pytest.raises(RuntimeError, match="broke off"):
            ours(ids, **with_cache(cache))
        cache.reset()
        ours(ids, **with_cache(cache))


class Wrapped(torch.nn.Module):
    """A projection whose matrix cannot be seen, with an adapter that is switched on by a scale."""

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
    """A quantized one, or one with an adapter, is asked for its matrix, once."""
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
    with torch.no_grad():
        for piece in ids.split([30, 1, 1], 1):
            logits = [
                x(piece, **with_cache(cache)).logits
                for x, cache in zip((ours, twin), caches, strict=True)
            ]
            torch.testing.assert_close(*logits)
            for layer, projection in zip(ours.model.layers, projections, strict=True):
                CHANGES[change](projection)
                layer.self_attn.kv_b_proj.weight.copy_(projection.merged())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_projection_is_read_as_it_is_now(dtype):
    """In bfloat16 its two matrices are packed, and remembered with the weight that they are of."""
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
        torch.testing.assert_close(expansion.answers(out).double(), wanted, **near)
        return expansion

    with torch.no_grad():
        assert check() is check()
        module.kv_b_proj.weight.mul_(-2)
        check()
        module.kv_b_proj.weight = torch.nn.Parameter(module.kv_b_proj.weight.flip(0))
        check()
        module.kv_b_proj.weight.data.mul_(-2)  # which nothing counts: a prompt looks again
        check(fresh=True)
    projection = weakref.ref(module.kv_b_proj)
    del module.kv_b_proj
    gc.collect()
    assert projection() is None  # what was packed has gone with it
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
    ask = linear_matrix._ask
    monkeypatch.setattr(linear_matrix, "_ask", lambda *x: (calls.append(1), ask(*x))[1])
    full, cache, (ids,) = (
        DynamicCache(config=ours.config),
        H2OCache(ours.config, **FULL),
        prompts(30),
    )
    with torch.no_grad():
        for piece in ids.split([20, *[1] * 10], 1):
            got, expected = (ours(piece, **with_cache(x)).logits for x in (cache, full))
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-3)
    assert len(calls) == 2  # layers


def test_half_precision_is_near_float32():
    ours, half = model("deepseek_v2"), model("deepseek_v2").bfloat16()
    ids = prompts(30)[0]
    cache, full = H2OCache(half.config, H2OConfig.full()), DynamicCache(config=half.config)
    exact = DynamicCache(config=ours.config)
    with torch.no_grad():
        for piece in (ids[:, :20], *ids[:, 20:].split(1, dim=1)):
            wanted = ours(piece, **with_cache(exact)).logits
            got = half(piece, **with_cache(cache)).logits.float()
            theirs = half(piece, **with_cache(full)).logits.float()
            assert (got - wanted).abs().mean() < 1.5 * (theirs - wanted).abs().mean() + 1e-3


def test_a_language_model_within_one_that_reads_images():
    """Kimi K2.5's layers are DeepSeek V3's."""
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


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_dtype": "int8-int4"}, 'use "int8"'),
        ({"positions": "cache_relative"}, "cache_relative"),
    ],
)
def test_settings_that_do_not_go_with_latents(settings, words):
    with pytest.raises(UnsupportedError, match=words):
        H2OCache(model("deepseek_v3").config, **SMALL, **settings)


def test_heads_are_not_measured():
    ours = model("deepseek_v3")
    for measure in (h2o.calibrate, h2o.analyze):
        with pytest.raises(UnsupportedError, match="all heads of a layer share its latents"):
            measure(ours, prompts(64)[0])


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention_is_refused(model_type):
    config = AutoConfig.for_model(model_type)
    assert "an indexer" in supports(config).reason
    with pytest.raises(UnsupportedError, match="an indexer"):
        H2OCache(config, **SMALL)


def test_compiling_is_refused():
    with pytest.raises(UnsupportedError, match="compileable"):
        H2OCache(model("deepseek_v3").config, **SMALL, compileable=True)


@pytest.mark.parametrize("kv_dtype", ["auto", None])
def test_a_part_of_the_bytes(kv_dtype):
    """As `h2o generate` has it, and with latents as they are."""
    ours = model("deepseek_v3")
    config = exact(
        dataclasses.replace(H2OConfig.robust(0.3, budget_unit="bytes"), kv_dtype=kv_dtype)
    )
    cache = H2OCache(ours.config, config)
    with torch.no_grad():
        ours(prompts(200)[0], **with_cache(cache))
    assert cache.layers[0].config.kv_dtype == ("int8" if kv_dtype else None)
    total = cache.report().total
    share = (total.bytes_held + total.bytes_bookkeeping) / total.bytes_full
    assert 0.27 < share <= 0.3
