"""`files_fingerprint`: a hash of the contents of files that are not loaded.

sha256 reads 1.2 to 1.4 GB per second and core, and is the fastest of hashlib's functions on
processors with instructions for it. The digest of a large file is therefore stored, in the folder
`digests` of `h2o.utils.filesystem.cache_folder`, with the file's inode, size and times. The next
run reads the digest instead of the file, unless any of these has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from h2o.utils.filesystem import atomic_write, cache_folder

LARGE = 2**20
"""Size in bytes from which a file's digest is stored."""

SETTLED = 2 * 10**9
"""Nanoseconds for which a file must not have changed before its digest is stored. Later writes then
change its times, because no file system's clock is coarser."""


def files_fingerprint(texts: Iterable[str]) -> str:
    """16 hexadecimal digits for the files and folders named in these texts, "" if none exists.

    The hash covers the names and the contents of the files.

    Raises:
        OSError: a file cannot be read.
    """
    files = sorted({file for text in texts for path in _paths(text) for file in _files_below(path)})
    digest = hashlib.sha256()
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for file, content in zip(files, threads.map(_file_digest, files), strict=True):
            digest.update(f"{file} {content}".encode())
    return digest.hexdigest()[:16] if files else ""


def _file_digest(file: Path) -> str:
    """The sha256 of a file's contents, which is read only if no digest of it is stored."""
    state = _state(file)
    is_large = file.stat().st_size >= LARGE
    if is_large and (stored := _stored_digest(file, state)):
        return stored
    now = time.time_ns()
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(LARGE))
    with file.open("rb", buffering=0) as content:
        while size := content.readinto(buffer):
            digest.update(buffer[:size])
    # A state that is newer, or that has changed meanwhile, may be that of other contents.
    if is_large and max(state[2:]) < now - SETTLED and state == _state(file):
        with contextlib.suppress(OSError, RuntimeError):  # if there is no folder for it
            place = _place(file)
            place.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(place) as draft:
                draft.write_text(json.dumps([state, digest.hexdigest()]), "utf-8")
    return digest.hexdigest()


def _stored_digest(file: Path, state: list[int]) -> str | None:
    """The stored digest of a file in this state."""
    with contextlib.suppress(OSError, RuntimeError, ValueError, TypeError):
        stored_state, digest = json.loads(_place(file).read_text("utf-8"))
        return str(digest) if stored_state == state else None
    return None


def _state(file: Path) -> list[int]:
    """What changes when a file is written or replaced: its inode, size, and times of modification
    and of change, of which no program can set the latter. Links are followed."""
    stat = file.stat()
    return [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _place(file: Path) -> Path:
    """The file in which the digest of a file is stored."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(file))).hexdigest()[:32]
    return cache_folder() / "digests" / f"{name}.json"


def _paths(text: str) -> Iterator[Path]:
    """Paths in an argument: the text itself, those in JSON, or those in name=path,name=path. A path
    may contain commas and equals signs, as "lr=0.1" does."""
    try:
        listed = _strings(json.loads(text))
    except (ValueError, RecursionError):
        listed = [part.strip() for part in text.split(",")]
    values = [part.partition("=")[2] for part in listed]
    for part in dict.fromkeys((text, *listed, *values)):
        # Unlike Path.exists, this is also False for a text too long for a file name.
        if part and os.path.exists(part):
            yield Path(part).resolve()


def _strings(content: object) -> list[str]:
    """All texts in a JSON value."""
    if isinstance(content, dict | list):
        inner = content.values() if isinstance(content, dict) else content
        return [text for value in inner for text in _strings(value)]
    return [content] if isinstance(content, str) else []


def _files_below(path: Path) -> list[Path]:
    """The path itself or all files in a folder, without devices and pipes, which have no end."""
    paths = path.rglob("*") if path.is_dir() else [path]
    return [file for file in paths if file.is_file()]
