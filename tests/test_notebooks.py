"""The notebooks as files. `make notebooks` runs them and compares with the committed outputs."""

import ast
import base64
import html
import importlib.util
import json
import re
from importlib import resources
from pathlib import Path

import pytest

from tests.default_model import narrow_default_model

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells(path, kind="code"):
    notebook = json.loads(path.read_text("utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def texts(output):
    """All text that a reader may see in an output, without pictures."""
    shown = output.get("data", {"text/plain": output.get("text", "")})
    return ["".join(text) for form, text in shown.items() if form != "image/png"]


def pictures(path):
    outputs = [output for cell in cells(path) for output in cell["outputs"]]
    return [
        base64.b64decode("".join(output["data"]["image/png"]))
        for output in outputs
        if "image/png" in output.get("data", {})
    ]


@pytest.mark.skipif(not NOTEBOOKS, reason="the notebooks are not here")
def test_their_numbers_are_in_order():
    assert [path.name[:2] for path in NOTEBOOKS] == [f"{n:02}" for n in range(1, 9)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_shown_and_code_is_code(path):
    """The outputs are of one run from the first cell to the last, and contain no paths, addresses
    or times of one machine."""
    notebook = json.loads(path.read_text("utf-8"))
    assert notebook["cells"][0]["cell_type"] == "markdown"
    assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
    code = cells(path)
    for cell in code:
        ast.parse("".join(cell["source"]))
        assert not cell["metadata"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert len(outputs) > 1
    for output in outputs:
        assert output["output_type"] in ("stream", "display_data", "execute_result")
        assert output.get("name", "stdout") == "stdout"
        for text in texts(output):
            assert not re.search(r"/(?:tmp|home|root)/| at 0x|\d s$", text, re.MULTILINE)


@pytest.mark.skipif(not NOTEBOOKS, reason="the notebooks are not here")
def test_shaded_text_is_the_texts_own():
    """An output quotes the text of the package, in the text's own spelling."""
    outputs = [output for cell in cells(NOTEBOOKS[0]) for output in cell["outputs"]]
    (shaded,) = [x["data"]["text/html"] for x in outputs if "text/html" in x.get("data", {})]
    text = resources.files("h2o").joinpath("data", "lighthouse.txt").read_text("utf-8")
    assert text.startswith(html.unescape(re.sub("<[^>]*>", "", "".join(shaded))))


def test_pictures_are_small():
    every = [picture for path in NOTEBOOKS for picture in pictures(path)]
    assert len(every) > 2
    assert max(map(len, every)) < 60_000
    assert sum(map(len, every)) < 500_000


@pytest.fixture
def run():
    pytest.importorskip("nbclient")
    spec = importlib.util.spec_from_file_location("run", FOLDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("perplexity 40.578", "perplexity 40.612", True),
        ("perplexity 40.578", "perplexity 43.1", False),
        ("layer 0 retains 46%", "layer 0 retains 47%", True),
        ("layer 0 retains 46%", "layer 3 retains 46%", False),
        ("  0  'The'   887.4", "  0  'A'   887.4", False),
        ("1.2 MB", "1.2 MB of 18.5", False),
        ("kept   9.0%", "kept 10.0%", False),
    ],
)
def test_what_counts_as_the_same(run, one, other, same):
    assert run.alike(one, other) is same


def test_what_differs_is_named(run):
    nbformat = pytest.importorskip("nbformat")
    path = NOTEBOOKS[-1]
    old, new = (nbformat.read(path, as_version=4) for _ in range(2))
    assert run.differences(old, new) == []
    number, cell = next((i, x) for i, x in enumerate(new.cells) if x.get("outputs"))
    cell.outputs[0].text = "perplexity 1.0\n"
    (said,) = run.differences(old, new)
    assert said.startswith(f"cell {number}:")
    assert said.endswith("+perplexity 1.0")


def test_a_faint_shade_makes_no_difference(run):
    nbformat = pytest.importorskip("nbformat")
    faint = 'style="background:rgb(255 140 0/0.01)"'
    shown = [
        f'<span {faint} title="7: 0.5921">a</span>',
        '<span style="" title="7: 0.5919">a</span>',
    ]
    shown += ['<span title="7: 0.5919">b</span>']
    one, other, third = (
        run.seen(nbformat.v4.new_output("execute_result", {"text/html": x})) for x in shown
    )
    assert run.alike(one, other)
    assert not run.alike(one, third)


def test_only_one_machine_knows_times_and_folders(run):
    shown = (
        "setting  kept  time\n-------  ----  ----\nfull     1.0%  12 s\nwritten: /tmp/x1y_/a.json\n"
    )
    wanted = "setting  kept\n-------  ----\nfull     1.0%\nwritten: FOLDER/a.json\n"
    assert run.anonymous(shown) == wanted
    assert run.anonymous("<Axes at 0x7f0a>") == "<Axes>"


@pytest.fixture(scope="module")
def three_layers():
    """(model, tokenizer): a model with few and narrow layers instead of the default model."""
    return narrow_default_model(3)


WITH_MODEL = [path for path in NOTEBOOKS if path.stem != "03_lm_eval"]
"""Notebooks to run. The one left out runs h2o eval, as tests/evaluation does."""


@pytest.mark.filterwarnings("ignore")  # from other packages
@pytest.mark.parametrize("path", WITH_MODEL, ids=lambda path: path.stem)
def test_code_runs(path, three_layers, monkeypatch):
    """The code runs with three layers and few tokens. The notebooks' assertions on the whole
    model's results are removed."""
    pytest.importorskip("pandas")
    pytest.importorskip("matplotlib").use("Agg")
    import h2o

    monkeypatch.setattr(h2o, "load_model", lambda: three_layers)
    profile = h2o.Profile((0.1,), (((1.0,) * 3,) * 3,), 96)
    monkeypatch.setattr(h2o.Profile, "shipped", classmethod(lambda cls, model: profile))
    code = "\n".join("".join(cell["source"]) for cell in cells(path))
    code = re.sub(r"(, :)\d{3}\]", r"\g<1>96]", code)
    code = re.sub(r"layer=\d+", "layer=1", code)
    code = re.sub(r"^assert .*$", "", code, flags=re.MULTILINE)
    exec(compile(code, path.name, "exec"), {"__name__": path.stem})
