"""Nearly last, because it leaves servers dead: instances are killed under their requests, and no client notices."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from loadtest.client import ATTEMPTS_MAX, Client, Reply
from loadtest.stack import Instance, Stack
from tests.vllm.fault_proxy import HandshakeProxy
from tests.vllm.test_failures import Moving
from tests.vllm.twins import twin
from vllm_plugin.settings import RESERVATION_LEASE_S

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {
    "prompt": "Man overboard",
    "temperature": 0.8,
    "seed": 21,
    "presence_penalty": 0.5,
    "ignore_eos": True,
    "max_tokens": 600,
}


@pytest_asyncio.fixture(loop_scope="session")
async def lone_client(stack: Stack) -> AsyncIterator[Client]:
    client = Client(stack)
    try:
        yield client
    finally:
        await client.close()


def kill(instance: Instance) -> None:
    os.killpg(instance.pid, signal.SIGKILL)


async def test_a_destination_killed_when_it_has_just_committed_costs_neither_a_token_nor_a_reply(
    lone_client: Client,
) -> None:
    """A stream that b has just taken over, and a whole reply on b, when b gets SIGKILL: both end as without it.

    The source has the acknowledgement, and lets go; the gateway has yet to follow.
    """
    client = lone_client
    whole_body = {"model": client.stack.model, **BODY, "prompt": "All hands"}

    async def post() -> dict[str, Any]:
        response = await client.http.post(client.url + COMPLETIONS, json=whole_body, headers=client.headers())
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def kill_when_done(proxy: HandshakeProxy, request: web.Request, body: bytes) -> web.StreamResponse:
        answer = await proxy.forward(request, body)
        kill(client.stack.instance("b"))
        return answer

    alone = await twin(client, COMPLETIONS, **BODY)
    whole_alone = await post()
    await client.wait_until_empty(3.0)
    async with HandshakeProxy(client.stack.instance("b").url).running() as proxy:
        proxy.faults["commit"] = kill_when_done
        async with client.only("b"):
            whole = asyncio.create_task(post())
            await running_on(client, "b")
        moving = Moving(client, proxy, BODY)
        reply, move = await asyncio.gather(moving.stream(), moving.order())
    assert move["outcome"] == "committed", move
    assert client.stack.instance("b").process.exit_status is not None
    assert_same(reply, alone)
    answer = await whole
    assert answer["choices"] == whole_alone["choices"]
    assert answer["usage"] == whole_alone["usage"]


async def test_with_one_instance_dead_new_requests_go_to_the_other(lone_client: Client) -> None:
    replies = await asyncio.gather(*(lone_client.run(COMPLETIONS, **BODY) for _ in range(3)))
    assert len({tuple(reply.tokens) for reply in replies}) == 1
    assert all(reply.done == 1 for reply in replies)


async def test_a_server_that_was_killed_takes_part_again_when_it_is_back(lone_client: Client) -> None:
    client = lone_client
    await client.stack.restart("b")
    async with asyncio.timeout(30):
        while (await client.status("b"))["requests"] or "b" not in await known_healthy(client):
            await asyncio.sleep(0.1)
    alone = await twin(client, COMPLETIONS, **BODY)
    assert (await client.moved(COMPLETIONS, alone, **BODY)).tokens == alone.tokens


async def test_a_killed_source_costs_no_token_of_what_it_was_sending_and_of_what_it_had_received(
    lone_client: Client,
) -> None:
    """Two streams on a when it gets SIGKILL: one in mid-stage on its way to b, one that came from b before."""
    client = lone_client
    arrived_body = {**BODY, "prompt": "Came from b", "max_tokens": 1000}
    alone = await twin(client, COMPLETIONS, **BODY)
    arrived_alone = await client.run(COMPLETIONS, **arrived_body)
    await client.wait_until_empty(3.0)

    async def kill_source(proxy: HandshakeProxy, request: web.Request, body: bytes) -> web.StreamResponse:
        answer = await proxy.forward(request, body)
        kill(client.stack.instance("a"))
        return answer

    async with HandshakeProxy(client.stack.instance("b").url).running() as proxy:
        arrived = await arrived_on_a(client, arrived_body)
        proxy.faults["stage"] = kill_source
        moving = Moving(client, proxy, BODY)
        reply, _ = await asyncio.gather(moving.stream(), moving.order(), return_exceptions=True)
        assert isinstance(reply, Reply), reply
        assert_same(reply, alone)
        arrived_reply = await arrived
    assert arrived_reply.committed(), arrived_reply.outcomes()
    assert_same(arrived_reply, arrived_alone)
    assert client.stack.instance("a").process.exit_status is not None
    async with asyncio.timeout(RESERVATION_LEASE_S + 3.0):  # What was reserved for the one in mid-stage.
        while True:
            report = (await client.status("b"))["report"]
            if report["blocks_free"] == report["blocks_total"] and not report["migrations_in"]:
                break
            await asyncio.sleep(0.1)


async def arrived_on_a(client: Client, body: dict[str, Any]) -> asyncio.Task[Reply]:
    """A stream that began on b and decodes on a. On a busy machine it may end before its move does."""
    for _ in range(ATTEMPTS_MAX):
        stream = asyncio.create_task(client.run(COMPLETIONS, move_at=[40], start_on="b", **body))
        while not stream.done():
            if await decodes_on(client, "a"):
                return stream
            await asyncio.sleep(0.01)
        reply = await stream
    raise AssertionError(f"{ATTEMPTS_MAX} streams, and none moved in time: {reply.outcomes()}")


async def running_on(client: Client, instance_id: str) -> None:
    """Until the instance decodes a request."""
    async with asyncio.timeout(30):
        while not await decodes_on(client, instance_id):
            await asyncio.sleep(0.01)


async def decodes_on(client: Client, instance_id: str) -> bool:
    """A request that is still on its way there has output tokens as well."""
    requests = (await client.status(instance_id))["requests"]
    return any(request["state"] == "running" and request["output_tokens"] for request in requests)


async def known_healthy(client: Client) -> list[str]:
    answer = await client.http.get(f"{client.url}/admin/instances", headers=client.admin_headers())
    return [entry["id"] for entry in answer.json()["instances"] if entry["healthy"]]


def assert_same(reply: Reply, alone: Reply) -> None:
    assert reply.tokens == alone.tokens
    assert reply.text == alone.text
    assert reply.finish == alone.finish
    assert reply.done == 1
    assert len(reply.identity()) == 1


async def test_a_server_that_is_told_to_end_does_so_although_a_gateway_reads_its_reports(lone_client: Client) -> None:
    process = lone_client.stack.instance("b").process
    os.kill(process.pid, signal.SIGTERM)
    async with asyncio.timeout(20):
        while process.exit_status is None:
            await asyncio.sleep(0.1)
    assert process.exit_status is not None
