"""`H2OConfig.echo`: the places of a prompt are dealt over all layers and heads by echo."""

from __future__ import annotations

import pytest
import torch
from transformers import CompileConfig, DynamicCache

import h2o
from h2o import H2OCache, H2OConfig, generate_all
from h2o.borrowed import with_cache
from h2o.reference_echo import shared_echo
from tests.hf import test_one_budget as one_budget
from tests.hf.test_echo import echo_of
from tests.hf.test_prompt_echo import read
from tests.hf.test_reading import positions
from tests.hf.test_simulation import prove, text
from tests.hf.tiny import batch, greedy, model, needs_compiler, prompts, shared

SMALL = {"heavy": 6, "recent": 4, "sinks": 2, "rank_by": "mean-echo", "shares": "echo"}
SMALL |= {"value_weighted": True}


def wanted(ours, document):
    """What the oracle keeps, by the attention, the echo and the values of caches without a
    budget."""
    roomy = {"heavy": 500, "recent": 0}
    means, echoes = read(ours, [document], **roomy, rank_by="mean"), echo_of(ours, document)
    layers = [
        (
            means.kept(i).scores[0].double(),
            echoes[i][0].double(),
            means.layers[i].held()[1][0].double().norm(dim=-1),
        )
        for i in range(len(means.layers))
    ]
    return shared_echo(layers, SMALL["heavy"], SMALL["recent"], SMALL["sinks"])


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "phi", "qwen3"])
def test_what_is_kept(name):
    ours, (document,) = shared(name), prompts(60)
    expected = wanted(ours, document)
    assert positions(read(ours, [document], **SMALL)) == expected
    assert len({len(head) for layer in expected for head in layer}) > 1, "heads never differ"
    plain = {**SMALL, "shares": None}
    assert positions(read(ours, [document], **plain)) != expected


def test_a_row_is_what_it_is_alone():
    ours, documents = shared("llama"), prompts(60, 25, 44)
    together = read(ours, documents, **SMALL)
    for row, document in enumerate(documents):
        alone = positions(read(ours, [document], **SMALL))
        assert positions(together, row) == alone


@pytest.mark.parametrize("kv_dtype", [None, "int8", "int8-int4"])
@pytest.mark.parametrize("lengths", [(200,), (200, 60, 130)])
def test_keys_that_no_budget_can_keep_are_dropped_while_a_prompt_is_read(lengths, kv_dtype):
    """What is kept is the same, and less is held meanwhile."""
    deep = one_budget.deep()
    if kv_dtype == "int8-int4":
        deep = one_budget.deep(head_dim=32)
    caches, most = [], []
    for drops in (True, False):
        with one_budget.watched(deep, drops) as held:
            caches.append(read(deep, prompts(*lengths), **SMALL, kv_dtype=kv_dtype))
        most.append(max(held))
    assert [positions(caches[0], i) for i in range(len(lengths))] == [
        positions(caches[1], i) for i in range(len(lengths))
    ]
    assert most[0] < most[1] / 2


def test_steps_are_those_of_robust():
    """And budgets stay what they have become."""
    ours, (document, more) = model("llama"), prompts(60, 30)
    cache = read(ours, [document], **SMALL)
    before = [layer.budget_by_head for layer in cache.report().layers]
    with torch.no_grad():
        ours(more, **with_cache(cache))
        for token in more.split(1, dim=1):
            ours(token, **with_cache(cache))
    assert [layer.kept_by_head for layer in cache.report().layers] == before


