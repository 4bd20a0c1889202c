"""Every pair of modes has a cell, and the cell is true.

A refused pair raises its reason at the first call that knows both modes. A test that a cell names
exists.
"""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import DynamicCache, GenerationConfig

from h2o import H2OCache, H2OConfig, UnsupportedError, compress_document, generate_all, simulated
from h2o.compat import with_cache
from h2o.hf import modes
from h2o.hf.modes import PAIRS, REFUSED, Mode, config_modes, refusal, why_not
from h2o.hf.patch import enable, patched
from h2o.hf.support import model_modes
from h2o.vllm.config_entry import config_of_entry
from tests.hf.tiny import FAMILIES, LATENT, model, prompts, shared

ROOT = Path(__file__).parents[2]
SMALL = {"heavy": 4, "recent": 4}
RELATIVE = {"positions": "cache_relative"}
M = Mode

UNTESTED = {frozenset((M.VLLM, M.IMAGES))}
"""Pairs that are allowed and that no test combines. Take one out with its test."""


# ---- The table ---------------------------------------------------------------------------------


def test_every_pair_has_one_cell():
    assert PAIRS.keys() == {frozenset(pair) for pair in itertools.combinations(Mode, 2)}
    rows = [frozenset(row[:2]) for row in REFUSED]
    rows += [frozenset((a, b)) for a, others, _ in (*modes.APART, *modes.TESTED) for b in others]
    assert not {pair for pair in rows if len(pair) != 2 or rows.count(pair) > 1}
    kinds = {modes.Refused, modes.Apart, modes.Tested, modes.Untested}
    assert {type(cell) for cell in PAIRS.values()} <= kinds
    assert {pair for pair, cell in PAIRS.items() if cell == modes.Untested()} == UNTESTED


def test_modes_have_names_of_their_own():
    assert len({*map(str, Mode)}) == len(Mode)
    assert f"{M.TRACE}" == str(M.TRACE) == "trace=True"


def test_where_a_pair_is_tested():
    places = {cell.where for cell in PAIRS.values() if isinstance(cell, modes.Tested)}
    for place in {*places, *(x for x in PROVOKED.values() if isinstance(x, str))}:
        path, _, name = place.partition("::")
        tree = ast.parse((ROOT / path).read_text("utf-8"))
        functions = {x.name for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)}
        assert functions if not name else name in functions, place


def test_a_reason_says_what_to_do():
    assert refusal({M.PINS, M.TRACE}) == refusal([]) == refusal([M.LATENT]) == ""
    assert refusal({M.PINS, M.TRACE, M.COMPILED}) == refusal([M.COMPILED, M.TRACE])
    assert refusal([M.TRACE, M.COMPILED]) == (
        "compileable=True cannot be combined with trace=True: the record grows with each step. "
        "Leave out one of them"
    )
    assert "original positions" in why_not(M.CACHE_RELATIVE, {M.WINDOWS, M.PINS})
    assert why_not(M.CACHE_RELATIVE, {M.PINS}) == ""


# ---- What models and configs ask for -------------------------------------------------------------


def test_modes_of_a_config():
    assert config_modes(H2OConfig(**SMALL)) == set()
    assert config_modes(H2OConfig(**SMALL, kv_dtype="int8")) == {M.BITS}
    assert config_modes(H2OConfig(heavy=[4, 5], recent=4)) == {M.HEAD_BUDGETS}
    assert config_modes(H2OConfig(heavy=lambda i, n: 4, recent=4)) == {M.HEAD_BUDGETS}
    echo = {M.HEAD_BUDGETS, M.SHARED_BUDGET, M.ECHO, M.FEW_BITS, M.GROWTH}
    assert config_modes(H2OConfig(budget=0.2, kv_dtype="int8-int4")) == echo
    both = H2OConfig(**SMALL, **RELATIVE, head_shares=[[1.0, 2.0]])
    assert config_modes(both) == {M.HEAD_BUDGETS, M.CACHE_RELATIVE}
    assert config_modes(H2OConfig(**SMALL, score_by="random")) == {M.RANDOM}
    assert config_modes(H2OConfig(heavy=[4, [2, 0.1]], recent=0)) == {M.HEAD_BUDGETS, M.GROWTH}
    assert config_modes(H2OConfig.authors(0.2)) == config_modes(H2OConfig(heavy=0.0)) - {M.GROWTH}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", set()),
        ("gemma3", {M.WINDOWS}),
        ("deepseek_v3", {M.LATENT}),
        ("falcon_h1", {M.HYBRID}),
        ("gemma3n_text", {M.WINDOWS, M.SHARED_KEYS}),
    ],
)
def test_modes_of_a_model(name, expected):
    if name in FAMILIES | LATENT:
        assert model_modes(shared(name)) == model_modes(shared(name).config) == expected


