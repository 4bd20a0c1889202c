"""What the compiled core needs from Python: the limited API, or an interpreter without a GIL."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import threading

import pytest

from h2o import _core
from tests.core.calls import make
from tests.core.producers import Table

FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


@pytest.mark.skipif(FREE_THREADED, reason="knows no limited API")
def test_one_binary_serves_all_versions():
    assert _core.__file__.endswith("_core.abi3.so")


@pytest.mark.skipif(not FREE_THREADED, reason="an interpreter with a GIL")
def test_the_gil_stays_off():
    program = "import sys, h2o; sys.exit(sys._is_gil_enabled())"
    assert subprocess.run([sys.executable, "-W", "error", "-c", program]).returncode == 0


def test_threads_that_bring_new_types():
    """All threads share the cache of types and their tables, so new types in several threads must
    not corrupt it."""
    calls = [make("step") for _ in range(4)]
    start = threading.Barrier(len(calls))
    failed = []

    def steps(call):
        start.wait()
        for _ in range(50):
            query = Table(call.get("query"))
            call.put("query", query.tensor()).run()
            if query.calls != 1:
                failed.append(query)

    threads = [threading.Thread(target=steps, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    reference = make("step")
    for _ in range(50):
        reference.run()
    for call in calls:
        for tensor in call.written:
            assert call.get(tensor).tobytes() == reference.get(tensor).tobytes()
