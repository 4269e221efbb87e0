"""``kvferry requests``, ``migrate`` and ``drain``."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway import wire
from gateway.policy.decide import Policy
from loadtest.processes import free_port
from tests.cli.conftest import Kvferry
from tests.conftest import Running, StartGateway, chat_body, until, until_true
from tests.fake_instance import instances
from tests.scripts import starts_and_waits
from tests.test_admin import Migratable, result
from tests.test_drain import Movable, request_of

REQUEST_KEYS = {
    *("id", "path", "model", "stream", "state", "instance", "output_tokens", "token_gap_ms", "moves"),
}


@contextlib.asynccontextmanager
async def waiting_request(running: Running, **fields: Any) -> AsyncIterator[str]:
    async with running.client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True, **fields)) as response:
        yield response.headers[wire.REQUEST_ID_HEADER]


async def test_requests_are_listed_and_shown(start_gateway: StartGateway, kvferry: Kvferry) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        assert (await running.chat()).status_code == 200
        await until(lambda: not running.gateway.sessions.live())
        a.script = starts_and_waits
        async with waiting_request(running) as request_id:
            ran = await kvferry("requests", url=running.url)
            assert ran.rows[0] == ["REQUEST", "STATE", "INSTANCE", "GATEWAY", "MODEL", "PATH", "TOKENS", "MOVES"]
            assert [row[:3] for row in ran.rows[1:]] == [[request_id, "running", "a"]]
            assert [row[1] for row in (await kvferry("requests", "--recent")).rows[1:]] == ["running", "done"]
            (one,) = (await kvferry("requests", "--json")).json["requests"]
            assert set(one) >= REQUEST_KEYS
            assert set((await kvferry("requests", "list", "--recent", "--json")).json) == {
                "requests",
                "recent",
                "complete",
            }
            for name in (request_id, f"chatcmpl-{request_id}"):
                assert (await kvferry("requests", "show", name, "--json")).json["id"] == request_id
            assert (await kvferry("requests", "show", request_id)).rows[1][0] == request_id
            assert "`x`" in (await kvferry("requests", "show", "x")).fails(1)


async def test_any_gateway_lists_shows_and_cancels_the_requests_of_all(
    start_gateway: StartGateway, kvferry: Kvferry
) -> None:
    async with instances("a") as (a,), start_gateway(a) as one, start_gateway(a) as other:
        a.script = starts_and_waits
        async with waiting_request(one) as first, waiting_request(other) as second:

            async def lists_both() -> bool:
                listed = (await kvferry("requests", "--json", url=one.url)).json
                ids = {request["id"] for request in listed["requests"]}
                return listed["complete"] is True and ids == {first, second}

            await until_true(lists_both)
            shown = (await kvferry("requests", "show", second, "--json")).json
            assert (shown["id"], shown["gateway"]) == (second, other.gateway.gateway_id)
            ran = await kvferry("requests", "cancel", second)
            assert (ran.status, ran.out) == (0, f"{second} is cancelled: its client is told so.\n")
            await until(lambda: not other.gateway.sessions.live())
            assert f"`{second}`" in (await kvferry("requests", "cancel", second, "--json")).fails(1)
            assert [request["id"] for request in one.gateway.sessions.live()] == [first]


async def test_an_instance_is_added_and_removed_by_its_id_or_its_url(
    start_gateway: StartGateway, kvferry: Kvferry
) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    async with instances("a", "b") as (a, b), start_gateway(a) as running:
        ran = await kvferry("instances", "add", f"{b.url}/", url=running.url)
        assert (ran.status, ran.out) == (0, f"{b.url} is followed by all gateways from now on.\n")
        assert (await kvferry("instances", "add", gone, "--json")).json == {"url": gone, "source": "added"}
        await until(lambda: running.gateway.members.get("b"))
        answer = (await kvferry("instances", "--json")).json
        assert [(one["id"], one["source"]) for one in answer["instances"]] == [("a", "listed"), ("b", "added")]
        assert [one["url"] for one in answer["addresses"]] == [a.url, b.url, gone]
        assert [row[:3] for row in (await kvferry("instances")).rows[-1:]] == [["-", "unknown", gone]]
        assert (await kvferry("instances", "remove", "b")).status == 0
        ran = await kvferry("instances", "remove", gone)
        assert (ran.status, ran.out) == (0, f"{gone} gets nothing new, and is forgotten once nothing runs there.\n")
        await until(lambda: not running.gateway.members.get("b"))
        assert [row[0] for row in (await kvferry("instances")).rows[1:]] == ["a"]
        assert "`b`" in (await kvferry("instances", "remove", "b")).fails(1)
        (await kvferry("instances", "add", "10.0.0.3:8001")).fails(1)


async def test_what_clients_have_named_cannot_write_to_the_terminal(
    start_gateway: StartGateway, kvferry: Kvferry
) -> None:
    name = "[red]\x1b]0;owned\x07\nm"
    async with instances("a") as (a,):
        a.models = (name,)
        async with start_gateway(a) as running:
            a.script = starts_and_waits
            async with waiting_request(running, model=name):
                ran = await kvferry("requests", url=running.url)
                assert len(ran.out.splitlines()) == 2
                assert "[red]�]0;owned��m" in ran.out
                assert (await kvferry("requests", "--json")).json["requests"][0]["model"] == name


async def test_migrate_says_what_was_moved_and_what_the_client_saw(
    start_gateway: StartGateway, kvferry: Kvferry
) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        Migratable(a, b)
        streaming = asyncio.create_task(running.stream())
        request_id = (await a.exchange()).request.headers[wire.REQUEST_ID_HEADER]
        ran = await kvferry("migrate", request_id, "b", url=running.url)
        assert (ran.status, ran.err) == (0, "")
        assert ran.out.startswith(f"{request_id} has moved from a to b: 1 blocks sent in 2 stages")
        assert "pause of" in ran.out
        await streaming
        shown = await kvferry("requests", "show", request_id)
        assert shown.rows[2] == ["MOVE", "KIND", "FROM", "TO", "TOKENS", "PAUSE"]
        assert shown.rows[3][1:5] == ["migrated", "a", "b", "2"]


async def test_a_move_that_does_not_happen_fails_and_says_why(start_gateway: StartGateway, kvferry: Kvferry) -> None:
    orders: list[wire.MigrateOrder] = []

    async def abort(order: wire.MigrateOrder) -> tuple[int, Any]:
        orders.append(order)
        return 200, result(order, outcome="aborted", reason="no blocks")

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script, a.migrate = starts_and_waits, abort
        async with waiting_request(running) as request_id:
            ran = await kvferry("migrate", request_id, "b", "--method", "recompute", url=running.url)
            assert (ran.status, ran.out, ran.err) == (1, f"{request_id} stays on a: no blocks.\n", "")
            ran = await kvferry("migrate", request_id, "b", "--json")
            assert (ran.status, ran.json["outcome"], ran.json["reason"]) == (1, "aborted", "no blocks")
            assert "`c`" in (await kvferry("migrate", request_id, "c")).fails(1)
            assert "`nothing`" in (await kvferry("migrate", "nothing", "b")).fails(1)
    assert [order.method for order in orders] == ["recompute", "live"]


async def test_an_order_goes_to_the_first_gateway_that_can_be_reached(
    start_gateway: StartGateway, kvferry: Kvferry
) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        Migratable(a, b)
        streaming = asyncio.create_task(running.stream())
        request_id = (await a.exchange()).request.headers[wire.REQUEST_ID_HEADER]
        urls = f"http://127.0.0.1:{free_port()},{running.url}"
        assert (await kvferry("migrate", request_id, "b", "--url", urls)).status == 0
        await streaming


async def test_drain_empties_an_instance_and_undo_takes_it_back(start_gateway: StartGateway, kvferry: Kvferry) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b, policy=Policy.NONE) as running:
        Movable(a, "r1", "r2")
        ran = await kvferry("drain", "a", url=running.url)
        assert (ran.status, ran.out) == (0, "a is empty, and can be stopped: 2 requests have moved away.\n")
        assert (await kvferry("instances")).rows[1][:2] == ["a", "drained"]
        ran = await kvferry("drain", "a", "--undo")
        assert (ran.status, ran.out, a.draining) == (0, "a is taken back.\n", False)
        assert (await kvferry("drain", "a", "--json")).json["empty"] is True
        assert (await kvferry("instances", "undrain", "a", "--json")).json == {"instance": "a", "draining": False}


async def test_a_drain_that_does_not_end_in_time_fails_and_lists_what_is_left(
    start_gateway: StartGateway, kvferry: Kvferry
) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b, policy=Policy.NONE) as running:
        a.requests = [request_of("r1", movable=False, reason="n > 1")]

        async def lists_what_is_left() -> bool:
            ran = await kvferry("drain", "a", "--timeout", "0.2", url=running.url)
            assert ran.status == 1
            assert ran.out.startswith("a is not empty yet, and goes on draining: 0 requests have moved away.\n")
            return ran.rows[1:] == [["REQUEST", "STATE", "REASON"], ["r1", "running", "n > 1"]]

        await until_true(lists_what_is_left)
        ran = await kvferry("drain", "a", "--timeout", "0.2", "--json")
        assert (ran.status, ran.json["empty"], ran.json["draining"]) == (1, False, True)
        for nothing in ("x", "..", "x/../a", ""):
            assert f"`{nothing}`" in (await kvferry("drain", nothing, "--undo")).fails(1)


async def test_a_wrong_timeout_is_wrong_usage(kvferry: Kvferry) -> None:
    for timeout in ("0", "nan", "4000", "soon"):
        ran = await kvferry("drain", "a", "--timeout", timeout)
        assert ran.status == 2
        assert "--timeout" in ran.err


async def test_a_gateway_that_is_not_one_is_said_so(kvferry: Kvferry) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = bodies.pop(0)
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    bodies = [b"<html>", b"[]", b'{"instances": 1}', json.dumps({"instances": [1]}).encode()]
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        while bodies:
            (await kvferry("instances", url=f"http://127.0.0.1:{port}")).fails(3)


async def test_a_route_that_an_older_gateway_lacks_is_named(start_gateway: StartGateway, kvferry: Kvferry) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        await until(lambda: running.gateway.members.all())
        error = (await kvferry("status", url=f"{running.url}/admin")).fails(1)
        assert "GET /admin/admin/instances" in error


@pytest.mark.parametrize("path", ["status", "requests"])
async def test_an_instance_is_not_a_gateway(path: str, kvferry: Kvferry) -> None:
    async with instances("a") as (a,):
        (await kvferry(path, url=a.url)).fails(1)
