"""generate_all(compileable=True): a graph for all steps gives the answers of eager steps."""

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
from tests.hf.test_generate_all import CONFIGS, LENGTHS, texts
from tests.hf.tiny import llama, model, needs_compiler, slow_if


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
def test_one_graph_serves_all_steps(name, dynamo):
    """Idle rows, refilled rows and chunks of prompts must not need other graphs."""
    for more in ({}, {"generation_config": GenerationConfig(prefill_chunk_size=8)}):
        compiled, eager = compiled_and_eager(model("llama"), CONFIGS[name], rows=3, **more)
        assert compiled == eager
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]


@needs_compiler
def test_requests_of_all_kinds_share_the_graph(dynamo):
    """Prompts of one token, with their own or fractional budgets, or after a prefix."""
    ours, config = llama(1), CONFIGS["h2o"]
    requests = [
        h2o.Request(text, config=H2OConfig(heavy=n, recent=n) if n else None)
        for text, n in zip(texts(20, 1, 33, 9, 28), (0, 0, 4, 5, 0), strict=True)
    ]
    how = {"rows": 2, "max_new_tokens": 9}
    compiled, eager = compiled_and_eager(ours, config, requests, **how)
    assert compiled == eager
    assert counters["stats"]["unique_graphs"] == 1
    document, *rest = texts(20, 5, 9, 7)
    prefix = H2OCache(ours.config, config)
    ours(torch.tensor([document]), **with_cache(prefix))
    fractions = dataclasses.replace(CONFIGS["fractions"], ratio_of="prompt")
    for settings, more in ((fractions, {}), (config, {"prefix": prefix})):
        torch._dynamo.reset()
        counters.clear()
        after = [document + text for text in rest]
        if more:
            after[1] = h2o.Request(after[1], evict=[(2, 17)])
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
        with pytest.warns(RuntimeWarning, match="steps are not compiled"):
            compiled, eager = compiled_and_eager(ours, CONFIGS["h2o"], requests, **how)
    finally:
        hook.remove()
    assert compiled == eager
