"""`H2OConfig.echo`: all layers and heads share one budget, which is divided by echo."""

from __future__ import annotations

import pytest
import torch
from transformers import CompileConfig, DynamicCache

from h2o import H2OCache, H2OConfig, generate_all
from h2o.compat import with_cache
from tests.hf.modes import MODES
from tests.hf.test_compress import positions
from tests.hf.test_echo import echo_of
from tests.hf.test_prompt_echo import read
from tests.hf.test_simulation import TEXT, check_rows_alone, prove, text
from tests.hf.tiny import batch, failing, greedy, model, needs_compiler, prompts, shared
from tests.reference.echo import shared_echo

SMALL = {"heavy": 6, "recent": 4, "sinks": 2, "score_by": "mean-echo", "head_shares": "echo"}
SMALL |= {"value_weighted": True}


def wanted(ours, document):
    """Positions that the reference keeps, given the attention, echo and values of caches with room
    for all keys."""
    roomy = {"heavy": 500, "recent": 0}
    means, echoes = read(ours, [document], **roomy, score_by="mean"), echo_of(ours, document)
    layers = [
        (
            means.kept(i).scores[0].double(),
            echoes[i][0].double(),
            means.layers[i].kept_rows()[1][0].double().norm(dim=-1),
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
    plain = {**SMALL, "head_shares": None}
    assert positions(read(ours, [document], **plain)) != expected


@pytest.mark.parametrize("more", [{}, {"heavy": 0.2, "recent": 0.1, "min_tokens": 0}], ids=str)
def test_a_row_is_what_it_is_alone(more):
    """A row must keep the same keys. One that is shorter than its budget must leave the same room
    in each head."""
    ours, documents = shared("llama"), prompts(60, 25, 8)
    together = read(ours, documents, **SMALL | more)
    for row, document in enumerate(documents):
        alone = read(ours, [document], **SMALL | more)
        assert positions(together, row) == positions(alone)
        for layer, alike in zip(together.report().layers, alone.report().layers, strict=True):
            assert layer.budget_by_head[row] == alike.budget_by_head[0]


def test_steps_are_those_of_robust():
    """Chunks and steps after the prompt must not change the budgets that the prompt gave to
    heads."""
    ours, (document, more) = model("llama"), prompts(60, 30)
    cache = read(ours, [document], **SMALL)
    before = [layer.budget_by_head for layer in cache.report().layers]
    ours(more, **with_cache(cache))
    for token in more.split(1, dim=1):
        ours(token, **with_cache(cache))
    assert [layer.kept_by_head for layer in cache.report().layers] == before


def test_chunks_of_a_prompt_share_its_budget():
    ours, (document,) = model("llama"), prompts(60)
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
    """Keys of a DynamicCache and of models without rotary positions have no echo, so all heads must
    get equal budgets."""
    ours, (document, more) = model("llama"), prompts(60, 8)
    full = DynamicCache(config=ours.config)
    ours(document, **with_cache(full))
    cache = H2OCache.from_dynamic_cache(full, ours.config, **SMALL)
    ours(more, **with_cache(cache))
    assert {n for layer in cache.report().layers for n in layer.kept_by_head[0]} == {12}
    opt = shared("opt")
    report = read(opt, [document], **SMALL).report()
    assert {n for layer in report.layers for n in layer.kept_by_head[0]} == {12}


@pytest.mark.parametrize(
    "name",
    ["llama", "gemma3", "deepseek_v3", "falcon_h1", "qwen3_next"],
)
def test_the_prompt_is_attended_to_as_a_whole(name):
    """The prompt must attend to all of its keys. With room for all keys the answers must be those
    of a full cache."""
    ours, (document,) = model(name), prompts(60)
    inputs = {"input_ids": document}
    theirs = DynamicCache(config=ours.config)
    full = greedy(model(name, "sdpa"), inputs, **with_cache(theirs))
    roomy = H2OCache(ours.config, **SMALL | {"heavy": 500})
    assert torch.equal(greedy(ours, inputs, **with_cache(roomy)), full)
    caches = [H2OCache(ours.config, **SMALL | more) for more in ({}, {"heavy": 500})]
    cut, dense = (ours(document, **with_cache(cache)).logits for cache in caches)
    torch.testing.assert_close(cut, dense, rtol=0, atol=1e-5)
    assert mean_kept(caches[0]) == 12


def mean_kept(cache):
    """Mean number of keys that a head keeps in the first row."""
    layers = [layer for layer in cache.report().layers if layer.kind == "h2o"]
    heads = [n for layer in layers for n in layer.kept_by_head[0]]
    return sum(heads) / len(heads)


def test_no_head_keeps_fewer_than_the_floor():
    """A head with little echo must not keep fewer keys than `min_tokens`."""
    ours, (document,) = shared("qwen3"), prompts(70)
    config = SMALL | {"heavy": 0.3, "recent": 0.05, "min_tokens": 25}
    cache = read(ours, [document], **config)
    free = read(ours, [document], **config | {"min_tokens": 0})
    held, least = ([len(head) for layer in positions(x) for head in layer] for x in (cache, free))
    assert min(held) == 25
    assert min(least) < 25
    assert sum(held) == sum(least)
    assert any(layer.floored for layer in cache.report().layers)
    assert not any(layer.floored for layer in free.report().layers)


def test_no_head_is_left_without_a_key():
    ours, (document,) = shared("qwen3"), prompts(70)
    cache = read(ours, [document], **SMALL | {"heavy": 2, "recent": 0, "sinks": 0})
    heads = [len(head) for layer in positions(cache) for head in layer]
    assert min(heads) >= 1
    assert sum(heads) == 2 * len(heads)


def test_room_that_a_short_prompt_leaves_is_for_what_follows():
    ours, (document, more) = model("llama"), prompts(10, 60)
    cache = read(ours, [document], **SMALL)
    ours(more, **with_cache(cache))
    assert {n for layer in cache.report().layers for n in layer.kept_by_head[0]} == {12}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head_shares", [None, "echo"])
def test_every_way_to_generate(mode, head_shares):
    ours, made = model("llama"), []

    def make():
        made.append(H2OCache(ours.config, **SMALL | {"head_shares": head_shares}))
        return made[-1]

    MODES[mode](ours, batch(prompts(23, 17)), make)
    heads = [n for x in made[-1].report().layers for row in x.kept_by_head for n in row]
    assert sum(heads) == 12 * len(heads)


def test_a_trace_says_that_keys_left_at_the_end_of_the_prompt():
    assert read(model("llama"), prompts(60), **SMALL, trace=True).evicted_at(1).min() == 60


def test_a_pass_that_broke_off_is_forgotten():
    ours, (document,) = model("llama"), prompts(60)
    cache = H2OCache(ours.config, **SMALL)
    inner = ours.model.layers[1].self_attn
    with failing(inner):
        ours(document, **with_cache(cache))
    cache.reset()
    assert cache.guard.current is None
    ours(document, **with_cache(cache))
    assert positions(cache) == positions(read(ours, [document], **SMALL))


@pytest.mark.parametrize("head_shares", [None, "echo"])
def test_tokens_of_a_prompt_are_taken_back(head_shares):
    ours, (document,) = model("llama"), prompts(60)
    settings = SMALL | {"head_shares": head_shares}
    cache = H2OCache(ours.config, **settings)
    cache.activate_past_recording()
    ours(document, **with_cache(cache))
    cache.crop(-10)
    assert positions(cache) == positions(read(ours, [document[:, :50]], **settings))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"head_shares": "best"}, '"shipped" or "echo"$'),
        (SMALL | {"heavy": [[3, 4], [5, 6]]}, "shares divide"),
        (
            {"head_shares": "echo", "score_by": "max"},
            'head_shares="echo" requires score_by="mean-echo", not \'max\'. The preset echo sets '
            'head_shares="echo": give score_by="mean-echo", or use the preset robust',
        ),
        ({"heavy": 0.1, "head_shares": "echo"}, 'head_shares="echo" requires score_by="mean-echo"'),
    ],
)
def test_refusals(parameters, message):
    with pytest.raises((TypeError, ValueError), match=message):
        H2OConfig(**parameters)


def test_the_preset():
    config = H2OConfig.echo(0.2, budget_unit="bytes")
    robust = H2OConfig.robust(0.2, budget_unit="bytes")
    assert (config.score_by, config.head_shares) == ("mean-echo", "echo")
    assert (config.heavy, config.recent, config.sinks) == (robust.heavy, robust.recent, 4)


# ---- Simulation is the cache -------------------------------------------------------------------


@pytest.mark.parametrize("prompt_length", [1, 40, TEXT])
@pytest.mark.parametrize("more", [{}, {"kv_dtype": "int8"}, {"heavy": 0.3, "min_tokens": 12}])
def test_simulation_equals_the_cache(more, prompt_length):
    ours = model("llama", "sdpa")
    tolerance = 2e-2 if "kv_dtype" in more else 2e-4
    base = {"ratio_of": "seen" if "min_tokens" in more else "prompt"}
    prove(ours, text(1), prompt_length, tolerance, base=base, **SMALL | more)


def test_a_simulated_row_is_what_it_is_alone():
    documents = prompts(60, 25, 44)
    check_rows_alone(model("llama", "sdpa"), documents, [50, 20, 30], **SMALL)
