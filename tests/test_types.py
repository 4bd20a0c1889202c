"""What a type checker or an editor sees of h2o in a user's script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import h2o
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("x")
cache: h2o.H2OCache = h2o.H2OCache(model.config, heavy=256, recent=256)
reveal_type(cache.report().total.mass_evicted)
with h2o.patched(model, heavy=0.1) as patch:
    reveal_type(patch.cache)
with h2o.simulated(model, h2o.H2OConfig(heavy=4)) as simulation:
    reveal_type(simulation.layers())
reveal_type(h2o.supports(model.config))
h2o.enable(model).undo()

class Lengths:  # as tensors and arrays have it
    def tolist(self) -> list[int]:
        return [20]

cache = h2o.H2OCache(model.config, heavy=0.1, prompt_length=Lengths())
h2o.H2OCache.from_dynamic_cache(cache, model.config, prompt_length=Lengths())
"""

MISTAKES = """
h2o.H2OCash
h2o.H2OCache(model.config, heavey=1)
h2o.H2OCache(model.config, score_by="maks")
h2o.enable(model, budget_unit="bites")
h2o.simulated(model, decay="0.8")
h2o.analyze(model, kv_dtype="int9")
h2o.H2OConfig(positions="roled")
h2o.H2OConfig.robust(0.1, budget_unit="bites")
h2o.H2OCache(model.config, prompt_length="20")
"""
SAID = (
    'has no attribute "H2OCash"', '"heavey"', '"score_by"', '"budget_unit"', '"decay"',
    '"kv_dtype"', '"positions"', '"budget_unit"', '"prompt_length"',
)  # fmt: skip

# Checking torch's and transformers' own types takes a minute and is not the purpose here.
CONFIG = """
[mypy]
strict = True
[mypy-torch.*,transformers.*,numpy.*]
follow_imports = skip
[mypy-h2o.*]
follow_imports = silent
"""


def test_strict_types(tmp_path):
    """A script must have the right types, and an error in each line with a mistake only."""
    pytest.importorskip("mypy")
    (tmp_path / "script.py").write_text(SCRIPT + MISTAKES)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "script.py"],
        cwd=tmp_path, text=True, capture_output=True, check=False, timeout=300,
        env={**os.environ, "MYPYPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert [line.partition('type is "')[2].rstrip('"') for line in lines[:4]] == [
        "float",
        "h2o.hf.cache.cache.H2OCache | None",
        "list[int]",
        "h2o.hf.support.Support",
    ]
    first = len(SCRIPT.splitlines()) + 2  # MISTAKES begins with an empty line
    wrong = [line for line in lines if ": error: " in line]
    assert len(wrong) == len(SAID) == len(MISTAKES.strip().splitlines()), done.stdout
    for number, (line, said) in enumerate(zip(wrong, SAID, strict=True), first):
        assert line.startswith(f"script.py:{number}: "), done.stdout
        assert said in line, done.stdout
