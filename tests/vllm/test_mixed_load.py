"""Clients of every kind at once, with pages for twelve requests: SIGTERM in the middle, and what
thousands of clients leave behind."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from h2o import H2OConfig
from tests.vllm import held
from tests.vllm.engines import MiB, after_prefix, alone, prompts
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
MANY, WAVE = 5000, 250
KINDS = 9
PREFIX = 30
PINNED = (2, 6)
ROOM = SMALL["heavy"] + SMALL["recent"]
BUDGETS = (1, 3, ROOM // 2, ROOM - 1, 10**9)
WRONG = (
    {"vllm_xargs": {"h2o_heavy": -1}},
    {"vllm_xargs": {"h2o_prefix": "x"}},
    {"vllm_xargs": {"h2o_pinned": "9:1"}},
    {"vllm_xargs": {"h2o_context": 0}},
    {"prompt": []},
    {"prompt": [5] * 3000},
    {"prompt": [10**9]},
    {"max_tokens": -1},
    {"temperature": "hot"},
)


async def one_of_many(client: Any, i: int, requests: list) -> Any:
    """Answer to the i-th client: LEFT if it disconnects, REFUSED for a wrong body."""
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
    prefix, pins = {"h2o_prefix": PREFIX}, {"h2o_pinned": "{}:{}".format(*PINNED)}
    arguments = {5: prefix, 6: prefix, 8: pins}.get(kind, {})
    return await answered(client, prompt, kind == 5, vllm_xargs=arguments)


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
    """A function that gives the expected answer to the i-th client."""
    plain = alone(model, requests, H2OConfig(**SMALL), NEW)
    parted = after_prefix(model, requests, PREFIX, H2OConfig(**SMALL))
    pinned = alone(model, requests, H2OConfig(**SMALL), NEW, [PINNED])
    budgets = []
    for amount in BUDGETS:
        recent = min(amount, ROOM)
        config = H2OConfig(heavy=min(amount, ROOM - recent), recent=recent)
        budgets.append(alone(model, requests, config, NEW))

    def of_client(i: int) -> Any:
        answers = {
            0: budgets[i // KINDS % len(BUDGETS)], 3: [REFUSED] * len(requests), 5: parted,
            6: parted, 7: plain, 8: pinned,
        }.get(i % KINDS, [LEFT] * len(requests))  # fmt: skip
        return answers[i % len(requests)]

    return of_client


async def load(server: Server, requests: list, clients: Sequence[int], end: bool = False) -> list:
    """Answers to these clients, all at once, and the errors. With `end`, SIGTERM comes when a
    quarter is done. Even without h2o, vLLM does not end requests that arrive at the moment when its
    engine ends. They wait until their clients give up."""
    async with openai.AsyncOpenAI(
        base_url=f"{server.address}/v1", api_key="none", timeout=30 if end else 600, max_retries=0
    ) as client:
        calls = [asyncio.create_task(one_of_many(client, i, requests)) for i in clients]
        if end:
            while sum(call.done() for call in calls) < len(clients) // 4:
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


class Watched:
    """A server with pages for twelve requests, and all of its processes."""

    def __init__(self, server: Server) -> None:
        self.server, self.address = server, server.address
        self.family = [api := psutil.Process(server.process.pid), *api.children(recursive=True)]

    def descriptors(self) -> int:
        return sum(one.num_fds() for one in self.family)

    def bytes(self) -> int:
        return sum(one.memory_info().rss for one in self.family)

    def wait_until_idle(self) -> None:
        wait_until(
            lambda: (
                metric(self.address, "vllm:num_requests_running") == 0
                and metric(self.address, "vllm:num_requests_waiting") == 0
                and metric(self.address, "vllm:kv_cache_usage_perc") == 0
            ),
            self.server.log.read_text,
        )

    def load(self, requests: list, clients: Sequence[int], right: Callable[[int], Any]) -> None:
        """Send these clients' requests all at once. All answers must be right, and the metrics must
        count them."""
        before, kinds = counts(self.address), [*map(right, clients)]
        refused, left = kinds.count(REFUSED), kinds.count(LEFT)
        whole = len(kinds) - refused - left
        assert asyncio.run(load(self.server, requests, clients)) == kinds
        self.wait_until_idle()
        more = {name: after - before[name] for name, after in counts(self.address).items()}
        assert whole <= more["answered"] <= whole + left, more
        assert whole * NEW <= more["tokens"] <= (whole + left) * NEW, more
        assert refused <= more["refused"] <= refused + left, more
        assert more["failed"] == 0


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """(folder, prompts of the requests, function that gives the i-th client's answer)"""
    folder = tmp_path_factory.mktemp("llama")
    model = with_tokenizer(folder, max_position_embeddings=4096)
    (beginning,) = prompts((PREFIX,), 7)
    requests = [beginning + rest for rest in prompts((5, 60, 20, 1, 33), 8)]
    return folder, requests, expected(model, requests)


OPTIONS = {"max-model-len": 2048, "num-gpu-blocks-override": 13}


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("clients", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_a_mixed_load_and_the_end_of_the_server_amid_it(clients, llama, tmp_path):
    """All answers must be right, metrics must count all requests, and pages and file descriptors
    must be free afterwards. After SIGTERM during the same load no client may hang and no process
    may stay."""
    folder, requests, right = llama
    with serving(folder, tmp_path / "log", **OPTIONS) as server:
        watched, opened = Watched(server), []
        for _ in range(2):
            watched.load(requests, range(clients), right)
            opened.append(watched.descriptors())
        wait_until(
            lambda: watched.descriptors() <= opened[0], lambda: (opened, watched.descriptors())
        )
        ended = asyncio.run(load(server, requests, range(clients), end=True))
        for i, answer in enumerate(ended):
            if not isinstance(answer, (openai.APIError, OSError)):
                assert answer == right(i)[: len(answer)]
        assert any(isinstance(answer, openai.APIError) for answer in ended), ended
        server.process.wait(90)
        _, alive = psutil.wait_procs(watched.family, 60)
        assert not alive


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_thousands_of_requests_leave_nothing_behind(llama, tmp_path):
    """In no process of the server may objects of h2o or elements of its containers accumulate, nor
    pages, file descriptors, or memory beyond that of the first thousand requests."""
    folder, requests, right = llama
    # oneDNN compiles a product for each number of tokens in a batch, and keeps a thousand of them.
    environment = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8", "VLLM_SERVER_DEV_MODE": "1"}
    environment |= held.installed(tmp_path / "held")
    with serving(folder, tmp_path / "log", environment, **OPTIONS) as server:
        watched, sizes = Watched(server), []

        def left() -> dict[str, Any]:
            """What is held after a request that found nothing stored, and after the same request
            again."""
            url = f"{watched.address}/reset_prefix_cache?reset_external=true"
            urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60).close()
            for _ in range(2):
                watched.load(requests, [7], right)
            prompts_stored = "h2o:stored_prompts", "h2o:stored_prompt_bytes"
            wait_until(
                lambda: metric(watched.address, prompts_stored[0]) == 1, server.log.read_text
            )
            numbers = {name: metric(watched.address, name) for name in prompts_stored}
            return numbers | held.ask(tmp_path / "held")

        watched.load(requests, range(WAVE), right)
        first, opened = left(), watched.descriptors()
        for begin in range(0, MANY, WAVE):
            watched.load(requests, range(begin, begin + WAVE), right)
            sizes.append(watched.bytes())
        assert left() == first
        wait_until(lambda: watched.descriptors() <= opened, lambda: (opened, watched.descriptors()))
        assert sizes[-1] < sizes[1000 // WAVE] + 4 * MiB, sizes
