"""Stands between two llumlets, or between gateway and instance, and makes one step go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
from aiohttp import web

Fault = Callable[["HandshakeProxy", web.Request, bytes], Awaitable[web.StreamResponse]]


class HandshakeProxy:
    """Forwards a destination's handshake routes; ``faults``: step (reserve, stage, commit, abort) to fault."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.faults: dict[str, Fault] = {}
        self.reached = asyncio.Event()
        """Set when a step with a fault comes by."""
        self.release = asyncio.Event()
        """What ``hang`` waits for."""
        self.url = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[HandshakeProxy]:
        application = web.Application(client_max_size=64 << 20)
        application.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(application, shutdown_timeout=0.5)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        (address,) = runner.addresses
        self.url = f"http://127.0.0.1:{address[1]}"
        self._http = aiohttp.ClientSession()
        try:
            yield self
        finally:
            self.release.set()
            await self._http.close()
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        fault = self.faults.get(request.path.rsplit("/", 1)[-1])
        if fault is None:
            return await self.forward(request, body)
        self.reached.set()
        return await fault(self, request, body)

    async def forward(self, request: web.Request, body: bytes) -> web.Response:
        headers = {
            name: value for name, value in request.headers.items() if name.lower().startswith(("x-", "content-type"))
        }
        async with self._http.request(request.method, self.target + request.path, data=body, headers=headers) as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")


async def refuse(proxy: HandshakeProxy, request: web.Request, body: bytes) -> web.StreamResponse:
    return web.json_response({"error": {"message": "refused by the test"}}, status=500)


async def cut(proxy: HandshakeProxy, request: web.Request, body: bytes) -> web.StreamResponse:
    """The step never arrives, and the connection ends."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def lose_reply(proxy: HandshakeProxy, request: web.Request, body: bytes) -> web.StreamResponse:
    """The step is done at the destination, but the source does not learn it."""
    await proxy.forward(request, body)
    return await cut(proxy, request, body)


async def hang(proxy: HandshakeProxy, request: web.Request, body: bytes) -> web.StreamResponse:
    await proxy.release.wait()
    return await cut(proxy, request, body)


async def dead_agents(proxy: HandshakeProxy, request: web.Request, body: bytes) -> web.StreamResponse:
    """The destination is told of KV agents that do not listen."""
    message = json.loads(body)
    message["agents"] = [[host, 9] for host, _ in message["agents"]]
    return await proxy.forward(request, json.dumps(message).encode())
