"""Versions of installed packages, and errors with the remedy if a package or the core is missing.

Commands in messages install h2o from where this copy came from: a folder, a git URL or a file.
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
"""Marks a build without a core (setup.py, H2O_PURE=1), as opposed to one whose core is missing. The
file contains the version."""
TESTED = ("5.16", "5.24")
"""The oldest and the newest version of transformers with which all tests have passed."""
SOURCES = "in its source folder"
"""Names the source folder in commands. Its path is unknown after an installation from a file."""


def version(package: str) -> str:
    """The version of a package, "none" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def versions(*packages: str) -> dict[str, str | None]:
    """The versions of packages, None for one that is not installed."""
    return {x: None if (number := version(x)) == "none" else number for x in packages}


def supports_transformers(version: str) -> bool:
    """Whether h2o supports this version of transformers, tested or not."""
    return version != "none" and (5, 16) <= tuple(int(x) for x in version.split(".")[:2]) < (6,)


def check_transformers(name: str) -> None:
    """Raise an ImportError that says what to install, unless this transformers supports `name`."""
    here = version("transformers")
    if not supports_transformers(here):
        raise ImportError(
            f"{name} needs torch and transformers >= 5.16 and < 6, but transformers is {here}: "
            f"{install_command('hf')}"
        )


@contextlib.contextmanager
def explain_missing(name: str) -> Iterator[None]:
    """Import h2o's modules for `name` inside the block. If transformers lacks something that they
    need, raise an ImportError that names the tested versions.

    h2o's modules look up names in transformers while they are imported. A name that a later version
    has moved therefore raises ImportError or AttributeError inside the block.
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
    """The module in which an import or an attribute was not found."""
    if isinstance(error, ImportError):
        return error.name or ""
    return getattr(error.obj, "__module__", None) or getattr(error.obj, "__name__", "")


def is_command() -> bool:
    """Whether this process is `h2o` or `python -m h2o`.

    With `python -m` the package is imported before the main file is known, and argv[0] is "-m".
    """
    return Path(sys.argv[0]).name == "h2o" or (sys.argv[0] == "-m" and "h2o" in sys.orig_argv)


def check() -> None:
    """Raise an ImportError that names the remedy if the compiled core cannot be imported.

    pip checks the versions of Python and NumPy at installation, but a package installed later may
    replace NumPy by an older one, and a folder on the path is not checked at all.
    """
    if sys.version_info < (3, 10):  # noqa: UP036
        raise ImportError(f"h2o needs Python >= 3.10, but this is {sys.version}")
    try:
        from numpy import __version__ as numpy
    except ModuleNotFoundError:
        numpy = "none"
    if numpy.split(".")[0] in ("none", "0", "1"):
        raise ImportError(f'h2o needs numpy >= 2, but numpy is {numpy}: pip install "numpy>=2"')
    if not (has_core() or take_installed_core() or pure_version()):
        raise ImportError(f"h2o._core, the compiled core, is missing{remedy()}")


def has_core() -> bool:
    """Whether the compiled core can be found and this is not a build without core."""
    is_there = importlib.util.find_spec("h2o._core") is not None
    return is_there and not (PACKAGE / PURE_BUILD).is_file()


@functools.cache
def pure_version() -> str:
    """The version of a build without a core, "" for any other build.

    In a source folder it is the installed one's, as with `take_installed_core`.
    """
    installed = installed_folder()
    for folder in (PACKAGE, installed):
        if folder is not None and (folder / PURE_BUILD).is_file():
            if folder == PACKAGE or same_sources(folder):
                return (folder / PURE_BUILD).read_text("utf-8").strip()
    return ""


@functools.cache
def warn_without_core() -> None:
    """Warn, once per process, if this build has no core."""
    if not has_core():
        warnings.warn(without_core(), RuntimeWarning, stacklevel=3)


def without_core() -> str:
    """The warning of a build without a core, with the command that builds one."""
    from_file = _origin()[0].endswith(".whl")
    command = f"pip install . {SOURCES}" if from_file else install_command()
    return (
        f"this {DISTRIBUTION} was built without its compiled core (H2O_PURE=1, or a pure wheel) "
        f"and uses slower torch operations. If there is a C compiler, run {command}"
    )


def take_installed_core() -> bool:
    """If the installed h2o-kv has a core of these sources, put it on the path of this package.

    In a source folder Python imports the sources instead of the installed package. The sources have
    no core if pip built it elsewhere.

    Returns:
        Whether there is now a core.
    """
    folder = installed_folder()
    if folder is None or not same_sources(folder):
        return False
    sys.modules["h2o"].__path__.append(str(folder))
    return has_core()


def installation() -> importlib.metadata.Distribution | None:
    """What pip has recorded about the installed h2o-kv, None if it is not installed.

    A build leaves `h2o_kv.egg-info` in the source folder. It lists sources instead of installed
    files, and Python finds it first if it runs in that folder.
    """
    found = importlib.metadata.distributions(name=DISTRIBUTION)
    return next((x for x in found if x.read_text("SOURCES.txt") is None), None)


def installed_folder() -> Path | None:
    """Folder of the installed h2o package, None if it is this folder or nothing is installed."""
    installed = installation()
    for file in (installed and installed.files) or []:
        if str(file) == "h2o/packages.py":
            folder = Path(str(file.locate())).parent
            return None if folder.resolve() == PACKAGE.resolve() else folder
    return None


def same_sources(installed: Path) -> bool:
    """Whether each Python file of this folder equals the installed one."""
    files = ((file, installed / file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py"))
    return all(there.is_file() and there.read_bytes() == here.read_bytes() for here, there in files)


def remedy() -> str:
    """Remedy for a missing core, as the end of a sentence."""
    if (PACKAGE.parent / "setup.py").exists():
        other = installed_folder()
        there = f" (the one in {other} was built from other sources)" if other else ""
        folder = shlex.quote(str(PACKAGE.parent))
        return f"{there}: build it in this source folder with pip install -e {folder}"
    return (
        ". In a source folder, build it: pip install -e .  Otherwise another package may be in the "
        "way: H2O.ai's client, `h2o` on PyPI, has the same import name as h2o-kv, and an "
        f"environment cannot have both: pip uninstall h2o h2o-kv, then {install_command()}"
    )


def install_command(extra: str = "") -> str:
    """Command that installs h2o-kv from its origin, with an extra of pyproject.toml."""
    extra = f"[{extra}]" if extra else ""
    url, editable = _origin()
    if not url:  # h2o-kv is not on any package index
        return f"pip install {shlex.quote(f'.{extra}')} {SOURCES}"
    if url.startswith("file://") and not url.endswith(".whl"):
        folder = unquote(urlsplit(url).path)
        return f"pip install {'-e ' if editable else ''}{shlex.quote(folder + extra)}"
    return f"pip install {shlex.quote(f'{DISTRIBUTION}{extra} @ {url}')}"


def _origin() -> tuple[str, bool]:
    """(URL that h2o-kv was installed from, whether the installation is editable). The URL is "" if
    pip recorded none, as with --find-links, and this source folder if h2o-kv is not installed."""
    installed = installation()
    if installed is None:
        root = PACKAGE.parent
        return (root.as_uri(), False) if (root / "setup.py").exists() else ("", False)
    text = installed.read_text("direct_url.json")
    if not text:
        return "", False
    origin = json.loads(text)
    url = origin["url"]
    if vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return url, bool(origin.get("dir_info", {}).get("editable"))
