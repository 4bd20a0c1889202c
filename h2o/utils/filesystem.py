"""Writing results: atomic writes, locks between processes, and a check before a long run that a
folder is writable.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from h2o.errors import UserError


def cache_folder() -> Path:
    """h2o's folder for files that are made once and reused. It may not exist yet.

    It is $H2O_CACHE, $XDG_CACHE_HOME/h2o or ~/.cache/h2o, in this order.

    Raises:
        RuntimeError: there is no home folder.
    """
    if folder := os.environ.get("H2O_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "h2o"


def explain_unreadable(file: str | Path, error: OSError | UnicodeDecodeError) -> str:
    """Error message that says why a text file cannot be read."""
    reason = error.strerror if isinstance(error, OSError) else "not a text in UTF-8"
    return f"cannot read {file}: {reason}"


def read_text(file: Path) -> str:
    """Read a UTF-8 text file, without the byte order mark that some editors write.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        return file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(explain_unreadable(file, error)) from error


def make_writable(folder: Path) -> None:
    """Create a folder unless it exists, and check that it is writable.

    Raises:
        UserError: it is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"cannot write to {folder} ({error.strerror}): name another output folder"
        ) from error


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Lock a file or folder against other processes that use this function, which wait.

    The lock is a hidden file next to it, which is not removed. If a process is killed, the system
    releases its lock.
    """
    from filelock import FileLock  # comes with torch, which profiles do not need

    hidden = path.parent / f".{path.name}.lock"
    with _name_in_errors(path, hidden), FileLock(hidden):
        yield


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Replace a file or folder atomically by a draft next to it, which the block writes.

    Readers see either the old or the complete new content. If the block fails, its draft is
    removed; if the process is killed, the draft remains. If `path` is a link, its target is
    replaced. Permissions are those after `open(path, "w")`: a file that exists keeps its own, and
    new files get those that the umask and the folder give.

    Raises:
        OSError: names `path` instead of the draft. Or `path` is a device or a pipe, such as
            /dev/null, which the draft would replace for all processes. Or `path` is a file that may
            not be written to.
    """
    target = resolve(path)
    if is_special(target):
        raise OSError(errno.EINVAL, "Not a file: a device or a pipe cannot be replaced", str(path))
    if target.is_file() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    draft = target.with_name(f"{_draft_prefix(path)}{os.getpid()}-{threading.get_ident()}.draft")
    try:
        with _name_in_errors(path, draft):
            yield draft
            _set_permissions(draft, target)
            os.replace(draft, target)
    finally:
        _remove(draft)


def resolve(path: str | Path) -> Path:
    """The absolute path behind all links. Raises: OSError for links that lead in a circle, for
    which `Path.resolve` raises RuntimeError or, from Python 3.13 on, returns a link."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return target


def is_special(path: Path) -> bool:
    """Whether a path exists and is neither a file nor a folder: a device, a pipe or a socket."""
    return path.exists() and not (path.is_file() or path.is_dir())


def make_once(path: Path, make: Callable[[Path], Any]) -> None:
    """Make a file or folder in a cache, unless it exists. `make` gets the path of a draft.

    One of several processes makes it while the others wait. Drafts of killed processes are removed.
    If the file or folder exists, write permission is not needed.

    Raises:
        OSError: the folder is not writable.
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock(path):
        for draft in path.parent.glob(f"{glob.escape(_draft_prefix(path))}*draft*"):
            _remove(draft)
        if not path.exists():
            with atomic_write(path) as draft:
                make(draft)


def _remove(draft: Path) -> None:
    with contextlib.suppress(OSError):
        draft.unlink()
    shutil.rmtree(draft, ignore_errors=True)


def _set_permissions(draft: Path, target: Path) -> None:
    """Give a draft, or all files in it if it is a folder, the permissions of the file that it
    replaces or those of a new file. Some libraries, such as safetensors, make files that only their
    owner can read."""
    if target.is_file():
        mode = target.stat().st_mode
    else:
        probe = draft.with_name(f"{draft.name}.probe")
        probe.touch()  # reading the umask would change it for other threads
        mode = probe.stat().st_mode
        probe.unlink()
    for file in draft.rglob("*") if draft.is_dir() else [draft]:
        own = file.lstat().st_mode
        if stat.S_ISREG(own) and own != mode:
            file.chmod(stat.S_IMODE(mode))


def _draft_prefix(path: Path) -> str:
    """Prefix of the names of drafts, truncated so that no file system rejects them as too long."""
    return f".{path.name[:40]}."


@contextlib.contextmanager
def _name_in_errors(path: Path, hidden: Path) -> Iterator[None]:
    """Make an OSError from the block name the file that the user knows instead of a hidden one."""
    try:
        yield
    except OSError as error:
        if str(hidden) in (str(error.filename), str(error.filename2)):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
