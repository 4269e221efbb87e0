"""Every kind of wait has a budget of its own, and a leg that is given up leaves nothing in the pool."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import AsyncIterator

import pytest

from gateway.cluster.members import Instance
from gateway.config import Budgets
from gateway.errors import LegTimeout
from gateway.serving.backend import Backend, Call, Leg
from tests.conftest import StartGateway
from tests.fake_instance import MODEL, SECRET, Exchange, Generation, instances
from tests.scripts import gone

CALL = Call("r" * 32, "/v1/completions", b'{"model":"%s"}' % MODEL.encode())
POOL = 10


@pytest.mark.slow
async def test_silence_before_the_first_event_is_not_measured_by_the_gap_between_two(
    start_gateway: StartGateway,
) -> None:
    """Nor is a reply's whole length: a long prompt is silent for minutes, and a long reply takes longer."""
    budgets = Budgets(event_gap_s=2, whole_reply_s=2, header_grace_s=0.05)

    async def script(exchange: Exchange) -> None:
        await asyncio.sleep(2.5)
        await exchange.start()
        await asyncio.sleep(2.5)
        for block in Generation(exchange.request).rest():
            await exchange.send(block)
            await asyncio.sleep(0.06)
        await exchange.finish()

    async with instances("a") as (a,), start_gateway(a, budgets=budgets) as running:
        a.script = script
        assert (await running.stream()).endswith(b"data: [DONE]\n\n")
        assert len(a.received) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_whole_request_has_an_end_however_healthy_it_is(stream: bool, start_gateway: StartGateway) -> None:
    """F39: an error event and an abort upstream; nothing is made up."""
    budgets = Budgets(total_s=0.6, header_grace_s=0.05)

    async def endless(exchange: Exchange) -> None:
        generation = Generation(exchange.request)
        if stream:
            await exchange.start()
        while not exchange.client_gone.is_set():
            if stream:
                await exchange.send(generation.token(0))
            await asyncio.sleep(0.05)

    async with instances("a", "b") as (a, b), start_gateway(a, b, budgets=budgets) as running:
        a.script = endless
        reply = await running.chat(stream=stream)
        assert reply.status_code == (200 if stream else 504)
        last = reply.content.split(b"\n\n")[-2].removeprefix(b"data: ") if stream else reply.content
        assert json.loads(last)["error"]["code"] == 504
        assert b"[DONE]" not in reply.content
        await gone(await a.exchange())
        assert not b.received
        assert running.gateway.dispatcher.in_flight("a") == 0
        assert running.gateway.members.healthy_count() == 2


@contextlib.asynccontextmanager
async def full_socket() -> AsyncIterator[tuple[socket.socket, Instance]]:
    """A server whose queue is full: a connection to it is never refused and never made."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.setblocking(False)
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        first = stack.enter_context(socket.socket())
        first.setblocking(False)
        await loop.sock_connect(first, server.getsockname())
        yield server, Instance("a", f"http://127.0.0.1:{server.getsockname()[1]}", "boot-1")


@contextlib.asynccontextmanager
async def backend(connect_s: float) -> AsyncIterator[Backend]:
    one = Backend(SECRET, "", Budgets(connect_s=connect_s), connections_max=POOL)
    try:
        yield one
    finally:
        await one.close()


def ask(backend: Backend, instance: Instance) -> Leg:
    return backend.open(instance, CALL, lambda: None, stream=False)


async def test_a_connection_that_does_not_come_about_is_a_504() -> None:
    async with full_socket() as (_, instance), backend(connect_s=0.2) as pool:
        with ask(pool, instance) as leg, pytest.raises(LegTimeout) as raised:
            await asyncio.wait_for(leg.head(), 5)
    assert raised.value.status == 504


async def test_waiting_for_a_place_in_the_pool_has_an_end() -> None:
    async def silent(exchange: Exchange) -> None:
        await exchange.client_gone.wait()

    async with instances("a") as (a,), backend(connect_s=1) as pool, contextlib.AsyncExitStack() as stack:
        a.script = silent
        instance = Instance("a", a.url, "boot-1")
        for _ in range(POOL):
            stack.enter_context(ask(pool, instance))
        await a.exchange(POOL - 1)
        with ask(pool, instance) as leg, pytest.raises(LegTimeout):
            await asyncio.wait_for(leg.head(), 5)


async def test_legs_given_up_at_any_moment_leave_the_pool_free() -> None:
    chance = random.Random(7)

    async def give_up(after_s: float, twice: bool) -> None:
        with ask(pool, instance) as leg:
            asking = asyncio.create_task(leg.head())
            await asyncio.sleep(after_s)
            leg.close()
            asking.cancel()
            if twice:
                await asyncio.sleep(0)
                asking.cancel()
            await asyncio.wait({asking})

    async with full_socket() as (server, instance), backend(connect_s=5) as pool:
        await asyncio.gather(*(give_up(chance.uniform(0, 0.4), index % 3 == 0) for index in range(100)))
        async with answering(server):
            with contextlib.ExitStack() as legs:  # A free pool has room for all of these at once.
                heads = [legs.enter_context(ask(pool, instance)).head() for _ in range(POOL)]
                async with asyncio.timeout(4):
                    assert {head.status for head in await asyncio.gather(*heads)} == {200}


@contextlib.asynccontextmanager
async def answering(server: socket.socket) -> AsyncIterator[None]:
    """Heads of replies only, so that their connections stay taken."""
    writers: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n")

    async with await asyncio.start_server(answer, sock=server):
        yield
        for writer in writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)