def test_a_model_that_cannot_be_served_has_no_modes():
    config = FAMILIES["llama"].build_config()
    config.is_encoder_decoder = True
    with pytest.raises(UnsupportedError, match="does not support llama: encoder-decoder"):
        model_modes(config)


# ---- Refused pairs -------------------------------------------------------------------------------


def needs(name):
    """The tiny model of a family. Skips the test if this version of transformers has none."""
    if name not in FAMILIES | LATENT:
        pytest.skip(f"this transformers has no {name}")
    return shared(name)


def cache(name, **settings):
    return H2OCache(needs(name), **SMALL, **settings)


def cropped():
    ours = needs("qwen3_next")
    held = H2OCache(ours, **SMALL)
    held.activate_past_recording()
    ours(*prompts(12), **with_cache(held))
    held.crop(-1)


def gaps(name):
    ours, (ids,) = needs(name), prompts(12)
    mask = torch.ones_like(ids)
    mask[:, 5] = 0
    ours(ids, attention_mask=mask, **with_cache(H2OCache(ours, **SMALL)))


def continued():
    ours, full = shared("llama"), DynamicCache()
    ours(*prompts(12), **with_cache(full))
    H2OCache.from_dynamic_cache(full, ours, **SMALL, **RELATIVE)


def simulate(name, **settings):
    with simulated(needs(name), **SMALL, **settings):
        pass


def reread(ours, **settings):
    text = torch.arange(2, 12)[None]
    compress_document(ours, text, readings=2, repeat=text[0, :2], **SMALL, **settings)


def answer(ours, **settings):
    return list(generate_all(ours, [[2, 3]], rows=1, **SMALL, **settings))


def cut(name):
    """A model of which this process has the last of two parts, as tensor parallelism leaves it."""
    needs(name)
    ours = model(name)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for module in ours.modules():
        if hasattr(module, "q_proj"):
            weight = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
            module.q_proj.register_parameter("cut", torch.nn.Parameter(weight))
    return ours


def without_span(name, **settings):
    held = cache(name, **settings)
    shared(name)(*prompts(12), **with_cache(held))
    held.evict([(1, 2)])


SHARED = {"budget": 0.5, "min_tokens": 0}
IN_VLLM = "tests/vllm/test_engine_refusals.py"

