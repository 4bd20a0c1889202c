"""vLLM servers on tiny models, and clients for them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from h2o import models
from tests.launch import ENVIRONMENT, ROOT
from tests.vllm.engines import tiny

openai = pytest.importorskip("openai")

SMALL = {"heavy": 8, "recent": 8}
NEW = 24
START = 900
"""Seconds until a server must answer, even on a busy machine."""


class Server(NamedTuple):
    """A running server."""

    address: str
    process: subprocess.Popen
    log: Path


def with_tokenizer(folder: Path, **config: Any) -> Any:
    """Make a tiny model with the default model's tokenizer and save it in a folder."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models.embedded_folder())
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": 0}
    return tiny("llama", folder, head_dim=32, **sizes, **config)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def started(
    command: list, model: Path, log: Path, environment: dict[str, str] | None, options: dict
) -> subprocess.Popen:
    """Start a vLLM process with these options and those common to all tests."""
    options = {
        "model": model, "served-model-name": "tiny", "dtype": "float32", "max-model-len": 256,
        "max-num-seqs": 32, "kv-cache-memory-bytes": 2_000_000,
        "additional-config": json.dumps({"h2o": SMALL}),
    } | options  # fmt: skip
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return launched([sys.executable, *command, "--enforce-eager", *flags], log, environment)


def launched(
    command: list, log: Path, environment: dict[str, str] | None = None
) -> subprocess.Popen:
    """Run a command in the project's root, with the environment of servers."""
    with log.open("w") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ
            | ENVIRONMENT
            | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": str(ROOT)}
            | (environment or {}),
        )


API_SERVER = ["-m", "vllm.entrypoints.openai.api_server"]
SERVE = [ROOT / "tests/vllm/serve.py"]


@contextlib.contextmanager
def serving(
    model: Path,
    log: Path,
    environment: dict[str, str] | None = None,
    command: list = API_SERVER,
    **options: Any,
) -> Iterator[Server]:
    """Start a server and wait until it answers."""
    port = free_port()
    options = {"port": port, "host": "127.0.0.1"} | options
    with answering(started(command, model, log, environment, options), port, log) as server:
        yield server


@contextlib.contextmanager
def answering(
    process: subprocess.Popen, port: int, log: Path, path: str = "/health"
) -> Iterator[Server]:
    """Wait until a process answers. It ends with the block."""
    try:
        deadline = time.monotonic() + START
        while True:
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5)
                break
            except OSError:
                time.sleep(1)
        yield Server(f"http://127.0.0.1:{port}", process, log)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def metric(server: str, name: str) -> float:
    """A number of `/metrics`, summed over its labels."""
    text = urllib.request.urlopen(f"{server}/metrics", timeout=30).read().decode()
    return sum(float(x) for x in re.findall(rf"^{name}(?:{{.*}})? ([\d.e+]+)$", text, re.M))


async def answered(client, prompt: list[int], stream: bool, leave: bool = False, **body) -> list:
    request = {
        "model": "tiny", "prompt": prompt, "max_tokens": NEW, "temperature": 0,
        "extra_body": {"ignore_eos": True, "return_token_ids": True, **body},
    }  # fmt: skip
    if not stream:
        out = await client.completions.create(**request)
        return out.choices[0].token_ids
    tokens = []
    async with await client.completions.create(stream=True, **request) as events:
        async for event in events:
            tokens += event.choices[0].token_ids
            if leave and len(tokens) > 3:
                break
    return tokens


def together(server: str, requests: list, headers: Any = None, **options) -> list:
    """Answers to all requests at once, one client per request. Every second one is a stream."""

    async def run():
        shared = {"base_url": f"{server}/v1", "api_key": "none", "default_headers": headers}
        async with openai.AsyncOpenAI(**shared, timeout=300) as client:
            calls = [
                answered(client, prompt, **{"stream": i % 2 == 0} | options)
                for i, prompt in enumerate(requests)
            ]
            return await asyncio.gather(*calls)

    return asyncio.run(run())
