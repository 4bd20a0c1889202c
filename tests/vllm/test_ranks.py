"""A model in tensor parallel ranks, each with its heads of every page."""

from __future__ import annotations

import json

import pytest

from h2o import H2OConfig
from tests.launch import ROOT, launch
from tests.vllm.engines import alone, prompts, tiny


@pytest.mark.parametrize("entry", [{}, {"shares": [[1, 2, 3, 4], [3, 1, 1, 2]]}])
def test_two_ranks_answer_as_one(entry, tmp_path):
    entry = {"heavy": 12, "recent": 12, **entry}
    model = tiny("llama", tmp_path, num_key_value_heads=4)
    out, _ = launch([ROOT / "tests/vllm/ranks.py", tmp_path, 2, json.dumps(entry)], launcher=[])
    answers = [line for line in out.splitlines() if line.startswith("[[")]
    assert json.loads(answers[-1]) == alone(model, prompts(), H2OConfig(**entry))
