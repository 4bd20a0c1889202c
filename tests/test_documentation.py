"""README.md and docs are correct as they stand.

The Python of each page is run in order. A block of Python or of a command that is followed by a
block of text is run with the default model and must print that text. Other commands are parsed,
links and names must resolve, and tables must name every option.
"""

from __future__ import annotations

import argparse
import dataclasses
import doctest
import importlib
import importlib.util
import inspect
import json
import re
import shlex
from collections.abc import Container, Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

import h2o
from h2o import cli, models
from h2o.config import PARAMETERS
from tests.default_model import narrow_default_model

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

if not (ROOT / "docs").is_dir():
    pytest.skip("the documentation is not here", allow_module_level=True)
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
MASKS = pytest.importorskip("h2o.evaluation.published_masks").MASKS


class Block(NamedTuple):
    """A block of code, and its output if a block of text follows it."""

    language: str
    code: str
    output: str | None

    @property
    def is_script(self) -> bool:
        """Whether the block is a script for several processes. tests/hf/test_parallel.py tests such
        scripts."""
        return "sys.argv" in self.code


FENCED = re.compile(r"^```(\w+)\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)


def page_name(page: Path) -> str:
    """A page's name: its path in docs, without the ending."""
    return str(page.relative_to(ROOT).with_suffix("")).removeprefix("docs/")


BLOCKS = {
    page_name(page): [
        Block(language, code, output or None)
        for language, code, output in FENCED.findall(page.read_text("utf-8"))
    ]
    for page in PAGES
}


# ---- Python ------------------------------------------------------------------------------------

LAYERS, GROUPS = 6, 3
ARTICLE = resources.files("h2o").joinpath("data/lighthouse.txt").read_text("utf-8")


@pytest.fixture(scope="module")
def default():
    """(model, tokenizer): a model with few and narrow layers instead of the default model."""
    return narrow_default_model(LAYERS)


@pytest.fixture
def names(default, tmp_path, monkeypatch):
    """Names that the text around a block has introduced, in an empty working folder."""
    model, tokenizer = default
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(h2o, "load_model", lambda **how: default)
    table = torch.rand(LAYERS, GROUPS, generator=torch.Generator().manual_seed(0)) + 0.5
    profile = h2o.Profile((0.1,), (tuple(map(tuple, table.tolist())),), 1024)
    monkeypatch.setattr(h2o.Profile, "shipped", classmethod(lambda cls, model: profile))
    inputs = tokenizer(ARTICLE[:2500], return_tensors="pt")
    asked = tokenizer(["\nWho?", "\nWhere?"], return_tensors="pt").input_ids
    return {
        "h2o": h2o,
        "torch": torch,
        "model": model,
        "tokenizer": tokenizer,
        "text": ARTICLE[:5000],
        "inputs": inputs,
        "input_ids": inputs.input_ids,
        "mask": inputs.attention_mask,
        "document_ids": inputs.input_ids,
        "questions": [torch.cat([inputs.input_ids, ids[None]], dim=1) for ids in asked],
        "cache": h2o.H2OCache(model.config, heavy=20, recent=20),
        "layer": 3,
        "table": table,
    }


VLLM = "how_to/serve_with_vllm"
"""Run by tests/vllm/test_documentation.py, where vLLM is installed."""
PYTHON = {
    name: code
    for name, blocks in BLOCKS.items()
    if (code := "\n".join(x.code for x in blocks if x.language == "python" and not x.is_script))
    and name != VLLM
}
SLOW = {"how_to/calibrate", "how_to/study_attention"}


def slowly(pages: Iterable[str], slow: Container[str]) -> list[Any]:
    """Parameters of a test, with those of slow pages marked."""
    return [pytest.param(x, marks=[pytest.mark.slow] if x in slow else []) for x in pages]


@pytest.mark.filterwarnings("ignore")  # from other packages
@pytest.mark.parametrize("name", slowly(PYTHON, SLOW))
def test_python(name, names, monkeypatch):
    """Run all blocks of a page in order, with a small model, a part of the article and few new
    tokens."""
    code = PYTHON[name]
    if "pretrained" in code or "H2OLM" in code:
        names |= {"AutoModelForCausalLM": transformers.AutoModelForCausalLM, "name": "m"}
        names["model"].save_pretrained("m")
        names["tokenizer"].save_pretrained("m")
        monkeypatch.setattr(models, "embedded_folder", lambda log: Path("m"))
    if "lm_eval" in code:
        lm_eval = pytest.importorskip("lm_eval")
        asked = []
        monkeypatch.setattr(lm_eval, "simple_evaluate", lambda **keywords: asked.append(keywords))
    if "h2o.analyze" in code:
        names["ax"] = pytest.importorskip("matplotlib.figure").Figure().add_subplot()
    code = code.replace('mode="default"', 'mode=None, backend="eager"')  # g++ takes a minute
    code = code.replace(".read_text()", ".read_text()[4500:8000]")  # this part names the Sabrina
    code = re.sub(r"max_new_tokens=\d+", "max_new_tokens=3", code)
    with mock.patch.dict(MASKS):  # a page adds a ranking
        exec(compile(code, name, "exec"), names)


# ---- Output ------------------------------------------------------------------------------------

PRINTING = {name for name, blocks in BLOCKS.items() if any(x.output for x in blocks)}
FAST = {"understand/how_h2o_works"}
"""Pages that load no model."""


def write_config(folder: Path) -> None:
    """Config of the model whose requests the pages count, with its published sizes."""
    transformers.AutoConfig.for_model(
        "qwen3", num_hidden_layers=28, hidden_size=2048, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, intermediate_size=6144, tie_word_embeddings=True,
        dtype="bfloat16",
    ).save_pretrained(folder)  # fmt: skip


MEASURED = re.compile(r"(\d+\.\d+) +±(\d+\.\d+)")
"""A mean and its standard error."""


def same(shown: str, printed: str) -> bool:
    """Whether a page shows what was printed. Three dots match anything, and spaces and line ends
    are equivalent. Means may differ by their standard error, since processors round differently."""
    for ours, theirs in zip(MEASURED.finditer(shown), MEASURED.finditer(printed), strict=False):
        if abs(float(ours[1]) - float(theirs[1])) > float(ours[2]):
            return False
    shown, printed = (MEASURED.sub("mean ±error", text) for text in (shown, printed))
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(shown.strip(), printed.strip(), flags)


def test_three_dots_stand_for_anything():
    assert same("a ...\nc 1", " a b\nc  1\n")
    assert not same("a ...\nc 1", "a b\nc 2")


def test_means_may_differ_by_their_error():
    shown = "a 0.033 ±0.013 5"
    assert same(shown, "a 0.040  ±0.014 5")
    assert not same(shown, "a 0.047 ±0.013 5")
    assert not same(shown, "a 0.033 ±0.013 6")
    assert not same(shown, f"{shown} 0.1 ±0.1")


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")  # from other packages
@pytest.mark.parametrize("name", slowly(sorted(PRINTING), PRINTING - FAST))
def test_a_page_shows_what_is_printed(name, capsys, tmp_path, monkeypatch):
    """Run a page with the whole default model, up to the last block whose output is shown."""
    try:
        models.find_weights()
    except models.UserError as error:
        pytest.skip(str(error))
    monkeypatch.chdir(tmp_path)
    Path("article.txt").write_text(ARTICLE, "utf-8")
    write_config(Path("Qwen/Qwen3-1.7B"))
    has_python = name in PYTHON
    blocks = [x for x in BLOCKS[name] if x.output or (x.language == "python" and has_python)]
    while blocks and not blocks[-1].output:
        blocks.pop()
    names = {"__name__": name}
    for block in blocks:
        if block.language == "python":
            exec(compile(block.code, name, "exec"), names)
        else:
            for command in commands_of(block.code):
                assert cli.main(shlex.split(command, comments=True)) == 0
        printed = capsys.readouterr().out
        if block.output:
            assert same(block.output, printed), printed


# ---- Commands ----------------------------------------------------------------------------------


def commands_of(code: str) -> list[str]:
    """Arguments of each `h2o ...` in a block, without the parts of the line that belong to the
    shell."""
    lines = code.replace("\\\n", "").splitlines()
    found = (re.search(r"(?:^|[|=\w] |-m )h2o (?!  )([^|>]*)", line) for line in lines)
    return [command[1] for command in found if command]


COMMANDS = [
    command
    for blocks in BLOCKS.values()
    for block in blocks
    if block.language == "bash"
    for command in commands_of(block.code)
]


def test_commands_are_found():
    assert len(COMMANDS) > 20
    assert {command.split()[0] for command in COMMANDS} >= {
        "generate", "info", "eval", "analyze", "calibrate", "recommend",
    }  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, monkeypatch):
    """Every option is one of h2o's or of lm-eval's, and every setting exists."""
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
        budgets = (
            ",".join(budgets) if isinstance(budgets, list) else budgets
        )  # a list in h2o recommend
        assert parse_all(options.compare, budgets)


