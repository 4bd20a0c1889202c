"""What README.md and docs show works as it stands.

Python is run, commands are parsed, links and names lead somewhere, tables name every option, and
the pages stay as short as they are meant to be.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import inspect
import re
import shlex
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import h2o
from h2o import cli
from h2o.config import PARAMETERS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

if not (ROOT / "docs").is_dir():
    pytest.skip("the documentation is not here", allow_module_level=True)
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def blocks(language: str) -> dict[str, str]:
    """Code blocks by page and number."""
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    numbered = {}
    for page in PAGES:
        texts = [text for kind, text in fence.findall(page.read_text("utf-8")) if kind == language]
        numbered |= {f"{page.stem} {number}": text for number, text in enumerate(texts)}
    return numbered


# ---- Python ------------------------------------------------------------------------------------

LAYERS, GROUPS = 6, 3


@pytest.fixture(scope="module")
def default():
    """(model, tokenizer): the first layers of the default model."""
    from h2o import models

    try:
        model, tokenizer = models.load_model(attn_implementation="h2o")
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
    monkeypatch.setattr(h2o, "load_model", lambda **how: default)
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
        monkeypatch.setattr(lm_eval, "simple_evaluate", lambda **keywords: asked.append(keywords))
    if "h2o.analyze" in code:
        names["ax"] = pytest.importorskip("matplotlib.figure").Figure().add_subplot()
    code = code.replace('mode="default"', 'mode=None, backend="eager"')  # not a minute of g++
    code = re.sub(r"max_new_tokens=\d+", "max_new_tokens=3", code)
    exec(compile(code, name, "exec"), names)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of other packages
@pytest.mark.parametrize("name", ["README 0", "which 0"])
def test_the_first_call_that_a_page_shows_answers_a_short_question(name, capsys):
    model, tokenizer = h2o.load_model()
    question = "What is the capital of France?"
    code = PYTHON[name].replace(
        '"Briefly summarize the following article.\\n\\n" + text', repr(question)
    )
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    names = {"h2o": h2o, "model": model, "tokenizer": tokenizer, "inputs": inputs}
    exec(compile(code, name, "exec"), names)
    assert "Paris" in tokenizer.decode(names["out"][0, names["inputs"].input_ids.shape[1] :])
    assert names["inputs"].input_ids.shape[1] < 100


# ---- Commands ----------------------------------------------------------------------------------


def commands() -> list[str]:
    """Each h2o ... of the blocks, without what the shell does before and after."""
    arguments = []
    for text in blocks("").values():
        for line in text.replace("\\\n", "").splitlines():
            if command := re.search(r"(?:^|[|=\w] |-m )h2o (?!  )([^|>]*)", line):
                arguments.append(command[1])
    return arguments


COMMANDS = commands()


def test_commands_are_found():
    assert len(COMMANDS) > 20
    assert {command.split()[0] for command in COMMANDS} >= {
        "generate", "info", "eval", "analyze", "calibrate", "bench",
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
    of_lm_eval = {"--num_fewshot", "--batch_size", "--include_path", "--metadata"}
    known = of_lm_eval if hasattr(options, "tasks") else set()
    assert {word for word in options.rest if word.startswith("--")} <= known
    if getattr(options, "compare", None) and hasattr(options, "budgets"):
        from h2o.evaluation.setting import parse_all

        budgets = options.budgets
        budgets = ",".join(budgets) if isinstance(budgets, list) else budgets  # of h2o bench
        assert parse_all(options.compare, budgets)


# ---- Pages -------------------------------------------------------------------------------------

FOLDERS = ("docs", "benchmarks", "csrc", "examples", "h2o", "notebooks", "tests", "tools")
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md"))),
]
TODAY = [page for page in DOCUMENTS if page.name != "CHANGELOG.md"]
"""The changelog speaks of what was there."""
MADE = ("benchmarks/results", "h2o/kernels.fatbin")
"""Named in the documents, and made by commands."""


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub and Sphinx make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    names = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        kept = re.sub(r"[^\w\- ]", "", heading.lower())
        names.add(kept.replace(" ", "-"))
    return names


def first_columns(page: str) -> str:
    """The first cells of a page's tables."""
    text = (ROOT / page).read_text("utf-8")
    return "\n".join(re.findall(r"^\|([^|]*)\|", text, re.MULTILINE))


def test_readme_is_short():
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 150
    for wanted in ("docs/results.svg", "make demo", "make test", "pip install"):
        assert wanted in text


def test_pictures_are_small():
    pictures = [page for kind in ("svg", "png") for page in (ROOT / "docs").rglob(f"*.{kind}")]
    assert {picture.name for picture in pictures} >= {"results.svg"}
    assert {picture.name for picture in pictures if picture.stat().st_size > 100_000} == set()


