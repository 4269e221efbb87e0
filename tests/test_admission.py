"""Keys, limits and classes as clients meet them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.access import Key, digest
from gateway.config import Budgets
from gateway.counters import Counters
from gateway.openai.caps import Caps
from gateway.policy.limits import KeyLimits
from gateway.wire import PriorityClass
from loadtest.redis_server import RedisServer
from tests.conftest import Running, StartGateway, chat_body, until
from tests.fake_instance import MODEL, Exchange, FakeInstance, Generation, generate, instances
from tests.test_routes import assert_openai_error

PATIENT = Budgets(header_grace_s=0.05, limits_s=20.0)
"""However slow the machine, Redis is to decide."""
SECRET_KEY = "kvf-test"
BEARER = {"authorization": f"Bearer {SECRET_KEY}"}


def named(**limits: Any) -> tuple[Key, ...]:
    """A key with a name of its own, so that no other run of a test has used any of it."""
    priority_max = limits.pop("priority_max", PriorityClass.HIGH)
    key_limits = KeyLimits(**limits) if limits else None
    return (Key(uuid.uuid4().hex, digest(SECRET_KEY.encode()), key_limits, priority_max),)


def settings(**limits: Any) -> dict[str, Any]:
    return {"named_keys": named(**limits), "budgets": PATIENT}


async def chat(running: Running, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    headers = BEARER | (headers or {})
    return await running.client.post("/v1/chat/completions", json=chat_body(**fields), headers=headers)


class Held:
    """A script that holds its reply back until ``go`` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, exchange: Exchange) -> None:
        await self.go.wait()
        await generate(exchange)


@contextlib.asynccontextmanager
async def several(
    start_gateway: StartGateway, count: int, *fakes: FakeInstance, **changes: Any
) -> AsyncIterator[list[Running]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(start_gateway(*fakes, **changes)) for _ in range(count)]


async def test_a_limit_of_10_lets_in_10_of_100_whichever_gateways_they_go_to(start_gateway: StartGateway) -> None:
    held = Held()
    async with instances("a") as (a,), several(start_gateway, 4, a, **settings(concurrent_requests=10)) as gateways:
        a.script = held
        calls = [asyncio.create_task(chat(gateways[n % 4])) for n in range(100)]
        await until(lambda: sum(call.done() for call in calls) >= 90, 60)
        held.go.set()
        statuses = sorted([(await call).status_code for call in calls])
        assert statuses == [200] * 10 + [429] * 90
        assert len(a.received) == 10
        refused = next(call.result() for call in calls if call.result().status_code == 429)
        error = assert_openai_error(refused, 429)
        assert error["code"] == "rate_limit_exceeded"
        assert int(refused.headers["retry-after"]) >= 1


async def test_a_request_refused_for_its_concurrency_uses_no_rate(start_gateway: StartGateway) -> None:
    held = Held()
    changes = settings(requests_per_minute=2, concurrent_requests=1)
    async with instances("a") as (a,), several(start_gateway, 2, a, **changes) as (one, two):
        a.script = held
        running = asyncio.create_task(chat(one))
        await a.exchange(0)
        assert_openai_error(await chat(two), 429)
        held.go.set()
        assert (await running).status_code == 200
        assert (await chat(two)).status_code == 200
        refused = await chat(one)
        assert_openai_error(refused, 429)
        assert refused.headers["x-ratelimit-limit-requests"] == "2"
        assert refused.headers["x-ratelimit-reset-requests"] == f"{refused.headers['retry-after']}s"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_place_is_free_as_soon_as_the_client_has_its_reply(stream: bool, start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), several(start_gateway, 2, a, **settings(concurrent_requests=1)) as gateways:
        for number in range(6):
            response = await chat(gateways[number % 2], stream=stream)
            assert response.status_code == 200, number


@pytest.mark.parametrize("stream", [False, True])
async def test_the_last_bytes_of_a_reply_are_sent_when_its_place_is_free(
    stream: bool, start_gateway: StartGateway
) -> None:
    """A client goes on at [DONE], and does not wait for the end of the connection."""
    async with instances("a") as (a,), start_gateway(a, **settings(concurrent_requests=1)) as running:
        limiter = running.gateway.limiter
        messages = [{"type": "http.request", "body": json.dumps(chat_body(stream=stream)).encode()}]
        held: list[int] = []

        async def receive() -> Any:
            if not messages:
                await asyncio.Event().wait()
            return messages.pop()

        async def send(message: Any) -> None:
            if b"[DONE]" in message.get("body", b"") or b'"usage"' in message.get("body", b""):
                held.append(len(limiter._places) + len(limiter._queue))

        headers = [(b"content-type", b"application/json"), (b"authorization", BEARER["authorization"].encode())]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
        await running.gateway(scope, receive, send)
        assert held == [0]


