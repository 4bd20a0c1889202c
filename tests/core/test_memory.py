"""Each allocation of a call fails once: MemoryError, nothing written, and the next call
succeeds."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable

import pytest

from h2o import _core
from tests.core import calls

testcapi = pytest.importorskip("_testcapi")


def fail_one_after_the_other(
    run: Callable[[], object], snapshot: Callable[[], object] = lambda: None
) -> int:
    """Run a call once for each n, with its n-th allocation of Python objects failing. Returns how
    many allocations failed."""
    before = snapshot()
    for n in range(2000):
        failed = False
        testcapi.set_nomemory(n, n + 1)
        try:
            run()
        except MemoryError:
            failed = True
        finally:
            testcapi.remove_mem_hooks()
        if not failed:
            return n
        assert snapshot() == before, f"allocation {n} failed, and something was written"
    raise AssertionError("the call never succeeded")


@pytest.mark.parametrize("name", calls.NAMES)
def test_python_has_no_memory(name):
    call, twin = calls.make(name), calls.make(name)
    assert fail_one_after_the_other(call.run, call.snapshot) > 0
    twin.run()
    assert call.snapshot() == twin.snapshot()


def test_info_has_no_memory():
    assert fail_one_after_the_other(_core.info) > len(_core.info()["levels"])


SHIM = """
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

static atomic_long left = -1;

void fail_at(long n) { left = n; }
long failed(void) { return left < -1; }

/* Nobody but h2o's core allocates so in this process. */
void *aligned_alloc(size_t alignment, size_t bytes) {
    void *memory = NULL;
    if (left >= 0 && left-- == 0) {
        left = -2;
        errno = ENOMEM;
        return NULL;
    }
    return posix_memalign(&memory, alignment, bytes) ? NULL : memory;
}
"""

GENERATE = """
import ctypes, os, sys
import torch
torch.set_num_threads(1)
import h2o
from h2o.compat import with_cache
from tests.hf import tiny

shim = ctypes.CDLL(None)
model = tiny.model("llama")
ids = tiny.prompts(40)[0]

def generate():
    cache = h2o.H2OCache(model.config, heavy=6, recent=6)
    return model.generate(ids, **with_cache(cache), max_new_tokens=12, do_sample=False).tolist()

def child(n):
    shim.fail_at(ctypes.c_long(n))
    try:
        told = generate()
    except MemoryError as error:
        assert "no memory for a workspace of" in str(error), error
    else:
        print("ALL", told, flush=True)
        return 3 if not shim.failed() else 1
    print(generate(), flush=True)
    return 0

# each in a child that has allocated nothing yet, since what is free is used again
for n in range(100):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os._exit(child(n))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        sys.exit(0 if status == 3 and n > 2 else f"allocation {n}: {status}")
"""


@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="ASan allocates first")
def test_the_core_has_no_memory_during_generate(tmp_path):
    pytest.importorskip("torch")
    shim = tmp_path / "shim.so"
    (tmp_path / "shim.c").write_text(SHIM)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", shim, tmp_path / "shim.c"], check=True)
    completed = subprocess.run(
        [sys.executable, "-c", GENERATE], text=True, capture_output=True,
        env={**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout + completed.stderr
    answers = {line.removeprefix("ALL ") for line in completed.stdout.splitlines()}
    assert len(answers) == 1, completed.stdout
    assert len(completed.stdout.splitlines()) > 3, completed.stdout
