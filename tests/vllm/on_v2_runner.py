"""python -m pytest -p tests.vllm.on_v2_runner FILE...: engines run on vLLM's V2 model runner, with
its Triton kernels interpreted. vLLM's CPU build requires a Triton with a backend for CPUs, which
the one on PyPI lacks. Interpreted kernels need no backend."""

from __future__ import annotations

import os
import sys
import types

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}

from triton import backends

RUNNER = "vllm.v1.worker.cpu.model_runner"
"""Module of the V2 runner. vLLM imports it when a worker uses that runner."""

backends.backends["cpu"] = types.SimpleNamespace(driver=None)


def pytest_sessionfinish(session, exitstatus):
    assert exitstatus or RUNNER in sys.modules, "no engine has run on the V2 model runner"
