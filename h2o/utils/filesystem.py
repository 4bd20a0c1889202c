"""Write results: files that appear complete or not at all, locks between processes, and a check
that a folder can be written to before a long run starts.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from h2o.errors import UserError


def cache_folder() -> Path:
    """The folder of what h2o makes once and looks up later, which may not exist yet.

    $H2O_CACHE, else $XDG_CACHE_HOME/h2o, else ~/.cache/h2o.

    Raises:
        RuntimeError: there is no home folder.
    """
    if folder := os.environ.get("H2O_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "h2o"


def explain_unreadable(file: str | Path, error: OSError | UnicodeDecodeError) -> str:
    """Say why a text file cannot be read, for an error."""
    reason = error.strerror if isinstance(error, OSError) else "not a text in UTF-8"
    return f"cannot read {file}: {reason}"


def read_text(file: Path) -> str:
    """Read a text file in UTF-8, without the byte order mark that some editors put first.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        return file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(explain_unreadable(file, error)) from error


def make_writable(folder: Path) -> None:
    """Create a folder unless it exists, and check that files can be written there.

    Raises:
        UserError: they cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"cannot write to {folder} ({error.strerror}): name another output folder"
        ) from error


@contextlib.contextmanager
def lock(path: Path, *, waits: bool = True) -> Iterator[None]:
    """Keep other processes out of such blocks for a file or folder.

    The lock is a hidden file beside it, which stays. The system releases the lock of a process that
    was killed.

    Args:
        waits: for the end of another process's block, instead of raising an error.

    Raises:
        UserError: another process is in such a block, and `waits` is False.
    """
    from filelock import FileLock, Timeout  # which comes with torch: profiles do without

    hidden = path.parent / f".{path.name}.lock"
    held = FileLock(hidden, timeout=-1 if waits else 0)
    with _name_in_errors(path, hidden):
        try:
            held.acquire()
        except Timeout as error:
            raise UserError(
                f"another process writes to {path}: wait until it has ended, or name another file"
            ) from error
        try:
            yield
        finally:
            held.release()


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Replace a file or folder at once by a draft beside it, which the block makes.

    Readers see what was there before, or all that is new. A block that fails leaves nothing. The
    draft of a process that was killed remains. A link stays, and what it points to is replaced.

    Raises:
        OSError: with the name of `path` instead of the draft's.
    """
    target = path.resolve()
    draft = target.with_name(f"{_draft_prefix(path)}{os.getpid()}-{threading.get_ident()}.draft")
    try:
        with _name_in_errors(path, draft):
            yield draft
            os.replace(draft, target)
    finally:
        _remove(draft)


def make_once(path: Path, make: Callable[[Path], Any]) -> None:
    """Make a file or folder in a cache, unless it is there. `make` gets the path of its draft.

    One of several processes makes it, the others wait. The draft of a process that was killed is
    removed. Needs no right to write if all is there.

    Raises:
        OSError: the folder cannot be written to.
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


def _draft_prefix(path: Path) -> str:
    """The start of the drafts' names, cut so that no file system finds them too long."""
    return f".{path.name[:40]}."


@contextlib.contextmanager
def _name_in_errors(path: Path, hidden: Path) -> Iterator[None]:
    """Let an OSError of the block name the file that its reader knows, not a hidden one."""
    try:
        yield
    except OSError as error:
        if str(hidden) in (str(error.filename), str(error.filename2)):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
