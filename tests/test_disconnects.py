"""The client goes away: every instance learns of it within a second, and every count is given back."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.conftest import Running, StartGateway, chat_body, until
from tests.fake_instance import Exchange, FakeInstance, Generation, generate, instances
from tests.scripts import gone, moved, moves_after, prebind, silent, starts_and_waits


@contextlib.asynccontextmanager
async def leaving_client(running: Running, stream: bool, sent: float = 1) -> AsyncIterator[asyncio.StreamReader]:
    """A request over a socket of its own, which is closed at the end of the block. ``sent``: the part that is sent."""
    body = httpx.Request("POST", running.url, json=chat_body(stream=stream)).read()
    url = httpx.URL(running.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    request = head.encode() + b"content-type: application/json\r\n\r\n" + body
    writer.write(request[: int(len(request) * sent)])
    await writer.drain()
    try:
        yield reader
    finally:
        writer.close()
        await writer.wait_closed()


async def assert_idle(running: Running, *fakes: FakeInstance) -> None:
    dispatcher = running.gateway.dispatcher
    await until(lambda: not running.gateway.sessions.live())
    assert [dispatcher.in_flight(fake.instance_id) for fake in fakes] == [0] * len(fakes)


@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_byte(stream: bool, start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script = b.script = silent
        async with leaving_client(running, stream):
            exchange = await a.exchange()
        await gone(exchange)
        await assert_idle(running, a, b)
        assert not b.received


async def test_between_two_events(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script = starts_and_waits
        async with leaving_client(running, stream=True) as reader:
            await reader.readuntil(b" w1")
        await gone(await a.exchange())
        await assert_idle(running, a, b)
        assert not b.received


async def test_before_the_first_event_of_a_stream_that_has_begun(start_gateway: StartGateway) -> None:
    async def head_only(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.client_gone.wait()

    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = head_only
        async with leaving_client(running, stream=True) as reader:
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        await gone(await a.exchange())
        await assert_idle(running, a)


async def test_while_the_destination_waits(start_gateway: StartGateway) -> None:
    async def source(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.send(*Generation(exchange.request).upto(2), prebind(b))
        await exchange.client_gone.wait()

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script, b.script = source, silent
        async with leaving_client(running, stream=True) as reader:
            await reader.readuntil(b" w1")
            legs = [await a.exchange(), await b.exchange()]
        await gone(*legs)
        await assert_idle(running, a, b)


async def test_after_moved_but_before_the_destination_is_live(start_gateway: StartGateway) -> None:
    async def source(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.send(prebind(b), *Generation(exchange.request).upto(2), moved(b, 2))
        await exchange.finish()

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script, b.script = source, silent
        async with leaving_client(running, stream=True) as reader:
            await reader.readuntil(b" w1")
            leg = await b.exchange()
        await gone(leg)
        await assert_idle(running, a, b)


async def test_after_a_move(start_gateway: StartGateway) -> None:
    async def destination(exchange: Exchange) -> None:
        await exchange.start(200, {"x-kvferry-resumed": "m1 2"})
        await exchange.send(Generation(exchange.request).token(2))
        await exchange.client_gone.wait()

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script, b.script = moves_after(2, b), destination
        async with leaving_client(running, stream=True) as reader:
            await reader.readuntil(b" w2")
        await gone(await b.exchange())
        await assert_idle(running, a, b)


async def test_a_reply_in_one_piece_after_its_move(start_gateway: StartGateway) -> None:
    async def source(exchange: Exchange) -> None:
        await exchange.json(409, {}, {"x-kvferry-moved": "m1 b 2"})

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script, b.script = source, silent
        async with leaving_client(running, stream=False):
            leg = await b.exchange()
        await gone(leg)
        await assert_idle(running, a, b)


async def test_many_clients_at_random_moments_leave_nothing_behind(start_gateway: StartGateway) -> None:
    """Half sent, before the reply, within it, while another instance is tried; then no one is thought busy."""
    chance = random.Random(11)

    async def resets_later(exchange: Exchange) -> None:
        await asyncio.sleep(0.02)
        await exchange.reset()

    async with instances("a", "b", "c") as fakes:
        for fake, script in zip(fakes, (starts_and_waits, silent, resets_later), strict=True):
            fake.script, fake.freeness_steps = script, 8000.0
        async with start_gateway(*fakes) as running:

            async def leave() -> None:
                stream, sent, after_s = chance.random() < 0.5, chance.uniform(0.5, 2), chance.uniform(0, 0.2)
                async with leaving_client(running, stream, min(sent, 1)):
                    await asyncio.sleep(after_s)

            await asyncio.gather(*(leave() for _ in range(50)))
            await assert_idle(running, *fakes)
            await gone(*fakes[0].exchanges, *fakes[1].exchanges)
            for fake in fakes:
                fake.script = generate
            restarted, port = fakes[0], int(httpx.URL(fakes[0].url).port or 0)
            await restarted.stop()
            await until(lambda: running.gateway.members.healthy_count() == 2)
            restarted.boot_id, restarted._sequence = "boot-2", 0
            await restarted.listen(port)
            await until(lambda: running.gateway.members.healthy_count() == 3)
            before = [len(fake.received) for fake in fakes]
            await asyncio.gather(*(running.chat() for _ in range(30)))
            spread = [len(fake.received) - count for fake, count in zip(fakes, before, strict=True)]
            assert sum(spread) == 30
            assert max(spread) - min(spread) <= 4  # One that was thought busy would have got none.
