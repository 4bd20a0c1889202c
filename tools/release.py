"""Prepare a folder for upload to PyPI and conda-forge, and report what is wrong with it.

    make release-dry-run, or: python tools/release.py [--dist dist] [--out build/release]

Uses the sdist and wheels that `make wheels` has built, and checks that

- all have the same version as pyproject.toml, CITATION.cff and conda's recipe;
- each wheel has the sdist's metadata, the license, and nothing but the package;
- the sdist contains only files that git tracks;
- sizes and kernels are right (wheel_contents.py);
- twine, PyPI's own checker, has no complaints;
- conda's recipe renders its outputs on each platform.

The folder gets the files, SHA256SUMS, the recipe with the sdist's hash, and the long description as
PyPI would show it. Nothing is uploaded. Needs twine, readme-renderer[md] and py-rattler-build.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import tomllib
from wheel_contents import kernel_complaints, size_complaints

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "conda" / "recipe.yaml"
ZEROS = "0" * 64
"""Placeholder in the recipe for the sdist's hash"""
BUILT = re.compile(r"PKG-INFO|setup\.cfg|h2o_kv\.egg-info/.*")
"""Files of an sdist that its build generates"""
CONDA = {
    "linux-64": ["h2o-kv", "h2o-kv-cuda"],
    "linux-aarch64": ["h2o-kv", "h2o-kv-cuda"],
    "osx-64": ["h2o-kv"],
    "osx-arm64": ["h2o-kv"],
}
"""Outputs of the recipe by platform, if there is a compiler for CUDA"""
VARIANTS = {
    "c_compiler": ["gcc"],
    "cxx_compiler": ["gxx"],
    "c_stdlib": ["sysroot"],
    "cuda_compiler": ["cuda-nvcc"],
    "cuda_compiler_version": ["12.9"],
    "python": ["3.10.* *_cpython"],
}


def sdist_metadata(sdist: Path) -> Message:
    with tarfile.open(sdist) as archive:
        file = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert file is not None
        return email.message_from_bytes(file.read())