# ---- Pages -------------------------------------------------------------------------------------

FOLDERS = ("docs", "benchmarks", "csrc", "examples", "h2o", "notebooks", "tests", "tools")
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md"))),
]
TODAY = [page for page in DOCUMENTS if page.name != "CHANGELOG.md"]
"""The changelog may name things that no longer exist."""
MADE = ("benchmarks/results", "h2o/kernels.fatbin")
"""Paths that the documents name and commands create."""


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and Sphinx generate them."""
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


def test_pictures_are_small():
    pictures = [page for kind in ("svg", "png") for page in (ROOT / "docs").rglob(f"*.{kind}")]
    assert {picture.name for picture in pictures} >= {"results.svg", "walk.svg", "rooms.svg"}
    assert {picture.name for picture in pictures if picture.stat().st_size > 100_000} == set()


def test_pictures_show_what_they_are_drawn_from():
    """A picture is out of date when its source has changed. `make pictures` redraws it."""
    from tools import draw_results, draw_rooms, draw_walk, pictures

    shown = draw_results.figures()
    assert (len(shown.losses), len(shown.found), len(shown.token_ms)) == (5, 6, 2)
    assert all(len(losses) == len(shown.bytes_kept) > 2 for losses in shown.losses.values())
    assert all(len(times) == len(shown.prompts) > 2 for times in shown.token_ms.values())
    assert pictures.is_up_to_date("results", shown)
    walk = draw_walk.walk()
    assert all(len(row.scores) == draw_walk.HEAVY + draw_walk.RECENT for row in walk[1:])
    assert pictures.is_up_to_date("walk", walk)
    for name, arrows in (("rooms", draw_rooms.rooms()), ("rooms_of_hf", draw_rooms.rooms_of_hf())):
        assert pictures.is_up_to_date(name, draw_rooms.figures(arrows)), name


def test_models_lists_the_modes_that_cannot_be_combined():
    """`python -m tools.draw_modes` writes the table."""
    from tools import draw_modes

    page = draw_modes.PAGE.read_text("utf-8")
    assert page.count(draw_modes.BEGIN + draw_modes.table() + draw_modes.END) == 1


def test_readme_has_the_figures_of_the_documents():
    """A row of a README table differs from the page it was copied from."""
    readme = (ROOT / "README.md").read_text("utf-8")
    results = (ROOT / "docs/reference/results.md").read_text("utf-8")
    benchmarks = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
    quality = re.findall(r"^\| `H2OConfig\.[^|]*\|(.*)\|$", readme, re.MULTILINE)
    speed = re.findall(r"^\| \d+ \| .*->.* \|$", readme, re.MULTILINE)
    assert (len(quality), len(speed)) == (3, 3)
    assert all(f"|{row}|" in results for row in quality)
    assert all(f"\n{row}\n" in benchmarks for row in speed)


def test_readme_says_in_words_what_tables_have():
    said = " ".join((ROOT / "README.md").read_text("utf-8").split())
    results = (ROOT / "docs/reference/results.md").read_text("utf-8")
    rows = re.findall(r"^\| `echo-bytes` \|(.*)\|$", results, re.MULTILINE)
    figures = [re.findall(r"([\d.]+) \(", row) for row in rows]
    (lost,) = re.findall(r"loses ([\d.]+), ([\d.]+) and ([\d.]+) nats per token", said)
    assert list(lost) in figures
    (found,) = re.findall(r"`budget=0\.1` still finds \[(\d+)% of the facts", said)
    assert f"{int(found) / 100:.2f}" in [row[1] for row in figures]
    families = (ROOT / "docs/reference/families.txt").read_text("utf-8")
    (supported, every) = re.search(r"\[(\d+) of the (\d+) causal model families", said).groups()
    assert f"causal language models: {supported} of {every} families are supported" in families


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def text_of(page: Path) -> str:
    """Markdown of a page, or of a notebook's cells."""
    text = page.read_text("utf-8")
    if page.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(x["source"]) for x in cells if x["cell_type"] == "markdown")


