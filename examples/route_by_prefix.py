"""One address for several vLLM servers with h2o. Requests with the same prefix go to one server.

    vllm serve MODEL --port 8000 --additional-config '{"h2o": {"heavy": 128, "recent": 128}}'
    vllm serve MODEL --port 8001 --additional-config '{"h2o": {"heavy": 128, "recent": 128}}'
    python examples/route_by_prefix.py --nodes http://127.0.0.1:8000 http://127.0.0.1:8001

Clients then use http://127.0.0.1:8100/v1. All nodes must have the same model and the same entry
`h2o`, so that every node gives the same answers. A stored prompt is found again only on the node
that stored it. The router therefore hashes the first `h2o_prefix` tokens of a prompt, or the whole
prompt, and each hash has its own order of nodes. When a node fails before its answer begins, the
next one answers, and the prompts of other nodes stay where they are. The router does not balance
load. A prefix with more requests than one node can answer needs one of these routers instead:

- vllm-router from PyPI: `vllm-router --policy consistent_hash --worker-urls http://A:8000
  http://B:8000`. Clients name the prefix in the header `x-session-id`.
- vLLM production stack on Kubernetes. In the chart's values, the arguments of `vllm serve` belong
  in `servingEngineSpec.modelSpec[].vllmConfig.extraArgs`, an image with h2o in `repository` and
  `tag`, and `routerSpec` needs `routingLogic: session` and `sessionKey: x-prefix`. Clients name the
  prefix in the header `x-prefix`. The logic `prefixaware` needs no header, but compares text and
  does not support prompts of token ids. `kvaware` needs LMCache, which h2o does not support.
- Ray Serve LLM: examples/serve_with_ray.py.

vllm-router and Ray Serve LLM have been tested with h2o, the production stack has not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json

import aiohttp
from aiohttp import web

FORWARDED = ("Authorization", "Content-Type")
"""Headers of a request that are passed on to nodes."""

LONGEST_BODY = 1 << 26
"""Limit of a request in bytes."""

NO_PROMPT = (
    ValueError, TypeError, AttributeError, LookupError, RecursionError, aiohttp.ClientError
)  # fmt: skip
"""Errors that a body without a readable prompt raises."""


class Router:
    """Forwards requests to nodes."""

    def __init__(self, nodes: list[str], session: aiohttp.ClientSession) -> None:
        self.nodes, self.session = nodes, session

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Stream the answer of the first node that can be reached."""
        body = await request.read()
        headers = {name: request.headers[name] for name in FORWARDED if name in request.headers}
        for node in self.in_order(await self.prefix(body)):
            call = self.session.request(
                request.method, node + request.path_qs, data=body, headers=headers
            )
            try:
                answer = await call
            except aiohttp.ClientConnectionError:
                continue
            async with answer:
                kind = {"Content-Type": answer.headers.get("Content-Type", "text/plain")}
                response = web.StreamResponse(status=answer.status, headers=kind)
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    await response.write(part)
            return response
        error = {"message": f"None of the nodes answers: {', '.join(self.nodes)}.", "code": 503}
        return web.json_response({"error": error}, status=503)

    def in_order(self, prefix: bytes) -> list[str]:
        """The nodes in the order for this prefix (rendezvous hashing)."""
        return sorted(
            self.nodes, key=lambda node: hashlib.sha256(node.encode() + b"\0" + prefix).digest()
        )

    async def prefix(self, body: bytes) -> bytes:
        """The tokens of a request's prefix, as bytes. A body without a readable prompt is its own
        prefix, and a node answers it with the error."""
        try:
            fields = json.loads(body)
            tokens = fields.get("prompt")
            if not isinstance(tokens, list):
                tokens = await self.tokenize(body)
            arguments = fields.get("vllm_xargs") or {}
            length = arguments.get("h2o_prefix") or arguments.get("h2o_context")
            return json.dumps(tokens[:length]).encode()
        except NO_PROMPT:
            return body

    async def tokenize(self, body: bytes) -> list[int]:
        """Let the first node that can be reached tokenize a request's text or messages."""
        for node in self.nodes:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                headers = {"Content-Type": "application/json"}
                async with self.session.post(
                    f"{node}/tokenize", data=body, headers=headers
                ) as answer:
                    return json.loads(await answer.read())["tokens"]
        raise LookupError("None of the nodes answers.")


async def serve(nodes: list[str], host: str, port: int) -> None:
    unlimited = aiohttp.ClientTimeout(total=None, sock_connect=10)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=unlimited, connector=connector) as session:
        app = web.Application(client_max_size=LONGEST_BODY)
        app.router.add_route("*", "/{path:health|v1/.*}", Router(nodes, session).handle)
        # A client that disconnects cancels its handler, which cancels the request on the node.
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", nargs="+", required=True, help="addresses of vLLM servers")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100)
    options = parser.parse_args()
    nodes = [node.rstrip("/") for node in options.nodes]
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(nodes, options.host, options.port))


if __name__ == "__main__":
    main()
