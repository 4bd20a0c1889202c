"""Fetch transformers' own model tests, which its wheel does not contain.

    python tests/transformers_suite/fetch.py FOLDER

downloads the source distribution of the installed transformers version with pip (once), unpacks its
tests into FOLDER/transformers_tests, and prints FOLDER. The source distribution lacks two modules
from which the common tests import mixins (export and generation). Empty mixins replace them.
"""

import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

ABSENT = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
}


def fetch(folder: Path) -> Path:
    """Path of the package transformers_tests in `folder`, for the installed version."""
    package = folder / "transformers_tests"
    stamp = package / "VERSION"
    wanted = version("transformers")
    if stamp.exists() and stamp.read_text() == wanted:
        return package
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary", ":all:", "--no-build-isolation", "--dest", temporary]
        subprocess.run([*command, f"transformers=={wanted}"], check=True)
        (archive,) = Path(temporary).glob("transformers-*.tar.gz")
        unpack(archive, package)
    for name, text in ABSENT.items():
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).parent.joinpath("__init__.py").touch()
        (package / name).write_text(text)
    (package / "__init__.py").touch()
    stamp.write_text(wanted)
    return package


def unpack(archive: Path, package: Path) -> None:
    """Extract the .py files at the top of the archive's tests folder."""
    package.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = Path(member.name).parts
            if len(parts) == 3 and parts[1] == "tests" and parts[2].endswith(".py"):
                (package / parts[2]).write_bytes(tar.extractfile(member).read())


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
    print(sys.argv[1])
