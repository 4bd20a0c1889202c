"""How far it is to walk: calls within h2o that a prompt, a step and a new cache make.

Who reads or debugs a forward pass follows these calls. A number is raised on purpose, or not at
all: what never changes for a model is asked when a cache is planned, what belongs to a pass once
in the pass.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import h2o
from h2o.compat import with_cache
from tests.hf.tiny import prompts

ROOT = str(Path(h2o.__file__).parent)
BACKENDS = str(Path(ROOT, "backends"))  # of which another machine has another one


def walk(function):
    """Calls within h2o and changes from file to file that a function makes."""
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
    """Of a cache that is made, a prompt and a decode step of a model with so many layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="h2o",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids = prompts(40)[0].cpu()
    held = {}

    def make():
        held.update(with_cache(h2o.H2OCache(model, heavy=6, recent=6)))

    def read(ids):
        return lambda: model(ids, **held)

    with torch.no_grad():
        make()  # what is known of a model is found out once
        read(ids)()
        made, prompt = walk(make), walk(read(ids))
        read(ids[:, :1])()
        return made, prompt, walk(read(ids[:, :1]))


@pytest.fixture(scope="module")
def measured():
    """Walks of the first two layers, and of each further one."""
    two, four = walks(2), walks(4)
    return [(x.tolist(), ((y - x) / 2).tolist()) for x, y in zip(two, four, strict=True)]


@pytest.mark.parametrize(
    ("index", "two_layers", "further_layer"),
    [(0, (93, 36), (12, 9)), (1, (211, 121), (90, 49)), (2, (75, 51), (24, 16))],
    ids=["made", "prompt", "step"],
)
def test_a_walk_has_become_no_longer(measured, index, two_layers, further_layer):
    """(calls, changes of file); from Python 3.12 on a comprehension is no call."""
    two, further = measured[index]
    assert two[0] <= two_layers[0], two
    assert two[1] <= two_layers[1], two
    assert further[0] <= further_layer[0], further
    assert further[1] <= further_layer[1], further


def test_a_step_asks_nothing_of_the_plan(measured):
    """A further layer makes a step no longer by what its prompt has decided."""
    _, (_, prompt), (_, step) = measured
    assert step[0] < prompt[0] / 3
