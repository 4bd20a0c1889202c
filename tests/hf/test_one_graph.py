"""Decode steps of a compileable cache are one graph, recorded once, as fast steps on a GPU need."""

from __future__ import annotations

import collections
import dataclasses
import functools

import pytest
import torch
from torch._dynamo.utils import counters

import h2o
from h2o import H2OCache, H2OConfig
from h2o.compat import with_cache
from tests.hf.recordings import recording
from tests.hf.test_compiled import compiling, nothing_compiled  # noqa: F401
from tests.hf.tiny import batch, exact, greedy, llama, needs_compiler, prompts, slow_if

pytestmark = needs_compiler
TOKENS = 14
CONFIGS = {
    "robust": exact(H2OConfig.robust(0.5), ratio_of="prompt"),
    "authors": exact(H2OConfig.authors(0.5), ratio_of="prompt"),
    "echo": exact(H2OConfig.echo(0.5), ratio_of="prompt"),
    "echo, heads alike": H2OConfig(heavy=6, recent=6, score_by="mean-echo"),
    "echo over all heads": H2OConfig(heavy=6, recent=6, score_by="mean-echo", head_shares="echo"),
    "int8-int4": H2OConfig(heavy=6, recent=6, kv_dtype="int8-int4"),
    "int4": H2OConfig(heavy=6, recent=6, kv_dtype="int4"),
}


@functools.cache
def wide(layers=1):
    """A model whose heads have 32 elements, the size of a group of int4."""
    return llama(layers, head_dim=32)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        slow_if(rows == 3 or name not in ("robust", "echo", "int8-int4"), name, rows)
        for name in CONFIGS
        for rows in (1, 3)
    ],
)
def test_generate_records_a_step_once(name, rows):
    """A second cache must not record its steps again, whether its prompt is longer or, under a
    fractional budget, equally long. Only a budget that heads share by the prompt needs another
    recording, because its slots have another shape."""
    ours, seen = wide(2 if CONFIGS[name].head_shares == "echo" else 1), set()
    compiled = compiling(recording(seen))
    longer = 9 if isinstance(CONFIGS[name].heavy, int) else 0
    for seed in range(2):
        inputs = batch(prompts(*[40 + seed * longer, 17, 23][:rows], seed=seed))
        expected = greedy(ours, inputs, TOKENS, **with_cache(H2OCache(ours.config, CONFIGS[name])))
        cache = H2OCache(ours.config, CONFIGS[name], compileable=True)
        got = greedy(ours, inputs, TOKENS, **with_cache(cache), **compiled)
        assert got.tolist() == expected.tolist()
    assert len(seen) == (2 if CONFIGS[name].head_shares == "echo" else 1)
    assert not counters["graph_break"]


@pytest.mark.parametrize("name", ["robust", slow_if(True, "int8-int4")])
def test_generate_all_records_its_steps_once(name, monkeypatch):
    """Steps must not be recorded again when other rows are idle."""
    seen = set()
    lengths = (40, 17, 23, 17, 40)
    requests = [
        h2o.Request(ids[0].tolist(), max_new_tokens=3 + 5 * i)
        for i, ids in enumerate(prompts(*lengths))
    ]
    config = dataclasses.replace(CONFIGS[name], heavy=6, recent=6, budget_unit="keys")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=recording(seen)))
    eager, compiled = (
        [x.ids for x in h2o.generate_all(wide(), requests, config, rows=2, compileable=how)]
        for how in (False, True)
    )
    assert compiled == eager
    recordings = collections.Counter(graph for graph, _ in seen)
    assert [*recordings.values()] == [1]
