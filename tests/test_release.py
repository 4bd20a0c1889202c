"""Checks of tools/release.py on a release's files, and conda's recipe."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")
yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / ".git").exists():
    pytest.skip("needs a checkout", allow_module_level=True)
sys.path.insert(0, str(ROOT / "tools"))
import release  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


@pytest.fixture
def dist(checkout) -> Path:
    """Folder with the sdist and the pure wheel."""
    return checkout / "dist"


def test_a_release_of_this_checkout(dist):
    """This checkout passes h2o's own checks. make release-dry-run adds those of twine and
    rattler-build."""
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    metadata = release.sdist_metadata(sdist)
    assert metadata["License-Expression"] == "MIT"
    assert list(release.version_complaints(metadata["Version"])) == []
    assert list(release.sdist_complaints(sdist)) == []
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"docs/start/quickstart.md", "examples/pinned_chat.py", "CODE_OF_CONDUCT.md"} <= names
    assert list(release.wheel_complaints(wheel, metadata)) == []
    (first, *_) = release.version_complaints("9.9")
    assert first == f"pyproject.toml says version {PROJECT['version']}, the sdist 9.9"


KNOWN = """
import importlib.metadata
from lm_eval.api.registry import get_model, model_registry

(entry,) = importlib.metadata.entry_points(group="lm_eval.models")
if entry.name not in model_registry:  # lm-eval 0.4.13 does not look for plugins
    model_registry.register(entry.name, target=entry.value)
model = get_model("h2o")
print("MODEL", model.__name__, importlib.import_module(model.__module__).__file__)
"""


def test_lm_eval_finds_the_model_of_an_installed_wheel(dist, tmp_path):
    pytest.importorskip("lm_eval")
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KNOWN], cwd=tmp_path, capture_output=True,
        text=True, check=False, env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    file = tmp_path / "h2o" / "evaluation" / "lm.py"
    assert f"MODEL H2OLM {file}" in done.stdout


def test_wheels_that_no_release_should_have(dist, tmp_path):
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    other = tmp_path / wheel.name
    packed = zipfile.ZipFile(other, "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(wheel) as good, packed as bad:
        for name in good.namelist():
            text = good.read(name)
            if name.endswith("METADATA"):
                text = text.replace(b"License-Expression: MIT", b"License-Expression: BSD-3-Clause")
            if not name.endswith("LICENSE"):
                bad.writestr(name, text)
        bad.writestr("tests/test_core.py", "")
    assert list(release.wheel_complaints(other, release.sdist_metadata(sdist))) == [
        "has another License-Expression than the sdist",
        "holds tests/test_core.py, which is not part of the package",
        "holds no LICENSE",
    ]


def test_the_recipe_is_of_this_project():
    """The recipe's outputs require what pyproject.toml requires, and use existing Makefile
    targets."""
    recipe = yaml.safe_load(release.RECIPE.read_text("utf-8"))
    assert recipe["context"]["version"] == PROJECT["version"]
    cpu, cuda = recipe["outputs"]
    assert set(PROJECT["dependencies"]) == {"numpy>=2"}
    assert "numpy >=2" in cpu["requirements"]["run"]
    constraints = {x.replace(" ", "") for x in cpu["requirements"]["run_constraints"]}
    optional = {x.replace("torch", "pytorch", 1) for x in PROJECT["optional-dependencies"]["hf"]}
    assert constraints <= optional
    assert (
        f"python {PROJECT['requires-python'].removeprefix('>=')}.*" in cpu["requirements"]["host"]
    )
    assert cpu["build"]["python"]["entry_points"] == [
        f"{name} = {value}" for name, value in PROJECT["scripts"].items()
    ]
    target = re.match(r"make (\S+) NVCC=", cuda["build"]["script"][0])[1]
    assert f"\n{target}:" in (ROOT / "Makefile").read_text("utf-8")
    assert cuda["tests"][0]["package_contents"]["site_packages"] == [target]
    for output in recipe["outputs"]:
        assert (ROOT / output["about"]["license_file"]).is_file()


def test_the_recipe_can_be_rendered(dist, tmp_path):
    pytest.importorskip("rattler_build")
    (sdist,) = dist.glob("*.tar.gz")
    assert list(release.write_recipe(sdist, tmp_path)) == []
    assert release.sha256(sdist) in (tmp_path / "conda" / "recipe.yaml").read_text("utf-8")
