"""h2o.read(scored_by="echo"): judged by the queries and keys of transformers' own attention, each
query at the position where echo asks it."""

from __future__ import annotations

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

import h2o
from h2o import H2OConfig, Unsupported, backends
from h2o.borrowed import with_cache
from h2o.hf import echo, other_heads, reading
from h2o.hf.layer import H2OLayer
from h2o.hf.layer_kinds import HYBRIDS
from h2o.hf.model_rotary import Rotary
from tests.hf.test_reading import BUDGET, choice, positions, weights_of
from tests.hf.test_rolled import SCALED, scaled
from tests.hf.tiny import (
    DEVICE,
    FAMILIES,
    LATENT,
    ROTARY,
    TWINS,
    WITHOUT_ROTARY,
    Family,
    batch,
    greedy,
    model,
    prompts,
    shared,
    slow_if,
)

SERVED = {name: FAMILIES[name] for name in ROTARY}
SERVED |= {"glm": Family("glm"), "glm4": Family("glm4")}
MORE = {f"llama, {kind}": scaled(kind) for kind in SCALED} | {
    "smollm3, a layer without rotation": Family("smollm3", {"no_rope_layers": [1, 0]}),
    "cohere2, full attention without rotation": Family(
        "cohere2", {"sliding_window": 10}, layers=("sliding", "h2o")
    ),
    "phi, half of each head": Family("phi", {"partial_rotary_factor": 0.5}),
    "gemma2, a low cap": Family(
        "gemma2",
        FAMILIES["gemma2"].config | {"attn_logit_softcapping": 2.0},
        layers=FAMILIES["gemma2"].layers,
    ),
}
EVERY = SERVED | MORE


def made(name):
    torch.manual_seed(5)
    built = AutoModelForCausalLM.from_config(EVERY[name].build_config()).eval().to(DEVICE)
    built.set_attn_implementation("h2o")
    for module in built.modules():
        if isinstance(getattr(module, "sinks", None), torch.nn.Parameter):
            torch.nn.init.normal_(module.sinks, std=20)
    return built


