"""Echo scores of a prompt, compared with those of queries and keys from transformers' own
attention, with each query at the position where echo evaluates it."""

from __future__ import annotations

import copy
import math
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

import h2o
from h2o import H2OCache, backends
from h2o.compat import with_cache
from h2o.hf.layers.layer import H2OLayer
from h2o.hf.prompt import echo
from h2o.hf.prompt.echo_scorer import PromptEcho
from h2o.hf.rotary.model_rotary import rotary_of
from tests.hf.test_cache_relative import SCALED, scaled
from tests.hf.tiny import (
    DEVICE,
    FAMILIES,
    ROTARY,
    TWINS,
    Family,
    batch,
    prompts,
    shared,
    slow_if,
)

SUPPORTED = {name: FAMILIES[name] for name in ROTARY}
SUPPORTED |= {"glm": Family("glm"), "glm4": Family("glm4")}
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
EVERY = SUPPORTED | MORE


def made(name):
    torch.manual_seed(5)
    built = AutoModelForCausalLM.from_config(EVERY[name].build_config()).eval().to(DEVICE)
    built.set_attn_implementation("h2o")
    for module in built.modules():
        if isinstance(getattr(module, "sinks", None), torch.nn.Parameter):
            torch.nn.init.normal_(module.sinks, std=20)
    return built