def test_forks_files_and_chunks(tmp_path):
    ours, (document, more) = model("llama"), prompts(60, 8)
    cache = read(ours, [document], **SMALL)
    cache.save(tmp_path / "document.safetensors", ours)
    whole = torch.cat([document, more], 1)
    expected = greedy(ours, {"input_ids": whole}, **with_cache(cache.fork()))
    loaded = H2OCache.load(tmp_path / "document.safetensors", ours)
    assert loaded.config == cache.config
    assert torch.equal(greedy(ours, {"input_ids": whole}, **with_cache(loaded)), expected)
    pieces = H2OCache(ours.config, **SMALL, prompt_length=60)
    greedy(ours, {"input_ids": document}, prefill_chunk_size=20, **with_cache(pieces))
    heads = [n for layer in pieces.report().layers for n in layer.kept_by_head[0]]
    assert sum(heads) == 12 * len(heads)


def test_many_requests_answer_as_alone():
    ours, documents = model("llama"), prompts(60, 33, 47)
    config = H2OConfig(**SMALL)
    results = generate_all(
        ours, [x[0].tolist() for x in documents], config, rows=2, max_new_tokens=6
    )
    for result in results:
        cache = H2OCache(ours.config, config)
        alone = greedy(ours, {"input_ids": documents[result.index]}, 6, **with_cache(cache))
        assert result.ids == alone[0].tolist()


@needs_compiler
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_steps():
    ours, documents = model("llama"), prompts(60, 50)
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True
    for document in documents:
        eager, compiled = (H2OCache(ours.config, **SMALL, compileable=x) for x in (False, True))
        inputs = batch([document])
        expected = greedy(ours, inputs, 6, **with_cache(eager))
        got = greedy(ours, inputs, 6, **with_cache(compiled), compile_config=config)
        assert torch.equal(got, expected)


def test_keys_without_echo_share_nothing():
    """Of a DynamicCache, and of a model without rotary positions, whose heads are all alike."""
    ours, (document, more) = model("llama"), prompts(60, 8)
    full = DynamicCache(config=ours.config)
    with torch.no_grad():
        ours(document, **with_cache(full))
        cache = H2OCache.from_dynamic_cache(full, ours.config, **SMALL)
        ours(more, **with_cache(cache))
    assert {n for layer in cache.report().layers for n in layer.kept_by_head[0]} == {12}
    opt = shared("opt")
    report = read(opt, [document], **SMALL).report()
    assert {n for layer in report.layers for n in layer.kept_by_head[0]} == {12}


def test_the_preset():
    config = H2OConfig.echo(0.2, of="bytes")
    robust = H2OConfig.robust(0.2, of="bytes")
    assert (config.rank_by, config.shares) == ("mean-echo", "echo")
    assert (config.heavy, config.recent, config.sinks) == (robust.heavy, robust.recent, 4)
    with pytest.raises(ValueError, match='shares="echo" goes with rank_by="mean-echo"'):
        H2OConfig(heavy=6, recent=6, shares="echo")


# ---- Simulation is the cache -------------------------------------------------------------------


@pytest.mark.parametrize("prompt_length", [1, 40, 96])
@pytest.mark.parametrize("more", [{}, {"kv_dtype": "int8"}, {"heavy": 0.3, "min_tokens": 12}])
def test_simulation_equals_the_cache(more, prompt_length):
    ours = model("llama", "sdpa")
    tolerance = 2e-2 if "kv_dtype" in more else 2e-4
    of_prompt = {"ratio_of": "prompt"}
    prove(ours, text(1), prompt_length, tolerance, base=of_prompt, **SMALL | more)


def test_a_simulated_row_is_what_it_is_alone():
    ours, documents = model("llama", "sdpa"), prompts(60, 25, 44)
    inputs = batch(documents)
    with h2o.simulated(ours, **SMALL, prompt_length=[50, 20, 30]), torch.no_grad():
        together = ours(**inputs, use_cache=False).logits
    for row, (document, prompt) in enumerate(zip(documents, (50, 20, 30), strict=True)):
        with h2o.simulated(ours, **SMALL, prompt_length=prompt), torch.no_grad():
            alone = ours(document, use_cache=False).logits[0]
        torch.testing.assert_close(together[row, -len(alone) :], alone, rtol=0, atol=1e-4)
