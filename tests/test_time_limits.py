"""The options in pyproject.toml end a test that hangs, whatever it waits for."""

from __future__ import annotations

import configparser
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

HANGS = {
    "test_thread": """
import threading
def test_thread():
    thread = threading.Thread(target=threading.Event().wait)
    thread.start()
    thread.join()
""",
    "test_task": """
import asyncio
def test_task():
    async def wait_for_ever():
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass
    asyncio.run(wait_for_ever())
""",
    "test_pool": """
from concurrent.futures import ThreadPoolExecutor
import threading
def test_pool():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(threading.Event().wait).result()
""",
}


@pytest.mark.parametrize("name", HANGS)
def test_a_test_that_hangs_is_ended_and_named(tmp_path, name):
    file = tmp_path / "test_that_hangs.py"
    file.write_text(HANGS[name])
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "-o", "timeout=1"]
    done = subprocess.run(
        [*command, "--rootdir", tmp_path, "-p", "no:cacheprovider", file],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Timeout" in done.stdout + done.stderr
    assert f"in {name}" in done.stdout + done.stderr


def test_every_test_has_a_limit(request):
    assert 0 < float(request.config.getini("timeout")) <= 600


def test_the_suite_of_transformers_has_the_same_limit(request):
    path = ROOT / "tests" / "transformers_suite" / "pytest.ini"
    options = configparser.ConfigParser()
    options.read(path, "utf-8")
    for name in ("timeout", "timeout_method"):
        assert options["pytest"][name] == str(request.config.getini(name))
