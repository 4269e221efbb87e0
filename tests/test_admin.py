"""What operators may call."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from gateway import wire
from gateway.admin import BODY_BYTES_MAX
from tests.conftest import Running, StartGateway, chat_body, until, until_true
from tests.fake_instance import Exchange, FakeInstance, Generation, error_body, instances
from tests.scripts import moved, prebind, starts_and_waits


def assert_openai_error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def result(order: wire.MigrateOrder, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "migration_id": "m1",
        "request_id": order.request_id,
        "source_id": "a",
        "destination_id": order.destination_id,
        "outcome": "committed",
        "reason": None,
        "stages": 2,
        "blocks_sent": 1,
        "blocks_reused": 0,
        "bytes_sent": 10,
        "output_tokens": 2,
        "duration_ms": 5.0,
        "final_ms": 1.0,
    }
    return wire.MigrationResult.from_json(values | changes).to_json()


async def migrate(running: Running, request: str, destination: str) -> httpx.Response:
    return await running.admin("POST", "/admin/migrate", json={"request": request, "destination": destination})


class Migratable:
    """A source that moves its request when it is told to, as a llumlet does."""

    def __init__(self, source: FakeInstance, destination: FakeInstance) -> None:
        self.destination = destination
        self.ordered = asyncio.Event()
        source.script, source.migrate = self.script, self.migrate

    async def script(self, exchange: Exchange) -> None:
        await exchange.start()
        await exchange.send(*Generation(exchange.request).upto(2))
        await self.ordered.wait()
        await exchange.send(prebind(self.destination))
        self.destination.commit("m1", 2)
        await exchange.send(moved(self.destination, 2))
        await exchange.finish()

    async def migrate(self, order: wire.MigrateOrder) -> tuple[int, Any]:
        assert order.destination_url == self.destination.url
        self.ordered.set()
        return 200, result(order)


@pytest.mark.parametrize("prefix", ["", "chatcmpl-"])
async def test_a_forced_move_answers_with_the_pause_that_the_client_saw(
    prefix: str, start_gateway: StartGateway
) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        Migratable(a, b)
        streaming = asyncio.create_task(running.stream())
        request_id = (await a.exchange()).request.headers[wire.REQUEST_ID_HEADER]
        response = await migrate(running, prefix + request_id, "b")
        assert response.status_code == 200, response.text
        answer = response.json()
        assert (answer["request_id"], answer["outcome"], answer["destination_id"]) == (request_id, "committed", "b")
        assert answer["pause_ms"] > 0
        assert (await streaming).endswith(b"data: [DONE]\n\n")


async def test_wrong_orders(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script = starts_and_waits
        async with running.client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as response:
            request_id = response.headers[wire.REQUEST_ID_HEADER]
            assert assert_openai_error(await migrate(running, "unknown", "b"), 404)["code"] == "request_not_found"
            assert assert_openai_error(await migrate(running, request_id, "c"), 404)["code"] == "instance_not_found"
            assert assert_openai_error(await migrate(running, request_id, "a"), 400)["param"] == "destination"
            half = b'{"request": "\\ud800", "destination": "a"}'
            assert_openai_error(await running.admin("POST", "/admin/migrate", content=half), 404)
            assert_openai_error(await running.admin("POST", "/admin/migrate", content=b"{"), 400)
            assert_openai_error(await running.admin("POST", "/admin/migrate", json=[]), 400)
            assert_openai_error(await running.admin("POST", "/admin/migrate", json={"request": request_id}), 400)


ORDERS = [
    ("POST", "/admin/instances"),
    ("DELETE", "/admin/instances"),
    ("POST", "/admin/migrate"),
    ("POST", "/admin/instances/a/drain"),
]


@pytest.mark.parametrize(("method", "path"), ORDERS)
async def test_an_order_is_bounded_and_says_nothing_that_is_not_known(
    method: str, path: str, start_gateway: StartGateway
) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        large = b'{"url": "' + b"x" * BODY_BYTES_MAX + b'"}'
        assert_openai_error(await running.admin(method, path, content=large), 413)
        error = assert_openai_error(await running.admin(method, path, json={"dry_run": True}), 400)
        assert error["param"] == "dry_run"
        for body in (b"{", b"[1]", b"null", b'{"a":' * 10_000, b"\xff"):
            assert_openai_error(await running.admin(method, path, content=body), 400)
        assert_openai_error(await running.admin(method, path + "/", json={}), 404)
        assert len(running.gateway.members.all()) == 1
        assert not a.draining


@pytest.mark.parametrize("method", [None, "live", "blocking", "recompute"])
async def test_an_order_may_name_a_method(method: str | None, start_gateway: StartGateway) -> None:
    orders: list[wire.MigrateOrder] = []

    async def migrate(order: wire.MigrateOrder) -> tuple[int, Any]:
        orders.append(order)
        return 200, result(order, outcome="aborted")

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script, a.migrate = starts_and_waits, migrate
        async with running.client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as response:
            order = {"request": response.headers[wire.REQUEST_ID_HEADER], "destination": "b"}
            named = order | ({} if method is None else {"method": method})
            assert (await running.admin("POST", "/admin/migrate", json=named)).status_code == 200
            wrong: Any
            for wrong in ("", "LIVE", 1, None, []):
                answer = await running.admin("POST", "/admin/migrate", json=order | {"method": wrong})
                assert assert_openai_error(answer, 400)["param"] == "method"
    assert [order.method for order in orders] == [method or "live"]


@pytest.mark.parametrize(
    ("status", "code", "expected"), [(409, "cannot_move", 409), (404, "request_not_found", 404), (500, "x", 502)]
)
async def test_what_the_llumlet_refuses_is_passed_on(
    status: int, code: str, expected: int, start_gateway: StartGateway
) -> None:
    async def refuse(order: wire.MigrateOrder) -> tuple[int, Any]:
        return status, error_body("n > 1 cannot move", "Conflict", code)

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script, a.migrate = starts_and_waits, refuse
        async with running.client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as response:
            error = assert_openai_error(await migrate(running, response.headers[wire.REQUEST_ID_HEADER], "b"), expected)
            assert error["message"] == "n > 1 cannot move"
            assert error["code"] == code


async def test_an_order_that_meets_a_reply_that_lags_behind_its_move_is_given_again(
    start_gateway: StartGateway,
) -> None:
    """The source has let the request go and knows it no more, but its last word has not come through yet."""
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        moving = Migratable(a, b)

        async def gone(order: wire.MigrateOrder) -> tuple[int, Any]:
            moving.ordered.set()
            return 404, error_body("no managed request is here", "NotFound", "request_not_found")

        a.migrate = gone
        streaming = asyncio.create_task(running.stream())
        request_id = (await a.exchange()).request.headers[wire.REQUEST_ID_HEADER]
        response = await migrate(running, request_id, "b")
        # By then the request is on b itself, so an order to move it there is refused for that reason.
        assert "is on `b` already" in assert_openai_error(response, 400)["message"]
        assert (await streaming).endswith(b"data: [DONE]\n\n")


async def test_an_aborted_move_is_an_answer_too(start_gateway: StartGateway) -> None:
    async def abort(order: wire.MigrateOrder) -> tuple[int, Any]:
        return 200, result(order, outcome="aborted", reason="no blocks")

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script, a.migrate = starts_and_waits, abort
        async with running.client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as response:
            answer = (await migrate(running, response.headers[wire.REQUEST_ID_HEADER], "b")).json()
            assert (answer["outcome"], answer["reason"], answer["pause_ms"]) == ("aborted", "no blocks", None)


async def test_the_admin_key_is_asked_for(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a, api_keys=("client",)) as running:
        for path in ("/admin/instances", "/admin/requests", "/admin/migrate", "/admin/nothing"):
            for key in (None, "wrong", "client"):
                headers = {} if key is None else {"authorization": f"Bearer {key}"}
                assert_openai_error(await running.client.get(path, headers=headers), 401)


async def test_without_an_admin_key_nobody_gets_in(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a, admin_key="") as running:
        for key in ("x", "admin-key"):
            headers = {"authorization": f"Bearer {key}"}
            assert_openai_error(await running.client.get("/admin/requests", headers=headers), 401)


async def test_instances_and_requests_are_shown(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script = starts_and_waits
        async with running.client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as response:
            request_id = response.headers[wire.REQUEST_ID_HEADER]
            shown = (await running.admin("GET", "/admin/instances")).json()["instances"]
            assert [(one["id"], one["healthy"], one["in_flight"]) for one in shown] == [("a", True, 1), ("b", True, 0)]
            assert shown[0]["report"]["freeness_steps"] == a.freeness_steps
            (live,) = (await running.admin("GET", "/admin/requests")).json()["requests"]
            assert (live["id"], live["instance"], live["state"]) == (request_id, "a", "running")
        await until(lambda: not running.gateway.sessions.live())
        (recent,) = (await running.admin("GET", "/admin/requests")).json()["recent"]
        assert (recent["id"], recent["state"]) == (request_id, "cancelled")


async def test_a_request_of_another_gateway_is_found_by_its_record(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as one, start_gateway(a, b) as other:
        Migratable(a, b)
        streaming = asyncio.create_task(one.stream())
        request_id = (await a.exchange()).request.headers[wire.REQUEST_ID_HEADER]
        await until_true(lambda: one.gateway.store.owner(request_id))
        response = await migrate(other, request_id, "b")
        assert response.status_code == 200
        assert response.json()["pause_ms"] is not None  # As the gateway has seen it that holds the client.
        await streaming
