"""Clients of every kind at once, with pages for twelve requests, and SIGTERM in their middle."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from h2o import H2OConfig
from tests.vllm.engines import after_prefix, alone, prompts
from tests.vllm.servers import (
    NEW,
    SMALL,
    Server,
    answered,
    metric,
    openai,
    serving,
    with_tokenizer,
)

psutil = pytest.importorskip("psutil")

LEFT, REFUSED = "left", "refused"
KINDS = 8
PREFIX = 30
ROOM = SMALL["heavy"] + SMALL["recent"]
BUDGETS = (1, 3, ROOM // 2, ROOM - 1, 10**9)
WRONG = (
    {"vllm_xargs": {"h2o_heavy": -1}},
    {"vllm_xargs": {"h2o_prefix": "x"}},
    {"vllm_xargs": {"h2o_pinned": "9:1"}},
    {"vllm_xargs": {"h2o_context": 0}},
    {"prompt": []},
    {"prompt": [5] * 3000},
    {"max_tokens": -1},
    {"temperature": "hot"},
)


async def one_of_many(client: Any, i: int, requests: list) -> Any:
    """The answer to the i-th client, LEFT for one that goes, REFUSED for a wrong body."""
    kind, turn, prompt = i % KINDS, i // KINDS, requests[i % len(requests)]
    if kind == 0:
        arguments = dict.fromkeys(("h2o_heavy", "h2o_recent"), BUDGETS[turn % len(BUDGETS)])
        return await answered(client, prompt, False, vllm_xargs=arguments)
    if kind == 1:
        await answered(client, prompt, True, leave=True)
        return LEFT
    if kind == 2:
        call = asyncio.create_task(answered(client, prompt, False))
        await asyncio.sleep(0.02 * (turn % 5))
        call.cancel()
        return LEFT
    if kind == 3:
        body = {"prompt": prompt} | WRONG[turn % len(WRONG)]
        with pytest.raises(openai.BadRequestError):
            await answered(client, stream=False, **body)
        return REFUSED
    if kind == 4:
        await disconnect(client.base_url, prompt, whole=turn % 2 == 0)
        return LEFT
    more = {"vllm_xargs": {"h2o_prefix": PREFIX}} if kind < 7 else {}
    return await answered(client, prompt, kind == 5, **more)


async def disconnect(address: Any, prompt: list[int], whole: bool) -> None:
    """Send a request, or half of its body, and close the connection at once."""
    body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": NEW}).encode()
    _, writer = await asyncio.open_connection(address.host, address.port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address.host}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + (body if whole else body[: len(body) // 2]))
    await writer.drain()
    writer.close()


def expected(model: Any, requests: list) -> Callable[[int], Any]:
    """What the i-th client gets."""
    plain = alone(model, requests, H2OConfig(**SMALL), NEW)
    parted = after_prefix(model, requests, PREFIX, H2OConfig(**SMALL))
    budgets = []
    for amount in BUDGETS:
        recent = min(amount, ROOM)
        config = H2OConfig(heavy=min(amount, ROOM - recent), recent=recent)
        budgets.append(alone(model, requests, config, NEW))

    def of_client(i: int) -> Any:
        answers = {
            0: budgets[i // KINDS % len(BUDGETS)], 3: [REFUSED] * len(requests), 5: parted,
            6: parted, 7: plain,
        }.get(i % KINDS, [LEFT] * len(requests))  # fmt: skip
        return answers[i % len(requests)]

    return of_client


async def load(server: Server, requests: list, clients: int, end: bool = False) -> list:
    """What all clients get, and the errors. With `end` SIGTERM comes when a quarter is done. vLLM,
    also without h2o, does not end requests that come in the moment in which its engine ends: these
    wait until their clients give up."""
    async with openai.AsyncOpenAI(
        base_url=f"{server.address}/v1", api_key="none", timeout=30 if end else 600, max_retries=0
    ) as client:
        calls = [asyncio.create_task(one_of_many(client, i, requests)) for i in range(clients)]
        if end:
            while sum(call.done() for call in calls) < clients // 4:
                await asyncio.sleep(0.05)
            server.process.terminate()
        return await asyncio.gather(*calls, return_exceptions=True)


def wait_until(condition: Callable[[], bool], state: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, state()
        time.sleep(0.5)


def counts(address: str) -> dict[str, float]:
    names = {
        "answered": 'vllm:request_success_total{.*finished_reason="length".*}',
        "tokens": "vllm:generation_tokens_total",
        "refused": 'http_requests_total{.*status="4xx".*}',
        "failed": 'http_requests_total{.*status="5xx".*}',
    }
    return {name: metric(address, pattern) for name, pattern in names.items()}


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("clients", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_a_mixed_load_and_the_end_of_the_server_amid_it(clients, tmp_path):
    """Who is answered is answered right, metrics count all, pages and file descriptors are free
    afterwards. Then SIGTERM comes amid the same load: nobody waits for good, no process stays."""
    folder = tmp_path / "model"
    model = with_tokenizer(folder, max_position_embeddings=4096)
    (beginning,) = prompts((PREFIX,), 7)
    requests = [beginning + rest for rest in prompts((5, 60, 20, 1, 33), 8)]
    wanted = expected(model, requests)
    kinds = [wanted(i) for i in range(clients)]
    refused, left = kinds.count(REFUSED), kinds.count(LEFT)
    whole = clients - refused - left
    options = {"max-model-len": 2048, "num-gpu-blocks-override": 13}
    with serving(folder, tmp_path / "log", **options) as server:
        address = server.address
        family = [api := psutil.Process(server.process.pid), *api.children(recursive=True)]

        def descriptors() -> int:
            return sum(one.num_fds() for one in family)

        opened = []
        for _ in range(2):
            before = counts(address)
            assert asyncio.run(load(server, requests, clients)) == kinds
            wait_until(
                lambda: (
                    metric(address, "vllm:num_requests_running") == 0
                    and metric(address, "vllm:num_requests_waiting") == 0
                    and metric(address, "vllm:kv_cache_usage_perc") == 0
                ),
                server.log.read_text,
            )
            more = {name: after - before[name] for name, after in counts(address).items()}
            assert whole <= more["answered"] <= whole + left, more
            assert whole * NEW <= more["tokens"] <= (whole + left) * NEW, more
            assert refused <= more["refused"] <= refused + left, more
            assert more["failed"] == 0
            opened.append(descriptors())
        wait_until(lambda: descriptors() <= opened[0], lambda: (opened, descriptors()))
        ended = asyncio.run(load(server, requests, clients, end=True))
        for answer, right in zip(ended, kinds, strict=True):
            if not isinstance(answer, (openai.APIError, OSError)):
                assert answer == right[: len(answer)]
        assert any(isinstance(answer, openai.APIError) for answer in ended), ended
        server.process.wait(90)
        _, alive = psutil.wait_procs(family, 60)
        assert not alive
