"""`import h2o` is fast, works before and after transformers, and explains a missing core."""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import h2o
from h2o import packages

PACKAGE = Path(h2o.__file__).parent
NAME_IS_KNOWN = (
    "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as a;"
    "from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as m;"
    "print('h2o' in a, 'h2o' in m)"
)

FINDERS = "import sys; print(sum(getattr(f, '__module__', '') == 'h2o' for f in sys.meta_path))"


def run(code: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **kwargs)


ORDERS = (
    "import transformers.modeling_utils, h2o",
    "import h2o.hf.attention.attention",
    "import importlib.util, h2o; importlib.util.find_spec('transformers.modeling_utils')",
)
FORKS = """
import contextlib, importlib, os, sys
# Which take the longest, and of which no order says anything.
for name in (
    "numpy torch._dynamo torch.distributed.fsdp torch.distributed.tensor accelerate scipy.optimize"
    " torchao.prototype.safetensors.safetensors_support huggingface_hub tokenizers"
).split():
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
assert not {'h2o', 'transformers'} & set(sys.modules)
for lines in sys.argv[1:]:
    sys.stdout.flush()
    if not (child := os.fork()):
        exec(lines)
        print("end of lines")
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, lines
"""


MOVED = """
import transformers.utils.output_capturing as capturing
del capturing._active_collector
import h2o, transformers.modeling_utils
print('transformers itself can be imported')
try:
    h2o.H2OCache
except ImportError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def printed():
    """Outputs of several pieces of code, each of which runs in a forked process."""
    lines = [*[f"{imports}; {NAME_IS_KNOWN}; {FINDERS}" for imports in ORDERS], MOVED]
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS, *lines], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split("end of lines\n")


def test_name_is_registered_in_any_order(printed):
    assert [text.split() for text in printed[: len(ORDERS)]] == [["True", "True", "0"]] * 3


def test_a_private_name_that_has_moved_is_reported_where_h2o_is_used(printed):
    """A missing private name must not break the import of transformers. h2o must report it when h2o
    is used."""
    first, error = printed[len(ORDERS)].splitlines()
    assert first == "transformers itself can be imported"
    assert error.startswith("h2o.H2OCache does not work with transformers")
    assert "_active_collector" in error
    assert "h2o was tested with transformers 5.16 to" in error


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


@pytest.fixture
def clone(tmp_path):
    """(sources without a core, the folder with what pip installed from them).

    pip leaves metadata in the sources that it builds.
    """
    ignored = shutil.ignore_patterns("__pycache__", "kernels.fatbin")
    sources, site = tmp_path / "a clone", tmp_path / "site"
    shutil.copytree(
        PACKAGE, sources / "h2o", ignore=lambda *x: {*ignored(*x), *fnmatch.filter(x[1], "_core*")}
    )
    (sources / "setup.py").touch()
    left = sources / "h2o_kv.egg-info"
    left.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: h2o-kv\nVersion: {h2o.__version__}\n"
    (left / "PKG-INFO").write_text(metadata)
    (left / "SOURCES.txt").write_text("setup.py\nh2o/packages.py\n")
    shutil.copytree(sources / "h2o", site / "h2o")
    (core,) = PACKAGE.glob("_core*.so")
    (site / "h2o" / core.name).symlink_to(core)
    facts = site / f"h2o_kv-{h2o.__version__}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(metadata)
    rows = []
    for file in sorted((site / "h2o").rglob("*.py")):
        digest = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest())
        rows.append(f"{file.relative_to(site)},sha256={digest.rstrip(b'=').decode()},1")
    (facts / "RECORD").write_text("\n".join(rows))
    return sources, site


def in_clone(clone, code="import h2o"):
    sources, site = clone
    finders = "[f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]"
    path = os.pathsep.join([str(sources), str(site)])
    return run(
        f"import sys; sys.meta_path[:] = {finders}; {code}", cwd=sources,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def test_a_clone_takes_the_core_that_was_installed_from_it(clone):
    code = "import h2o; from h2o import _core; print(h2o.__file__); print(_core.__file__)"
    done = in_clone(clone, f"{code}; print(h2o.ops.info()['version'])")
    assert not done.stderr
    package, core, version = done.stdout.splitlines()
    assert Path(package).parent == clone[0] / "h2o"
    assert Path(core).parent == clone[1] / "h2o"
    assert version == h2o.__version__


def test_a_clone_takes_no_core_of_other_sources(clone):
    with (clone[0] / "h2o" / "ops.py").open("a") as file:
        file.write("# changed\n")
    error = in_clone(clone).stderr.splitlines()[-1]
    assert f"(the one in {clone[1] / 'h2o'} was built from other sources)" in error
    assert error.endswith(f"pip install -e '{clone[0]}'")


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ('{"url": "file:///a%20b", "dir_info": {}}', "pip install '/a b[hf]'"),
        ('{"url": "file:///a", "dir_info": {"editable": true}}', "pip install -e '/a[hf]'"),
        ('{"url": "https://b.org/c", "vcs_info": {"vcs": "git", "commit_id": "e1"}}',
         "pip install 'h2o-kv[hf] @ git+https://b.org/c@e1'"),
        ('{"url": "file:///d.whl", "archive_info": {}}', "pip install 'h2o-kv[hf] @ file:///d.whl'"),
        (None, "pip install '.[hf]' in its source folder"),
    ],
    ids=str,
)  # fmt: skip
def test_messages_install_from_where_h2o_came(tmp_path, monkeypatch, origin, command):
    facts = tmp_path / "h2o_kv-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: h2o-kv\nVersion: 1\n")
    if origin is not None:
        (facts / "direct_url.json").write_text(origin)
    monkeypatch.syspath_prepend(tmp_path)
    left = tmp_path / "checkout" / "h2o_kv.egg-info"  # of a build, in the working folder
    left.mkdir(parents=True)
    (left / "PKG-INFO").write_text((facts / "METADATA").read_text())
    (left / "SOURCES.txt").write_text("h2o/packages.py\n")
    monkeypatch.syspath_prepend(left.parent)
    assert packages.install_command("hf") == command
    again = packages.without_core().partition("C compiler, run ")[2]
    if ".whl" in command:  # a wheel has no sources
        assert again == "pip install . in its source folder"
    else:
        assert again == packages.install_command()


def test_messages_without_an_installation_name_the_folder(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: [])
    assert packages.install_command() == f"pip install {PACKAGE.parent}"


OLD = [
    (
        "raise ModuleNotFoundError('No numpy', name='numpy')",
        "3.11",
        "numpy >= 2, but numpy is none",
    ),
    ("__version__ = '2.4.6'", "3.9", "Python >= 3.10, but this is "),
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
    wanted = 'h2o: error: h2o needs numpy >= 2, but numpy is 1.26.4: pip install "numpy>=2"\n'
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
    assert "ImportError: h2o.H2OCache needs torch and transformers >= 5.16 and < 6" in result.stderr
    assert f"but transformers is {version}" in result.stderr


def test_versions_within_the_range_are_served():
    served = ["5.16.0", "5.16.0.dev0", "5.22.0rc1", "5.99.1"]
    assert all(map(h2o.packages.supports_transformers, served))


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
    """`dir` and an editor's completion must not show private names."""
    assert {name for name in dir(h2o) if not name.startswith("__")} == {*h2o.__all__} - {
        "__version__"
    }
    assert "__version__" in dir(h2o)
    assert all(hasattr(h2o, name) for name in dir(h2o))
