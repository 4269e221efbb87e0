"""The stream that the dashboard is made from."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import httpx

from gateway.counters import Counters
from gateway.dashboard.stream import VIEWERS_MAX, Events, Part
from tests.conftest import ADMIN_KEY, StartGateway, chat_body, until
from tests.dashboard.event_stream import watching
from tests.fake_instance import instances
from tests.scripts import starts_and_waits
from tests.test_admin import Migratable, assert_openai_error, migrate
from tests.test_replicas import knows_each_other, streaming


async def test_it_shows_what_this_gateway_knows_of_all_instances(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script = starts_and_waits
        a.report_changes = {
            "blocks_free": 300,
            "blocks_reserved": 50,
            "head_of_line_blocks": 96,
            "requests_running": 3,
            "requests_waiting": 1,
            "running_by_priority": {"-100": 1, "0": 1, "99": 1, "what": 7},
        }
        async with watching(running) as events, streaming(running) as (request_id, _):
            newest = await events.until(
                lambda newest: (
                    len(newest) == 3
                    and newest["requests"]["requests"]
                    and newest["cluster"]["instances"][0].get("running") == 3
                )
            )
            shown, other = newest["cluster"]["instances"]
            assert (shown["id"], shown["state"], other["id"], other["state"]) == ("a", "ready", "b", "ready")
            assert (shown["blocks_total"], shown["blocks_used"], shown["blocks_reserved"]) == (1000, 650, 50)
            assert (shown["head_of_line_blocks"], shown["freeness_steps"]) == (96, a.freeness_steps)
            assert shown["running_by_class"] == {"high": 1, "normal": 1, "low": 1}
            (request,) = newest["requests"]["requests"]
            assert (request["id"], request["instance"]) == (request_id, "a")
            assert request["gateway"] == newest["cluster"]["gateway"]["id"] == running.gateway.gateway_id
            assert newest["cluster"]["freeness"]["mean_steps"] == (a.freeness_steps + b.freeness_steps) / 2
            assert "hello" not in str(newest)  # The prompt.


async def test_the_admin_key_is_asked_for(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a, api_keys=("client",)) as running:
        for headers in ({}, {"authorization": "Bearer client"}, {"authorization": f"Basic {ADMIN_KEY}"}):
            assert_openai_error(await running.client.get("/admin/events", headers=headers), 401)
        assert_openai_error(await running.client.get("/admin/events", params={"key": ADMIN_KEY}), 401)
        assert_openai_error(await running.admin("POST", "/admin/events"), 405)


async def test_nothing_is_computed_while_nobody_looks(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        events = running.gateway.events
        assert not events.looks
        async with watching(running) as one, watching(running) as other:
            await one.until(lambda newest: "cluster" in newest)
            await other.until(lambda newest: "cluster" in newest)
            assert (events.looks, events.viewers) == (True, 2)
        await until(lambda: events.viewers == 0)
        assert not events.looks


async def test_a_move_is_told_with_its_pause_and_the_numbers_that_it_happened_for(start_gateway: StartGateway) -> None:
    """Also by a gateway that only hears of it."""
    async with instances("a", "b") as (a, b), start_gateway(a, b) as one, start_gateway(a, b) as other:
        await knows_each_other(one, other)
        Migratable(a, b)
        async with watching(one) as near, watching(other) as far, streaming(one) as (request_id, _):
            await far.until(lambda newest: request_id in str(newest.get("requests")))
            assert (await migrate(other, request_id, "b")).status_code == 200
            for events, gateway_id in ((near, None), (far, one.gateway.gateway_id)):
                newest = await events.until(lambda newest: "'move'" in str(newest.get("journal")))
                entries = newest["journal"]["entries"]
                (entry,) = [entry for entry in entries if entry["kind"] == "move"]
                assert entry["text"] == (f"moved {request_id[:8]} from a to b: a had 15000 decode steps left, b 600")
                moved = entry["moved"]
                assert (moved["request"], moved["source"], moved["destination"]) == (request_id, "a", "b")
                assert moved["pause_ms"] > 0
                assert entry["gateway"] == gateway_id
            assert "is ordered to move from a to b" in str(far.newest["journal"])


class Counting:
    """A part that says a number, each time another one, as fast as it is looked at."""

    def __init__(self) -> None:
        self.looks = 0

    async def look(self) -> int:
        self.looks += 1
        return self.looks


class Client:
    """Takes ASGI messages while ``reads`` is set."""

    def __init__(self) -> None:
        self.reads, self.leaves = asyncio.Event(), asyncio.Event()
        self.numbers: list[int] = []
        self.ended = False
        self.began = asyncio.Event()

    async def receive(self) -> MutableMapping[str, Any]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.began.set()
        await self.reads.wait()
        body = message.get("body", b"")
        self.numbers += [int(line[6:]) for line in body.splitlines() if line.startswith(b"data: ")]
        self.ended = message["type"] == "http.response.body" and not message["more_body"]


def build(part: Counting) -> Events:
    return Events([Part("count", 0.0, part.look)], Counters(), lambda: None)


async def test_a_reader_who_is_slow_gets_the_newest_and_nothing_is_kept_for_him() -> None:
    part, client = Counting(), Client()
    events = build(part)
    viewing = asyncio.create_task(events({"method": "GET"}, client.receive, client.send))
    await client.began.wait()
    before = part.looks
    await until(lambda: part.looks > before + 10)
    client.reads.set()
    await until(lambda: client.numbers)
    assert client.numbers[0] > before + 10
    events.close()
    await viewing
    assert client.ended
    assert client.numbers == sorted(set(client.numbers))
    await events.stop()


async def test_the_number_of_viewers_is_bounded(start_gateway: StartGateway) -> None:
    part = Counting()
    events = build(part)
    clients = [Client() for _ in range(VIEWERS_MAX)]
    viewing = [asyncio.create_task(events({"method": "GET"}, one.receive, one.send)) for one in clients]
    await until(lambda: events.viewers == VIEWERS_MAX)
    transport = httpx.ASGITransport(events)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        assert_openai_error(await client.get("/admin/events"), 503)
        for one in clients:
            one.leaves.set()
        await asyncio.gather(*viewing)
        assert (events.viewers, events.looks) == (0, False)
        await events.stop()
        assert_openai_error(await client.get("/admin/events"), 503)


async def test_a_stream_ends_when_the_gateway_does(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running, watching(running) as events:
        await events.until(lambda newest: "cluster" in newest)
        running.gateway.refuse_new()
        await until(lambda: running.gateway.events.viewers == 0)


async def test_clients_have_no_part_in_it(start_gateway: StartGateway) -> None:
    """A stream of a client goes on whether anybody looks or not, and what it says is not shown."""
    async with instances("a") as (a,), start_gateway(a) as running, watching(running) as events:
        secret = "a secret of the client's"
        body = chat_body(messages=[{"role": "user", "content": secret}], stream=True)
        assert (await running.client.post("/v1/chat/completions", json=body)).content.endswith(b"data: [DONE]\n\n")
        newest = await events.until(
            lambda newest: "cluster" in newest and newest["cluster"]["measured"]["ttft_ms"]["count"]
        )
        assert secret not in str(newest)
        assert newest["cluster"]["measured"]["ttft_ms"]["p50"] > 0