PROVOKED = {
    (M.CACHE_RELATIVE, M.SHARED_KEYS): lambda: cache("gemma3n_text", **RELATIVE),
    (M.CACHE_RELATIVE, M.WINDOWS): lambda: cache("gemma3", **RELATIVE),
    (M.CACHE_RELATIVE, M.LATENT): lambda: cache("deepseek_v3", **RELATIVE),
    (M.LATENT, M.FEW_BITS): lambda: cache("deepseek_v3", kv_dtype="int8-int4"),
    (M.LATENT, M.RANDOM): lambda: simulate("deepseek_v3", score_by="random"),
    (M.COMPILED, M.WINDOWS): lambda: cache("gemma3", compileable=True),
    (M.COMPILED, M.LATENT): lambda: cache("deepseek_v3", compileable=True),
    (M.COMPILED, M.SHARED_KEYS): lambda: cache("gemma3n_text", compileable=True),
    (M.COMPILED, M.CACHE_RELATIVE): lambda: cache("llama", **RELATIVE, compileable=True),
    (M.COMPILED, M.TRACE): lambda: cache("llama", trace=True, compileable=True),
    (M.CROP, M.HYBRID): cropped,
    (M.NAMED_SPANS, M.HYBRID): lambda: without_span("qwen3_next"),
    (M.NAMED_SPANS, M.LATENT): lambda: without_span("deepseek_v3"),
    (M.NAMED_SPANS, M.TRACE): lambda: without_span("llama", trace=True),
    (M.NAMED_SPANS, M.COMPILED): lambda: without_span("llama", compileable=True),
    (M.GAPS, M.WINDOWS): lambda: gaps("gemma3"),
    (M.GAPS, M.HYBRID): lambda: gaps("qwen3_next"),
    (M.FROM_DYNAMIC, M.CACHE_RELATIVE): continued,
    (M.SIMULATED, M.CACHE_RELATIVE): lambda: simulate("llama", **RELATIVE),
    (M.REREADING, M.CACHE_RELATIVE): lambda: reread(shared("llama"), **RELATIVE),
    (M.GENERATE_ALL, M.WINDOWS): lambda: answer(needs("gemma3")),
    (M.GENERATE_ALL, M.BEAMS): lambda: answer(
        shared("llama"), generation_config=GenerationConfig(num_beams=3)
    ),
    (M.TENSOR_PARALLEL, M.SHARED_BUDGET): lambda: H2OCache(cut("llama"), **SHARED),
    (M.TENSOR_PARALLEL, M.SHARED_KEYS): lambda: H2OCache(cut("gemma3n_text"), **SMALL),
    (M.TENSOR_PARALLEL, M.REREADING): lambda: reread(cut("llama")),
    (M.VLLM, M.HYBRID): f"{IN_VLLM}::test_models_with_states_are_refused",
    (M.VLLM, M.LATENT): f"{IN_VLLM}::test_kinds_of_attention_are_refused",
    (M.VLLM, M.SHARED_KEYS): f"{IN_VLLM}::test_keys_of_other_layers_are_refused",
    (M.VLLM, M.CACHE_RELATIVE): lambda: config_of_entry(SMALL | RELATIVE),
    (M.VLLM, M.GROWTH): lambda: config_of_entry({"budget": 0.2, "ratio_of": "seen"}),
    (M.COMPILED, M.GROWTH): lambda: H2OCache(shared("llama"), heavy=0.1, compileable=True),
    (M.VLLM, M.RANDOM): lambda: config_of_entry(SMALL | {"score_by": "random"}),
}
"""A call for each refused pair, or the test that makes it where vLLM is installed."""


@pytest.fixture
def last_of_two():
    """Make this process the last of two, of which the other does not exist."""
    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    distributed.destroy_process_group()


def test_each_refusal_is_provoked():
    assert {frozenset(pair) for pair in PROVOKED} == {frozenset(row[:2]) for row in REFUSED}


@pytest.mark.parametrize("pair", [pair for pair, x in PROVOKED.items() if callable(x)])
def test_a_refused_pair_raises_its_reason(pair, request):
    if M.TENSOR_PARALLEL in pair:
        request.getfixturevalue("last_of_two")
    error, reason = UnsupportedError, PAIRS[frozenset(pair)].reason
    if M.GAPS in pair:  # the error names the row
        error, reason = ValueError, modes.COUNTS_PADDING
    if M.CROP in pair:  # as other caches of transformers
        error = NotImplementedError
    with pytest.raises(error, match=re.escape(reason)):
        PROVOKED[pair]()


# ---- A model that is cut is refused before it reads a prompt -------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda ours: H2OCache(ours, **SHARED),
        lambda ours: patched(ours, **SHARED).__enter__(),
        lambda ours: enable(ours, **SHARED),
        lambda ours: simulated(ours, **SHARED, prompt_length=8).__enter__(),
        lambda ours: generate_all(ours, [[2, 3]], rows=1, **SHARED),
    ],
)
def test_a_cut_model_with_one_budget_for_all_heads(call, last_of_two):
    ours = cut("llama")
    with pytest.raises(UnsupportedError, match="cut over several processes cannot be combined"):
        call(ours)
    assert "_h2o_patches" not in vars(ours)
    ours(*prompts(8))  # works as before


def test_a_cut_model_that_only_the_forward_pass_shows(last_of_two):
    """A config does not show it. The first forward pass raises the same reason."""
    ours = cut("llama")
    held = H2OCache(ours.config, **SHARED)
    with pytest.raises(
        UnsupportedError, match=re.escape(refusal([M.TENSOR_PARALLEL, M.SHARED_BUDGET]))
    ):
        ours(*prompts(12), **with_cache(held))
