"""Length of the call path: calls within h2o that a new cache, a prompt and a step make.

Whoever reads or debugs a forward pass follows these calls, so raise a number only on purpose. Facts
that never change for a model are looked up when a cache is planned, and facts about a pass once in
the pass.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import h2o
from h2o.compat import CROPS_TO_LENGTH, with_cache
from tests.hf.tiny import batch, prompts, shared

ROOT = str(Path(h2o.__file__).parent)
BACKENDS = str(Path(ROOT, "backends"))  # not counted: which one runs depends on the machine


def walk(function):
    """Number of calls within h2o that a function makes, and how often they change file."""
    files = []

    def note(frame, event, _):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOT) and not name.startswith(BACKENDS):
            files.append(name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    changes = sum(a != b for a, b in itertools.pairwise(files))
    return torch.tensor([len(files), changes])


def walks(layers):
    """Walks of a new cache, a prompt and a decode step, in a model with `layers` layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="h2o",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids = prompts(40)[0].cpu()
    budget, held = h2o.H2OConfig(heavy=6, recent=6), {}

    def make():
        held.update(with_cache(h2o.H2OCache(model, budget)))

    def read(ids):
        return lambda: model(ids, **held)

    with torch.no_grad():
        make()  # the first call looks up the facts about the model
        read(ids)()
        made, prompt = walk(make), walk(read(ids))
        read(ids[:, :1])()
        return made, prompt, walk(read(ids[:, :1]))


@pytest.fixture(scope="module")
def measured():
    """Walks with two layers, and what each further layer adds."""
    two, four = walks(2), walks(4)
    return [(x.tolist(), ((y - x) / 2).tolist()) for x, y in zip(two, four, strict=True)]


@pytest.mark.parametrize(
    ("index", "two_layers", "further_layer"),
    [(0, (58, 33), (12, 9)), (1, (209, 120), (87, 48)), (2, (73, 51), (22, 16))],
    ids=["made", "prompt", "step"],
)
def test_a_walk_has_become_no_longer(measured, index, two_layers, further_layer):
    """No change may add calls or changes of file. Limits are pairs (calls, changes of file). From
    Python 3.12 on a comprehension is not a call."""
    two, further = measured[index]
    assert two[0] <= two_layers[0], two
    assert two[1] <= two_layers[1], two
    assert further[0] <= further_layer[0], further
    assert further[1] <= further_layer[1], further


def test_a_step_asks_nothing_of_the_plan(measured):
    """A step must not repeat in each layer what was decided when the prompt was prefilled."""
    _, (_, prompt), (_, step) = measured
    assert step[0] < prompt[0] / 3


def test_what_is_found_once_a_pass_is_of_no_other_pass():
    """A prompt must not get the lengths of an interrupted prompt, or those from before a crop."""
    model, settings = shared("llama"), {"heavy": 0.2, "recent": 0.2, "min_tokens": 0}

    def assert_as_fresh(cache, texts):
        fresh = h2o.H2OCache(model, **settings)
        model(**texts, **with_cache(fresh))
        for layer in range(len(cache.layers)):
            assert torch.equal(cache.kept(layer).positions, fresh.kept(layer).positions)

    def interrupt(tokens):
        raise KeyboardInterrupt

    with torch.no_grad():
        cache, last = h2o.H2OCache(model, **settings), len(model.model.layers) - 1
        cache.layers[last].forward = interrupt
        with pytest.raises(KeyboardInterrupt):
            model(**batch(prompts(40, 25)), **with_cache(cache))
        del cache.layers[last].forward
        cache.reset()
        texts = batch(prompts(22, 31))
        model(**texts, **with_cache(cache))
        assert_as_fresh(cache, texts)

        cache = h2o.H2OCache(model, **settings)
        cache.activate_past_recording()
        ids = prompts(40)[0]
        model(ids, **with_cache(cache))
        cache.crop(21 if CROPS_TO_LENGTH else -19)
        assert cache.guard.prompt_counts is None
        assert_as_fresh(cache, {"input_ids": ids[:, :21]})