def wheel_metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (x for x in archive.namelist() if x.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def version_complaints(version: str) -> Iterator[str]:
    """Yield files of the repository that name another version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    for name, known in {
        "pyproject.toml": project["version"],
        "CITATION.cff": "".join(re.findall(r"^version: (.*)$", citation, re.M)),
        "recipes/conda/recipe.yaml": "".join(
            re.findall(r'^  version: "(.*)"$', RECIPE.read_text("utf-8"), re.M)
        ),
    }.items():
        if known != version:
            yield f"{name} says version {known or 'nothing'}, the sdist {version}"


def wheel_complaints(wheel: Path, metadata: Message) -> Iterator[str]:
    """Yield what is wrong with a wheel. tools/wheels.py checks its core."""
    yield from size_complaints(wheel)
    yield from kernel_complaints(wheel)
    own = wheel_metadata(wheel)
    if differing := [
        name
        for name in {*metadata, *own} - {"Dynamic"}
        if metadata.get_all(name) != own.get_all(name)
    ]:
        yield f"has another {', '.join(sorted(differing))} than the sdist"
    info = f"h2o_kv-{metadata['Version']}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        if foreign := [x for x in names if not x.startswith(("h2o/", info))]:
            yield f"holds {', '.join(foreign[:5])}, which is not part of the package"
        license_file = f"{info}licenses/LICENSE"
        if license_file not in names:
            yield "holds no LICENSE"
        elif archive.read(license_file) != (ROOT / "LICENSE").read_bytes():
            yield "holds another LICENSE than the repository"


def sdist_complaints(sdist: Path) -> Iterator[str]:
    """Yield files of the sdist that are not in the repository, and files that it lacks."""
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    prefix = f"{sdist.name.removesuffix('.tar.gz')}/"
    with tarfile.open(sdist) as archive:
        files = {x.name.removeprefix(prefix) for x in archive.getmembers() if x.isfile()}
    if foreign := sorted(x for x in files - set(tracked) if not BUILT.fullmatch(x)):
        yield f"holds {', '.join(foreign[:5])}, which git does not track"
    needed = {x for x in tracked if x.startswith(("csrc/", "h2o/"))} | {"LICENSE", "setup.py"}
    if missing := sorted(needed - files):
        yield f"lacks {', '.join(missing[:5])}"


def twine_complaints(files: list[Path]) -> Iterator[str]:
    """Yield twine's complaints. --strict includes its warnings."""
    command = [sys.executable, "-m", "twine", "check", "--strict", *files]
    checked = subprocess.run(command, capture_output=True, text=True)
    if checked.returncode:
        yield f"twine: {checked.stdout}{checked.stderr}"


def write_description(metadata: Message, out: Path) -> Iterator[str]:
    """Write the page that PyPI would show. Links to files of the repository are broken there."""
    from readme_renderer import markdown

    text = metadata.get_payload()
    assert isinstance(text, str)
    page = markdown.render(text, variant="GFM")
    if page is None:
        yield "readme_renderer cannot render the long description"
        return
    (out / "long_description.html").write_text(page, "utf-8")
    relative = [x for x in re.findall(r'(?:href|src)="([^"]+)"', page) if "://" not in x]
    if links := [x for x in relative if not x.startswith("#")]:
        print(f"note: {len(links)} links of the long description point into the repository "
              f"({', '.join(links[:3])}, ...) and are broken on PyPI")  # fmt: skip


def write_recipe(sdist: Path, out: Path) -> Iterator[str]:
    """Write conda's recipe with the sdist's hash, and render each of its outputs."""
    from rattler_build import (
        PlatformConfig,
        RattlerBuildError,
        RenderConfig,
        Stage0Recipe,
        VariantConfig,
    )

    text = RECIPE.read_text("utf-8")
    if text.count(ZEROS) != 1:
        yield f"{RECIPE.name} has no placeholder for the sdist's hash"
    recipe = out / "conda" / RECIPE.name
    recipe.parent.mkdir()
    recipe.write_text(text.replace(ZEROS, sha256(sdist)), "utf-8")
    for platform, wanted in CONDA.items():
        where = RenderConfig(platform=PlatformConfig(target_platform=platform))
        try:
            rendered = Stage0Recipe.from_file(recipe).render(VariantConfig(VARIANTS), where)
        except RattlerBuildError as error:
            yield f"{RECIPE.name} on {platform}: {error}"
            continue
        names = [one.recipe.package.name for one in rendered]
        if names != wanted:
            yield f"{RECIPE.name} on {platform} makes {names}, expected {wanted}"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make(dist: Path, out: Path) -> list[str]:
    """Fill the folder `out`. Returns all complaints."""
    sdists, wheels = sorted(dist.glob("*.tar.gz")), sorted(dist.glob("*.whl"))
    if len(sdists) != 1 or not wheels:
        sys.exit(f"{dist} holds {len(sdists)} sdists and {len(wheels)} wheels: run make wheels")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (sdist,) = sdists
    metadata = sdist_metadata(sdist)
    found = list(version_complaints(metadata["Version"]))
    for file in (sdist, *wheels):
        own = sdist_complaints(sdist) if file == sdist else wheel_complaints(file, metadata)
        found += [f"{file.name}: {complaint}" for complaint in own]
        copy = shutil.copy(file, out)
        print(f"{file.stat().st_size / 1000:7.0f} kB  {Path(copy).name}")
    files = [out / file.name for file in (sdist, *wheels)]
    found += twine_complaints(files)
    found += write_description(metadata, out)
    found += write_recipe(sdist, out)
    sums = "".join(f"{sha256(file)}  {file.name}\n" for file in files)
    (out / "SHA256SUMS").write_text(sums, "utf-8")
    print(f"license: {metadata['License-Expression']}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "release")
    arguments = parser.parse_args()
    found = make(arguments.dist, arguments.out)
    print(*found, sep="\n", end="\n" if found else "")
    if found:
        return 1
    print(f"{arguments.out}: nothing was uploaded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