def test_the_picture_is_of_the_tables():
    """If not: make pictures."""
    where = ROOT / "tools" / "draw_results.py"
    spec = importlib.util.spec_from_file_location("draw_results", where)
    draw_results = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw_results)
    shown = draw_results.figures()
    assert (len(shown.losses), len(shown.found), len(shown.token_ms)) == (4, 6, 2)
    assert all(len(losses) == len(shown.bytes_kept) > 2 for losses in shown.losses.values())
    assert all(len(times) == len(shown.prompts) > 2 for times in shown.token_ms.values())
    assert f"figures {shown.hash()}" in draw_results.PICTURE.read_text("utf-8")


def test_readme_has_the_figures_of_the_documents():
    """Rows of its tables stand in the pages that they come from."""
    readme = (ROOT / "README.md").read_text("utf-8")
    results = (ROOT / "docs" / "results.md").read_text("utf-8")
    benchmarks = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
    quality = re.findall(r"^\| `H2OConfig\.[^|]*\|(.*)\|$", readme, re.MULTILINE)
    speed = re.findall(r"^\| (\d+) \| (.*->.*) \|$", readme, re.MULTILINE)
    assert (len(quality), len(speed)) == (3, 4)
    assert all(f"|{row}|" in results for row in quality)
    for prompt, row in speed:
        (there,) = re.findall(rf"^\| bfloat16 \| {prompt} \| (.*) \|$", benchmarks, re.MULTILINE)
        assert set(row.split(" | ")) <= set(there.split(" | "))


@pytest.mark.parametrize("page", DOCUMENTS, ids=page_id)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if "://" in link or "`" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", TODAY, ids=page_id)
def test_paths_and_names_are_there(page):
    """Files of the repository and modules of the package, where they are named as code."""
    text = page.read_text("utf-8")
    for code in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)):
        for path in re.findall(
            r"\b(?:csrc|h2o|tests|tools|docs|examples|benchmarks)/[\w./*]+", code
        ):
            if not path.startswith(MADE) and "<" not in code:  # a pattern
                assert list(ROOT.glob(path.rstrip("/."))), path
        for name in re.findall(r"^(h2o(?:\.\w+)+)", code):
            assert is_there(name), name


