"""A gateway that is told to end: out of the balancer first, its streams last."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator

import httpx
import pytest

from gateway.app import Gateway
from gateway.cluster.store import Store
from gateway.config import Budgets, Settings
from gateway.server import server_config
from gateway.shutdown import GracefulServer, ShutdownSettings
from loadtest.processes import free_port
from tests.conftest import INTERVALS, chat_body, http_client, until
from tests.fake_instance import SECRET, Exchange, FakeInstance, Generation, instances
from tests.scripts import silent, starts_and_waits


class Ending:
    """A gateway under its own server, and a client with a connection for each request."""

    def __init__(self, gateway: Gateway, server: GracefulServer, serving: asyncio.Task[None], url: str) -> None:
        self.gateway = gateway
        self.server = server
        self.serving = serving
        self.url = url
        self.client = http_client(url)

    async def health(self) -> int:
        return (await self.client.get("/health")).status_code

    async def chat(self, stream: bool = False) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=chat_body(stream=stream))


@contextlib.asynccontextmanager
async def ending(redis_url: str, fake: FakeInstance, **shutdown: float) -> AsyncIterator[Ending]:
    settings = Settings(
        SECRET,
        (fake.url,),
        redis_url,
        budgets=Budgets(header_grace_s=0.05),
        intervals=INTERVALS,
        shutdown=ShutdownSettings(**shutdown),
    )
    gateway = Gateway(settings)
    server = GracefulServer(server_config(gateway, "127.0.0.1", 0), gateway, settings.shutdown)
    serving = asyncio.create_task(server._serve())
    await until(lambda: server.started or serving.done(), 20)
    one = Ending(gateway, server, serving, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}")
    try:
        async with one.client:
            yield one
    finally:
        server.should_exit = True
        await asyncio.wait({serving})


async def test_health_is_503_at_once_and_new_requests_are_still_served_for_a_while(redis_url: str) -> None:
    async with instances("a") as (a,), ending(redis_url, a, accept_s=600, grace_s=600) as one:
        assert await one.health() == 200
        one.server.handle_exit(signal.SIGTERM, None)
        assert await one.health() == 503
        assert (await one.chat()).status_code == 200
        assert (await one.chat(stream=True)).content.endswith(b"data: [DONE]\n\n")


async def test_then_nothing_new_is_taken_and_what_runs_goes_on_to_its_end(redis_url: str) -> None:
    closed = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        generation = Generation(exchange.request)
        await exchange.start()
        await exchange.send(*generation.upto(2))
        await closed.wait()
        await exchange.send(*generation.rest(2))
        await exchange.finish()

    async with instances("a") as (a,), ending(redis_url, a, accept_s=0, grace_s=600) as one:
        a.script = script
        streaming = asyncio.create_task(one.chat(stream=True))
        await a.exchange()
        one.server.handle_exit(signal.SIGTERM, None)
        await until(lambda: one.gateway._is_closed)
        await until(lambda: not one.server.servers[0].is_serving())
        async with httpx.AsyncClient(base_url=one.url, trust_env=False) as late:
            with pytest.raises(httpx.ConnectError):
                await late.post("/v1/chat/completions", json=chat_body())
        assert not one.serving.done()
        closed.set()
        assert (await streaming).content.endswith(b"data: [DONE]\n\n")
        await asyncio.wait_for(one.serving, 10)
        assert len(a.received) == 1


@pytest.mark.parametrize("begun", [True, False])
async def test_after_the_grace_a_request_ends_with_an_error_and_not_with_a_cut(begun: bool, redis_url: str) -> None:
    async with instances("a") as (a,), ending(redis_url, a, accept_s=0, grace_s=0.3) as one:
        a.script = starts_and_waits if begun else silent
        asking = asyncio.create_task(one.chat(stream=begun))
        exchange = await a.exchange()
        await asyncio.sleep(0.2 if begun else 0)
        one.server.handle_exit(signal.SIGTERM, None)
        reply = await asking
        assert reply.status_code == (200 if begun else 503)
        last = reply.content.split(b"\n\n")[-2].removeprefix(b"data: ") if begun else reply.content
        assert json.loads(last)["error"]["code"] == 503
        assert b"[DONE]" not in reply.content
        await asyncio.wait_for(exchange.client_gone.wait(), 5)
        await asyncio.wait_for(one.serving, 10)


async def test_lease_and_records_are_given_up_at_the_end(redis_url: str) -> None:
    store = Store(redis_url)
    async with instances("a") as (a,), ending(redis_url, a, accept_s=0, grace_s=0.2) as one:
        a.script = starts_and_waits
        asking = asyncio.create_task(one.chat(stream=True))
        request_id = (await a.exchange()).request.headers["x-request-id"]
        await until(lambda: one.gateway.leader.is_leading)
        async with asyncio.timeout(5):
            while await store.owner(request_id) is None:
                await asyncio.sleep(0.02)
        one.server.handle_exit(signal.SIGTERM, None)
        await asking
        await asyncio.wait_for(one.serving, 10)
        assert await store.owner(request_id) is None
        lease = await store.take_lease("successor", 1.0)
        assert lease is not None
        await store.drop_lease(lease)
    await store.close()


async def test_replicas_are_replaced_one_after_the_other_and_no_stream_breaks(redis_url: str) -> None:
    """F53: a rolling restart. Of those that went nothing stays in Redis."""
    go = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        generation = Generation(exchange.request)
        await exchange.start()
        await exchange.send(*generation.upto(2))
        await go.wait()
        await exchange.send(*generation.rest(2))
        await exchange.finish()

    patient = {"accept_s": 0.0, "grace_s": 600.0}
    async with instances("a") as (a,), ending(redis_url, a, **patient) as one, ending(redis_url, a, **patient) as two:
        a.script = script
        streams = [asyncio.create_task(gateway.chat(stream=True)) for gateway in (one, two) for _ in range(10)]
        await until(lambda: len(a.exchanges) == 20, 30)
        one.server.handle_exit(signal.SIGTERM, None)
        await until(lambda: not one.server.servers[0].is_serving())
        async with ending(redis_url, a, **patient) as new:
            two.server.handle_exit(signal.SIGTERM, None)
            await until(lambda: not two.server.servers[0].is_serving())
            streams.append(asyncio.create_task(new.chat(stream=True)))
            await until(lambda: len(a.exchanges) == 21, 30)
            go.set()
            assert all(reply.content.endswith(b"data: [DONE]\n\n") for reply in await asyncio.gather(*streams))
            await asyncio.wait({one.serving, two.serving}, timeout=30)
            await until(lambda: new.gateway.leader.is_leading, 30)
            await until(lambda: not new.gateway.replicas.others, 30)
            assert not new.gateway.dispatcher.in_flight("a")


@pytest.mark.parametrize("signals", [1, 2])
async def test_the_command_ends_well_after_one_signal_and_at_once_after_two(signals: int, redis_url: str) -> None:
    """The real process: a stream is under way, and its grace is long."""
    port = free_port()
    async with instances("a") as (a,):
        a.script = starts_and_waits
        environment = {
            **os.environ,
            "KVFERRY_SECRET": SECRET,
            "KVFERRY_INSTANCES": a.url,
            "KVFERRY_REDIS_URL": redis_url,
            "KVFERRY_PORT": str(port),
            "KVFERRY_SHUTDOWN_ACCEPT_S": "0",
            "KVFERRY_SHUTDOWN_GRACE_S": "0.5" if signals == 1 else "600",
        }
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "gateway", "serve", env=environment)
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as client:
                async with asyncio.timeout(60):
                    while not await _is_up(client):
                        await asyncio.sleep(0.05)
                asking = asyncio.create_task(client.post("/v1/chat/completions", json=chat_body(stream=True)))
                await a.exchange()
                process.send_signal(signal.SIGTERM)
                if signals == 2:
                    await asyncio.sleep(0.5)
                    assert process.returncode is None
                    process.send_signal(signal.SIGTERM)
                await asyncio.wait({asking})
                status = await asyncio.wait_for(process.wait(), 20)
                assert status == (0 if signals == 1 else -signal.SIGTERM)
                if signals == 1:
                    assert b'"error"' in asking.result().content
                else:
                    assert isinstance(asking.exception(), httpx.TransportError)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _is_up(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.TransportError:
        return False
