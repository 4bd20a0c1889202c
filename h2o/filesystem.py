"""Writing results: files that appear complete or not at all, locks between processes, and a check
that a folder can be written to before a long run starts.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from h2o.errors import UserError

__all__ = [
    "atomic_write",
    "cache_folder",
    "drafts",
    "locked",
    "make_writable",
    "read_text",
    "writable",
]


def cache_folder() -> Path:
    """What h2o makes once and looks up later lies here: $H2O_CACHE, else $XDG_CACHE_HOME/h2o, else
    ~/.cache/h2o. It need not be there.

    Raises: RuntimeError where there is no home folder.
    """
    if folder := os.environ.get("H2O_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "h2o"


def read_text(file: Path) -> str:
    """A text file in UTF-8, without the mark that some editors put first.

    Raises: UserError where it cannot be read.
    """
    try:
        return file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}") from error


def make_writable(folder: Path) -> None:
    """Creates a folder, if it is not there, and a file in it, which is removed again.

    Raises: UserError where that cannot be done.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"cannot write to {folder} ({error.strerror}): name another output folder"
        ) from error


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[None]:
    """A folder as `make_writable` leaves it; what it had to create is removed again where the block
    fails, unless something lies in it by then.
    """
    parents = [folder, *folder.parents]
    created = [parent for parent in parents if not parent.exists()]
    make_writable(folder)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for parent in created:
                parent.rmdir()
        raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Within the block no other process is in such a block for this file; they wait.

    The lock lies on a hidden file beside it. Its folder must be there.
    """
    hidden = path.parent / f".{path.name}.lock"
    with _spoken_of_as(path, hidden), hidden.open("a") as lock:
        _wait_for(lock.fileno())
        yield


def _wait_for(file: int) -> None:
    """Takes the lock on a file, which whoever closes the file gives back."""
    if sys.platform == "win32":
        import msvcrt

        while True:
            with contextlib.suppress(OSError):  # it gives up after ten seconds
                msvcrt.locking(file, msvcrt.LK_LOCK, 1)
                return
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX)


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A draft beside a file or folder, for the block to make, which then takes its place at once.

    Readers see what was there before or all that is new. A block that fails leaves nothing; only
    of a process that was killed a draft remains, see `drafts`.

    Raises: OSError, which names `path` where the system named the draft.
    """
    draft = path.with_name(f"{_start(path)}{os.getpid()}-{threading.get_ident()}.draft")
    try:
        with _spoken_of_as(path, draft):
            yield draft
            os.replace(draft, path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
        shutil.rmtree(draft, ignore_errors=True)


def drafts(path: Path) -> Iterator[Path]:
    """Those of a path, also what a process that was killed has left."""
    return path.parent.glob(f"{glob.escape(_start(path))}*draft*")


def _start(path: Path) -> str:
    """Of its drafts' names, which are not to be too long where its own name is long."""
    return f".{path.name[:40]}."


@contextlib.contextmanager
def _spoken_of_as(path: Path, hidden: Path) -> Iterator[None]:
    """An OSError of the block names the file that its reader knows, not a hidden one beside it."""
    try:
        yield
    except OSError as error:
        if str(hidden) in (str(error.filename), str(error.filename2)):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
