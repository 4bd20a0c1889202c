"""Installed packages, and errors that name the remedy where the compiled core cannot be imported.

The commands in messages install from where this h2o came: a folder, a git URL or a file.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import shlex
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "h2o-kv"
PACKAGE = Path(__file__).parent
PURE_BUILD = "pure_build.txt"
"""The file by which a build without a core (setup.py, H2O_PURE=1) is told from one whose core is
missing. It holds the version."""
TESTED = ("5.4", "5.24")
"""The oldest and newest version of transformers that all tests have passed with."""
SOURCES = "in the folder of its sources"
"""Stands for the folder of the sources, which an installation from a file does not name."""


def version(package: str) -> str:
    """The version of a package, "none" without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def versions(*packages: str) -> dict[str, str | None]:
    """The versions of packages, None of one that is not installed."""
    return {x: None if (number := version(x)) == "none" else number for x in packages}


def supports_transformers(version: str) -> bool:
    """Whether h2o supports this version of transformers, tested or not."""
    return version != "none" and (5, 4) <= tuple(int(x) for x in version.split(".")[:2]) < (6,)


def check_transformers(name: str) -> None:
    """Raise an ImportError that says what to install where `name` cannot work here."""
    here = version("transformers")
    if not supports_transformers(here):
        raise ImportError(
            f"{name} needs torch and transformers >= 5.4 and < 6, but transformers is {here}: "
            f"{install_command('hf')}"
        )


@contextlib.contextmanager
def explain_missing(name: str) -> Iterator[None]:
    """Within the block, h2o's modules are imported for `name`, and what transformers lacks for them
    becomes an ImportError that names the tested versions.

    Modules of h2o ask transformers for what they need while they are imported, so a name that has
    moved in a later version is an ImportError or AttributeError here.
    """
    check_transformers(name)
    try:
        yield
    except (ImportError, AttributeError) as error:
        if _module_of(error).partition(".")[0] != "transformers":
            raise
        raise ImportError(
            f"{name} does not work with transformers {version('transformers')}: {error}. h2o was "
            f"tested with transformers {TESTED[0]} to {TESTED[1]}: "
            f'pip install "transformers=={TESTED[1]}.*"'
        ) from error


def _module_of(error: ImportError | AttributeError) -> str:
    """The module that lacks what was asked of it."""
    if isinstance(error, ImportError):
        return error.name or ""
    return getattr(error.obj, "__module__", None) or getattr(error.obj, "__name__", "")


def is_command() -> bool:
    """Whether this process is `h2o` or `python -m h2o`, whose package is imported before its main.

    Until Python knows which file it is to run, that file's name is -m.
    """
    return Path(sys.argv[0]).name == "h2o" or (sys.argv[0] == "-m" and "h2o" in sys.orig_argv)


def check() -> None:
    """Raise an ImportError that names the remedy where the compiled core cannot be imported.

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
    if not (has_core() or take_installed_core() or pure_version()):
        raise ImportError(f"h2o._core, the compiled core, is missing{remedy()}")


def has_core() -> bool:
    """Whether the compiled core can be found, and this is no build without it."""
    is_there = importlib.util.find_spec("h2o._core") is not None
    return is_there and not (PACKAGE / PURE_BUILD).is_file()


@functools.cache
def pure_version() -> str:
    """The version of a build without a core, "" of any other.

    In a folder of the sources it is the installed one's, as with `take_installed_core`.
    """
    installed = installed_folder()
    for folder in (PACKAGE, installed):
        if folder is not None and (folder / PURE_BUILD).is_file():
            if folder == PACKAGE or same_sources(folder):
                return (folder / PURE_BUILD).read_text("utf-8").strip()
    return ""


@functools.cache
def warn_without_core() -> None:
    """Warn once a process where this build has no core."""
    if not has_core():
        warnings.warn(without_core(), RuntimeWarning, stacklevel=3)


def without_core() -> str:
    """Warning of a build without a core, with the command that makes one with it."""
    from_file = _origin()[0].endswith(".whl")
    command = f"pip install . {SOURCES}" if from_file else install_command()
    return (
        f"this {DISTRIBUTION} was built without its compiled core (a pure wheel, for where none is "
        f"made for the system): torch operations serve, slower. With a C compiler: {command}"
    )


def take_installed_core() -> bool:
    """Whether the installed h2o-kv has a core of these sources, which is then found.

    In a folder of the sources Python takes them before what was installed from them, and they have
    no core where pip built it elsewhere.
    """
    folder = installed_folder()
    if folder is None or not cores(folder) or not same_sources(folder):
        return False
    sys.modules["h2o"].__path__.append(str(folder))
    return has_core()


def cores(folder: Path) -> list[Path]:
    """The compiled cores in a folder; their ending is the system's."""
    return [path for ending in ("so", "pyd") for path in folder.glob(f"_core*.{ending}")]


def installed_folder() -> Path | None:
    """Where the installed h2o-kv has its package, if that is not this folder."""
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if str(file) == "h2o/packages.py":
            folder = Path(str(file.locate())).parent
            return None if folder.resolve() == PACKAGE.resolve() else folder
    return None


def same_sources(installed: Path) -> bool:
    """Whether each Python file of this folder is as it was installed."""
    files = ((file, installed / file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py"))
    return all(there.is_file() and there.read_bytes() == here.read_bytes() for here, there in files)


def remedy() -> str:
    """Remedy for a missing core, as the rest of a sentence."""
    if (PACKAGE.parent / "setup.py").exists():
        other = installed_folder()
        there = f" (the one in {other} is of other sources)" if other else ""
        folder = shlex.quote(str(PACKAGE.parent))
        return f"{there}: build it in this folder of its sources, pip install -e {folder}"
    return (
        ". In a folder of its sources build it: pip install -e .  Otherwise two packages may have "
        "met: H2O.ai's client, `h2o` on PyPI, has the same import name as h2o-kv, and both cannot "
        f"be in one environment: pip uninstall h2o h2o-kv, then {install_command()}"
    )


def install_command(extra: str = "") -> str:
    """Command that installs h2o-kv from where it came from, with an extra of pyproject.toml."""
    extra = f"[{extra}]" if extra else ""
    url, editable = _origin()
    if not url:  # no index has it
        return f"pip install {shlex.quote(f'.{extra}')} {SOURCES}"
    if url.startswith("file://") and not url.endswith(".whl"):
        folder = unquote(urlsplit(url).path)
        return f"pip install {'-e ' if editable else ''}{shlex.quote(folder + extra)}"
    return f"pip install {shlex.quote(f'{DISTRIBUTION}{extra} @ {url}')}"


def _origin() -> tuple[str, bool]:
    """(URL, whether editable) that h2o-kv was installed from; "" where pip notes none, as with
    --find-links. Where it was not installed, the folder of the sources that this file lies in."""
    try:
        text = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        root = PACKAGE.parent
        return (root.as_uri(), False) if (root / "setup.py").exists() else ("", False)
    if not text:
        return "", False
    origin = json.loads(text)
    url = origin["url"]
    if vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return url, bool(origin.get("dir_info", {}).get("editable"))
