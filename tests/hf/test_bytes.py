"""Budgets in bytes, and presets that depend on the model: which keys are kept, and how much memory
they take."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import DynamicCache, LlamaConfig

import h2o
from h2o import H2OCache, H2OConfig, Profile, UnsupportedError
from h2o.compat import with_cache
from h2o.config.layer_plan import LayerPlan
from h2o.kv_dtype import bytes_per_token
from h2o.model_identity import key_size
from tests.hf.tiny import batch, exact, greedy, llama, model, prompts


def filled(config: H2OConfig, tokens: int = 600, family: str = "llama"):
    ours = model(family)
    cache = H2OCache(ours.config, config)
    ours(prompts(tokens)[0], **with_cache(cache))
    return cache.report()


@pytest.mark.parametrize("part", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("value_weighted", [False, True])
def test_all_that_is_allocated_fits(part, kv_dtype, value_weighted):
    config = H2OConfig(
        heavy=part * 0.75, recent=part * 0.25, sinks=2, min_tokens=0,
        budget_unit="bytes", kv_dtype=kv_dtype, value_weighted=value_weighted,
    )  # fmt: skip
    total = filled(config).total
    taken = total.bytes_held + total.bytes_bookkeeping
    assert taken <= part * total.bytes_full
    slot = (total.bytes_held + total.bytes_bookkeeping) / (sum(total.kept) + 4)
    assert taken + 2 * 4 * slot > part * total.bytes_full  # another key for each head would not fit


def test_values_take_the_bits_that_go_with_the_head_dimension():
    for D, kv_dtype in ((8, "int8"), (32, "int8-int4"), (48, "int8"), (64, "int8-int4")):
        config = LlamaConfig(head_dim=D)
        sized = H2OConfig.robust(0.1, budget_unit="bytes").for_model(config)
        assert sized.kv_dtype == kv_dtype
        assert sized._token_bytes == bytes_per_token(
            *key_size(config), kv_dtype, value_weighted=True
        )
        assert sized.for_model(config) == sized
    total = filled(exact(H2OConfig.robust(0.1, budget_unit="bytes"))).total
    assert total.bytes_held + total.bytes_bookkeeping <= 0.1 * total.bytes_full
    with pytest.raises(ValueError, match='use "int8"'):
        H2OCache(
            model("llama").config,
            H2OConfig(
                heavy=0.1, recent=0.1, min_tokens=0, budget_unit="bytes", kv_dtype="int8-int4"
            ),
        )


def test_keys_in_four_bits():
    """More keys must fit in four bits. A latent, which is key and value, has no such format."""
    ours = llama(2, head_dim=64)
    kept = {}
    for kv_dtype in ("int8-int4", "int4"):
        config = H2OConfig.robust(0.2, budget_unit="bytes")
        config = dataclasses.replace(config, min_tokens=0, ratio_of="prompt", kv_dtype=kv_dtype)
        cache = H2OCache(ours, config)
        ours(*prompts(120), **with_cache(cache))
        total = cache.report().total
        assert total.bytes_held + total.bytes_bookkeeping <= 0.2 * total.bytes_full
        kept[kv_dtype] = sum(total.kept)
    # With these budgets keys in eight bits would be a quarter of all.
    for dtype, budget in ((torch.bfloat16, 0.115), (torch.float32, 0.0576)):
        sized = llama(2, head_dim=64).to(dtype)
        sized.config.dtype = dtype
        for factor, wanted in ((0.98, "int4"), (1.02, "int8-int4")):
            cache = H2OCache(sized, budget=factor * budget, min_tokens=0)
            assert cache.config.kv_dtype == wanted
            sized(*prompts(240), **with_cache(cache))
            assert ("in four bits" in str(cache.report())) == (wanted == "int4")
    assert H2OConfig(budget=64).for_model(ours).kv_dtype is None
    assert kept["int4"] > 1.15 * kept["int8-int4"]
    with pytest.raises(UnsupportedError, match='Use kv_dtype="int8"'):
        H2OCache(model("deepseek_v3"), heavy=4, recent=4, kv_dtype="int4")


@pytest.mark.parametrize("way", ["to", "autocast"])
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_bytes_are_those_of_the_keys_that_come(way, kv_dtype):
    """A budget in bytes must follow the dtype of the keys, not the dtype in which the model was
    loaded."""
    ours = model("llama")
    assert ours.config.dtype is torch.float32 or ours.config.dtype is None
    config = H2OConfig(heavy=0.1, recent=0.1, min_tokens=0, budget_unit="bytes", kv_dtype=kv_dtype)
    cache = H2OCache(ours.config, config)
    (ids,) = prompts(600)
    reads = torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast")
    try:
        with reads, h2o.simulated(ours, config, trace=True) as simulation:
            ours.to(torch.bfloat16 if way == "to" else torch.float32)
            ours(ids, use_cache=False)
        with reads:
            ours(ids, **with_cache(cache))
    finally:
        ours.float()
    total = cache.report().total
    assert total.bytes_full == 2 * 2 * 2 * 600 * 8 * 2
    taken = total.bytes_held + total.bytes_bookkeeping
    assert 0.18 * total.bytes_full < taken <= 0.2 * total.bytes_full
    kept = len(cache.kept(0).positions[0, 0])  # without the key that the last token evicts
    assert int((simulation.evicted_at(0)[0, 0] == 600).sum()) == kept + 1


@pytest.mark.parametrize("way", ["prompt", "fork", "chunk", "crop", "load"])
def test_a_sliding_window_frees_the_keys_before_it(way, tmp_path):
    """transformers stores a window as a view of all keys of the pass, which stayed in memory."""
    ours = model("gemma3")
    cache = H2OCache(ours, heavy=8, recent=8)
    if way in ("crop", "load"):
        cache.activate_past_recording()
    ours(prompts(300)[0], **with_cache(cache))
    if way == "fork":
        cache = cache.fork()
    if way == "chunk":
        ours(prompts(90)[0], **with_cache(cache))
    if way == "crop":
        cache.crop(-1)
    if way == "load":
        cache.save(tmp_path / "cache")
        cache = H2OCache.load(tmp_path / "cache", ours)
    windows = [layer for layer in cache.layers if layer.is_sliding]
    stored = [x for layer in windows for x in (layer.keys, layer.values)]
    allocated = sum(x.untyped_storage().nbytes() for x in stored)
    assert allocated == sum(x.bytes_held for x in cache.report().layers if x.kind == "sliding")
    assert all(x.shape[2] == 9 for x in stored)


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
def test_a_full_cache_is_a_dynamic_cache(name):
    """A DynamicCache keeps only the window of a sliding layer, which is no merit of h2o."""
    ours, (ids,) = model(name), prompts(300)
    full = DynamicCache(config=ours.config)
    model(name, "eager")(ids, **with_cache(full))
    for config in (H2OConfig.full(), H2OConfig(heavy=8, recent=8)):
        cache = H2OCache(ours, config)
        ours(ids, **with_cache(cache))
        taken = sum(x.nbytes for layer in full.layers for x in (layer.keys, layer.values))
        assert cache.report().total.bytes_full == taken


def test_a_short_prompt_keeps_what_fits():
    config = H2OConfig(heavy=0.06, recent=0.04, sinks=2, min_tokens=0, budget_unit="bytes")
    total = filled(config, tokens=12).total
    assert total.kept == [2 * 3]  # two sinks and one more key in each of two layers


def test_bytes_need_fractions():
    with pytest.raises(ValueError, match='budget_unit="bytes" needs one fraction'):
        H2OConfig(heavy=16, recent=0.1, budget_unit="bytes")
    with pytest.raises(ValueError, match='expected "keys" or "bytes"'):
        H2OConfig(budget_unit="tokens")
    for preset in (H2OConfig.robust, H2OConfig.calibrated):
        with pytest.raises(ValueError, match='expected "keys" or "bytes"'):
            preset(0.1, budget_unit="byte")
    with pytest.raises(ValueError, match="for_model"):
        H2OConfig(heavy=0.1, recent=0.1, min_tokens=0, budget_unit="bytes").tokens(100)


def test_a_share_of_keys_forgets_the_bytes_of_the_model():
    """`dataclasses.replace` must not leave the bytes of a token to a config that counts keys."""
    sized = H2OConfig(heavy=0.1, recent=0.1, min_tokens=0, budget_unit="bytes").for_model(
        LlamaConfig(head_dim=32)
    )
    assert dataclasses.replace(sized, budget_unit="keys").tokens(100) == (10, 10)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_bytes_are_those_of_the_keys_that_arrive(kv_dtype):
    """A model may have been converted to another dtype, and layers may differ in head dimension."""
    config = H2OConfig(heavy=0.1, recent=0.1, budget_unit="bytes", kv_dtype=kv_dtype)
    plan = LayerPlan.of(config.for_model(LlamaConfig(head_dim=32)), 0, 1)
    for D, element in ((32, 2), (32, 4), (96, 2)):
        wanted = bytes_per_token(D, element, 2, kv_dtype, value_weighted=False)
        assert plan.for_keys(D, element).token_bytes == wanted


def test_no_bytes_beside_the_sinks():
    assert filled(H2OConfig.robust(0.0, budget_unit="bytes")).layers[0].kept == [4]


def test_no_profile_is_shipped_for_a_tiny_model():
    with pytest.raises(ValueError, match=r"no profile for this model.*h2o calibrate"):
        H2OCache(model("llama").config, H2OConfig.calibrated(0.2))


def test_a_profile_of_another_model_is_refused():
    profile = next(iter(_shipped()))
    with pytest.raises(ValueError, match="this profile is of another model"):
        H2OCache(model("llama").config, H2OConfig.calibrated(0.2, profile))
    with (
        pytest.raises(ValueError, match="this profile is of another model"),
        h2o.patched(model("llama"), H2OConfig.calibrated(0.2, profile)),
    ):
        pass
    with (
        pytest.raises(ValueError, match="this profile is of another model"),
        h2o.simulated(model("llama"), H2OConfig.calibrated(0.2, profile)),
    ):
        pass


def _shipped():
    from h2o.config.profile import _load_shipped

    return _load_shipped()


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.04, 0.1])
def test_a_part_of_the_default_model_s_bytes(part):
    ours, _ = h2o.load_model(attn_implementation="h2o")
    assert isinstance(Profile.shipped(ours), Profile)
    ids = torch.randint(5, 5000, (1, 1024), generator=torch.Generator().manual_seed(0))
    for config in (
        H2OConfig.robust(part, budget_unit="bytes"),
        H2OConfig.calibrated(part, budget_unit="bytes"),
    ):
        cache = H2OCache(ours.config, config)
        ours.set_attn_implementation("h2o")
        ours(ids, **with_cache(cache))
        total = cache.report().total
        taken = total.bytes_held + total.bytes_bookkeeping
        assert 0.97 * part < taken / total.bytes_full <= part


def test_rows_of_a_batch_have_their_own_bytes():
    ours = model("llama")
    rows = prompts(200, 420)
    config = H2OConfig(heavy=0.1, recent=0.1, min_tokens=0, budget_unit="bytes", kv_dtype="int8")
    cache = H2OCache(ours.config, config)
    greedy(ours, batch(rows), 4, **with_cache(cache))
    for b, row in enumerate(rows):
        alone = H2OCache(ours.config, config)
        greedy(ours, {"input_ids": row}, 4, **with_cache(alone))
        budgets = alone.report().layers[0].budget_by_head[0]
        assert cache.report().layers[0].budget_by_head[b] == budgets


@pytest.mark.parametrize("compileable", [False, True])
def test_a_single_token_among_padding_is_a_decode_step(compileable):
    """A single token among padding must attend to its own key as the slots store it, like a decode
    step in a batch without padding."""
    ours, (text,) = model("llama"), prompts(30)
    config = H2OConfig(heavy=8, recent=8, min_tokens=0, kv_dtype="int8")
    turn = text[:, 20:25]

    def answer(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows = len(ids)
        cache = H2OCache(ours.config, config, compileable=compileable)
        before = torch.ones(rows, 20, dtype=torch.long)
        ours(text[:, :20].expand(rows, -1), attention_mask=before, **with_cache(cache))
        positions = 20 + (mask.cumsum(1) - 1).clamp(min=0)
        whole = torch.cat([before, mask], dim=1)
        out = ours(ids, attention_mask=whole, position_ids=positions, **with_cache(cache))
        return out.logits[0, int(mask[0].nonzero()[-1])]

    one, many = torch.tensor([[1, 0, 0, 0, 0]]), torch.ones(1, 5, dtype=torch.long)
    padded = answer(turn.expand(2, -1), torch.cat([one, many]))
    alone = answer(turn[:, :1], one[:, :1])
    torch.testing.assert_close(padded, alone, rtol=1e-5, atol=1e-5)


def logits_after_bias(bias, kv_dtype):
    """Logits of decode steps of a Qwen2 whose bias adds a number to two elements of each key."""
    ours = model("qwen2")
    for layer in ours.model.layers:
        for head in layer.self_attn.k_proj.bias.data.view(-1, 8):
            head[[3, 7]] = bias  # a pair that rotates slowly
    cache = H2OCache(ours.config, heavy=30, recent=30, kv_dtype=kv_dtype)
    ids = prompts(50)[0]
    with torch.no_grad():
        ours(ids[:, :40], **with_cache(cache))
        steps = [ours(ids[:, i : i + 1], **with_cache(cache)).logits for i in range(40, 50)]
    return torch.cat(steps, 1)


def test_keys_far_from_zero_lose_no_precision():
    """With one scale per key, eight bits cannot hold a few elements that are a hundred times larger
    than the others, unless they are much the same in all keys and subtracted first."""
    errors = []
    for bias in (0.0, 100.0):
        exact, stored = (logits_after_bias(bias, kv_dtype) for kv_dtype in (None, "int8"))
        errors.append(float((exact - stored).abs().mean()))
    assert errors[1] < 2 * errors[0]
