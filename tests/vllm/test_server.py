"""The OpenAI server with h2o's pages, and the `openai` client: streams, many at once, leaving."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from h2o import H2OConfig, models
from tests.launch import ENVIRONMENT, ROOT
from tests.vllm.engines import alone, prompts, tiny

openai = pytest.importorskip("openai")

SMALL = {"heavy": 8, "recent": 8}
NEW = 24
CLIENTS = 64


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny model with the tokenizer of the default one."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("llama")
    tokenizer = AutoTokenizer.from_pretrained(models.embedded_folder())
    tokenizer.save_pretrained(folder)
    return folder, tiny("llama", folder, head_dim=32, vocab_size=len(tokenizer), pad_token_id=0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def server(llama, tmp_path_factory):
    """The address of a server. `vllm serve` of the CPU build ends before it reads an option."""
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    options = {
        "model": llama[0], "served-model-name": "tiny", "port": port, "host": "127.0.0.1",
        "dtype": "float32", "max-model-len": 256, "max-num-seqs": 32,
        "kv-cache-memory-bytes": 2_000_000, "additional-config": json.dumps({"h2o": SMALL}),
        "logits-processors": "h2o.vllm.plugin:Budgets",
    }  # fmt: skip
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        )
    try:
        for _ in range(400):
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                time.sleep(1)
        yield f"http://127.0.0.1:{port}"
        assert process.poll() is None, log.read_text()[-4000:]
    finally:
        process.terminate()
        process.wait(60)


def metric(server: str, name: str) -> float:
    text = urllib.request.urlopen(f"{server}/metrics", timeout=30).read().decode()
    return sum(float(x) for x in re.findall(rf"^vllm:{name}(?:{{.*}})? ([\d.e+]+)$", text, re.M))


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


def together(server: str, requests: list, **options) -> list:
    """The answers of as many clients as requests, all at once; every other one is a stream."""

    async def run():
        address = f"{server}/v1"
        async with openai.AsyncOpenAI(base_url=address, api_key="none", timeout=300) as client:
            calls = [
                answered(client, prompt, **{"stream": i % 2 == 0} | options)
                for i, prompt in enumerate(requests)
            ]
            return await asyncio.gather(*calls)

    return asyncio.run(run())


def texts(number: int, seed: int) -> list[list[int]]:
    lengths = tuple(3 + 37 * i % 200 for i in range(number))
    return prompts(lengths, seed)


def test_clients_are_answered_as_an_h2o_cache_answers(server, llama):
    requests = texts(CLIENTS, 1)
    wanted = alone(llama[1], requests, H2OConfig(**SMALL), NEW)
    answers = together(server, requests)
    assert [x == y for x, y in zip(answers, wanted, strict=True)] == [True] * CLIENTS
    assert metric(server, "num_preemptions_total") == 0


def test_requests_have_budgets_of_their_own_within_a_page(server, llama):
    requests = texts(6, 4)
    for asked, config in (((4, 3), H2OConfig(4, 3)), ((90, 5), H2OConfig(11, 5))):
        arguments = dict(zip(("h2o_heavy", "h2o_recent"), asked, strict=True))
        answers = together(server, requests, vllm_xargs=arguments)
        assert answers == alone(llama[1], requests, config, NEW)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"h2o_heavy": "a lot"}, "h2o_heavy must be a number of tokens"),
        ({"h2o_heavy": -3}, "h2o_heavy must be from 0"),
        ({"h2o_recent": 1.5}, "h2o_recent=1.5: a float is a fraction"),
        ({"h2o_heav": 3}, "h2o_heav: a request has h2o_heavy and h2o_recent"),
    ],
)
def test_wrong_budgets_are_errors_of_the_client(server, arguments, reason):
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", timeout=60, max_retries=0)
    with pytest.raises(openai.BadRequestError, match=reason):
        client.completions.create(
            model="tiny", prompt=[5, 6], max_tokens=4, extra_body={"vllm_xargs": arguments}
        )


def test_clients_that_leave_change_nothing(server, llama):
    left = together(server, texts(12, 2), stream=True, leave=True)
    assert all(3 < len(x) < NEW for x in left)
    requests = texts(8, 3)
    assert together(server, requests) == alone(llama[1], requests, H2OConfig(**SMALL), NEW)
    assert metric(server, "num_requests_running") == 0


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [2] * 300},
        {"prompt": [10**9]},
        {"prompt": []},
        {"max_tokens": -1},
        {"temperature": "hot"},
    ],
)
def test_wrong_bodies_are_errors_of_the_client(server, body):
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", timeout=60, max_retries=0)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(**{"model": "tiny", "prompt": [5, 6], "max_tokens": 4} | body)
    assert together(server, [[5, 6, 7]])
