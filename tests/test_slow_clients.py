"""A client that does not read costs little memory, holds its instance back, and is let go in the end."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from gateway.config import Budgets
from tests.conftest import Running, StartGateway, chat_body, until
from tests.fake_instance import Exchange, instances
from tests.scripts import gone
from tests.test_disconnects import assert_idle, leaving_client

MIB = 1024 * 1024
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * 64 * 1024 + b'"},"finish_reason":null}]}\n\n'


class Flood:
    """A hundred MiB, as fast as they are taken."""

    def __init__(self) -> None:
        self.sent_bytes = 0

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.start()
        while self.sent_bytes < 100 * MIB and not exchange.client_gone.is_set():
            await exchange.send(EVENT)
            self.sent_bytes += len(EVENT)
            await asyncio.sleep(0)
        await exchange.finish()


async def stands_still(flood: Flood) -> None:
    """Until nothing more is taken for a while."""
    async with asyncio.timeout(20):
        before = -1
        while flood.sent_bytes == 0 or flood.sent_bytes != before:
            before = flood.sent_bytes
            await asyncio.sleep(0.3)


async def test_what_a_client_does_not_read_is_not_read_from_its_instance_either(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = flood = Flood()
        async with leaving_client(running, stream=True) as reader:
            exchange = await a.exchange()
            await stands_still(flood)
            # What is in flight lies in four sockets' buffers of the kernel; the gateway itself holds a fraction of it.
            assert flood.sent_bytes < 60 * MIB
            assert held_bytes(running) < MIB
            before = flood.sent_bytes
            while flood.sent_bytes == before:  # It goes on as soon as the client does.
                await reader.read(MIB)
        await gone(exchange, within_s=5)
        await assert_idle(running, a)


async def test_a_client_that_has_stopped_reading_is_let_go_after_a_time(start_gateway: StartGateway) -> None:
    budgets = Budgets(header_grace_s=0.05, client_stuck_s=0.5)
    async with instances("a") as (a,), start_gateway(a, budgets=budgets) as running:
        a.script = Flood()
        with contextlib.suppress(ConnectionError):  # Reset, at the end of the block.
            async with leaving_client(running, stream=True):
                await gone(await a.exchange(), within_s=15)
                await until(lambda: running.gateway.counters.get("clients_stuck") == 1)
                await assert_idle(running, a)
        assert running.gateway.counters.get("internal_errors") == 0


async def test_a_client_that_reads_slowly_is_not_let_go(start_gateway: StartGateway) -> None:
    budgets = Budgets(header_grace_s=0.05, client_stuck_s=1.5)
    async with instances("a") as (a,), start_gateway(a, budgets=budgets) as running:
        a.script = flood = Flood()
        async with leaving_client(running, stream=True) as reader:
            await a.exchange()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2.5):
                    while await reader.read(256 * 1024):
                        await asyncio.sleep(0.01)
            assert flood.sent_bytes > 0
            assert running.gateway.counters.get("clients_stuck") == 0


@pytest.mark.parametrize("said", [b"", b"GET /health HTTP/1.1\r\nhost: "])
async def test_a_client_that_does_not_say_what_it_wants_is_let_go(start_gateway: StartGateway, said: bytes) -> None:
    async with instances("a") as (a,), start_gateway(a, budgets=Budgets(head_s=0.3)) as running:
        reader, writer = await connect(running)
        writer.write(said)
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()


async def test_a_client_that_begins_its_next_request_has_time_until_the_last_one_is_answered(
    start_gateway: StartGateway,
) -> None:
    async with instances("a") as (a,), start_gateway(a, budgets=Budgets(head_s=0.1)) as running:
        go_on = asyncio.Event()

        async def waits(exchange: Exchange) -> None:
            await go_on.wait()
            await exchange.json(200, {})

        a.script = waits
        reader, writer = await connect(running)
        body = json.dumps(chat_body()).encode()
        length = str(len(body)).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
        writer.write(head + length + b"\r\n\r\n" + body + b"GET /he")
        await a.exchange()
        await asyncio.sleep(0.3)
        go_on.set()
        async with asyncio.timeout(10):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            await reader.read()  # Then it is let go.
        writer.close()


@pytest.mark.parametrize(
    "lines", [b"x-a: " + b"y" * 100_000, b"x-a: y\r\n" * 30_000, b"x-a: " + b"y" * 1000 * 1000, b"x" * 1_000_000]
)
async def test_a_head_that_is_too_large_is_refused(start_gateway: StartGateway, lines: bytes) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        reader, writer = await connect(running)
        with contextlib.suppress(ConnectionError):
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n" + lines)
            await writer.drain()
        answer = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(10):
                while piece := await reader.read(65536):
                    answer += piece
        assert answer == b"" or answer.startswith(b"HTTP/1.1 431 "), answer[:100]
        writer.close()


async def connect(running: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", running.client.base_url.port)


def held_bytes(running: Running) -> int:
    """In the connection to the instance: read from the socket, and not passed on."""
    held = 0
    for leg in running.gateway.backend.legs():
        opened = leg._opening.result()
        assert not isinstance(opened, Exception)
        held += opened._size
    return held
