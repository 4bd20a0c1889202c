"""The notebooks as files; `make notebooks` runs them."""

import ast
import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.skipif(not NOTEBOOKS, reason="the notebooks are not here")
def test_there_are_four():
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped_and_code_is_code(path):
    notebook = json.loads(path.read_text("utf-8"))
    assert notebook["cells"][0]["cell_type"] == "markdown"
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            ast.parse("".join(cell["source"]))
    assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