def test_files_that_contributing_names_are_there():
    """By the end of their path: the page speaks of rooms without repeating where they lie."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    elsewhere = {"Python.h", "setup.py"}
    files = [
        f"/{path.relative_to(ROOT)}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
    ]
    named = set(re.findall(r"(?<![\w>/])[\w/]+\.(?:pyi?|c|h|inc|cuh?|cpp)\b", text))
    assert len(named) > 20
    assert {
        name for name in named - elsewhere if not any(file.endswith(f"/{name}") for file in files)
    } == set()


def is_there(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    parts = name.split(".")
    thing = importlib.import_module(parts[0])
    for depth, part in enumerate(parts[1:], start=2):
        if not hasattr(thing, part):
            try:
                importlib.import_module(".".join(parts[:depth]))
            except ModuleNotFoundError:
                return part in getattr(thing, "__annotations__", {})  # a field of a NamedTuple
        thing = getattr(thing, part)
    return True


TEXTS = (".md", ".py", ".ipynb", ".txt", ".sh", ".yml", ".toml", "Makefile", ".ci/run")


def test_no_index_is_asked_for_a_package_that_it_has_not():
    """Until there is a release: then this test goes, and `packages.install_command` names it."""
    named = r"""pip install[^\n`"]*[ '"](h2o-kv|\{DISTRIBUTION\})(?!\S* @ |\{extra\} @ )"""
    assert re.search(named, "pip install 'h2o-kv[hf]'")
    assert re.search(named, "pip install -q h2o-kv")
    assert not re.search(named, "pip install 'h2o-kv[hf] @ git+https://b.org/c'")
    folders = [ROOT / x for x in (*FOLDERS, ".github", ".ci")]
    files = [*ROOT.glob("*"), *(file for folder in folders for file in folder.rglob("*"))]
    for file in files:
        if file.is_file() and str(file).endswith(TEXTS) and "__pycache__" not in file.parts:
            text = file.read_text("utf-8")
            if file != Path(__file__):
                assert not re.search(named, text), file
            if file.name == "requirements.txt":
                assert "h2o-kv" not in text, file


@pytest.fixture(scope="module")
def conf():
    """docs/conf.py, which draws what is drawn when the site is built."""
    spec = importlib.util.spec_from_file_location("conf", ROOT / "docs" / "conf.py")
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    return conf


# ---- Tables of options -------------------------------------------------------------------------


def test_policies_name_every_field():
    named = set(re.findall(r"`(\w+)`", first_columns("docs/policies.md")))
    assert named >= {*PARAMETERS}
    rows = dict(
        re.findall(r"^\| `(\w+)` \| ([^|]*) \|", (ROOT / "docs/policies.md").read_text(), re.M)
    )
    defaults = h2o.H2OConfig()
    for name in PARAMETERS:
        assert rows[name].strip('"') == str(getattr(defaults, name)), name


def test_commands_are_listed():
    named = set(re.findall(r"`h2o (\w+)`", first_columns("docs/commands.md")))
    assert named == {command.name for command in cli.COMMANDS}


def test_every_option_of_every_command_is_drawn(conf, capsys):
    """On the site, from the parsers, each below its command and with what --help says."""
    assert "{{ h2o --help }}" in (ROOT / "docs/options.md").read_text("utf-8").splitlines()
    drawn = conf.included("h2o --help")
    parts = dict(re.findall(r"^## h2o (\w+)\n((?:(?!## ).*\n?)*)", drawn, re.MULTILINE))
    assert list(parts) == [command.name for command in cli.COMMANDS]
    for name, part in parts.items():
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        said = capsys.readouterr().out
        rows = re.findall(r"^\| `(.*?)[ `].* \| (.*) \|$", part, re.MULTILINE)
        options = {option for option, _ in rows if option.startswith("--")}
        assert options == set(re.findall(r"^  (--[\w-]+)", said, re.MULTILINE))
        said = "".join(said.split())
        for option, meaning in rows:
            assert "".join(meaning.replace("\\|", "|").split()) in said, option


def test_settings_of_compare_are_listed(capsys):
    with pytest.raises(SystemExit):
        cli.main(["eval", "--help"])
    shown = capsys.readouterr().out.partition("settings of --compare")[2]
    settings = set(re.findall(r"^([a-z][a-z-]*)(?::| )", shown, re.MULTILINE))
    named = set(re.findall(r"`([a-z][a-z-]*)", first_columns("docs/evaluation.md")))
    assert len(settings) > 9
    options = re.search(r"there are\s+([\w, ]+)\.", shown)
    assert set(re.findall(r"\w+", options[1])) <= set(
        re.findall(r"`(\w+)`", (ROOT / "docs/evaluation.md").read_text("utf-8"))
    )
    assert settings - {"settings", "follow", "real"} <= named


def shown() -> dict[str, Any]:
    """What the pages draw from docstrings, by dotted name."""
    pages = "\n".join(page.read_text("utf-8") for page in (ROOT / "docs").rglob("*.md"))
    names = re.findall(r"^\.\. auto\w+:: ([\w.]+)", pages, re.MULTILINE)
    things = {name: found(name) for name in names}
    for name, thing in list(things.items()):
        if inspect.ismodule(thing):
            things |= {f"{name}.{member}": getattr(thing, member) for member in thing.__all__}
    return things


def found(name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def given_by(thing: Any) -> Iterator[str]:
    """Dotted names of h2o's classes that a function returns, or what a class has."""
    texts = []
    for owner in [x for x in getattr(thing, "__mro__", [thing]) if x.__module__.startswith("h2o")]:
        members = [owner]
        if inspect.isclass(owner):
            if dataclasses.is_dataclass(owner) or hasattr(owner, "_fields"):
                texts += [(owner.__module__, x) for x in inspect.get_annotations(owner).values()]
            members = [x for name, x in vars(owner).items() if not name.startswith("_")]
        for member in members:
            member = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if inspect.isfunction(function := inspect.unwrap(member)):
                said = function.__annotations__.get("return", "")
                texts.append((function.__module__, said))
    for module, text in texts:
        for name in re.findall(r"\b[A-Z]\w+", str(text)):
            source = inspect.getsource(importlib.import_module(module))
            imported = re.search(rf"from (h2o[\w.]*) import [^\n]*\b{name}\b", source)
            if imported or re.search(rf"^class {name}\b", source, re.MULTILINE):
                yield f"{imported[1] if imported else module}.{name}"


def test_the_api_pages_have_all_that_is_public():
    """What `h2o` has, what calls of that return, and what the documents' own code names."""
    things = shown()
    assert set(things) >= {f"h2o.{name}" for name in h2o.__all__} - {"h2o.__version__"}
    assert "h2o.errors.UserError" in things
    members = [thing for thing in things.values() if not inspect.ismodule(thing)]
    given = {name for thing in members for name in given_by(thing)}
    assert {
        "h2o.hf.store.kept.Kept",
        "h2o.hf.patch.Patch",
        "h2o.hf.store.report.LayerReport",
    } <= given
    code = "\n".join(PYTHON.values())
    given |= {name for name in re.findall(r"\bh2o(?:\.\w+)+\.[A-Z]\w+", code) if is_there(name)}
    classes = {name for name in given if inspect.isclass(found(name))}
    missing = {name for name in classes if found(name) not in things.values()}
    assert not missing, f"not in docs/api: {sorted(missing)}"