@pytest.mark.parametrize("page", [*DOCUMENTS, *NOTEBOOKS], ids=page_id)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if "://" in link or "`" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", TODAY, ids=page_id)
def test_paths_and_names_are_there(page):
    """A file or module named as code does not exist."""
    text = page.read_text("utf-8")
    for code in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)):
        assert not code.startswith("git show "), f"readers may have no history: {code}"
        for path in re.findall(
            r"\b(?:csrc|h2o|tests|tools|docs|examples|benchmarks)/[\w./*]+", code
        ):
            if not path.startswith(MADE) and "<" not in code:  # a pattern
                assert list(ROOT.glob(path.rstrip("/."))), path
        for name in re.findall(r"^(h2o(?:\.\w+)+)", code):
            assert is_there(name), name


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/understand/architecture.md"])
def test_files_that_pages_for_contributors_name_are_there(page):
    """A file is found by the end of its path, because these pages name files without their
    folders."""
    text = (ROOT / page).read_text("utf-8")
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
    """Until there is a release, no document may tell pip to install the package from PyPI. With the
    first release this test is removed and `packages.install_command` names the package."""
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
    """docs/conf.py, which generates parts of the pages when the site is built."""
    spec = importlib.util.spec_from_file_location("conf", ROOT / "docs" / "conf.py")
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    return conf


