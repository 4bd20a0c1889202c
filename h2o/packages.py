"""What is installed, and what stands in the way where the compiled core cannot be imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path


def version(package: str) -> str:
    """The version of a package, "none" without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def versions(*packages: str) -> dict[str, str | None]:
    """The versions of packages, None of one that is not installed."""
    return {x: None if (number := version(x)) == "none" else number for x in packages}


def serves_transformers(version: str) -> bool:
    """Whether this version of transformers has the interfaces that h2o fits into."""
    return version != "none" and (5, 4) <= tuple(int(x) for x in version.split(".")[:2]) < (6,)


def check_transformers(name: str) -> None:
    """Raises an ImportError that says what to do where h2o does not fit into what is installed.

    `name`: of what needs it.
    """
    here = version("transformers")
    if not serves_transformers(here):
        raise ImportError(
            f"{name} needs torch and transformers >= 5.4 and < 6, here is {here}: "
            'pip install "h2o-kv[hf]"'
        )


def is_command() -> bool:
    """Whether this process is `h2o` or `python -m h2o`, whose package is imported before its main.

    Until Python knows which file it is to run, that file's name is -m.
    """
    return Path(sys.argv[0]).name == "h2o" or (sys.argv[0] == "-m" and "h2o" in sys.orig_argv)


def check() -> None:
    """Raises an ImportError that says what to do where the compiled core cannot be imported.

    pip checks the versions of Python and NumPy, but not when another package asks for an older
    NumPy later, and nothing does for a folder on the path.
    """
    if sys.version_info < (3, 10):  # noqa: UP036
        raise ImportError(f"h2o needs Python >= 3.10, here is {sys.version}")
    try:
        from numpy import __version__ as numpy
    except ModuleNotFoundError:
        numpy = "none"
    if numpy.split(".")[0] in ("none", "0", "1"):
        raise ImportError(f'h2o needs numpy >= 2, here is {numpy}: pip install "numpy>=2"')
    if importlib.util.find_spec("h2o._core") is None:
        raise ImportError(
            "h2o._core, the compiled core, is missing. From a source tree, build it: "
            "pip install -e .  Otherwise two packages may have met: H2O.ai's client, `h2o` on "
            "PyPI, has the same import name as h2o-kv, and both cannot be in one environment: "
            "pip uninstall h2o h2o-kv && pip install h2o-kv"
        )
