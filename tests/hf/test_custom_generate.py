"""examples/custom_generate, the code that `generate(custom_generate=FOLDER)` runs."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import transformers.dynamic_module_utils

from h2o import H2OCache, H2OConfig
from h2o.compat import CACHE, with_cache
from tests.hf.test_patching import traces
from tests.hf.tiny import batch, exact, greedy, model, prompts

FOLDER = str(Path(__file__).resolve().parents[2] / "examples" / "custom_generate")
ROBUST = {"preset": "robust", "budget": 32}


@pytest.fixture
def plain(tmp_path, monkeypatch):
    """A model under sdpa. transformers copies the example's code to a temporary folder."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    plain = model("llama", "sdpa")
    before = traces(plain)
    yield plain
    assert traces(plain) == before


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        ({"budget": 0.3, "min_tokens": 0}, exact(H2OConfig.echo(0.3, budget_unit="bytes"))),
        ({"heavy": 4, "recent": 4, "sinks": 2}, H2OConfig(heavy=4, recent=4, sinks=2)),
        (
            {"h2o_config": H2OConfig(heavy=0.2, recent=0.1, min_tokens=0)},
            H2OConfig(heavy=0.2, recent=0.1, min_tokens=0),
        ),
        ({"min_tokens": 0}, exact(H2OConfig())),
        (ROBUST, H2OConfig.robust(32)),
        (
            {"preset": "authors", "budget": 0.3, "budget_unit": "bytes"},
            H2OConfig.authors(0.3, budget_unit="bytes"),
        ),
        ({"preset": "authors", "budget": 12}, H2OConfig.authors(12)),
    ],
    ids=str,
)
def test_tokens_are_those_of_a_cache(plain, arguments, config):
    ours = model("llama")
    for inputs in ({"input_ids": prompts(40)[0]}, batch(prompts(40, 25))):
        wanted = greedy(ours, inputs, **with_cache(H2OCache(ours.config, config)))
        got = greedy(plain, inputs, custom_generate=FOLDER, trust_remote_code=True, **arguments)
        assert got.tolist() == wanted.tolist()
        assert got.tolist() != greedy(plain, inputs).tolist()


def test_the_cache_can_be_asked_for(plain):
    out = plain.generate(
        prompts(40)[0], max_new_tokens=3, custom_generate=FOLDER, trust_remote_code=True,
        heavy=4, recent=4, return_dict_in_generate=True,
    )  # fmt: skip
    assert out[CACHE].config.heavy == 4
    assert out[CACHE].report().layers[0].evicted == [42 - 8]


def test_pins_and_the_record_of_evictions_reach_the_cache(plain):
    out = plain.generate(
        prompts(40)[0], max_new_tokens=3, custom_generate=FOLDER, trust_remote_code=True,
        heavy=8, recent=4, return_dict_in_generate=True, pinned=[(10, 15)], trace=True,
    )  # fmt: skip
    assert {*range(10, 15)} <= set(out[CACHE].kept(0).positions[0, 0].tolist())
    assert (out[CACHE].evicted_at(0)[0, :, 10:15] == 42).all()


@pytest.mark.parametrize(
    "arguments",
    [
        {"budget": 0.2, "heavy": 4},
        {"preset": "best", "budget": 0.2},
        {**ROBUST, "heavy": 4},
        {**ROBUST, "budget_unit": "bites"},
    ],
    ids=str,
)
def test_nonsense_is_refused(plain, arguments):
    with pytest.raises((TypeError, ValueError), match=r"preset|budget|of must|not both"):
        greedy(
            plain, {"input_ids": prompts(8)[0]}, custom_generate=FOLDER, trust_remote_code=True,
            **arguments,
        )  # fmt: skip


def test_card():
    """The card must have the metadata that the hub and transformers look for."""
    head = (Path(FOLDER) / "README.md").read_text("utf-8").split("---")[1]
    assert {"library_name: transformers", "  - custom_generate"} <= set(head.splitlines())


def test_a_copy_runs_what_its_card_shows(plain, tmp_path):
    """On the hub the folder stands alone, so its code must not need any file outside of it."""
    copy = shutil.copytree(FOLDER, tmp_path / "repository")
    card = (copy / "README.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    names = {"model": plain, "inputs": batch(prompts(40)), "FOLDER": str(copy)}
    exec(code.replace("heavy=", "max_new_tokens=4, min_tokens=0, heavy="), names)
    assert names["out"].shape == (1, 44)
    for name in re.findall(r"`(\w+)`", card.split("| other fields")[0].rpartition("\n")[2]):
        assert name in H2OConfig.__dataclass_fields__


def test_without_h2o_it_says_how_to_install_that(monkeypatch):
    """h2o's own message must appear, not transformers', which would name a package that is in no
    index."""
    folder = Path(FOLDER) / "custom_generate"
    monkeypatch.setitem(sys.modules, "h2o", None)
    with pytest.raises(ImportError, match=r"h2o-kv: pip install '\.\[hf\]' in its source"):
        runpy.run_path(str(folder / "generate.py"))
    assert (folder / "requirements.txt").read_text("utf-8").split() == [
        "torch",
        "transformers>=5.16",
    ]