async def test_a_client_that_leaves_gives_its_place_back(start_gateway: StartGateway) -> None:
    held = Held()
    async with instances("a") as (a,), several(start_gateway, 2, a, **settings(concurrent_requests=1)) as (one, two):
        a.script = held
        for stream in (False, True):
            leaving = asyncio.create_task(chat(one, stream=stream))
            exchange = await a.exchange(len(a.exchanges))
            leaving.cancel()
            await asyncio.wait_for(exchange.client_gone.wait(), 10)
            await until(lambda: not one.gateway.limiter._places)
        held.go.set()
        assert (await chat(two)).status_code == 200


async def test_a_place_is_given_back_however_a_request_ends(start_gateway: StartGateway) -> None:
    async def refuses(exchange: Exchange) -> None:
        await exchange.json(400, {"error": {"message": "no"}})

    async def breaks(exchange: Exchange) -> None:
        await exchange.json(500, {"error": {"message": "broken"}})

    async def cuts(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.send(*Generation(exchange.request).upto(2))
        await exchange.cut()

    changes = settings(concurrent_requests=1, tokens_per_minute=1000)
    async with instances("a") as (a,), several(start_gateway, 1, a, **changes) as (one,):
        for script in (refuses, breaks, cuts):
            a.script = script
            response = await chat(one, stream=script is cuts)
            assert response.status_code != 429
        assert (await chat(one, model="unknown")).status_code == 404
        a.script = generate
        await until(lambda: not one.gateway.dispatcher.in_flight("a"))
        last = await chat(one)
        assert last.status_code in (200, 503)  # The instance may be held to be at fault for a moment.
        assert not one.gateway.limiter._places


async def test_tokens_are_booked_by_estimate_and_settled_by_what_was_used(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), several(start_gateway, 2, a, **settings(tokens_per_minute=1000)) as (one, two):
        a.script = short
        for number, stream in enumerate((False, True, False)):
            response = await chat((one, two)[number % 2], stream=stream, max_tokens=900)
            assert response.status_code == 200, number
            assert response.headers["x-ratelimit-limit-tokens"] == "1000"
            assert int(response.headers["x-ratelimit-remaining-tokens"]) < 100
        refused = await chat(two, max_tokens=990)
        assert_openai_error(refused, 429)
        assert "tokens a minute" in refused.json()["error"]["message"]


async def short(exchange: Exchange) -> None:
    """Far less than was asked for."""
    body = exchange.request.json | {"max_tokens": 2}
    exchange.request.body = json.dumps(body).encode()
    await generate(exchange)


async def test_a_key_without_limits_asks_redis_nothing(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a, **settings()) as running:
        limiter = running.gateway.limiter
        await until(lambda: limiter._sending is not None and limiter._sending.done())  # It looks for Redis once.
        before = limiter._sending
        assert (await chat(running, stream=True)).status_code == 200
        assert limiter._sending is before
        assert not limiter._ledgers


async def test_with_redis_stopped_requests_go_on_within_the_limits(tmp_path: Path, start_gateway: StartGateway) -> None:
    with RedisServer(log=tmp_path / "redis.log", environment={"PATH": os.environ["PATH"]}) as server:
        changes: dict[str, Any] = {"redis_url": server.url, "budgets": Budgets(header_grace_s=0.05, limits_s=0.5)}
        keys = named(requests_per_minute=10)
        assert server.process is not None
        async with instances("a") as (a,), start_gateway(a, named_keys=keys, **changes) as running:
            assert (await chat(running)).status_code == 200
            os.kill(server.process.pid, signal.SIGSTOP)
            try:
                statuses = [(await chat(running, stream=True)).status_code for _ in range(12)]
            finally:
                os.kill(server.process.pid, signal.SIGCONT)
            assert statuses == [200] * 9 + [429] * 3
            await until(lambda: running.gateway.limiter.is_shared, 20)


async def test_the_official_client_sees_a_limit_as_its_own_kind_of_error(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a, **settings(requests_per_minute=1)) as running:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=SECRET_KEY, max_retries=0) as client:
            create = client.chat.completions.create
            await create(model=MODEL, messages=[{"role": "user", "content": "x"}], service_tier="flex")
            with pytest.raises(openai.RateLimitError) as refusal:
                await create(model=MODEL, messages=[{"role": "user", "content": "x"}])
        assert refusal.value.code == "rate_limit_exceeded"
        assert refusal.value.type == "rate_limit_error"


