"""Locks between processes, and files that appear complete or not at all."""

import errno
import os
import stat
import subprocess
import sys
import threading

import pytest

from h2o.utils.filesystem import atomic_write, lock, make_once

pytest.importorskip("filelock")

HOLD = """
import sys, time
from pathlib import Path
from h2o.utils.filesystem import atomic_write, lock

path = Path(sys.argv[1])
with lock(path), atomic_write(path) as draft:
    draft.write_text("half")
    print("locked", flush=True)
    time.sleep(600)
"""
COUNT = """
import sys
from pathlib import Path
from h2o.utils.filesystem import atomic_write, lock

path = Path(sys.argv[1])
for _ in range(100):
    with lock(path):
        number = int(path.read_text())
        with atomic_write(path) as draft:
            draft.write_text(str(number + 1))
"""


SAVE = """
import os, sys
from pathlib import Path
from h2o.utils.filesystem import atomic_write, make_once

def private(path):
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))

def folder(path):
    path.mkdir()
    private(path / "inside")

os.umask(int(sys.argv[2], 8))
for make, name in ((private, "private"), (Path.touch, "plain")):
    with atomic_write(Path(sys.argv[1], name)) as draft:
        make(draft)
make_once(Path(sys.argv[1], "folder"), folder)
"""


def start(code, path):
    return subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)


@pytest.mark.timeout(120)
def test_processes_take_turns(tmp_path):
    path = tmp_path / "number"
    path.write_text("0")
    processes = [start(COUNT, path) for _ in range(3)]
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    assert path.read_text() == "300"
    assert sorted(os.listdir(tmp_path)) == [".number.lock", "number"]


@pytest.mark.timeout(120)
def test_a_process_that_was_killed_holds_nothing(tmp_path):
    """When the holder of a lock is killed, whoever waits for it removes the unfinished draft and
    makes the file."""
    path = tmp_path / "file"
    waiting = threading.Thread(
        target=make_once, args=[path, lambda draft: draft.write_text("whole")], daemon=True
    )
    with start(HOLD, path) as process:
        assert process.stdout.readline().strip() == b"locked"
        waiting.start()
        assert not path.exists()
        process.kill()
        waiting.join()
    assert path.read_text() == "whole"
    assert sorted(os.listdir(tmp_path)) == [".file.lock", "file"]
    make_once(path, lambda draft: pytest.fail("made twice"))


def test_a_maker_that_fails_leaves_nothing(tmp_path):
    path = tmp_path / "folder"

    def fail(draft):
        draft.mkdir()
        (draft / "file").write_text("half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make_once(path, fail)
    assert os.listdir(tmp_path) == [".folder.lock"]


def test_what_has_been_made_needs_no_lock(tmp_path):
    """The folder of a finished file may be read-only."""
    (tmp_path / "file").write_text("whole")
    make_once(tmp_path / "file", lambda draft: pytest.fail("made twice"))
    assert os.listdir(tmp_path) == ["file"]


def test_errors_name_the_file_and_not_its_lock(tmp_path):
    (tmp_path / "in the way").write_text("")
    path = tmp_path / "in the way" / "file"
    for block in (lock, atomic_write):
        with pytest.raises(OSError, match="in the way") as error, block(path):
            path.read_text()
        assert ".lock" not in str(error.value)
        assert "draft" not in str(error.value)


@pytest.mark.skipif(os.name == "nt", reason="Windows lets few users make links")
def test_a_link_stays_and_its_file_is_replaced(tmp_path):
    link, file = tmp_path / "link", tmp_path / "folder" / "file"
    file.parent.mkdir()
    file.write_text("old")
    link.symlink_to(file)
    with atomic_write(link) as draft:
        draft.write_text("new")
    assert link.is_symlink()
    assert file.read_text() == "new"
    assert os.listdir(file.parent) == ["file"]


@pytest.mark.skipif(os.name == "nt", reason="Windows lets few users make links")
def test_links_in_a_circle(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.symlink_to(second)
    second.symlink_to(first)
    with pytest.raises(OSError, match="first") as error, atomic_write(first):
        pytest.fail("a draft was made")
    assert error.value.errno == errno.ELOOP
    assert first.is_symlink()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no named pipes in folders")
def test_a_pipe_or_a_device_is_not_replaced(tmp_path):
    """The draft would take the place of /dev/null, for all processes."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match=r"cannot be replaced.*pipe"), atomic_write(pipe):
        pytest.fail("a draft was made")
    assert pipe.is_fifo()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")
@pytest.mark.parametrize("umask", ["022", "077", "002", "000"])
def test_permissions_are_those_of_open(tmp_path, umask):
    """New files get the umask's, whatever a library gave the draft. Those of a file that is
    replaced stay."""

    def modes():
        names = "private", "plain", "folder/inside"
        return [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in names]

    for _ in range(2):
        subprocess.run([sys.executable, "-c", SAVE, str(tmp_path), umask], check=True)
        assert modes() == [0o666 & ~int(umask, 8)] * 3
    (tmp_path / "private").chmod(0o604)
    (tmp_path / "plain").chmod(0o640)
    subprocess.run([sys.executable, "-c", SAVE, str(tmp_path), umask], check=True)
    assert modes()[:2] == [0o604, 0o640]
    assert sorted(os.listdir(tmp_path)) == [".folder.lock", "folder", "plain", "private"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write all")
def test_a_file_that_may_not_be_written_is_not_replaced(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o400)
    with pytest.raises(PermissionError, match="file"), atomic_write(path):
        pytest.fail("a draft was made")
    assert path.read_text() == "old"
