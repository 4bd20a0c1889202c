"""generate_all(compileable=True): graphs for steps and prompts give the answers of eager passes."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import GenerationConfig

import h2o
from h2o import H2OCache, H2OConfig
from h2o.compat import with_cache
from h2o.hf.batching.compiled_prefill import CompiledPrefill
from tests.hf.test_generate_all import CONFIGS, LENGTHS, alone, texts
from tests.hf.tiny import PURE, TWINS, llama, model, needs_compiler, shared, slow_if


@pytest.fixture
def dynamo(monkeypatch):
    """Skip the compiler's backend, which takes a quarter of a minute."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled_and_eager(ours, config, requests=None, **how):
    """Answers to the same requests, compiled and eager."""
    requests = requests or [
        h2o.Request(text, max_new_tokens=3 + 7 * (i % 4)) for i, text in enumerate(texts(*LENGTHS))
    ]
    both = (
        h2o.generate_all(ours, requests, config, compileable=compileable, **how)
        for compileable in (True, False)
    )
    return tuple([result.ids for result in results] for results in both)


# To a graph the slow settings are tensors of another dtype, and other numbers.
@needs_compiler
@pytest.mark.parametrize(
    "name", ["uneven heads", slow_if(True, "int8"), slow_if(True, "mean, sinks")]
)
def test_one_graph_serves_all_steps_and_another_all_prompts(name, dynamo):
    """Idle rows, refilled rows and chunks of prompts must not need other graphs."""
    for more in ({}, {"generation_config": GenerationConfig(prefill_chunk_size=8)}):
        compiled, eager = compiled_and_eager(model("llama"), CONFIGS[name], rows=3, **more)
        assert compiled == eager
        assert counters["stats"]["unique_graphs"] == 2
        assert not counters["graph_break"]


@pytest.fixture
def packs(monkeypatch):
    """The lengths of the prompts in each pass of a `CompiledPrefill`."""
    lengths = []
    run = CompiledPrefill._run

    def record(self, ids, chunks, inputs):
        lengths.append(chunks)
        return run(self, ids, chunks, inputs)

    monkeypatch.setattr(CompiledPrefill, "_run", record)
    return lengths


@needs_compiler
@pytest.mark.parametrize(
    "name", ["uneven heads", slow_if(True, "int8"), slow_if(True, "value norms")]
)
def test_waiting_prompts_are_packed_for_the_graph(name, dynamo, packs):
    """Prompts after the first must be prefilled up to four at a time, a quarter of the rows, by a
    single graph."""
    requests = [
        h2o.Request(text, max_new_tokens=3 + i % 4)
        for i, text in enumerate(texts(*LENGTHS, 1, 1100, 1000, *LENGTHS[::2], 16))
    ]
    ours = llama(2, max_position_embeddings=2048)
    compiled, eager = compiled_and_eager(ours, CONFIGS[name], requests, rows=16)
    assert packs == [[17, 40, 9, 33], [21, 3, 28, 1], [1100], [1000, 5, 40, 33], [3, 16]]
    assert compiled == eager
    assert counters["stats"]["unique_graphs"] == 2


@pytest.fixture
def uncompiled(monkeypatch):
    """Run what would be compiled eagerly."""
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)


FOR_IMAGES = ("llava", "qwen2_vl", "mllama")
"""Families whose prompts are prefilled one at a time."""


@pytest.mark.parametrize(
    "family", [slow_if(name in TWINS, name) for name in PURE if name not in FOR_IMAGES]
)
def test_packed_prompts_are_prefilled_as_alone(family, uncompiled, packs):
    """In every family, only attention may tell a prompt of its neighbors in a pass."""
    ours, some = shared(family), texts(9, 20, 31, 7, 3, *[2] * 11)
    config = dataclasses.replace(CONFIGS["mean, sinks"], decay=1.0)
    how = {"rows": 16, "max_new_tokens": 5, "compileable": True}
    results = list(h2o.generate_all(ours, some, config, **how))
    assert packs[:2] == [[20, 31, 7, 3], [2] * 4]
    for text, result in zip(some[:6], results, strict=False):
        assert result.error is None
        assert result.ids == alone(ours, text, config, max_new_tokens=5, do_sample=False)


def test_chunks_of_prompts_are_not_packed(uncompiled, packs):
    ours, some = shared("llama"), texts(9, 20, 31, 7, 3, *[2] * 11)
    how = {"rows": 16, "max_new_tokens": 5}
    chunks = {"generation_config": GenerationConfig(prefill_chunk_size=8)}
    both = (
        h2o.generate_all(ours, some, CONFIGS["int8"], compileable=x, **how, **chunks)
        for x in (True, False)
    )
    compiled, eager = ([result.ids for result in results] for results in both)
    assert compiled == eager
    assert packs[:8] == [[8], [8], [4], [8], [8], [8], [7], [7]]


def test_a_prompt_that_fails_in_a_pack(uncompiled, packs):
    """A prompt that fails must not affect the prompts that are packed with it."""
    ours = model("gpt2")
    long = ours.config.max_position_embeddings + 1
    some = texts(9, 12, long, 7, 3, *[2] * 11)
    how = {"rows": 16, "max_new_tokens": 5, "compileable": True}
    results = list(h2o.generate_all(ours, some, CONFIGS["h2o"], **how))
    assert packs[:5] == [[12, long, 7, 3], [12], [long], [7], [3]]
    assert [result.index for result in results if isinstance(result.error, IndexError)] == [2]
    for i in (0, 1, 3, 4, 5):
        want = alone(ours, some[i], CONFIGS["h2o"], max_new_tokens=5, do_sample=False)
        assert results[i].ids == want


@needs_compiler
def test_prompts_that_no_graph_reads(dynamo):
    """Prompts that the graph does not support must be answered eagerly: prompts of one token, with
    their own or fractional budgets, or after a prefix."""
    ours, config = llama(1), CONFIGS["h2o"]
    requests = [
        h2o.Request(text, config=H2OConfig(heavy=n, recent=n) if n else None)
        for text, n in zip(texts(20, 1, 33, 9, 28), (0, 0, 4, 5, 0), strict=True)
    ]
    how = {"rows": 2, "max_new_tokens": 9}
    compiled, eager = compiled_and_eager(ours, config, requests, **how)
    assert compiled == eager
    assert counters["stats"]["unique_graphs"] == 2
    document, *rest = texts(20, 5, 9, 7)
    prefix = H2OCache(ours.config, config)
    ours(torch.tensor([document]), **with_cache(prefix))
    for settings, more in ((CONFIGS["fractions"], {}), (config, {"prefix": prefix})):
        torch._dynamo.reset()
        counters.clear()
        after = [document + text for text in rest]
        compiled, eager = compiled_and_eager(ours, settings, after, **more, **how)
        assert compiled == eager
        assert counters["stats"]["unique_graphs"] >= 1


@needs_compiler
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # the compiler's own
def test_compiled_by_inductor():
    torch._dynamo.reset()
    compiled, eager = compiled_and_eager(model("llama"), CONFIGS["int8"], rows=3)
    assert compiled == eager


def test_a_model_that_cannot_be_compiled_is_served_eagerly(dynamo):
    ours = llama(1)
    requests, how = texts(20, 5, 9), {"rows": 2, "max_new_tokens": 6}
    hook = ours.model.norm.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    try:
        with (
            pytest.warns(RuntimeWarning, match="steps are not compiled"),
            pytest.warns(RuntimeWarning, match="prompts are not compiled"),
        ):
            compiled, eager = compiled_and_eager(ours, CONFIGS["h2o"], requests, **how)
    finally:
        hook.remove()
    assert compiled == eager