async def test_the_more_urgent_request_has_the_smaller_number_at_the_instance(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a, **settings()) as running:
        asked: list[tuple[dict[str, str], dict[str, Any]]] = [
            ({"x-kvferry-priority": "high"}, {}),
            ({}, {"service_tier": "priority"}),
            ({}, {"priority": -(2**63)}),
            ({}, {"service_tier": "flex", "priority": -5}),
            ({"x-vllm-priority": "-9"}, {}),
        ]
        for headers, fields in asked:
            response = await chat(running, headers, **fields)
            assert response.status_code == 200
        numbers = [received.json.get("priority", 0) for received in a.received]
        assert numbers == [-100, -100, 0, 100, 0]
        assert all("x-vllm-priority" not in received.headers for received in a.received)
        assert "x-kvferry-priority" not in str(a.received[0].raw_headers)


async def test_a_key_bounds_the_class_and_the_reply_names_the_one_that_was_given(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a, **settings(priority_max=PriorityClass.LOW)) as running:
        response = await chat(running, {"x-kvferry-priority": "high"})
        assert response.headers["x-kvferry-priority"] == "low"
        unasked = await chat(running)
        assert "x-kvferry-priority" not in unasked.headers
        assert [received.json["priority"] for received in a.received] == [100, 100]
        error = assert_openai_error(await chat(running, {"x-kvferry-priority": "urgent"}), 400)
        assert error["param"] == "x-kvferry-priority"
        assert assert_openai_error(await chat(running, service_tier="turbo"), 400)["param"] == "service_tier"


async def test_a_cap_is_a_400_that_names_it_and_uses_nothing(start_gateway: StartGateway) -> None:
    changes = settings(requests_per_minute=1) | {"caps": Caps(n=2)}
    async with instances("a") as (a,), start_gateway(a, **changes) as running:
        error = assert_openai_error(await chat(running, n=3), 400)
        assert error["param"] == "n"
        assert "at most 2" in error["message"]
        assert not a.received
        assert (await chat(running, n=2)).status_code == 200


async def test_a_key_in_the_query_or_the_body_opens_nothing(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a, **settings()) as running:
        for query in (f"?api_key={SECRET_KEY}", f"?key={SECRET_KEY}", f"?authorization=Bearer%20{SECRET_KEY}"):
            body = chat_body(api_key=SECRET_KEY)
            response = await running.client.post(f"/v1/chat/completions{query}", json=body)
            assert_openai_error(response, 401)
            assert SECRET_KEY not in response.text
        assert not a.received


async def test_a_clients_credentials_reach_no_instance_and_no_log(
    start_gateway: StartGateway, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("x-api-key", "api-key", "cookie", "proxy-authorization", "x-goog-api-key", "openai-organization")
    aimed = dict.fromkeys(("api_base", "base_url", "api_host"), "http://127.0.0.1:9") | {"api_key": "canary"}
    caplog.set_level("DEBUG", "kvferry")
    async with instances("a") as (a,), start_gateway(a, **settings(requests_per_minute=9)) as running:
        response = await chat(running, dict.fromkeys(names, "canary"), **aimed)
        assert response.status_code == 200
        again = await chat(running)
        (first, second) = a.received
        assert "canary" not in str(first.raw_headers) + str(second)
        assert SECRET_KEY not in str(first) + str(second) + caplog.text + str(again.headers)
        assert not {"authorization", "proxy-authorization"} & set(first.headers)


async def test_anthropics_clients_may_send_their_key_in_their_way(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a, **settings()) as running:
        headers = {"x-api-key": SECRET_KEY}
        assert_openai_error(await running.client.get("/v1/models", headers=headers), 401)
        assert_openai_error(await running.client.post("/v1/messages", headers={"x-api-key": "wrong"}), 401)
        response = await running.client.post("/v1/messages", json={}, headers=headers)
        assert response.status_code != 401


async def test_instances_and_redis_are_reached_directly_whatever_proxy_the_environment_names(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.lower(), "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8")
    async with instances("a") as (a,), start_gateway(a, **settings(requests_per_minute=5)) as running:
        response = await chat(running)
        assert response.status_code == 200
        assert response.headers["x-ratelimit-remaining-requests"] == "4"
        assert running.gateway.limiter.is_shared
        counters: Counters = running.gateway.counters
        assert counters.get("limits_applied_alone") == 0
