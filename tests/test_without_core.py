"""A build without the core gives the core's answers, rejects wrong calls, and says that the core is
missing."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import h2o
from h2o import backends, packages
from h2o.backends import without_core
from tests import inputs
from tests.conversation import Conversation, assert_same_kept, numpy_core
from tests.core.calls import EVERY_TENSOR, NAMES, make
from tests.core.conftest import refused as refused
from tests.torch.engines import core

PACKAGE = Path(h2o.__file__).parent
SAID = "this h2o-kv was built without its compiled core"


@pytest.fixture
def by_torch(monkeypatch):
    """Run the operations of this process as a build without the core does."""
    operations = {x: functools.partial(without_core.call, x, "run") for x in backends.OPERATIONS}
    served = types.SimpleNamespace(**operations)
    for name in ("backend_for", "backend_if_open"):
        monkeypatch.setattr(backends, name, lambda tensor: served)


def write(call):
    """Run a call and return the tensors it writes, by name."""
    call.run()
    return {name: call.get(name).copy() for name in call.written}


@pytest.mark.parametrize("name", NAMES)
def test_arrays_are_written_where_they_lie(name, request):
    wanted = write(make(name))
    request.getfixturevalue("by_torch")
    written = write(make(name))
    assert written.keys() == wanted.keys()
    for tensor in written:
        if (
            written[tensor].dtype.kind == "i"
            and "next_slot" not in tensor
            and tensor[:5] != "slots"
        ):
            np.testing.assert_array_equal(written[tensor], wanted[tensor], tensor)
        elif not tensor.startswith("slots."):  # each implementation may choose its own slots
            np.testing.assert_allclose(written[tensor], wanted[tensor], 1e-4, 1e-5, err_msg=tensor)
    if "slots.positions" in wanted:
        where = [np.sort(x["slots.positions"]) for x in (written, wanted)]
        np.testing.assert_array_equal(*where)


@pytest.mark.parametrize("engine", [numpy_core, core()], ids=lambda x: x.name)
@pytest.mark.parametrize("changes", [{}, {"value_weighted": True, "decay": 0.95}], ids=str)
def test_a_conversation_is_that_of_the_core(engine, changes, request):
    text = inputs.drifting(3, 1, 4, 2, 60, 16)
    policy = inputs.Policy(6, 5, sinks=2, **changes)
    pieces = [20, 9, *[1] * 31]
    wanted = Conversation(numpy_core, text, policy).feed_all(pieces)
    request.getfixturevalue("by_torch")
    answers = Conversation(engine, text, policy).feed_all(pieces)
    np.testing.assert_allclose(answers.answer, wanted.answer, rtol=2e-5, atol=2e-5)
    assert_same_kept(answers, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "tensor"), EVERY_TENSOR)
@pytest.mark.usefixtures("by_torch")
def test_what_is_no_operand_is_named(name, tensor, refused):
    call = make(name)
    array = call.get(tensor)
    refused(call.put(tensor, array[None]), ValueError, f"^{tensor}: has shape .*, wanted \\[")
    refused(call.put(tensor, array.astype("S1")), TypeError, f"^{tensor}: ")
    refused(call.put(tensor, array.astype(np.int16)), TypeError, f"^{tensor}: has dtype int16")
    refused(call.put(tensor, "text"), TypeError, f"^{tensor}: a str is not a tensor")
    meta = torch.empty(array.shape, device="meta", dtype=torch.from_numpy(array).dtype)
    with pytest.raises(ValueError, match=r"is on (meta|cpu), but .* on (cpu|meta)$"):
        call.put(tensor, meta).run()


@pytest.mark.usefixtures("by_torch")
def test_memory_that_cannot_be_written_is_refused_and_that_to_be_read_is_not(refused):
    call = make("step")
    answer = call.run().copy()
    fixed = make("step")
    for name in ("query", "key", "value"):
        fixed.get(name).flags.writeable = False
    turned = fixed.put("key", np.ascontiguousarray(fixed.get("key")[..., ::-1])[..., ::-1])
    np.testing.assert_array_equal(turned.run(), answer)
    for name in ("out", "slots.scores"):
        spoilt = make("step")
        spoilt.get(name).flags.writeable = False
        refused(spoilt, ValueError, f"^{name}: is written, but is read-only")
    wide = np.broadcast_to(np.float32(0), make("step").get("out").shape)
    refused(make("step").put("out", wide), ValueError, "^out: is written, but")


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [("decay", 2.0, ValueError), ("sinks", -1, ValueError), ("score_by", "summ", ValueError),
     ("softcap", -1.0, ValueError), ("scale", float("nan"), ValueError),
     ("softcap", "1", TypeError), ("value_weighted", True, ValueError), ("slots", 3, TypeError)],
)  # fmt: skip
@pytest.mark.usefixtures("by_torch")
def test_what_is_no_policy_is_named(field, value, error, refused):
    refused(make("step").put(field, value), error, field)


# ---- The package -------------------------------------------------------------------------------


def copied(folder: Path) -> Path:
    """Copy the package as a wheel without the core contains it."""
    ignored = shutil.ignore_patterns("_core*", "kernels.fatbin", "__pycache__")
    shutil.copytree(PACKAGE, folder / "h2o", ignore=ignored)
    (folder / "h2o" / packages.PURE_BUILD).write_text("1.2.3\n")
    return folder


def run(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(folder), **more}
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


CACHES = """
import warnings
import h2o, h2o.ops
from transformers import LlamaConfig
config = LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        h2o.H2OCache(config, heavy=4, recent=4)
print(h2o.__version__, [str(w.message) for w in caught if "core" in str(w.message)])
"""


# The finder of an editable install would look for the core in another checkout.
FINDERS = "[f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]"
NO_FINDERS = f"import sys; sys.meta_path[:] = {FINDERS}"
WHERE = (
    "import h2o; from h2o import packages; "
    "print(h2o.__file__, h2o.__version__, packages.install_command(), sep='\\n')"
)


def test_it_is_said_once_a_process_and_by_info(tmp_path):
    folder = copied(tmp_path)
    done = run(folder, "-c", CACHES)
    assert done.stdout.startswith(f"1.2.3 ['{SAID}"), done.stderr
    assert done.stdout.count(SAID) == 1
    info = run(folder, "-m", "h2o", "info", "--json")
    assert info.stderr.count(SAID) == 1
    facts = json.loads(info.stdout)
    assert facts["core"]["level"] == "none"
    assert set(facts["core"]["backends"].values()) == {"torch"}
    assert facts["versions"]["h2o"] == "1.2.3"
    check = run(folder, "-m", "h2o", "info", "--check")
    assert (check.returncode, check.stdout) != (0, "")
    assert SAID in check.stderr


def test_torch_that_is_missing_is_named_when_it_is_needed(tmp_path):
    folder = copied(tmp_path)
    (folder / "torch.py").write_text("raise ModuleNotFoundError('No torch', name='torch')")
    code = (
        "import h2o, numpy as np\n"
        "print('imported')\n"
        "h2o.ops.attend(*(np.ones((1, 1, 3, 8), np.float32) for _ in range(3)))"
    )
    done = run(folder, "-c", code)
    assert done.stdout == "imported\n"
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"ImportError: {SAID}")
    assert "torch operations need torch, which is missing: pip install" in error


def test_a_level_is_refused(tmp_path):
    done = run(copied(tmp_path), "-m", "h2o", "info", H2O_CPU="avx2")
    assert done.returncode == 1
    assert done.stderr.startswith("h2o: error: H2O_CPU=avx2: no such level")


def test_sources_whose_core_is_missing_are_no_such_build(tmp_path):
    folder = copied(tmp_path)
    (folder / "h2o" / packages.PURE_BUILD).unlink()
    done = run(folder, "-c", f"{NO_FINDERS}; import h2o")
    assert "ImportError: h2o._core, the compiled core, is missing" in done.stderr


def test_a_checkout_has_no_such_file():
    assert not (PACKAGE / packages.PURE_BUILD).exists()
    assert packages.pure_version() == ""
    assert packages.has_core()
    assert backends.HAS_CORE


def test_the_wheel_is_for_any_system_and_holds_no_core(checkout):
    (wheel,) = (checkout / "dist").glob("*.whl")
    version = importlib.metadata.version("h2o-kv")
    assert wheel.name == f"h2o_kv-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert archive.read(f"h2o/{packages.PURE_BUILD}").decode() == f"{version}\n"
    assert not [name for name in names if "_core" in Path(name).name and "without" not in name]
    files = (checkout / "h2o").rglob("*.py")
    assert {path.relative_to(checkout).as_posix() for path in files} <= names


def test_pip_installs_what_the_folder_has_now_and_imports_it_there(checkout):
    """pip builds in the checkout, where an earlier build has left files. A new user then starts
    Python in the same folder, whose sources have no core."""
    stale = [*(checkout / "build" / "lib" / "h2o").glob("packages.py")]
    assert stale, "no earlier build"
    for name in ("removed.py", "cli/removed.py", "data/removed.txt"):
        (stale[0].parent / name).write_text("")
    options = ("--quiet", "--no-build-isolation", "--no-deps", "--target", "site")
    done = run(checkout, "-m", "pip", "install", *options, ".", H2O_PURE="1")
    assert done.returncode == 0, done.stderr
    site = checkout / "site"
    installed = {path.relative_to(site) for path in (site / "h2o").rglob("*") if path.is_file()}
    assert Path("h2o/packages.py") in installed
    assert [x for x in installed if "removed" in x.name] == []
    assert (checkout / "h2o_kv.egg-info").is_dir()
    said = run(checkout, "-c", f"{NO_FINDERS}; {WHERE}", PYTHONPATH=str(site))
    assert said.stdout.splitlines() == [
        str(checkout / "h2o" / "__init__.py"), importlib.metadata.version("h2o-kv"),
        f"pip install {checkout}",
    ], said.stderr  # fmt: skip


def test_an_editable_install_in_place_compiles_nothing(checkout):
    """`make` compiles the core afterwards, so an editable install must not. A wheel built this way
    would lack the core and is rejected."""
    hooks = "from setuptools import build_meta as made; made.build_editable('editable')"
    (checkout / "editable").mkdir()
    done = run(checkout, "-c", hooks, H2O_IN_PLACE="1", CC="no-such-compiler")
    assert done.returncode == 0, done.stderr
    assert [path.suffix for path in (checkout / "editable").iterdir()] == [".whl"]
    refused = run(checkout, "setup.py", "--quiet", "bdist_wheel", H2O_IN_PLACE="1")
    assert refused.returncode == 1
    assert "pip install with -e" in refused.stderr


def test_a_build_without_a_compiler_names_the_build_without_core(checkout):
    done = run(checkout, "setup.py", "--quiet", "build_ext", CC="no-such-compiler")
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert said.startswith("h2o-kv needs a C compiler, and 'no-such-compiler' was not found")
    assert "H2O_PURE=1 pip install" in said
