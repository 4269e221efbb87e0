"""A request moves, and the client does not notice."""

from __future__ import annotations

import asyncio

import pytest

from gateway import wire
from tests.conftest import StartGateway
from tests.fake_instance import Exchange, Generation, instances

pytestmark = pytest.mark.asyncio


def moving_at(tokens: int, migration_id: str = "m1", to: str = "b", prebind: bool = True) -> object:
    pass


async def test_a_moved_stream_has_the_same_bytes_as_an_unmoved_one(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        expected = await running.stream()

        async def move(exchange: Exchange) -> None:
            generation = Generation(exchange.request)
            await exchange.start()
            await exchange.send(*generation.upto(3), wire.encode_comment(wire.Prebind("m1", "b")))
            await b.exchange()
            b.commit("m1", 3)
            await exchange.send(wire.encode_comment(wire.Moved("m1", "b", 3)))
            await exchange.finish()

        a.script = move
        b.created = 5
        moved = await running.stream()
        print(expected.decode()); print(moved.decode())
        print((await running.admin("GET", "/admin/requests")).json())
        assert len(moved) == len(expected)
