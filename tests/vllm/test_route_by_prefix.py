"""examples/route_by_prefix.py in front of nodes that say who they are, and of vLLM servers."""

from __future__ import annotations

import asyncio
import contextlib
import runpy
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from h2o import H2OConfig
from h2o.vllm.metrics import SECONDS
from tests.launch import ROOT
from tests.vllm.engines import after_prefix, alone, prompts
from tests.vllm.servers import (
    SMALL,
    answering,
    free_port,
    launched,
    metric,
    openai,
    serving,
    together,
    with_tokenizer,
)

aiohttp = pytest.importorskip("aiohttp")
web = pytest.importorskip("aiohttp.web")

SCRIPT = ROOT / "examples/route_by_prefix.py"
PREFIX = 40


class Node:
    """A server whose tokens are characters. An answer is its port."""

    def __init__(self) -> None:
        self.port, self.left = free_port(), asyncio.Event()
        app = web.Application()
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/v1/completions", self.complete)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)

    async def start(self) -> str:
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()
        return f"http://127.0.0.1:{self.port}"

    async def tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": [*map(ord, (await request.json())["prompt"])]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        except (ValueError, RecursionError):
            return web.Response(status=400, text="no JSON")
        answer = {"node": self.port, "key": request.headers.get("Authorization")}
        if not body.get("stream"):
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        try:
            await asyncio.sleep(60)  # until the client has gone
        except asyncio.CancelledError:
            self.left.set()
            raise
        return response


@contextlib.asynccontextmanager
async def routed(nodes: list[Node]) -> AsyncIterator[Any]:
    """A client of a router in front of these nodes."""
    port, serve = free_port(), runpy.run_path(str(SCRIPT))["serve"]
    addresses = [await node.start() for node in nodes]
    router = asyncio.create_task(serve(addresses, "127.0.0.1", port))
    try:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            assert not router.done(), router
            await asyncio.sleep(0.05)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
            yield client
    finally:
        router.cancel()
        for node in nodes:
            await node.runner.cleanup()


async def node_of(client: Any, prompt: Any, **arguments: int) -> int:
    """The port of the node that answers a prompt."""
    body = {"prompt": prompt, "vllm_xargs": arguments}
    headers = {"Authorization": "Bearer 1"}
    async with client.post("/v1/completions", json=body, headers=headers) as answer:
        assert answer.status == 200
        found = await answer.json()
        assert found["key"] == "Bearer 1"
        return found["node"]


def test_requests_with_one_prefix_have_one_node():
    """Whether they come as text or as tokens. When a node goes, only its prefixes move."""

    async def check() -> None:
        nodes = [Node(), Node(), Node()]
        async with routed(nodes) as client:
            homes = [await node_of(client, f"{i:04}", h2o_prefix=4) for i in range(60)]
            assert {*homes} == {node.port for node in nodes}
            for i, home in enumerate(homes):
                tokens = [*map(ord, f"{i:04}{i * i}")]
                assert await node_of(client, tokens, h2o_prefix=4) == home
                assert await node_of(client, tokens[:4]) == home
                assert await node_of(client, f"{i:04} and more", h2o_context=4) == home
            assert len({await node_of(client, f"0000{i}") for i in range(30)}) == 3
            await nodes[0].runner.cleanup()
            for i, home in enumerate(homes):
                now = await node_of(client, f"{i:04}", h2o_prefix=4)
                assert now == home if home != nodes[0].port else now in homes
            for node in nodes:
                await node.runner.cleanup()
            async with client.post("/v1/completions", json={"prompt": "0000"}) as answer:
                assert answer.status == 503
                assert "None of the nodes answers: http://" in await answer.text()

    asyncio.run(check())


def test_streams_and_errors_are_passed_on():
    """Parts as they come. A client that leaves leaves the node too."""

    async def check() -> None:
        node = Node()
        async with routed([node]) as client:
            for wrong in (b"", b"{", b"[" * 100_000, b"\xff", b'{"prompt": 1'):
                async with client.post("/v1/completions", data=wrong) as answer:
                    assert (answer.status, await answer.text()) == (400, "no JSON")
            odd = {"prompt": [1], "vllm_xargs": {"h2o_prefix": "x"}}
            for wrong in ({"prompt": None}, {"prompt": [1], "vllm_xargs": None}, odd):
                async with client.post("/v1/completions", json=wrong) as answer:
                    assert answer.status == 200
            body = {"prompt": "0000", "stream": True}
            async with client.post("/v1/completions", json=body) as answer:
                assert answer.headers["Content-Type"] == "text/event-stream"
                assert await answer.content.readany() == b"data: 1\n\n"
                assert not node.left.is_set()
            await asyncio.wait_for(node.left.wait(), 30)

    asyncio.run(check())


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_two_servers_answer_as_one(tmp_path):
    """Prefixes are found again, each is stored on one of them. Then one is killed."""
    folder = tmp_path / "model"
    model, config = with_tokenizer(folder), H2OConfig(**SMALL)
    beginnings = prompts((PREFIX,) * 8, 7)
    requests = [beginning + rest for beginning in beginnings for rest in prompts((5, 60, 20), 8)]
    wanted = after_prefix(model, requests, PREFIX, config)
    environment, port = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, free_port()
    arguments, log = {"vllm_xargs": {"h2o_prefix": PREFIX}}, tmp_path / "log"
    with (
        serving(folder, tmp_path / "0.log", environment) as one,
        serving(folder, tmp_path / "1.log", environment) as other,
    ):
        nodes = [one.address, other.address]
        command = [sys.executable, SCRIPT, "--port", str(port), "--nodes", *nodes]
        with answering(launched(command, log), port, log) as router:
            assert together(router.address, requests, **arguments) == wanted
            time.sleep(SECONDS + 3)
            stored = sum(metric(node, "h2o:forked_requests_total") for node in nodes)
            assert stored == len(requests) - len(beginnings)
            assert together(one.address, requests, **arguments) == wanted
            assert together(router.address, requests[::5]) == alone(model, requests[::5], config)
            with pytest.raises(openai.BadRequestError, match="h2o_heavy must be from 0"):
                together(router.address, requests[:1], stream=False, vllm_xargs={"h2o_heavy": -3})
            other.process.terminate()
            other.process.wait(60)
            assert together(router.address, requests, **arguments) == wanted
