"""Run programs in several processes, as torchrun does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHELASTIC_ERROR_FILE": ""}
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def start(arguments, launcher=TORCHRUN, **environment):
    """Start `python -m launcher arguments` in the root of the project. Its outputs are text."""
    module = [] if not launcher else ["-m", *launcher]
    return subprocess.Popen(
        [sys.executable, *module, *map(str, arguments)],
        cwd=ROOT,
        env={
            **os.environ,
            **ENVIRONMENT,
            **environment,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def launch(arguments, launcher=TORCHRUN, code=0, **environment):
    """Run a program to its end. Returns its standard output and its standard error."""
    process = start(arguments, launcher, **environment)
    out, error = process.communicate(timeout=420)
    assert process.returncode == code, error[-4000:]
    return out, error