def attention_of(theirs, document, shift):
    """What each layer's attention is given by transformers for tokens at positions from `shift`
    on: module, query, key [1, heads, n, D] and keyword arguments, by layer."""
    inputs_of = {}

    def function(module, query, key, value, mask, **kwargs):
        eager = sys.modules[type(module).__module__].eager_attention_forward
        uniform = other_heads.uniform(module, query, key, value)
        inputs_of[module.layer_idx] = module, uniform[0][0], uniform[1][0], kwargs
        return eager(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("test_echo", function)
    AttentionMaskInterface.register("test_echo", eager_mask)
    theirs = copy.deepcopy(theirs)
    theirs.set_attn_implementation("test_echo")
    ids = shift + torch.arange(document.shape[1], device=DEVICE)[None]
    with torch.no_grad():
        theirs.base_model(document, position_ids=ids, use_cache=False)
    return inputs_of


def expected(theirs, document, layers):
    """Scores [G, n] float64 of each of these layers."""
    n = document.shape[1]
    here, behind = (attention_of(theirs, document, shift) for shift in (0, n))
    scores = []
    for layer in layers:
        module, _, keys, how = here[layer]
        queries, keys = behind[layer][1].double(), keys.double()
        G = len(keys)
        logits = queries @ keys.repeat_interleave(len(queries) // G, 0).mT
        logits *= how.get("scaling") or queries.shape[-1] ** -0.5
        if softcap := how.get("softcap"):
            logits = softcap * torch.tanh(logits / softcap)
        if (sinks := getattr(module, "sinks", None)) is not None:
            column = sinks.detach().double()[:, None, None].expand(-1, n, 1)
            logits = torch.cat([logits, column], -1)
        weights = logits.softmax(-1)[..., :n]
        row, key = torch.arange(n)[:, None], torch.arange(n)
        just_before = ((key - row >= 0) & (key - row <= 4)).to(weights.device)
        scores.append((weights * just_before).unflatten(0, (G, -1)).amax((1, 2)))
    return scores


def scores_of(cache, row=0):
    """[G, n] of each H2O layer of a cache that holds all of a document."""
    scores = []
    for layer in cache.layers:
        if isinstance(layer, H2OLayer):
            kept = layer.kept()
            real = kept.positions[row, 0] >= 0
            assert (kept.positions[row][:, real] == torch.arange(real.sum(), device=DEVICE)).all()
            scores.append(kept.scores[row][:, real])
    return scores


def full_layers(cache):
    return [i for i, layer in enumerate(cache.layers) if isinstance(layer, H2OLayer)]


def agree(cache, theirs, document, row=0):
    for got, wanted in zip(
        scores_of(cache, row), expected(theirs, document, full_layers(cache)), strict=True
    ):
        torch.testing.assert_close(got.double(), wanted, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("name", [slow_if(name in TWINS, name) for name in EVERY])
def test_scores(name):
    ours, (document,) = made(name), prompts(50)
    cache = h2o.read(ours, document, H2OConfig.full(), scored_by="echo")
    agree(cache, ours, document)
    assert ours.config._attn_implementation == "h2o"


def test_scores_of_long_documents(monkeypatch):
    """Read in pieces, and asked some rows at a time."""
    monkeypatch.setattr(reading, "CHUNK", 32)
    ours, (document,) = shared("llama"), prompts(70)
    monkeypatch.setattr(echo, "ENTRIES", 3 * 70 * ours.config.num_attention_heads)
    monkeypatch.setattr(echo, "ROWS", 40)
    progress, passes = [], []
    hook = ours.model.register_forward_pre_hook(lambda *_: passes.append(1))
    cache = h2o.read(
        ours, document, H2OConfig.full(), scored_by="echo", progress=lambda *x: progress.append(x)
    )
    hook.remove()
    agree(cache, ours, document)
    assert progress == [(32, 70), (64, 70), (70, 70)]
    assert len(passes) == 3


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("n", [1, 3, 32, 100])
@pytest.mark.parametrize("size", [1.0, 12.0])
@pytest.mark.parametrize(
    "how", [{}, {"softcap": 20.0}, {"scale": 0.5, "sink_logits": True}], ids=str
)
def test_a_row_by_kernels_and_by_torch(how, size, n, by_torch, monkeypatch):
    """Both against dense softmax; the larger queries give the first key nothing, now and then."""
    monkeypatch.setattr(echo, "ROWS", 40)
    monkeypatch.setattr(echo, "ENTRIES", 6 * 100 * 7)
    generator = torch.Generator().manual_seed(n)
    query, keys = (torch.randn(heads, n, 16, generator=generator) for heads in (6, 2))
    query *= size
    if "sink_logits" in how:
        how = how | {"sink_logits": torch.randn(6, generator=generator) * 5}
    logits = query.double() @ keys.double().repeat_interleave(3, 0).mT * how.get("scale", 0.25)
    if cap := how.get("softcap"):
        logits = cap * torch.tanh(logits / cap)
    if (sinks := how.get("sink_logits")) is not None:
        logits = torch.cat([logits, sinks.double()[:, None, None].expand(6, n, 1)], -1)
    weights = logits.softmax(-1)[..., :n]
    behind = torch.arange(n) - torch.arange(n)[:, None]
    wanted = (weights * ((behind >= 0) & (behind <= 4))).unflatten(0, (2, 3)).amax((1, 2))
    if size > 1 and n == 100 and not cap:
        assert weights[..., 0].min() < 1e-30, "no probe is lost"
    with backends.by_torch() if by_torch else nullcontext():
        got = echo.largest(query, keys, None, **how)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_in_sixteen_bits(dtype):
    """Queries are rounded once they are rotated on, as the model's own are."""
    generator = torch.Generator().manual_seed(0)
    query, keys = (torch.randn(h, 300, 32, generator=generator).to(dtype) for h in (4, 2))
    angles = torch.linspace(0, 3, 16)
    angles = torch.stack([angles.cos(), angles.sin()])
    got = echo.largest(query, keys, angles)
    torch.testing.assert_close(
        got, echo.largest(query.float(), keys.float(), angles), rtol=0.05, atol=1e-5
    )


def test_a_first_key_of_next_to_no_attention():
    """Sums come from what it gets, of which float16 has no digits left."""
    generator = torch.Generator().manual_seed(1)
    query, keys = (torch.randn(h, 300, 32, generator=generator).half() for h in (4, 2))
    query += 1.5
    keys[:, 0] = -0.9
    expected = echo.largest(query.float(), keys.float(), None)
    torch.testing.assert_close(echo.largest(query, keys, None), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", ["llama", "phi", "gemma2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_batch_are_documents_of_their_own(name, side, monkeypatch):
    """Each is asked from behind its own end, and no pad counts."""
    monkeypatch.setattr(reading, "CHUNK", 32)
    ours, documents = shared(name), prompts(70, 41, 58)
    padded = batch(documents, side)
    ids, mask = padded["input_ids"], padded["attention_mask"]
    cache = h2o.read(ours, ids, H2OConfig.full(), attention_mask=mask, scored_by="echo")
    for row, document in enumerate(documents):
        agree(cache, ours, document, row)


@pytest.mark.parametrize("by_attention", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "smollm3"])
def test_what_is_kept(name, by_attention):
    """All of the config's recent keys, and what the scores choose of all layers and heads."""
    ours, (document,) = shared(name), prompts(70)
    cache = h2o.read(ours, document, BUDGET, scored_by="echo", by_attention=by_attention)
    first = weights_of(name, document).sum((2, 3))
    scores = torch.stack(expected(ours, document, full_layers(cache))).float()
    assert positions(cache) == choice(first, scores, BUDGET, by_attention, BUDGET.recent)
    assert cache.layers[0].policy.rank_by == "max"
    for layer, scored in zip(cache.layers, scores, strict=True):
        for g, (at, got) in enumerate(zip(*(x[0] for x in layer.kept()), strict=True)):
            real = at >= 0
            torch.testing.assert_close(got[real], scored[g, at[real]], rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "gpt_oss", *["qwen3_next", "falcon_h1"] * HYBRIDS]
)
def test_with_room_for_all_it_answers_as_the_full_cache(name):
    ours, (document,) = model(name), prompts(70)
    question = {"input_ids": torch.cat([document, *prompts(5, seed=3)], 1)}
    cache = h2o.read(ours, document, H2OConfig.full(), scored_by="echo")
    theirs = DynamicCache(config=ours.config)
    wanted = greedy(model(name, "eager"), question, **with_cache(theirs))
    assert torch.equal(greedy(ours, question, **with_cache(cache)), wanted)


def test_threads_read_with_one_model():
    """Each hears its own queries only, also where the model is patched."""
    ours, documents = model("llama", "sdpa"), prompts(70, 50, 60, 40)

    def kept(document):
        return positions(h2o.read(ours, document, BUDGET, scored_by="echo"))

    with h2o.patched(ours, BUDGET), ThreadPoolExecutor(4) as pool:
        assert list(pool.map(kept, documents * 3)) == list(map(kept, documents)) * 3


@pytest.mark.parametrize(
    "name",
    [*["deepseek_v3"] * bool(LATENT), *[name for name in WITHOUT_ROTARY if name in FAMILIES]],
)
def test_models_that_it_does_not_serve(name):
    with pytest.raises(Unsupported, match=r'scored_by="echo" cannot serve .*scored_by="repeat"'):
        h2o.read(shared(name), prompts(20)[0], BUDGET, scored_by="echo")


@pytest.mark.parametrize("n", [60, 140])
def test_scores_where_angles_depend_on_the_length(n):
    """Before and behind the length at which they change: those of a text so long."""
    ours, (document,) = made("llama, longrope"), prompts(n)
    cache = h2o.H2OCache(ours.config, heavy=n, recent=0, rank_by="echo")
    with torch.no_grad():
        ours(document, **with_cache(cache))
        agree(cache, ours, document)
        for _ in range(2):  # the queries of one set of angles are rotated on by the same
            ours(document[:, :1], **with_cache(cache))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("length", [100, 140, 600])
def test_angles_of_a_text_of_a_length(kind, length):
    rotary = Rotary(scaled(kind).build_config())
    cos, sin = copy.deepcopy(rotary.module)(torch.zeros(1), torch.tensor([[7, length - 1]]))
    angles = rotary.shift(7, length)
    size = rotary.module.attention_scaling
    torch.testing.assert_close(angles[0] * size, cos[0, 0, :4], rtol=0, atol=1e-5)
    torch.testing.assert_close(angles[1] * size, sin[0, 0, :4], rtol=0, atol=1e-5)


def test_angles_that_change_with_the_length():
    ours = made("llama, longrope")
    h2o.read(ours, prompts(127)[0], BUDGET, scored_by="echo")
    with pytest.raises(Unsupported, match=r'beyond 128 tokens .*scored_by="repeat"'):
        h2o.read(ours, prompts(128)[0], BUDGET, scored_by="echo")


def test_another_name():
    with pytest.raises(ValueError, match="scored_by is repeat, echo, not 'reread'"):
        h2o.read(shared("llama"), prompts(20)[0], BUDGET, scored_by="reread")
