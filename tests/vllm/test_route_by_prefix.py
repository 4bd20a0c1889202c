"""examples/route_by_prefix.py in front of nodes that return their ports, and of vLLM servers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import runpy
import shutil
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from h2o import H2OConfig
from h2o.vllm.metrics import SECONDS
from tests.launch import ROOT
from tests.vllm.engines import after_prefix, alone, prompts
from tests.vllm.servers import (
    SMALL,
    Server,
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

VLLM_ROUTER = shutil.which(
    "vllm-router", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
)


class Node:
    """A server whose tokens are characters. It answers with its port."""

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
            await asyncio.sleep(60)  # until the client disconnects
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
    """Port of the node that answers a prompt."""
    body = {"prompt": prompt, "vllm_xargs": arguments}
    headers = {"Authorization": "Bearer 1"}
    async with client.post("/v1/completions", json=body, headers=headers) as answer:
        assert answer.status == 200
        found = await answer.json()
        assert found["key"] == "Bearer 1"
        return found["node"]


def test_requests_with_one_prefix_have_one_node():
    """Text and tokens with the same prefix go to the same node. If a node fails, only its prefixes
    move."""

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
    """Parts must be forwarded as they come. If a client disconnects, the router must leave the
    node."""

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


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return folder, with_tokenizer(folder)


@pytest.fixture(scope="module")
def servers(llama, tmp_path_factory):
    """Two servers of one model. A test may end the second one if no other test follows."""
    logs, environment = tmp_path_factory.mktemp("logs"), {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (
        serving(llama[0], logs / "0", environment) as one,
        serving(llama[0], logs / "1", environment) as other,
    ):
        yield one, other


def forked(servers: tuple[Server, ...]) -> list[float]:
    """For each server, the number of requests that began with a stored prompt."""
    time.sleep(SECONDS + 3)
    return [metric(server.address, "h2o:forked_requests_total") for server in servers]


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.skipif(VLLM_ROUTER is None, reason="vllm-router is not installed (make test-vllm)")
def test_vllm_router_finds_prefixes_again(servers, llama, tmp_path):
    """Each prefix must go to the server that its header selects, with the answers of a single
    server."""
    beginnings = prompts((PREFIX,) * 8, 5)
    port, log = free_port(), tmp_path / "log"
    nodes, before = [server.address for server in servers], forked(servers)
    command = [VLLM_ROUTER, "--port", str(port), "--policy", "consistent_hash", "--worker-urls"]
    with answering(launched([*command, *nodes], log), port, log) as router:
        for i, beginning in enumerate(beginnings):
            requests = [beginning + rest for rest in prompts((5, 60, 20), i)]
            wanted = after_prefix(llama[1], requests, PREFIX, H2OConfig(**SMALL))
            named = {"headers": {"x-session-id": str(i)}, "vllm_xargs": {"h2o_prefix": PREFIX}}
            assert together(router.address, requests, **named) == wanted
        with pytest.raises(openai.BadRequestError, match="h2o_heavy is -3; expected"):
            together(router.address, requests[:1], stream=False, vllm_xargs={"h2o_heavy": -3})
    found = [now - then for now, then in zip(forked(servers), before, strict=True)]
    assert sum(found) == 2 * len(beginnings)
    assert min(found) > 0


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_two_servers_answer_as_one(servers, llama, tmp_path):
    """Prefixes are found again, and each is stored on only one server. Then one server is
    killed."""
    model, config = llama[1], H2OConfig(**SMALL)
    beginnings = prompts((PREFIX,) * 8, 7)
    requests = [beginning + rest for beginning in beginnings for rest in prompts((5, 60, 20), 8)]
    wanted = after_prefix(model, requests, PREFIX, config)
    port, arguments, log = free_port(), {"vllm_xargs": {"h2o_prefix": PREFIX}}, tmp_path / "log"
    nodes, before = [server.address for server in servers], forked(servers)
    command = [sys.executable, SCRIPT, "--port", str(port), "--nodes", *nodes]
    with answering(launched(command, log), port, log) as router:
        assert together(router.address, requests, **arguments) == wanted
        assert sum(forked(servers)) - sum(before) == len(requests) - len(beginnings)
        assert together(nodes[0], requests, **arguments) == wanted
        assert together(router.address, requests[::5]) == alone(model, requests[::5], config)
        with pytest.raises(openai.BadRequestError, match="h2o_heavy is -3; expected"):
            together(router.address, requests[:1], stream=False, vllm_xargs={"h2o_heavy": -3})
        servers[1].process.terminate()
        servers[1].process.wait(60)
        assert together(router.address, requests, **arguments) == wanted
