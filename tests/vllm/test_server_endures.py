"""What a server must survive: bodies of any kind, several API processes, killed processes."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from h2o import H2OConfig
from h2o.vllm.metrics import FOLDER
from tests.vllm.engines import MiB, alone, prompts
from tests.vllm.servers import (
    NEW,
    SERVE,
    SMALL,
    answered,
    metric,
    openai,
    serving,
    together,
    with_tokenizer,
)

httpx = pytest.importorskip("httpx")
psutil = pytest.importorskip("psutil")

BODIES = 400


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return folder, with_tokenizer(folder, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def running(llama, tmp_path_factory):
    with serving(llama[0], tmp_path_factory.mktemp("server") / "log") as server:
        yield server
        assert server.process.poll() is None, server.log.read_text()[-4000:]


# ---- Bodies ----------------------------------------------------------------------------------

VALUES = [
    None, True, False, 0, 1, 3, -1, 10**30, 2**63, -(2**31) - 1, 0.0, 0.5, 1.5, -0.0, 1e308, "",
    "3", "0.5", "a lot", "inf", "\x00", "\ud800", "\u00e9" * 300, [], [8], [[8, 8], [4, 4]], [None],
    {}, {"h2o_heavy": 3}, {"": ""}, [[[[[[]]]]]],
]  # fmt: skip
ARGUMENTS = ["h2o_heavy", "h2o_recent", "h2o_sinks", "h2o_", "h2o_heavy ", "H2O_HEAVY", "other", ""]
FIELDS = [
    "prompt", "max_tokens", "temperature", "vllm_xargs", "stream", "logprobs", "echo", "stop",
    "seed", "top_p", "ignore_eos", "model", "unknown", "logit_bias",
]  # fmt: skip


def body_of(dice: random.Random) -> dict:
    """A valid body, with some fields changed."""
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
    if dice.random() < 0.8:
        names = dice.sample(ARGUMENTS, dice.randint(1, 3))
        body["vllm_xargs"] = {name: dice.choice(VALUES) for name in names}
    for _ in range(dice.choice([0, 0, 1, 2])):
        body[dice.choice(FIELDS)] = dice.choice(VALUES)
    return body


def bytes_of(dice: random.Random) -> bytes:
    """The text of a body, often with bytes changed, removed or inserted."""
    text = bytearray(json.dumps(body_of(dice)).encode())
    for _ in range(dice.choice([0, 0, 1, 2, 8])):
        place = dice.randrange(len(text) + 1)
        part = dice.choice([b"", b"\0", b"NaN", b"-Infinity", b"1e999", b"{", b'"', b"]", b"\xff"])
        text[place : place + dice.choice([0, 1, 5])] = part
    return bytes(text)


def test_no_body_is_an_error_of_the_server(running, llama):
    """Bodies come through the client, and as bytes that the client would not send."""
    dice, codes = random.Random(7), []
    client = openai.OpenAI(
        base_url=f"{running.address}/v1", api_key="none", timeout=60, max_retries=0
    )
    for i in range(BODIES):
        if i % 2:
            sent = bytes_of(dice)
            answer = httpx.post(
                f"{running.address}/v1/completions",
                content=sent,
                headers={"Content-Type": "application/json"},
                timeout=60,
            )
            code, said = answer.status_code, answer.text
        else:
            sent = body_of(dice)
            try:
                client.post("/completions", body=sent, cast_to=object)
                code, said = 200, ""
            except openai.APIStatusError as error:
                code, said = error.status_code, str(error)
            except UnicodeEncodeError:  # the client cannot encode half a surrogate pair
                continue
        assert code == 200 or 400 <= code < 500, (code, sent, said)
        codes.append(code)
    assert len(codes) > BODIES * 0.9
    assert 20 < codes.count(200) < len(codes) - 100
    requests = prompts((5, 40, 100))
    assert together(running.address, requests) == alone(llama[1], requests, H2OConfig(**SMALL), NEW)
    assert metric(running.address, "vllm:num_requests_running") == 0


# ---- Several API processes -------------------------------------------------------------------


def test_two_api_processes_answer_alike(llama, tmp_path):
    """Both answer like an H2OCache and reject wrong requests. The log says which numbers are
    missing."""
    requests, reason = prompts((5, 40, 100)), "h2o_heavy is -1; expected an integer from 0"
    wanted = alone(llama[1], requests, H2OConfig(**SMALL), NEW)
    options = {"command": SERVE, "api-server-count": 2}
    with serving(llama[0], tmp_path / "log", **options) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        asked: set[int] = set()
        for _ in range(50):  # the system gives each connection to one of the processes
            with httpx.Client(base_url=server.address, timeout=60) as client:
                answers = [asked_by(client, prompt) for prompt in requests]
                wrong = asked_by(client, requests[0], vllm_xargs={"h2o_heavy": -1})
                asked.add(other_end(answers[0], family))
            assert [x.json()["choices"][0]["token_ids"] for x in answers] == wanted
            assert wrong.status_code == 400
            assert reason in wrong.text
            if len(asked) == 2:
                break
        assert len(asked) == 2
        assert metric(server.address, "h2o:request_bytes") == 0
        missing = "/metrics lacks h2o's metrics if there are several API processes"
        assert missing in server.log.read_text()


def asked_by(client: Any, prompt: list[int], **more: Any) -> Any:
    """The response to a request. All requests of a client use one connection."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": NEW, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    return client.post("/v1/completions", json=body | more)