def test_an_attribute_keeps_its_colons(conf):
    """napoleon would take what stands before the first colon for a type."""
    lines = ['"sum": all attention. "mean": attention per query.']
    told = [None, "attribute", "h2o.H2OConfig.score_by", None, None]
    conf.as_rest(*told, written := [*lines])
    assert ":" not in written[0]
    conf.with_colons(*told, written)
    assert written == lines


# ---- Tables of options -------------------------------------------------------------------------


def test_the_reference_names_every_field():
    named = set(re.findall(r"`(\w+)`", first_columns("docs/reference/configuration.md")))
    assert named >= {*PARAMETERS}
    page = (ROOT / "docs/reference/configuration.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \| ([^|]*) \|", page, re.M)
    made = h2o.H2OConfig(), h2o.H2OConfig(heavy=0.1, recent=0.1)
    for name, *defaults in rows:
        values = [str(getattr(config, name)) for config in made]
        assert [x.strip('"') for x in defaults] == values, name
    assert {name for name, *_ in rows} == {*PARAMETERS}


def test_commands_are_listed():
    named = set(re.findall(r"`h2o (\w+)`", first_columns("docs/reference/commands.md")))
    assert named == {command.name for command in cli.COMMANDS}


def test_every_option_of_every_command_is_drawn(conf, capsys):
    """An option is missing from the site, or its text there differs from --help."""
    assert (
        "{{ h2o --help }}" in (ROOT / "docs/reference/options.md").read_text("utf-8").splitlines()
    )
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
    named = set(re.findall(r"`([a-z][a-z-]*)", first_columns("docs/reference/commands.md")))
    assert len(settings) > 9
    options = re.search(r"there are\s+([\w, ]+)\.", shown)
    assert set(re.findall(r"\w+", options[1])) <= set(
        re.findall(r"`(\w+)`", (ROOT / "docs/reference/commands.md").read_text("utf-8"))
    )
    assert settings - {"settings", "follow", "real"} <= named


def shown() -> dict[str, Any]:
    """Objects that the pages document from docstrings, by dotted name."""
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
    """Dotted names of h2o's classes that a function returns or that a class has as fields."""
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
    """A class is missing from the API pages, though `h2o` exports it, a documented call returns it
    or the documents' code names it."""
    things = shown()
    assert set(things) >= {f"h2o.{name}" for name in h2o.__all__} - {"h2o.__version__"}
    assert "h2o.errors.UserError" in things
    members = [thing for thing in things.values() if not inspect.ismodule(thing)]
    given = {name for thing in members for name in given_by(thing)}
    assert {
        "h2o.hf.cache_state.kept_keys.Kept",
        "h2o.hf.patch.Patch",
        "h2o.hf.cache_state.report.LayerReport",
    } <= given
    code = "\n".join(PYTHON.values())
    given |= {name for name in re.findall(r"\bh2o(?:\.\w+)+\.[A-Z]\w+", code) if is_there(name)}
    classes = {name for name in given if inspect.isclass(found(name))}
    missing = {name for name in classes if found(name) not in things.values()}
    assert not missing, f"not in docs/reference/api: {sorted(missing)}"
