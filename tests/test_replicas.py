"""Any gateway answers for the requests of all."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from gateway import wire
from gateway.cluster import keys, replicas
from loadtest.processes import free_port
from tests.conftest import Running, StartGateway, chat_body, until, until_true
from tests.cutting_proxy import CuttingProxy
from tests.fake_instance import MODEL, instances
from tests.scripts import gone, silent, starts_and_waits
from tests.test_admin import assert_openai_error


async def knows_each_other(*gateways: Running) -> None:
    await until(lambda: all(len(one.gateway.replicas.others) >= len(gateways) - 1 for one in gateways))


@contextlib.asynccontextmanager
async def streaming(running: Running) -> AsyncIterator[tuple[str, AsyncIterator[bytes]]]:
    """A stream that has begun, and the gateway's id of it."""
    async with running.client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as response:
        chunks = response.aiter_bytes()
        await anext(chunks)
        yield response.headers[wire.OWN_REQUEST_ID_HEADER], chunks


async def listed(running: Running) -> Any:
    return (await running.admin("GET", "/admin/requests")).json()


async def test_all_requests_are_listed_and_shown_through_any_gateway(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as one, start_gateway(a) as other:
        a.script = starts_and_waits
        await knows_each_other(one, other)
        async with streaming(one) as (first, _), streaming(other) as (second, _):
            holders = {first: one.gateway.gateway_id, second: other.gateway.gateway_id}
            for running in (one, other):
                answer = await listed(running)
                assert answer["complete"] is True
                assert {request["id"]: request["gateway"] for request in answer["requests"]} == holders
                assert {gateway["id"] for gateway in answer["gateways"]} == set(holders.values())
                for request_id, gateway_id in holders.items():
                    shown = (await running.admin("GET", f"/admin/requests/chatcmpl-{request_id}")).json()
                    assert (shown["id"], shown["gateway"], shown["instance"]) == (request_id, gateway_id, "a")


async def test_a_request_is_cancelled_through_any_gateway_and_leaves_nothing_behind(
    start_gateway: StartGateway,
) -> None:
    async with instances("a") as (a,), start_gateway(a) as one, start_gateway(a) as other:
        a.script = starts_and_waits
        await knows_each_other(one, other)
        async with streaming(one) as (request_id, chunks):
            answer = await other.admin("DELETE", f"/admin/requests/{request_id}")
            assert answer.json() == {"request": request_id, "gateway": one.gateway.gateway_id, "cancelled": True}
            rest = b"".join([chunk async for chunk in chunks])
        error = json.loads(rest.split(b"data: ")[-1])["error"]
        assert (error["type"], error["code"]) == ("CancelledError", "request_cancelled")
        assert b"[DONE]" not in rest
        await gone(*a.exchanges)
        assert one.gateway.dispatcher.in_flight("a") == 0
        assert [ended["state"] for ended in (await listed(other))["recent"]] == ["cancelled"]
        assert_openai_error(await other.admin("DELETE", f"/admin/requests/{request_id}"), 404)

        async def forgotten() -> bool:
            return await one.gateway.store.owner(request_id) is None

        await until_true(forgotten)


async def test_what_has_said_nothing_yet_or_is_only_passed_on_is_cancelled_with_a_status(
    start_gateway: StartGateway,
) -> None:
    """A status that clients' libraries do not take for a reason to try again."""
    async with instances("a") as (a,), start_gateway(a) as one, start_gateway(a) as other:
        a.script = silent
        await knows_each_other(one, other)
        bodies = {"/v1/chat/completions": chat_body(), "/v1/embeddings": {"model": MODEL, "input": "x"}}
        for index, (path, body) in enumerate(bodies.items()):
            asking = asyncio.create_task(one.client.post(path, json=body))
            request_id = (await a.exchange(index)).request.headers[wire.REQUEST_ID_HEADER]
            cancelled = await other.admin("DELETE", f"/admin/requests/{request_id}")
            assert cancelled.json()["gateway"] == one.gateway.gateway_id
            assert assert_openai_error(await asking, 499)["code"] == "request_cancelled"


async def test_a_gateway_that_does_not_answer_is_named_and_waited_for_a_moment_only(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "ANSWER_WAIT_S", 0.2)
    async with instances("a") as (a,), start_gateway(a) as running:
        await running.gateway.store.beat("frozen", "epoch")
        await until(lambda: "frozen" in running.gateway.replicas.others)
        answer = await listed(running)
        assert {one["id"]: one["answered"] for one in answer["gateways"]} == {
            running.gateway.gateway_id: True,
            "frozen": False,
        }
        assert answer["complete"] is False
        assert_openai_error(await running.admin("GET", "/admin/requests/unknown"), 404)
        await running.gateway.store.leave("frozen")


async def test_without_redis_a_gateway_answers_for_itself_and_says_so(start_gateway: StartGateway) -> None:
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    async with instances("a") as (a,), start_gateway(a, redis_url=nowhere) as running:
        a.script = starts_and_waits
        async with streaming(running) as (request_id, _):
            answer = await listed(running)
            assert ([one["id"] for one in answer["requests"]], answer["complete"]) == ([request_id], False)
            for method in ("GET", "DELETE"):
                assert_openai_error(await running.admin(method, "/admin/requests/another"), 503)
            assert (await running.admin("DELETE", f"/admin/requests/{request_id}")).status_code == 200


@pytest.mark.parametrize("how", ["cut", "silent"])
async def test_questions_are_heard_again_soon_after_the_way_to_redis_was_lost(
    how: str, start_gateway: StartGateway, redis_url: str
) -> None:
    """F24: a reader that waits for word is deaf for ever when its connection dies without a sign; this one asks."""
    port = urlsplit(redis_url).port
    assert port is not None
    async with CuttingProxy(port).running() as proxy, instances("a") as (a,):
        behind = f"redis://127.0.0.1:{proxy.port}/0"
        async with start_gateway(a, redis_url=behind) as one, start_gateway(a) as other:
            a.script = starts_and_waits
            await knows_each_other(one, other)
            async with streaming(one) as (request_id, _):
                failures = one.gateway.store.failures
                if how == "silent":
                    proxy.passes.clear()
                proxy.refusing = True
                if how == "cut":
                    proxy.cut()
                await until(lambda: one.gateway.store.failures > failures + 2, 30)
                proxy.refusing = False
                proxy.cut()
                proxy.passes.set()

                async def answers() -> bool:
                    found = await other.admin("GET", f"/admin/requests/{request_id}")
                    return found.status_code == 200

                await until_true(answers, 30)


async def test_malformed_questions_are_let_go(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        store, own = running.gateway.store, keys.calls(running.gateway.gateway_id)
        for text in ("{", "[]", '{"id": "x"}', '{"id": "x", "kind": "y", "words": {}}', '{"id": 1, "kind": "look"}'):
            await store._redis.rpush(own, text)
        assert await running.gateway.replicas.ask([running.gateway.gateway_id], "list", {})


async def test_a_gateway_that_ends_is_asked_no_more(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as one:
        async with start_gateway(a) as other:
            await knows_each_other(one, other)
        await until(lambda: not one.gateway.replicas.others)


async def test_a_model_of_the_same_name_that_is_another_one_takes_no_request_of_another_gateway(
    start_gateway: StartGateway,
) -> None:
    async with instances("a", "b") as (a, b):
        b.card_changes = {MODEL: {"root": "another"}}
        async with start_gateway(a, b) as one, start_gateway(a, b) as other:
            a.script = starts_and_waits
            await knows_each_other(one, other)
            async with streaming(one) as (request_id, _):
                order = {"request": request_id, "destination": "b"}
                answer = await other.admin("POST", "/admin/migrate", json=order)
                assert assert_openai_error(answer, 409)["code"] == "model_not_served"


async def test_what_all_gateways_have_in_flight_at_an_instance_is_told_by_any(start_gateway: StartGateway) -> None:
    """So an instance counts as empty only when nobody has anything there."""
    async with instances("a") as (a,), start_gateway(a) as one, start_gateway(a) as other:
        a.script = starts_and_waits
        await knows_each_other(one, other)

        async def told(running: Running) -> tuple[Any, ...]:
            shown = (await running.admin("GET", "/admin/instances")).json()
            (instance,) = shown["instances"]
            return shown["complete"], instance["in_flight"], instance["in_flight_here"], instance["empty"]

        async with streaming(one), streaming(one), streaming(other):
            await until_true(lambda: is_told(told, one, (True, 3, 2, False)))
            await until_true(lambda: is_told(told, other, (True, 3, 1, False)))
        await until_true(lambda: is_told(told, one, (True, 0, 0, True)))


async def is_told(told: Any, running: Running, expected: tuple[Any, ...]) -> bool:
    return bool(await told(running) == expected)