def other_end(answer: Any, family: list) -> int:
    """Id of the process that answered, found by the connection, which is still open."""
    _, port = answer.extensions["network_stream"].get_extra_info("client_addr")
    (pid,) = {
        one.pid
        for one in family
        for connection in one.net_connections("tcp")
        if connection.raddr and connection.raddr.port == port
    }
    return pid


# ---- Killed ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "victim"), [(1, "EngineCore"), (2, "Worker")])
def test_a_process_that_is_killed_ends_the_server_and_its_clients_know(
    ranks, victim, llama, tmp_path
):
    """Clients must get errors, in the middle of streams and of whole answers, and when they come
    too late."""
    options = {"max-model-len": 2048, "kv-cache-memory-bytes": 64 * MiB}
    if ranks > 1:
        options |= {"tensor-parallel-size": ranks, "distributed-executor-backend": "mp"}
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    with serving(llama[0], tmp_path / "log", environment, **options) as server:
        api = psutil.Process(server.process.pid)
        family = [api, *api.children(recursive=True)]
        # The environment that a process started with, unless the process title has overwritten it.
        (folder,) = {Path(x[FOLDER]) for x in (one.environ() for one in family[1:]) if FOLDER in x}
        victims = [one for one in family if any(victim in x for x in (one.name(), *one.cmdline()))]
        assert len(victims) == ranks, [(one.name(), one.cmdline()) for one in family]
        together(server.address, [[5, 6, 7]])
        deadline = time.monotonic() + 60
        while not folder.exists():
            assert time.monotonic() < deadline
            time.sleep(0.5)
        errors = asyncio.run(interrupted(server.address, victims[-1].kill))
        assert all(isinstance(error, openai.APIError) for error in errors), errors
        assert all(str(error) for error in errors)
        server.process.wait(90)
        deadline = time.monotonic() + 60
        while any(one.is_running() and one.status() != "zombie" for one in family):
            assert time.monotonic() < deadline, [one for one in family if one.is_running()]
            time.sleep(0.5)
        assert not folder.exists(), list(folder.iterdir())
        assert server.process.returncode is not None
        with pytest.raises(openai.APIConnectionError):
            together(server.address, [[5, 6, 7]])


async def interrupted(address: str, end) -> list:
    """Errors of six clients with long answers when a process ends in the middle."""
    async with openai.AsyncOpenAI(
        base_url=f"{address}/v1", api_key="none", timeout=120, max_retries=0
    ) as client:
        calls = [
            asyncio.create_task(answered(client, [5, 6, 7], i % 2 == 0, max_tokens=2000))
            for i in range(6)
        ]
        await asyncio.sleep(1.5)
        assert not any(call.done() for call in calls)
        end()
        return await asyncio.gather(*calls, return_exceptions=True)
