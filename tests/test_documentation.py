"""What README.md and docs show works as it stands: Python is run, commands are parsed."""

from __future__ import annotations

import argparse
import re
import shlex
from importlib import resources
from pathlib import Path

import pytest

import h2o
from h2o import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

if not PAGES[0].exists():
    pytest.skip("the documentation is not here", allow_module_level=True)
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def blocks(language: str) -> dict[str, str]:
    """Code blocks by page and number."""
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    found = {}
    for page in PAGES:
        own = [text for kind, text in fence.findall(page.read_text("utf-8")) if kind == language]
        found |= {f"{page.stem} {number}": text for number, text in enumerate(own)}
    return found


# ---- Python ------------------------------------------------------------------------------------

LAYERS, GROUPS = 6, 3


@pytest.fixture(scope="module")
def default():
    """(model, tokenizer): the first layers of the default model."""
    from h2o import models

    try:
        model, tokenizer = models.load_default()
    except models.UserError as error:
        pytest.skip(str(error))
    model.model.layers = model.model.layers[:LAYERS]
    model.config.num_hidden_layers = LAYERS
    return model, tokenizer


@pytest.fixture
def names(default, tmp_path, monkeypatch):
    """What the text around a block has spoken of, in a folder of its own."""
    model, tokenizer = default
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(h2o, "load_default", lambda: default)
    table = torch.rand(LAYERS, GROUPS, generator=torch.Generator().manual_seed(0)) + 0.5
    profile = h2o.Profile((0.1,), (tuple(map(tuple, table.tolist())),), 1024)
    monkeypatch.setattr(h2o.Profile, "shipped", classmethod(lambda cls, model: profile))
    text = resources.files("h2o").joinpath("data/lighthouse.txt").read_text("utf-8")
    inputs = tokenizer(text[:2500], return_tensors="pt")
    asked = tokenizer(["\nWho?", "\nWhere?"], return_tensors="pt").input_ids
    return {
        "h2o": h2o,
        "torch": torch,
        "model": model,
        "tokenizer": tokenizer,
        "text": text[:5000],
        "inputs": inputs,
        "input_ids": inputs.input_ids,
        "mask": inputs.attention_mask,
        "document_ids": inputs.input_ids,
        "questions": [torch.cat([inputs.input_ids, ids[None]], dim=1) for ids in asked],
        "cache": h2o.H2OCache(model.config, heavy=20, recent=20),
        "layer": 3,
        "table": table,
        "pipe": transformers.pipeline(
            "text-generation", model=model, tokenizer=tokenizer, max_new_tokens=3
        ),
    }


PYTHON = blocks("python")
SLOW = {"calibration 0", "analysis 0"}


@pytest.mark.filterwarnings("ignore")  # of other packages
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] if x in SLOW else []) for x in PYTHON]
)
def test_python(name, names, monkeypatch):
    code = PYTHON[name]
    if "sys.argv" in code:
        pytest.skip("a script, for several processes: tests/hf/test_parallel.py has its like")
    if "pretrained" in code or "H2OLM" in code:
        names |= {"AutoModelForCausalLM": transformers.AutoModelForCausalLM, "name": "m"}
        names["model"].save_pretrained("m")
        names["tokenizer"].save_pretrained("m")
        code = code.replace("HuggingFaceTB/SmolLM2-135M", "m")
    if "lm_eval" in code:
        lm_eval = pytest.importorskip("lm_eval")
        asked = []
        monkeypatch.setattr(lm_eval, "simple_evaluate", lambda **given: asked.append(given))
    if "h2o.analyze" in code:
        names["ax"] = pytest.importorskip("matplotlib.figure").Figure().add_subplot()
        pytest.importorskip("pandas")
    code = code.replace('mode="default"', 'mode=None, backend="eager"')  # not a minute of g++
    code = re.sub(r"max_new_tokens=\d+", "max_new_tokens=3", code)
    exec(compile(code, name, "exec"), names)


# ---- Commands ----------------------------------------------------------------------------------


def commands() -> list[str]:
    """Each h2o ... of the blocks, without what the shell does before and after."""
    found = []
    for text in blocks("").values():
        for line in text.replace("\\\n", "").splitlines():
            if command := re.search(r"(?:^|[|=\w] |-m )h2o (?!  )([^|>]*)", line):
                found.append(command[1])
    return found


COMMANDS = commands()


def test_commands_are_found():
    assert len(COMMANDS) > 20
    assert {command.split()[0] for command in COMMANDS} >= {
        "generate", "info", "eval", "analyze", "calibrate", "stream",
    }  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, monkeypatch):
    """Every option is one of ours, or of lm-eval; every setting is one that there is."""
    parsed: list[argparse.Namespace] = []

    def run(options: argparse.Namespace) -> int:
        parsed.append(options)
        return 0

    monkeypatch.setattr(cli, "run", run)
    assert cli.main(shlex.split(command, comments=True)) == 0
    (options,) = parsed
    known = {"--num_fewshot", "--batch_size", "--include_path"} if hasattr(options, "tasks") else ()
    assert {word for word in options.rest if word.startswith("--")} <= set(known)
    if getattr(options, "compare", None) and hasattr(options, "budgets"):
        from h2o.evaluate.setting import parse_all

        assert parse_all(options.compare, options.budgets)
