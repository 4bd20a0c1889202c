"""`import h2o`: quick, in any order with transformers, and clear when the core is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import h2o

PACKAGE = Path(h2o.__file__).parent
NAME_IS_KNOWN = (
    "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as a;"
    "from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as m;"
    "print('h2o' in a, 'h2o' in m)"
)

FINDERS = "import sys; print(sum(getattr(f, '__module__', '') == 'h2o' for f in sys.meta_path))"


def run(code: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **kwargs)


@pytest.mark.parametrize(
    "imports",
    [
        "import h2o, transformers",
        "import transformers.modeling_utils, h2o",
        "import h2o.hf.attention",
        "import importlib.util, h2o; importlib.util.find_spec('transformers.modeling_utils')",
    ],
)
def test_name_is_registered_in_any_order(imports):
    result = run(f"{imports}; {NAME_IS_KNOWN}; {FINDERS}")
    assert result.stdout.split() == ["True", "True", "0"], result.stderr


def test_is_light():
    code = "import h2o, sys; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert run(code).stdout.split() == ["False", "False"]


def test_works_without_torch_and_transformers(tmp_path):
    for name in ("torch", "transformers"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import h2o, numpy as np\n"
        "out, scores = h2o.ops.attend(*(np.ones((1, 1, 3, 8), np.float32) for _ in range(3)))\n"
        "print(scores.sum())"
    )
    assert float(run(code).stdout) == 3.0


def test_every_public_name_exists():
    for name in h2o.__all__:
        assert getattr(h2o, name) is not None
        assert name in dir(h2o)
    with pytest.raises(AttributeError, match="no attribute 'H2OCash'"):
        h2o.H2OCash  # noqa: B018


def test_missing_core_is_explained(tmp_path):
    shutil.copytree(
        PACKAGE, tmp_path / "h2o", ignore=shutil.ignore_patterns("_core*.so", "__pycache__")
    )
    # The finder of an editable install would look for the core in the checkout.
    finders = "[f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]"
    result = run(f"import sys; sys.meta_path[:] = {finders}; import h2o", cwd=tmp_path)
    assert "ImportError: h2o._core, the compiled core, is missing" in result.stderr
    assert "pip install -e ." in result.stderr
    assert "H2O.ai's client" in result.stderr


OLD = [
    ("__version__ = '1.26.4'", "3.11", "numpy >= 2, here is 1.26.4"),
    ("raise ModuleNotFoundError('No numpy', name='numpy')", "3.11", "numpy >= 2, here is none"),
    ("__version__ = '2.4.6'", "3.9", "Python >= 3.10, here is "),
]


@pytest.mark.parametrize(("numpy", "python", "text"), OLD)
def test_a_core_that_cannot_be_imported_is_explained(tmp_path, numpy, python, text):
    (tmp_path / "numpy.py").write_text(numpy)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"sys.version_info = {tuple(map(int, python.split('.')))}\n"
        "import h2o"
    )
    error = run(code).stderr
    assert f"ImportError: h2o needs {text}" in error
    assert error.count("Traceback") == 1


@pytest.mark.parametrize("command", [["-m", "h2o"], ["h2o"]])
def test_the_command_beside_an_old_numpy_says_so_in_one_line(tmp_path, command):
    (tmp_path / "numpy.py").write_text("__version__ = '1.26.4'")
    script = tmp_path / "h2o"  # as pip writes it
    script.write_text("import sys; from h2o.cli import main; sys.exit(main())")
    words = [str(script)] if command == ["h2o"] else command
    path = os.pathsep.join([str(tmp_path), str(PACKAGE.parent)])
    done = subprocess.run(
        [sys.executable, *words, "info"], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 1
    wanted = 'h2o: error: h2o needs numpy >= 2, here is 1.26.4: pip install "numpy>=2"\n'
    assert (done.stdout, done.stderr) == ("", wanted)


@pytest.mark.parametrize("version", ["5.3.0", "6.0.0.dev0", "6.0.0", "10.1"])
def test_other_transformers_are_refused_by_name(tmp_path, version):
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text(f"__version__ = {version!r}")
    (tmp_path / "transformers" / "modeling_utils.py").write_text("")
    (tmp_path / f"transformers-{version}.dist-info").mkdir()
    metadata = tmp_path / f"transformers-{version}.dist-info" / "METADATA"
    metadata.write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import h2o, transformers.modeling_utils\n"
        "print('transformers itself can be imported')\n"
        "h2o.H2OCache"
    )
    result = run(code)
    assert "itself can be imported" in result.stdout, result.stderr
    assert "ImportError: h2o.H2OCache needs torch and transformers >= 5.4 and < 6" in result.stderr
    assert f"here is {version}" in result.stderr


def test_versions_within_the_range_are_served():
    served = ["5.4.0", "5.4.0.dev0", "5.16.0rc1", "5.99.1"]
    assert all(map(h2o.packages.serves_transformers, served))


@pytest.mark.parametrize(
    ("variable", "text"), [("H2O_CPU", "no such level"), ("H2O_BACKEND", "wanted")]
)
def test_the_command_says_in_one_line_that_a_variable_is_wrong(variable, text):
    done = subprocess.run(
        [sys.executable, "-m", "h2o", "info"], capture_output=True, text=True,
        env={**os.environ, variable: "nope"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"h2o: error: {variable}=nope: {text}")
    assert done.stderr.count("\n") == 1


def test_what_is_shown_is_public():
    """Of names, by `dir` and an editor's completion."""
    assert {name for name in dir(h2o) if not name.startswith("__")} == {*h2o.__all__} - {
        "__version__"
    }
    assert "__version__" in dir(h2o)
    assert all(hasattr(h2o, name) for name in dir(h2o))
