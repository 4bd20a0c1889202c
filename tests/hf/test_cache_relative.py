"""Cache-relative positions in an H2OCache: every family's rotation, modes, and errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from h2o import H2OCache, H2OConfig, UnsupportedError, patched, simulated, supports
from h2o.compat import with_cache
from h2o.hf.layers.cache_relative_variant import CacheRelativeVariant
from h2o.hf.model_traits.layer_kinds import kind_of
from h2o.hf.model_traits.shared_keys import SHARES_KEYS
from h2o.hf.rotary.model_rotary import CACHE_RELATIVE_TYPES, rotary_of
from tests import inputs
from tests.hf.drive import feed, new_cache
from tests.hf.modes import MODES
from tests.hf.tiny import (
    FAMILIES,
    WITH_STATES,
    Family,
    batch,
    greedy,
    model,
    prompts,
    slow_if,
)

SUPPORTED = [
    name for name, family in FAMILIES.items() if (family.model_type or name) in CACHE_RELATIVE_TYPES
]
SUPPORTED = [
    name
    for name in SUPPORTED
    if "sliding" not in FAMILIES[name].layers and (name == "llava" or not FAMILIES[name].vision)
]
SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 128,
    },
}
SMALL = H2OConfig(heavy=6, recent=6, positions="cache_relative")
FULL = H2OConfig(heavy=10**6, recent=0, positions="cache_relative")


def scaled(kind: str) -> Family:
    rope = {"rope_theta": 10000.0, **SCALED[kind]}
    return Family("llama", {"rope_parameters": rope})


def scaled_model(kind: str):
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(scaled(kind).build_config()).eval()
    made.set_attn_implementation("h2o")
    return made


def every_model():
    yield from ((name, lambda name=name: model(name)) for name in SUPPORTED)
    yield from ((kind, lambda kind=kind: scaled_model(kind)) for kind in SCALED)


MODELS = dict(every_model())
FIRST = {"llama", "phi", "cohere", "qwen3_next", "falcon_h1", *SCALED}
"""Models whose cases are not slow. They rotate whole heads, parts of heads or adjacent pairs, and
have states in layers of their own or next to keys. The layers of each other model work like those
of one of these."""
each = pytest.mark.parametrize("name", [slow_if(name not in FIRST, name) for name in MODELS])


def has_ranks(layer):
    return isinstance(getattr(layer, "variant", None), CacheRelativeVariant)


def stored(ours, position: int):
    """The keys that the layers hold of one token at `position`."""
    cache = H2OCache(ours.config, SMALL, prompt_length=1)
    ours(
        input_ids=torch.tensor([[7]]),
        position_ids=torch.tensor([[position]]),
        **with_cache(cache),
    )
    return [layer.kept_rows()[0] for layer in cache.layers if has_ranks(layer)]


def test_all_model_types_are_shown():
    shown = {FAMILIES[name].model_type or name for name in SUPPORTED}
    assert shown == CACHE_RELATIVE_TYPES


@pytest.mark.parametrize("name", MODELS)
def test_a_key_is_stored_as_if_it_had_no_position(name):
    ours = MODELS[name]()
    first, later = stored(ours, 0), stored(ours, 101)
    assert first
    for at_0, at_101 in zip(first, later, strict=True):
        torch.testing.assert_close(at_0, at_101, rtol=0, atol=1e-5 * at_0.abs().max().item())


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        slow_if(name not in FIRST or (i + j) % 2 > 0, name, mode)
        for i, name in enumerate(sorted(MODELS, key=lambda name: name not in FIRST))
        for j, mode in enumerate(["greedy", "beam search", "chunked prompt", "chat turns"])
    ],
)
def test_full_budget_is_the_full_cache(name, mode):
    ours = MODELS[name]()
    inputs = batch(prompts(17, 23))
    expected = MODES[mode](ours, inputs, lambda: None)
    got = MODES[mode](ours, inputs, lambda: H2OCache(ours.config, FULL))
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "name", [slow_if(name not in FIRST or name in SCALED, name) for name in MODELS]
)
def test_each_row_is_the_row_alone(name):
    """A padded row must give what the row gives alone. Models with states are not padded on the
    right, because their states would count the padding, in transformers too."""
    ours = MODELS[name]()
    rows = prompts(5, 17, 23, 30)
    alone = [H2OCache(ours.config, SMALL) for _ in rows]
    sides = {side: batch(rows, side) for side in ("left", "right")}
    if name in WITH_STATES:
        del sides["right"]
    together = {side: H2OCache(ours.config, SMALL) for side in sides}
    masks = {side: padded["attention_mask"] for side, padded in sides.items()}
    token = torch.full((4, 1), 9)
    for side, padded in sides.items():
        ours(**padded, **with_cache(together[side]))
    for row, cache in zip(rows, alone, strict=True):
        ours(input_ids=row, **with_cache(cache))
    for _ in range(20):
        answers = [ours(input_ids=token[:1], **with_cache(x)).logits[0] for x in alone]
        for side, cache in together.items():
            masks[side] = torch.cat([masks[side], torch.ones_like(token)], dim=1)
            out = ours(input_ids=token, attention_mask=masks[side], **with_cache(cache))
            torch.testing.assert_close(out.logits, torch.stack(answers), rtol=0, atol=1e-3)
    for layer in [i for i, x in enumerate(alone[0].layers) if kind_of(x) == "h2o"]:
        for b, cache in enumerate(alone):
            positions = cache.kept(layer).positions
            K = positions.shape[-1]
            for batched in together.values():
                assert torch.equal(batched.kept(layer).positions[b : b + 1, :, :K], positions)


@each
def test_positions_of_zero_change_nothing(name):
    """`patched` gives the model positions of 0, which must change nothing. Keys are rotated by
    their ranks, whatever positions the model counts."""
    ours = MODELS[name]()
    rows = batch(prompts(17, 23))
    expected = greedy(ours, rows, 30, **with_cache(H2OCache(ours.config, SMALL)))
    with patched(ours, SMALL) as patch:
        assert greedy(ours, rows, 30).tolist() == expected.tolist()
        seen = []
        hook = ours.get_decoder().register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
        )
        greedy(ours, rows, 3)
        hook.remove()
        assert len(seen) == 3
        assert not any(ids.any() for ids in seen)
    assert any(map(has_ranks, patch.cache.layers))


@pytest.mark.parametrize("name", inputs.ROLLED_CASES)
def test_the_cache_is_the_authors(name):
    """Outputs, kept keys and scores must be those of the authors' code, also when keys come rotated
    by their true positions."""
    golden = inputs.golden_cache(name)
    q, k, v = golden.text
    H, D = q.shape[1], q.shape[-1]
    text = inputs.Text(inputs.rotate(q), inputs.rotate(k), v)
    heads = {"num_attention_heads": H, "num_key_value_heads": H, "head_dim": D}
    config = Family("llama", heads, layers=("h2o",))
    cache = H2OCache(
        config.build_config(), heavy=golden.heavy, recent=golden.recent, positions="cache_relative"
    )
    out, start = [], 0
    for call, columns in enumerate(golden.calls):
        ids = torch.arange(start, start + columns)[None]
        out.append(
            feed(cache, text.cut(start, start + columns), [columns], position_ids=ids).numpy()
        )
        start += columns
        positions, scores = cache.kept(0)
        np.testing.assert_array_equal(positions, golden.kept[call])
        np.testing.assert_allclose(scores, golden.scores[call], rtol=0, atol=5e-5)
    np.testing.assert_allclose(np.concatenate(out, 1), golden.out, rtol=0, atol=2e-5)


def test_no_position_exceeds_the_budget():
    """The table of angles must grow with the budget and not with the text, even beyond the model's
    positions and with dynamic angles."""
    for name in ("llama", "dynamic"):
        ours = MODELS[name]()
        beyond = ours.config.max_position_embeddings + 20 if name == "dynamic" else 120
        with patched(ours, SMALL) as patch:
            greedy(ours, batch(prompts(20)), beyond)
            table = patch.cache.layers[0].variant.rotary.table(13)
            assert len(table) < 100
            assert patch.cache.layers[0].slots.keys.shape[2] == 13


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_answers_like_single(dtype):
    """Keys are rounded after the model's rotation, which is then undone. This must not cost much
    more accuracy than 16 bits cost anyway."""
    ours = model("llama")
    text = prompts(60)[0]

    def answers(made, config):
        cache, out = H2OCache(made.config, config), []
        for token in text[0]:
            out.append(made(input_ids=token.reshape(1, 1), **with_cache(cache)).logits)
        return torch.cat(out, dim=1).float()

    config = H2OConfig(heavy=6, recent=6, positions="cache_relative")
    single = answers(ours, config)
    half = answers(ours.to(dtype), config)
    plain = answers(ours, H2OConfig(heavy=6, recent=6))
    expected = answers(ours.float(), H2OConfig(heavy=6, recent=6))
    mean_error = (half - single).abs().mean()
    assert mean_error < 3 * (plain - expected).abs().mean() + 1e-3


def test_per_head_budgets_and_trace():
    ours = model("llama")
    shares = [[1.0, 3.0], [2.0, 1.0]]
    config = H2OConfig(heavy=20, recent=12, head_shares=shares, positions="cache_relative")
    cache = H2OCache(ours.config, config, trace=True)
    greedy(ours, batch(prompts(60, 45)), 20, **with_cache(cache))
    evicted_at = cache.evicted_at(0)
    held = [(evicted_at[:, g] == evicted_at.shape[-1]).sum(-1).tolist() for g in range(2)]
    assert held[0] < held[1]


def test_what_cannot_be_rolled_says_why():
    for name, reason in {
        "opt": "no rotary position embedding",
        "gemma2": "windows keep their keys",
        "qwen2_vl": "has not been tested",
        **dict.fromkeys(["gemma3n_text", "gemma4_text"] * SHARES_KEYS, "queries of later layers"),
        **dict.fromkeys(["jamba", "granitemoehybrid", "zamba2"], "no rotary position"),
    }.items():
        config = FAMILIES[name].build_config()
        with pytest.raises(UnsupportedError, match=reason):
            H2OCache(config, SMALL)
        assert reason in supports(config).not_cache_relative
        assert 'positions="cache_relative" is not supported' in str(supports(config))
    assert supports(model("llama").config).not_cache_relative == ""


def test_refusals():
    ours = model("llama")
    with pytest.raises(ValueError, match='"original" or "cache_relative"'):
        H2OConfig(positions="rolling")
    with pytest.raises(ValueError, match=r"simulated cannot be combined"), simulated(ours, SMALL):
        pass
    full = DynamicCache(config=ours.config)
    ours(input_ids=prompts(20)[0], **with_cache(full))
    with pytest.raises(UnsupportedError, match="a DynamicCache does not record"):
        H2OCache.from_dynamic_cache(full, ours.config, SMALL)
    text = inputs.drifting(1, H=4, G=2, N=8, D=8)
    cache = new_cache(heavy=4, recent=4, positions="cache_relative")
    with pytest.raises(UnsupportedError, match="position_ids"):
        feed(cache, text, [8])
    feed(cache, text, [8], position_ids=torch.arange(8)[None])  # the error has changed nothing
    with pytest.raises(UnsupportedError, match=r"position_ids \[B, Q\]"):
        feed(cache, text.cut(0, 1), [1], position_ids=torch.zeros(3, 1, 1))


def test_dynamic_angles_beyond_the_model_need_positions_of_zero():
    ours = scaled_model("dynamic")
    cache = H2OCache(ours.config, SMALL)
    with pytest.raises(UnsupportedError, match=r"h2o\.patched"):
        ours(input_ids=prompts(20)[0], position_ids=torch.arange(20)[None] + 505,
             **with_cache(cache))  # fmt: skip
    ours(input_ids=prompts(20)[0], **with_cache(cache))


def test_a_rotary_table_grows_by_halves():
    rotary = rotary_of(model("llama").config)
    assert len(rotary.table(3)) == 64
    assert len(rotary.table(65)) == 96
    assert torch.equal(rotary.table(65)[:3], rotary_of(model("llama").config).table(3)[:3])
