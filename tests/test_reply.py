"""What a reply writes, and how it waits for a client that is slow."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

from gateway.serving.reply import Reply


class Client:
    """As a server's ``send``: it waits while the client takes nothing."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.takes = asyncio.Event()
        self.takes.set()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        await self._drained()
        self.got.append(message.get("body", b""))

    async def _drained(self) -> None:
        if not self.takes.is_set():
            await self.takes.wait()


async def started(client: Client) -> Reply:
    reply = Reply(client.send)
    await reply.start_stream([])
    client.got.clear()
    return reply


async def test_what_is_written_at_once_needs_no_task() -> None:
    client = Client()
    reply = await started(client)
    reply.write_at_once(b"a")
    reply.write_at_once(b"b")
    assert client.got == [b"a", b"b"]
    assert reply.can_write


async def test_a_slow_client_gets_everything_in_order() -> None:
    client = Client()
    reply = await started(client)
    client.takes.clear()
    reply.write_at_once(b"a")
    assert not reply.can_write
    writing = asyncio.create_task(reply.write(b"b"))
    await asyncio.sleep(0.01)
    assert client.got == []
    client.takes.set()
    await writing
    await reply.end()
    assert client.got == [b"a", b"b", b""]
    assert reply.can_write


async def test_what_a_slow_client_has_not_taken_is_sent_once_it_takes_more_although_nothing_follows() -> None:
    client = Client()
    reply = await started(client)
    client.takes.clear()
    reply.write_at_once(b"a")
    client.takes.set()
    async with asyncio.timeout(5):
        while not reply.can_write:
            await asyncio.sleep(0)
    assert client.got == [b"a"]


async def test_nothing_is_written_at_once_before_the_reply_has_begun() -> None:
    assert not Reply(Client().send).can_write
