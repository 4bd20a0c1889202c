"""Files and folders that results go into: whole or not at all, and known to work beforehand."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from h2o.errors import UserError

__all__ = ["alone", "make_writable", "whole"]


def make_writable(folder: Path) -> None:
    """Creates a folder, if it is not there, and a file in it, which goes again.

    Errors: UserError where that cannot be done.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"cannot write to {folder} ({error.strerror}): name another output folder"
        ) from error


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Within the block no other process is in such a block for this file; they wait.

    The lock lies on a hidden file beside it. Its folder must be there.
    """
    with (path.parent / f".{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A draft beside a file, for the block to write, which then takes its place: whole or not at
    all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.draft")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