def attention_of(theirs, document, shift):
    """What transformers passes to the attention of each layer for tokens at positions from `shift`
    on: module, query and key [heads, n, D], and keyword arguments, by layer."""
    inputs_of = {}

    def function(module, query, key, value, mask, **kwargs):
        eager = sys.modules[type(module).__module__].eager_attention_forward
        inputs_of[module.layer_idx] = module, query[0], key[0], kwargs
        return eager(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("test_echo", function)
    AttentionMaskInterface.register("test_echo", eager_mask)
    theirs = copy.deepcopy(theirs)
    theirs.set_attn_implementation("test_echo")
    ids = shift + torch.arange(document.shape[1], device=DEVICE)[None]
    theirs.base_model(document, position_ids=ids, use_cache=False)
    return inputs_of


def expected(theirs, document, layers):
    """Echo of each of these layers, [G, n] float64."""
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


def echo_of(ours, ids, mask=None):
    """Echo of a prompt in each H2O layer, [B, G, N], by layer."""
    found, scores = [], PromptEcho.scores

    def record(echo, tokens, received):
        made = scores(echo, tokens, received)
        found.append(made[1])
        return made

    with mock.patch.object(PromptEcho, "scores", record):
        cache = H2OCache(ours.config, heavy=500, recent=0, score_by="mean-echo")
        ours(ids, attention_mask=mask, **with_cache(cache))
    layers = [i for i, layer in enumerate(cache.layers) if isinstance(layer, H2OLayer)]
    return dict(zip(layers, found, strict=True))


def agree(echo, theirs, document, row=0, real=slice(None)):
    wanted = expected(theirs, document, [*echo])
    for got, want in zip(echo.values(), wanted, strict=True):
        torch.testing.assert_close(got[row][:, real].double(), want, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("name", [slow_if(name in TWINS, name) for name in EVERY])
def test_echo_of_a_prompt(name):
    ours, (document,) = made(name), prompts(50)
    agree(echo_of(ours, document), ours, document)
    assert ours.config._attn_implementation == "h2o"


def test_echo_of_long_prompts(monkeypatch):
    """Evaluating the queries of a prompt in several parts must not change its echo."""
    ours, (document,) = shared("llama"), prompts(70)
    monkeypatch.setattr(echo, "ENTRIES", 3 * 70 * ours.config.num_attention_heads)
    monkeypatch.setattr(echo, "ROWS", 40)
    agree(echo_of(ours, document), ours, document)


@pytest.mark.parametrize("by", ["core", "bounds", "torch"])
@pytest.mark.parametrize("n", [1, 3, 32, 100])
@pytest.mark.parametrize("size", [1.0, 12.0])
@pytest.mark.parametrize(
    "how", [{}, {"softcap": 20.0}, {"scale": 0.5, "sink_logits": True}], ids=str
)
def test_a_row_by_kernels_and_by_torch(how, size, n, by, monkeypatch):
    """Kernels, bounds and torch must all agree with a dense softmax. Some of the larger queries
    give the first key no attention."""
    if by == "bounds":
        monkeypatch.setattr(echo, "FEWEST_BOUNDED", 1)
        monkeypatch.setattr(echo, "TOP_KEYS", 4)
        monkeypatch.setattr(echo, "BLOCK", 3)
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
        assert weights[..., 0].min() < 1e-30
    with backends.by_torch() if by == "torch" else nullcontext():
        got = echo.largest(query, keys, None, **how)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", [{}, {"softcap": 20.0}, {"sink_logits": True}], ids=str)
@pytest.mark.parametrize("size", [0.1, 2.0, 12.0])
def test_queries_that_are_left_out_change_no_bit(size, how, dtype, monkeypatch):
    """Leaving out queries must not change any score. The keys have a sink, outliers and an outlier
    channel, and attention ranges from even to a single key."""
    n, generator = 800, torch.Generator().manual_seed(2)
    query, keys = (torch.randn(heads, n, 32, generator=generator) for heads in (6, 2))
    query *= size
    query[:, :, 3] += 6
    keys[:, ::97] *= 4
    keys[:, 0, 3] += 8
    if "sink_logits" in how:
        how = how | {"sink_logits": torch.randn(6, generator=generator) * 5}
    query, keys = query.to(dtype), keys.to(dtype)
    got = echo.largest(query, keys, None, **how)
    monkeypatch.setattr(echo, "FEWEST_BOUNDED", n + 1)
    assert torch.equal(got, echo.largest(query, keys, None, **how))


def test_numbers_that_are_none_reach_the_same_scores(monkeypatch):
    """A NaN key must give its whole head NaN, and an infinite query only the keys after it."""
    generator = torch.Generator().manual_seed(3)
    query, keys = (torch.randn(heads, 800, 32, generator=generator) for heads in (6, 2))
    keys[0, 400, 3], query[5, 10] = math.nan, math.inf
    got = echo.largest(query, keys, None)
    assert got.isnan().sum(1).tolist() == [800, 5]
    monkeypatch.setattr(echo, "FEWEST_BOUNDED", 801)
    torch.testing.assert_close(got, echo.largest(query, keys, None), rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_most_queries_of_a_text_are_left_out(monkeypatch):
    """On a real model no more queries may be evaluated over all keys than the documents say."""
    model, tokenizer = h2o.load_model()
    text = (Path(__file__).parents[2] / "docs/understand/how_h2o_works.md").read_text()
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :600]
    assert ids.shape[1] == 600
    counts, log_sums = Counter(), echo._HeldKeys.log_sums

    def count(keys, queries, sinks):
        counts[len(queries), keys.held.keys.shape[2] + 1] += queries.shape[1] * len(queries)
        return log_sums(keys, queries, sinks)

    monkeypatch.setattr(echo._HeldKeys, "log_sums", count)
    monkeypatch.setattr(echo, "FEWEST_BOUNDED", 600)
    cache = H2OCache(model.config, budget=0.5)
    model(ids, logits_to_keep=1, **with_cache(cache))
    every = 30 * 9 * 600
    assert counts[3, 32] == counts[3, (600 - 32) // 64] == every
    assert 0.2 * every < counts[1, 600] < 0.4 * every


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_in_sixteen_bits(dtype):
    """Keys are rounded after they are rotated back, which must not cost more than the rounding of
    the model's own keys."""
    generator = torch.Generator().manual_seed(0)
    query, keys = (torch.randn(h, 300, 32, generator=generator).to(dtype) for h in (4, 2))
    angles = torch.linspace(0, 3, 16)
    angles = torch.stack([angles.cos(), angles.sin()])
    got = echo.largest(query, keys, angles)
    torch.testing.assert_close(
        got, echo.largest(query.float(), keys.float(), angles), rtol=0.05, atol=1e-5
    )


@pytest.mark.parametrize("first", [-0.9, 3.0])
def test_a_first_key_of_next_to_no_attention_and_of_all(first):
    """The first key is passed apart from the others and must count exactly once."""
    generator = torch.Generator().manual_seed(1)
    query, keys = (torch.randn(h, 300, 32, generator=generator).half() for h in (4, 2))
    query += 1.5
    keys[:, 0] = first
    expected = echo.largest(query.float(), keys.float(), None)
    torch.testing.assert_close(echo.largest(query, keys, None), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", ["llama", "phi", "gemma2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_batch_are_prompts_of_their_own(name, side):
    """The queries of each row must be evaluated after the row's own end, and padding must not
    count."""
    ours, documents = shared(name), prompts(70, 41, 58)
    padded = batch(documents, side)
    mask = padded["attention_mask"]
    found = echo_of(ours, padded["input_ids"], mask)
    for row, document in enumerate(documents):
        agree(found, ours, document, row, mask[row].bool())


@pytest.mark.parametrize("n", [60, 140])
def test_echo_where_angles_depend_on_the_length(n):
    """Echo must use the angles of the text's own length, below and above the length at which angles
    change."""
    ours, (document,) = made("llama, longrope"), prompts(n)
    agree(echo_of(ours, document), ours, document)


def test_echo_of_the_longest_text_with_the_angles_of_short_ones(monkeypatch):
    """A text of 128 tokens has the angles of short texts, so those of long texts must not matter,
    although echo evaluates its queries at later positions."""
    (document,) = prompts(128)
    rope = {"rope_theta": 10000.0, **SCALED["longrope"], "long_factor": [4.0, 3.0, 2.0, 1.0]}
    monkeypatch.setitem(EVERY, "others", Family("llama", {"rope_parameters": rope}))
    one, other = (echo_of(made(name), document) for name in ("llama, longrope", "others"))
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("length", [100, 140, 600])
def test_angles_of_a_text_of_a_length(kind, length):
    rotary = rotary_of(scaled(kind).build_config())
    cos, sin = copy.deepcopy(rotary.module)(torch.zeros(1), torch.tensor([[7, length - 1]]))
    angles = rotary.shift(7, length)
    size = rotary.module.attention_scaling
    torch.testing.assert_close(angles[0] * size, cos[0, 0, :4], rtol=0, atol=1e-5)
    torch.testing.assert_close(angles[1] * size, sin[0, 0, :4], rtol=0, atol=1e-5)
