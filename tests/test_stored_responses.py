"""A response that an instance stores: what follows on it goes there, through any gateway, or nowhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator

import httpx
import pytest
import redis.asyncio as redis

from gateway.cluster import keys
from gateway.cluster.store import Store
from tests.conftest import Running, StartGateway, until
from tests.fake_instance import MODEL, Exchange, FakeInstance, instances
from tests.scripts import resets
from tests.test_routes import assert_openai_error


async def stores(exchange: Exchange) -> None:
    """As vLLM with its store switched on."""
    instance, request = exchange.instance, exchange.request
    if request.path == "/v1/responses":
        previous = request.json.get("previous_response_id")
        response_id = f"resp_{uuid.uuid4().hex}"
        value = {"id": response_id, "object": "response", "previous": previous, "by": instance.instance_id}
        if request.json.get("stream"):
            created = {"response": value, "sequence_number": 0, "type": "response.created"}
            await exchange.start()
            await exchange.send(b"event: response.created\ndata: " + json.dumps(created).encode() + b"\n\n")
            await exchange.send(b"event: response.completed\ndata: {}\n\n")
            await exchange.finish()
        else:
            await exchange.json(200, value)
    else:
        await exchange.json(200, {"by": instance.instance_id, "path": request.path})


@contextlib.asynccontextmanager
async def cluster() -> AsyncIterator[list[FakeInstance]]:
    async with instances("a", "b", "c") as fakes:
        for fake in fakes:
            fake.script = stores
        yield fakes


async def create(running: Running, **fields: object) -> httpx.Response:
    return await running.client.post("/v1/responses", json={"model": MODEL, "input": "x", **fields})


async def create_at_b(running: Running, fakes: list[FakeInstance], **fields: object) -> str:
    """Where the next one, by freeness alone, will not go."""
    a, b, _ = fakes
    a.freeness_steps, b.freeness_steps = 600.0, 15_000.0
    await until(lambda: running.gateway.dispatcher.choose(None).instance_id == "b")
    response = await create(running, **fields)
    a.freeness_steps, b.freeness_steps = 15_000.0, 600.0
    await until(lambda: running.gateway.dispatcher.choose(None).instance_id == "a")
    data = response.content.partition(b"data: ")[2] if fields.get("stream") else response.content
    value = json.loads(data.partition(b"\n\n")[0])
    created: dict[str, str] = value.get("response", value)
    assert created["by"] == "b"
    return created["id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_follows_on_a_response_goes_to_its_instance_through_any_gateway(
    stream: bool, start_gateway: StartGateway
) -> None:
    async with cluster() as fakes, start_gateway(*fakes) as first, start_gateway(*fakes) as second:
        response_id = await create_at_b(first, fakes, stream=stream)
        for running in (second, first):
            get = await running.client.get(f"/v1/responses/{response_id}?stream=true&starting_after=3&key=canary")
            assert get.json() == {"by": "b", "path": f"/v1/responses/{response_id}?stream=true&starting_after=3"}
            cancel = await running.client.post(f"/v1/responses/{response_id}/cancel")
            assert cancel.json() == {"by": "b", "path": f"/v1/responses/{response_id}/cancel"}
            for previous in [response_id] * 2:
                follow = await create(running, previous_response_id=previous)
                assert (follow.json()["by"], follow.json()["previous"]) == ("b", response_id)
            another = (await create(running, previous_response_id=follow.json()["id"])).json()
            assert another["by"] == "b"


async def test_an_unknown_response_is_a_404_as_vllm_says_it(start_gateway: StartGateway) -> None:
    async with cluster() as fakes, start_gateway(*fakes) as running:
        for response_id in ("resp_0", "x" * 300, "a%20b"):
            for method, path in (("GET", ""), ("POST", "/cancel")):
                response = await running.client.request(method, f"/v1/responses/{response_id}{path}")
                assert_openai_error(response, 404)
        response = await create(running, previous_response_id="resp_0")
        message = "Response with id 'resp_0' not found."
        expected = {"message": message, "type": "invalid_request_error", "param": "response_id", "code": 404}
        assert response.json() == {"error": expected}
        assert not any(fake.received for fake in fakes)


async def test_a_response_is_lost_with_its_instance_and_no_other_is_asked(start_gateway: StartGateway) -> None:
    async with cluster() as fakes, start_gateway(*fakes) as running:
        b = fakes[1]
        response_id = await create_at_b(running, fakes)
        b.script = resets
        assert_openai_error(await running.client.get(f"/v1/responses/{response_id}"), 502)
        port = int(httpx.URL(b.url).port or 0)
        await b.stop()
        assert_openai_error(await running.client.get(f"/v1/responses/{response_id}"), 503)
        await until(lambda: not running.gateway.members.is_healthy("b"))
        assert_openai_error(await create(running, previous_response_id=response_id), 503)
        b.boot_id, b.script = "boot-2", stores
        await b.listen(port)
        await until(lambda: running.gateway.members.is_healthy("b"))
        error = assert_openai_error(await running.client.get(f"/v1/responses/{response_id}"), 404)
        assert "restarted" in error["message"]
        assert not fakes[0].received
        assert not fakes[2].received


async def test_a_draining_instance_still_answers_for_what_it_holds(start_gateway: StartGateway) -> None:
    async with cluster() as fakes, start_gateway(*fakes) as running:
        response_id = await create_at_b(running, fakes)
        fakes[1].draining = True
        await until(lambda: running.gateway.members.is_draining("b"))
        assert (await running.client.get(f"/v1/responses/{response_id}")).json()["by"] == "b"


async def test_what_is_not_to_be_stored_is_not_remembered(start_gateway: StartGateway) -> None:
    async with cluster() as fakes, start_gateway(*fakes) as running:
        response_id = (await create(running, store=False)).json()["id"]
        assert_openai_error(await running.client.get(f"/v1/responses/{response_id}"), 404)


async def test_without_redis_only_this_gateways_own_responses_are_found(start_gateway: StartGateway) -> None:
    async with cluster() as fakes, start_gateway(*fakes, redis_url="redis://127.0.0.1:1/0") as running:
        response_id = (await create(running)).json()["id"]
        assert (await running.client.get(f"/v1/responses/{response_id}")).status_code == 200
        assert_openai_error(await running.client.get("/v1/responses/resp_0"), 503)


async def test_what_redis_knows_of_responses_is_bounded_and_expires(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "RESPONSE", f"kvferry:test:{uuid.uuid4().hex}:")
    monkeypatch.setattr(keys, "RESPONSES", f"kvferry:test:{uuid.uuid4().hex}")
    monkeypatch.setattr(keys, "RESPONSES_MAX", 3)
    store = Store(redis_url)
    async with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        for index in range(5):
            await store.keep_response(f"r{index}", "a", "boot 1")
        homes = await asyncio.gather(*(store.response_home(f"r{index}") for index in range(5)))
        assert homes == [None, None, *[("a", "boot 1")] * 3]
        assert await client.zcard(keys.RESPONSES) == 3
        for name in (keys.RESPONSES, keys.response("r4")):
            assert 0 < await client.ttl(name) <= keys.RESPONSES_TTL_S
    await store.close()
